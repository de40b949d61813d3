"""Pictures: what matplotlib draws."""
