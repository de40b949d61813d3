"""Stores: one file each, and what those over a file share."""
