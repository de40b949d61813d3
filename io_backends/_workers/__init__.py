"""Threads of stores, and how they get past a fork."""
