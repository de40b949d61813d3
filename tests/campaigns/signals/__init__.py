"""The campaign of signals at random moments."""
