"""Tensors in no bytes at all: made again from others that are kept anyway."""
