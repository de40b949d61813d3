"""Here: measures in a few seconds what this machine reaches, to forecast steps that can also be run on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from .._memory import free_memory
from .hardware import Device

_SIDE = 1024  # of the matrices: a layer's products are about as fast
_ELEMENTS = 4 << 20  # of the vectors added: far more than caches hold
_SECONDS = 0.7  # for each figure
_LEAST_ROUNDS, _CALLS = 3, 4


def measure_here() -> Device:
    """Measure matrix products in float32 and bfloat16, memory, and an operator on a tiny tensor, on the CPU."""
    rates: dict[torch.dtype | None, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(_SIDE, _SIDE).to(dtype)
        rates[dtype] = 2 * _SIDE**3 / _time_s(lambda a=a: torch.mm(a, a))  # type: ignore[misc]
    rates[None] = rates[torch.float32]
    x, y = torch.randn(_ELEMENTS), torch.randn(_ELEMENTS)
    # The result is in new memory, as in a step.
    memory_bytes_per_s = 3 * x.nbytes / _time_s(lambda: torch.add(x, y))
    little = torch.ones(8, requires_grad=True)
    return Device(
        "here",
        rates,
        memory_bytes_per_s,
        free_memory.free_bytes(),
        link_bytes_per_s=memory_bytes_per_s / 2,
        source=f"measured: {torch.get_num_threads()} threads",
        op_s=_time_s(lambda: little + little),
        like_cuda=False,
    )


def _time_s(function: Callable[[], object]) -> float:
    """Median CPU time of a call per thread, over some hundred milliseconds; other processes do not count."""
    taken: list[float] = []
    function()
    begun_s = time.perf_counter()
    while len(taken) < _LEAST_ROUNDS or time.perf_counter() - begun_s < _SECONDS:
        since_s = time.process_time()
        for _ in range(_CALLS):
            function()
        taken.append((time.process_time() - since_s) / _CALLS / torch.get_num_threads())
    return median(taken)
