"""Tools to test a store with. Public as `io_backends.testing`."""
