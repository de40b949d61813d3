"""What we know about PyTorch's internals: the hook stack, modes, weights, nodes, private functions."""
