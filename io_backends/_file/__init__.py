"""A scratch file: made, laid out, written to, and how fast."""
