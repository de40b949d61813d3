"""Device memory as seen by a file store: recognise it, and hand it over without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np


class View:
    """`nbytes` at `address` for whoever takes arrays: of a device (`cuda`) or of the host. It owns nothing."""

    def __init__(self, address: int, nbytes: int, *, cuda: bool) -> None:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        if cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface


def view(address: int, nbytes: int, *, cuda: bool) -> Any:
    """An array over memory, without a copy. Whoever uses it keeps the memory alive."""
    memory = View(address, nbytes, cuda=cuda)
    return memory if cuda else np.asarray(memory)


def on_device(owner: object) -> bool:
    """Whether a buffer is memory of a CUDA device: its owner then offers `__cuda_array_interface__`."""
    try:
        return getattr(owner, "__cuda_array_interface__", None) is not None
    except Exception:  # a tensor on a device that requires grad, or of a type numpy lacks, has one but does not show it
        return True
