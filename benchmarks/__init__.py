"""What tba costs and saves, measured, and programs that look for what it breaks: `python -m benchmarks --help`."""
