"""Processes of the benchmarks: starting them, asking them, and measuring their memory."""
