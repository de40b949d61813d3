"""Benchmarks: the costs and savings of tba, measured: `python -m benchmarks --help`."""
