"""What a call may change: found, read, compared and restored."""
