"""Integrations: one file per framework, imported only on request, e.g. `tba.integrations.transformers`."""
