"""A kvikio in Python, for what no machine without a GPU can show: GPUDirect Storage, pieces that fail or come short.

It has the few names that KvikioStore uses. Files are real; device memory is host memory that says otherwise.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from io_backends import Buffer
from support.stores import Bytes


class OnDevice:
    """What memory on a device looks like to whoever looks for its address."""

    def __init__(self, array: Bytes) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": "|u1",
            "data": (array.ctypes.data, False),
            "version": 3,
        }


def device_buffer(array: Bytes) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes, OnDevice(array))


class CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class Future:
    """Moves its bytes when it is waited for, so that it shows who waits for whom."""

    def __init__(self, move: Callable[[], int]) -> None:
        self._move = move

    def get(self) -> int:
        return self._move()


class Kvikio:
    """State, and the modules over it.

    Attributes:
        gds: whether the driver says that GDS is available.
        accepts: whether the file system takes part in it.
        events: what was called, in order.
        fault: asked for each piece, by its number, what happens: an error, fewer bytes moved, or None.
    """

    def __init__(self, *, gds: bool = True, accepts: bool = True) -> None:
        self.gds = gds
        self.accepts = accepts
        self.events: list[str] = []
        self.fault: Callable[[int], int | Exception | None] = lambda number: None
        self.settings: dict[str, Any] = {
            "compat_mode": CompatMode.AUTO,
            "num_threads": 1,
            "gds_threshold": 16384,
            "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }
        self.pieces = 0
        self.task_bytes: list[int | None] = []  # of each piece: kvikio would cut larger ones further

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package, defaults, driver = (ModuleType(f"kvikio{name}") for name in ("", ".defaults", ".cufile_driver"))
        package.__path__ = []
        fake = self

        class CuFile(_CuFile):
            kvikio = fake

        package.CuFile, package.CompatMode = CuFile, CompatMode  # type: ignore[attr-defined]
        defaults.get, defaults.set = self.settings.__getitem__, self.set  # type: ignore[attr-defined]
        defaults.is_compat_mode_preferred = lambda: not self.gds  # type: ignore[attr-defined]
        driver.get = lambda name: {"is_gds_available": self.gds}[name]  # type: ignore[attr-defined]
        for module in (package, defaults, driver):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        package.defaults, package.cufile_driver = defaults, driver  # type: ignore[attr-defined]

    def set(self, name: str, value: Any) -> Any:
        before, self.settings[name] = self.settings[name], value

        @contextmanager
        def undo() -> Any:
            try:
                yield
            finally:
                self.settings[name] = before

        return undo()


class _CuFile:
    kvikio: Kvikio

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+"
        if self.kvikio.settings["compat_mode"] is CompatMode.OFF and not self.kvikio.accepts:
            raise RuntimeError("cuFile error: GPUDirect Storage not supported on current file")
        self._fd = os.open(path, os.O_RDWR)
        self.kvikio.events.append(f"open {self.kvikio.settings['compat_mode'].name}")

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        self.kvikio.events.append("close")
        os.close(self._fd)

    def pwrite(self, array: Any, size: int, file_offset: int, task_size: int | None = None) -> Future:
        self.kvikio.task_bytes.append(task_size)
        return self._submit(array, size, lambda memory: os.pwrite(self._fd, memory, file_offset))

    def pread(self, array: Any, size: int, file_offset: int, task_size: int | None = None) -> Future:
        self.kvikio.task_bytes.append(task_size)
        return self._submit(array, size, lambda memory: os.preadv(self._fd, [memory], file_offset))

    def _submit(self, array: Any, size: int, move: Callable[[memoryview], int]) -> Future:
        number, self.kvikio.pieces = self.kvikio.pieces, self.kvikio.pieces + 1
        interface = getattr(array, "__cuda_array_interface__", None) or getattr(array, "__array_interface__", None)
        memory = memoryview(array if interface is None else _bytes(interface["data"][0], size)).cast("B")
        assert memory.nbytes == size

        def work() -> int:
            self.kvikio.events.append(f"piece {number}")
            fault = self.kvikio.fault(number)
            if isinstance(fault, Exception):
                raise fault
            return move(memory) if fault is None else fault

        return Future(work)


def _bytes(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)
