"""Integrations: one file for each framework, imported only when asked for, e.g. `tba.integrations.transformers`."""
