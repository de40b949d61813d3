"""Audit of a model: the memory each preset would save and the gradient error it would cause, before training."""
