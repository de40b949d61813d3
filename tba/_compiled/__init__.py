"""Compiled: moves what a model compiled as one graph saves, by operators placed inside of that graph."""
