"""Out of memory and back: the store and its paths, and what is in flight."""
