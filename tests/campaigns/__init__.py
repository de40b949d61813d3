"""Campaigns: long random searches for what the engine breaks: `python -m tests.campaigns --help`."""
