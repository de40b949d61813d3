"""The campaign of the architectures that transformers has."""
