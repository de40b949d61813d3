"""Generators: objects that draw random numbers, whose state can be read and restored."""

from __future__ import annotations

import pickle
import random
from functools import partial
from typing import Any

import numpy as np
import torch

from .holders import Generator, Holder

# The generators that a program shares and checkpointing does not restore; both live as long as the process.
SHARED_GENERATORS: tuple[Any, ...] = (random.random.__self__, np.random.mtrand._rand)  # type: ignore[attr-defined]
_SHARED = dict(zip(map(id, SHARED_GENERATORS), ("Python's random numbers", "NumPy's random numbers"), strict=True))


def generator(value: Any, name: str) -> Holder | None:
    label = _SHARED.get(id(value)) or name or type(value).__name__
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, random.Random):
        kind = random.Random
        return Generator((partial(kind.getstate, value), partial(kind.setstate, value), lambda state: state), label)
    if isinstance(value, torch.Generator):
        return Generator((value.get_state, value.set_state, lambda state: state.numpy().tobytes()), label)
    if isinstance(value, np.random.RandomState):
        return Generator((value.get_state, value.set_state, pickle.dumps), label)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return Generator((lambda: bits.state, partial(setattr, bits, "state"), pickle.dumps), label)
    return None
