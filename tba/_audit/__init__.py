"""Audit: what each preset would do to the memory and the gradient of a model, before anything trains."""
