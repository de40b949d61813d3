"""Prices: what computing and moving cost on this machine, measured once as the first graph is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._config import OffloadConfig
from .._plan import clock
from .._plan.clock import Clock
from .._torch.modes import quiet
from .choice import Prices

_SIDE = 512  # of the matrices: a product takes milliseconds on a slow core
_COPIED_BYTES = 16 << 20  # more than caches hold
_TIMES = 3  # the fastest counts
_PASSES = 4  # over memory, that a byte takes out and back: each way it is read and written
# Seconds of an operation, and of a byte out and back, for a clock that stands still meanwhile, as those of tests do.
_FLOP_S, _BYTE_S = 1e-11, 5e-10


def prices_of(config: OffloadConfig) -> Prices:
    """Return the prices under some settings, whose rates limit the link."""
    flop_s, byte_s = _measured(torch.get_num_threads(), clock.current)
    rates = config.max_write_rate, config.max_read_rate
    return Prices(flop_s, byte_s, *(0.0 if rate is None else 1 / float(rate) for rate in rates))


@functools.cache
def _measured(threads: int, by: Clock) -> tuple[float, float]:
    """Seconds of one floating-point operation by so many threads, and of a byte that moves out and back, by a clock."""
    with torch.no_grad(), quiet():
        matrix = torch.ones(_SIDE, _SIDE, device="cpu")
        product_s = _fastest(lambda: torch.mm(matrix, matrix), by)
    there = bytes(_COPIED_BYTES)
    copy_s = _fastest(lambda: bytearray(there), by)  # on one thread, as transfers are made
    return product_s / (2 * _SIDE**3) or _FLOP_S, copy_s * _PASSES / 2 / _COPIED_BYTES or _BYTE_S


def _fastest(do: Callable[[], object], by: Clock) -> float:
    found = []
    for _ in range(_TIMES):
        begun_s = by.now_s()
        do()
        found.append(by.now_s() - begun_s)
    return min(found)
