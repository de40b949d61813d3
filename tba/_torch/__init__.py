"""What is known of the inside of PyTorch: the stack of hooks, modes, weights, nodes, private functions."""
