"""Kernels: groups of numbers to few-bit codes and back, the same bits in torch, numba and Triton."""
