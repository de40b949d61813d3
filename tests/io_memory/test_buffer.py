"""Buffer: the memory of arrays and tensors of any library, and what is refused because its bytes would be others."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from io_backends import Buffer, HostStore, PosixStore
from io_backends._buffer import on_device


class OnDevice:
    """What a CuPy array shows of itself."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, typestr: str = "<f4") -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, False),
            "strides": strides,
            "version": 3,
        }


@pytest.mark.parametrize(
    "memory",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24, dtype=np.float32).reshape(2, 3, 4)[1:, 1:],
        np.array(3.0),
        np.zeros((0, 5)),
        torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(5, requires_grad=True),
        torch.ones(7, 3)[2:5],
    ],
    ids=str,
)
def test_the_memory_of_an_array(memory: Any) -> None:
    buffer = Buffer.of(memory, writable=True)
    address = memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.ctypes.data
    nbytes = memory.numel() * memory.element_size() if isinstance(memory, torch.Tensor) else memory.nbytes
    assert buffer == Buffer(address, nbytes, memory)
    assert buffer.owner is memory


@pytest.mark.parametrize("kind", [bytearray, lambda data: array.array("B", data), memoryview])
def test_python_s_own_memory_is_held_where_it_is(kind: Any) -> None:
    memory = kind(bytearray(b"0123456789"))
    buffer = Buffer.of(memory, writable=True)
    assert ctypes.string_at(buffer.address, buffer.nbytes) == b"0123456789"
    if kind is bytearray:
        with pytest.raises(BufferError):  # it cannot move while the buffer lives
            memory.append(0)
        del buffer
        memory.append(0)


def test_bytes_can_be_written_and_not_read_into() -> None:
    buffer = Buffer.of(b"0123456789")
    assert ctypes.string_at(buffer.address, buffer.nbytes) == b"0123456789"
    read_only = np.zeros(10)
    read_only.flags.writeable = False
    for memory in (b"0123456789", read_only):
        with pytest.raises(ValueError, match="it is read-only, so nothing can be read into it"):
            Buffer.of(memory, writable=True)
    assert Buffer.of(mmap.mmap(-1, 100), writable=True).nbytes == 100


def test_a_buffer_is_itself() -> None:
    buffer = Buffer(4096, 10, None, padded=True, given=True)
    assert Buffer.of(buffer, writable=True) is buffer


@pytest.mark.parametrize(
    "memory",
    [np.zeros((4, 4)).T, np.zeros(10)[::2], torch.zeros(4, 4).T, torch.zeros(10)[::2], memoryview(b"abcd")[::2]],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_contiguous_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(memory).__name__} of .* bytes: it is not contiguous in memory"):
        Buffer.of(memory)


def test_what_has_no_bytes_of_its_own_is_refused() -> None:
    for memory in (None, 3, [1, 2]):
        with pytest.raises(TypeError, match="has no memory to transfer: give a Buffer, a NumPy array"):
            Buffer.of(memory)
    with pytest.raises(TypeError, match="references to Python objects"):
        Buffer.of(np.array([None, 3]))
    lazy = torch.ones(3, dtype=torch.complex64).conj()
    with pytest.raises(ValueError, match="its memory does not hold what it shows"):
        Buffer.of(lazy)


@pytest.mark.parametrize(
    ("memory", "nbytes"),
    [
        (OnDevice((2, 3)), 24),
        (OnDevice((2, 3), (12, 4)), 24),
        (OnDevice((2, 1, 3), (12, 999, 4)), 24),
        (OnDevice((), None, "<f8"), 8),
        (OnDevice((0, 3), (12, 4)), 0),
    ],
)
def test_device_memory_as_cupy_shows_it(memory: OnDevice, nbytes: int) -> None:
    assert Buffer.of(memory, writable=True) == Buffer(4096, nbytes, memory)


def test_device_memory_that_is_not_contiguous_is_refused() -> None:
    for strides in ((4, 12), (24, 4), (12, 8)):
        with pytest.raises(ValueError, match="OnDevice of 24 bytes: it is not contiguous"):
            Buffer.of(OnDevice((2, 3), strides))


def test_a_store_of_host_memory_refuses_a_device_s(tmp_path: Any) -> None:
    for store in (HostStore(), PosixStore(tmp_path)):
        with pytest.raises(ValueError, match=r"OnDevice of 24 bytes is memory of a CUDA device, and \w+Store"):
            store.write(OnDevice((2, 3)))
        store.close()


def test_which_owners_are_on_a_device() -> None:
    class Shy:
        """As a tensor on a device that requires grad."""

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("detach it first")

    assert on_device(Shy())
    assert on_device(OnDevice((1,)))
    tensors = [torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)]
    for host in (None, object(), np.zeros(3), memoryview(bytearray(3)), *tensors):
        assert not on_device(host)
