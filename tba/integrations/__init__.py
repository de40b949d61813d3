"""Integrations: tba inside other libraries' ways of training, one file each, imported only when asked for."""
