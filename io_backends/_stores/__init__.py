"""Stores: one file each, and what stores over a file share."""
