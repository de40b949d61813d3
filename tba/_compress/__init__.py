"""Compression: who saves a tensor, which codec it gets, and linear layers that save a projection instead."""
