"""Devices: lets frameworks that ask for an accelerator by name train on the CPU. Nothing else of them is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _CudaIsTheCPU(TorchFunctionMode):
    """Makes on the CPU what is asked for on "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """For Megatron-Core: it makes buffers on the current CUDA device, and recomputes with its random numbers."""
    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.random.get_rng_state", side_effect=lambda **_: torch.get_rng_state()),
        _CudaIsTheCPU(),
    ):
        yield


class _CPU:
    """`torch.cpu` with what torchtitan's metrics ask of a device module beside."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object) -> str:
        return "cpu"

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def torchtitan_on_the_cpu() -> None:
    """For torchtitan: without an accelerator it takes CUDA. To be called before the rest of it is imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _CPU()
