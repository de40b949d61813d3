"""Training: linear layers that save a projection of their input, and CompAct's optimizer (arXiv 2410.15352)."""
