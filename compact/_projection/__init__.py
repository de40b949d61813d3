"""Projections: random matrices made from a key, and what is projected by them."""
