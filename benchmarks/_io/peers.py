"""Peers of the io benchmark: DeepSpeed's asynchronous I/O handle and kvikio, where they are installed and work.

Each gets what its own documentation advises: locked memory for DeepSpeed, direct I/O and as many threads for kvikio.
DeepSpeed reads and writes its own memory only without a copy, so buffers are copied there outside of the clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .arms import Arm
from .fio import Mode
from .memory import Memory


class DeepSpeedArm:
    """`aio_handle` of DeepSpeed's async_io extension with its defaults, a file for each buffer."""

    modes: Sequence[Mode] = ("write", "read")

    def __init__(self, directory: Path, sources: Memory, threads: int) -> None:
        module = import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
        self._handle = module.aio_handle(overlap_events=True, intra_op_parallelism=threads)
        self._directory = directory
        example = torch.empty(0, dtype=torch.uint8)
        buffers = sources.buffers
        self._tensors = [self._handle.new_cpu_locked_tensor(buffer.nbytes, example) for buffer in buffers]

    def load(self, sources: Memory) -> None:
        for tensor, words in zip(self._tensors, sources.words, strict=True):
            tensor.numpy()[:] = words.view("uint8")

    def write(self, sources: Memory) -> None:
        self._run(self._handle.async_pwrite)

    def read(self, targets: Memory) -> None:
        self._run(self._handle.async_pread)

    def unload(self, targets: Memory) -> None:
        for tensor, words in zip(self._tensors, targets.words, strict=True):
            words.view("uint8")[:] = tensor.numpy()

    def wipe(self) -> None:
        for tensor in self._tensors:
            tensor.zero_()

    def both(self, sources: Memory, targets: Memory) -> float:
        raise NotImplementedError("not among its modes")

    def close(self) -> None:
        for index, tensor in enumerate(self._tensors):
            self._handle.free_cpu_locked_tensor(tensor)
            self._path(index).unlink(missing_ok=True)
        self._tensors.clear()

    def _run(self, call: Callable[[Any, str], int]) -> None:
        for index, tensor in enumerate(self._tensors):
            call(tensor, str(self._path(index)))
        ended = self._handle.wait()
        if ended != len(self._tensors):
            raise RuntimeError(f"DeepSpeed ended {ended} of {len(self._tensors)} transfers")

    def _path(self, index: int) -> Path:
        return self._directory / f"deepspeed-{index}.data"


class KvikioArm:
    """`kvikio.CuFile` on host memory, one file, one request for each buffer."""

    modes: Sequence[Mode] = ("write", "read")

    def __init__(self, directory: Path, sources: Memory, threads: int) -> None:
        kvikio, defaults = import_module("kvikio"), import_module("kvikio.defaults")
        defaults.set({"num_threads": threads, "auto_direct_io_read": True, "auto_direct_io_write": True})
        path = directory / f"kvikio-{os.getpid()}.data"
        self._file = kvikio.CuFile(path, "w+")
        path.unlink()

    def load(self, sources: Memory) -> None:
        """Nothing to prepare."""

    def write(self, sources: Memory) -> None:
        self._run(self._file.pwrite, sources)

    def read(self, targets: Memory) -> None:
        self._run(self._file.pread, targets)

    def unload(self, targets: Memory) -> None:
        """It is there."""

    def wipe(self) -> None:
        """It keeps nothing."""

    def both(self, sources: Memory, targets: Memory) -> float:
        raise NotImplementedError("not among its modes")

    def close(self) -> None:
        self._file.close()

    def _run(self, call: Callable[[Any, int, int], Any], memory: Memory) -> None:
        size = memory.buffers[0].nbytes
        futures = [call(words, size, index * size) for index, words in enumerate(memory.words)]
        for future in futures:
            moved = future.get()
            if moved != size:
                raise RuntimeError(f"kvikio moved {moved} of {size} bytes")


def make_peers(directory: Path, sources: Memory, threads: int) -> tuple[dict[str, Arm], dict[str, str]]:
    """Those that work here, by name, each having moved the buffers once; and of the others why not."""
    arms: dict[str, Arm] = {}
    missing: dict[str, str] = {}
    kinds: dict[str, Callable[[Path, Memory, int], Arm]] = {"deepspeed": DeepSpeedArm, "kvikio": KvikioArm}
    for name, make in kinds.items():
        try:
            arm = make(directory, sources, threads)
        except Exception as error:  # not installed, or a library, a compiler or a driver is missing
            missing[name] = _first_line(error)
            continue
        try:
            arm.load(sources)
            arm.write(sources)
        except Exception as error:
            arm.close()
            missing[name] = _first_line(error)
            continue
        arms[name] = arm
    return arms, missing


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
