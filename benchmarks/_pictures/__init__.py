"""Pictures, and the arithmetic of a step's events beneath them."""
