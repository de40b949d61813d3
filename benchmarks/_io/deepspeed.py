"""DeepSpeed's asynchronous I/O handle as an arm of the io benchmark, where it is installed and works.

As its documentation advises, it has locked memory of its own, since it moves no other without a copy. Buffers are
copied there outside of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .arms import Rig
from .fio import Mode
from .memory import Words


class DeepSpeedArm:
    """`aio_handle` of the async_io extension with its defaults, a file for each buffer."""

    modes: Sequence[Mode] = ("write", "read")

    def __init__(self, directory: Path, threads: int, rig: Rig) -> None:
        module = import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
        self._handle = module.aio_handle(overlap_events=True, intra_op_parallelism=threads)
        self._directory, self._rig = directory, rig
        example = torch.empty(0, dtype=torch.uint8)
        buffers = rig.sources.buffers
        self._tensors = [self._handle.new_cpu_locked_tensor(buffer.nbytes, example) for buffer in buffers]

    @property
    def found(self) -> Sequence[Words]:
        return [tensor.numpy().view("uint64") for tensor in self._tensors]

    def warm_write(self) -> None:
        for own, words in zip(self.found, self._rig.sources.words, strict=True):
            own[:] = words
        self.write()

    def warm_read(self) -> None:
        self.read()

    def write(self) -> None:
        self._run(self._handle.async_pwrite)

    def read(self) -> None:
        self._run(self._handle.async_pread)

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


def make_deepspeed(directory: Path, threads: int, rig: Rig) -> DeepSpeedArm | str:
    """Make the arm and write the buffers once; return the reason where that fails."""
    arm: DeepSpeedArm | None = None
    try:
        arm = DeepSpeedArm(directory, threads, rig)
        arm.warm_write()
    except Exception as error:  # not installed, or a library or a compiler is missing
        if arm is not None:
            arm.close()
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return arm
