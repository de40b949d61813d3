"""The campaign of random training programs."""
