"""Kernels: groups of numbers to few-bit codes and back, with the same bits in torch, numba and Triton."""
