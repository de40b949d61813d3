"""Buffer: memory of any library to transfer from or into; and `Location`, the range of a file that a write got."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Buffer(NamedTuple):
    """Plain memory to transfer from or into.

    Attributes:
        address, nbytes: the range.
        owner: any object that keeps the memory valid while it lives.
        padded: the aligned blocks around the range belong to the buffer too, so a direct read may overwrite them.
        given: the memory has no other user, so a store in memory may keep it instead of a copy.
        shared: others may change bytes of it during the write that nobody will read, so a read does not compare it.
    """

    address: int
    nbytes: int
    owner: object
    padded: bool = False
    given: bool = False
    shared: bool = False

    @staticmethod
    def of(memory: Any, *, writable: bool = False) -> Buffer:
        """The memory of an array or a tensor, uncopied and held by the buffer. A Buffer is returned unchanged.

        Args:
            memory: a contiguous torch tensor; an object with `__cuda_array_interface__` (CuPy, Numba; device memory) or
                `__array_interface__` (NumPy); or one with Python's buffer protocol (bytes, mmap).
            writable: whether it will be read into.

        Raises:
            TypeError: it has no such memory, or its elements are references to Python objects.
            ValueError: it is not contiguous, or read-only although `writable`.
        """
        if isinstance(memory, Buffer):
            return memory
        name = type(memory).__name__
        if hasattr(memory, "data_ptr") and hasattr(memory, "is_contiguous"):
            if memory.is_conj() or memory.is_neg():
                raise ValueError(f"{name}: its memory does not hold what it shows; call resolve_conj(), resolve_neg()")
            found = Buffer(memory.data_ptr(), memory.numel() * memory.element_size(), memory)
            contiguous, read_only = memory.is_contiguous(), False
        else:
            owner, interface = _interface(memory)
            if getattr(getattr(owner, "dtype", None), "hasobject", False):
                raise TypeError(f"{name}: its elements are references to Python objects, which cannot be stored")
            (address, read_only), shape = interface["data"], interface["shape"]
            itemsize = int(interface["typestr"][2:])
            found = Buffer(address or 0, math.prod(shape) * itemsize, owner)
            contiguous = found.nbytes == 0 or _is_contiguous(shape, interface.get("strides"), itemsize)
        if not contiguous:
            raise ValueError(f"{name} of {found.nbytes} bytes: it is not contiguous in memory; copy it first")
        if writable and read_only:
            raise ValueError(f"{name} of {found.nbytes} bytes: it is read-only, so nothing can be read into it")
        return found


def on_device(owner: object) -> bool:
    """Whether a buffer's owner offers `__cuda_array_interface__`: it is memory of a CUDA device then."""
    try:
        return getattr(owner, "__cuda_array_interface__", None) is not None
    except Exception:  # a device tensor that requires grad, or has a dtype that NumPy lacks, has one but raises
        return True


class Location(NamedTuple):
    """Where a write went. Direct reads need a buffer with the same `skew`, its address modulo the store's alignment.

    `checksum` covers the bytes or a sample of them; it is None for shared buffers and in stores that compare nothing.
    """

    offset: int
    length: int
    nbytes: int
    skew: int
    checksum: int | None = None


def _interface(memory: Any) -> tuple[Any, dict[str, Any]]:
    for kind in ("__cuda_array_interface__", "__array_interface__"):
        if (interface := getattr(memory, kind, None)) is not None:
            return memory, interface
    try:
        view = memoryview(memory)
    except TypeError as error:
        raise TypeError(
            f"{type(memory).__name__} has no memory to transfer: give a Buffer, a NumPy array, a torch tensor, an "
            "object with __cuda_array_interface__ or one with Python's buffer protocol"
        ) from error
    array = np.asarray(view)
    return array, array.__array_interface__


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    """Whether elements are adjacent, in C order. `strides` are in bytes; None means contiguous."""
    if strides is None:
        return True
    expected = itemsize
    for length, stride in reversed(list(zip(shape, strides, strict=True))):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
