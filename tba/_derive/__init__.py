"""Derivation: saved tensors that take no bytes, because others that are kept anyway give them again."""
