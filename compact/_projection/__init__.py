"""Projections: random matrices made from a key, what is projected by them, and samples of rows."""
