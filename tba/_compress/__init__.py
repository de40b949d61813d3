"""Compression: the class of a saved tensor, the codec it gets, and linear layers that save a projection instead."""
