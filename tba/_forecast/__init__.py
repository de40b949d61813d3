"""Forecast: what a training step would take on a machine that is not here, planned as one that is."""
