"""Blocks: a model's alike modules, found without naming them, tried, and made to recompute step by step."""
