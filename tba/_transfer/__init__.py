"""Out of memory and back: the store and its paths, and transfers in flight."""
