"""Workloads: the GPT that is trained, its sizes, and its text."""
