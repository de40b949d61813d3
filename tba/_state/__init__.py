"""What a call may change: found, read, compared and put back."""
