"""The campaign of random models whose blocks keep hidden state."""
