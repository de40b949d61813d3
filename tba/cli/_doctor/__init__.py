"""`tba doctor`: facts of a machine, the rules that judge them, and the report."""
