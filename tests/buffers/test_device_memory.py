"""Device memory: recognised by its owner, and handed over without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from io_backends._device_memory import on_device, view
from support.stores import pattern_at


def test_a_view_of_host_memory_is_that_memory() -> None:
    array = pattern_at(5, 1000)
    seen = view(array.ctypes.data + 10, 900, cuda=False)
    assert isinstance(seen, np.ndarray)
    assert (seen.ctypes.data, seen.nbytes, seen.dtype) == (array.ctypes.data + 10, 900, np.uint8)
    seen[:] = 7
    assert bytes(array[9:12]) == bytes([pattern_at(5, 1000)[9], 7, 7])


def test_a_view_of_device_memory_names_it() -> None:
    seen = view(123456, 900, cuda=True)
    assert seen.__cuda_array_interface__["data"] == (123456, False)
    assert (seen.__cuda_array_interface__["shape"], seen.__cuda_array_interface__["typestr"]) == ((900,), "|u1")
    assert not hasattr(seen, "__array_interface__")


def test_which_owners_are_on_a_device() -> None:
    class Shy:
        """As a tensor on a device that requires grad."""

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("detach it first")

    assert on_device(Shy())
    assert on_device(view(4096, 1, cuda=True))
    tensors = [torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)]
    for host in (None, object(), np.zeros(3), memoryview(bytearray(3)), *tensors):
        assert not on_device(host)
