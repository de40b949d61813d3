"""Ranks of one job that decide together: how they agree, and on what."""
