"""Threads of stores, and how they survive a fork."""
