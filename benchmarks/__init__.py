"""What tba costs and saves, measured: `python -m benchmarks step|hooks|overlap|demo`."""
