"""Startup: the folder that `tba run` puts on PYTHONPATH. Programs can import all that is in it: keep it to one file."""
