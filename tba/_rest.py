"""Rest: tier `auto` leaves its hooks off where a run has been seen to fit, until it may not fit any more.

A step that fitted with room to spare fits again while nothing changes. What may change is looked at where it costs
little:

- what the model's forward is given, at every forward: each tensor must be of a shape that has fitted, or smaller;
- free memory and which parameters are trained, at an entry now and then: the more room there was, the more seldom.

Hooks that are on cost each saved tensor some microseconds; a run that fits then pays for nothing.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ._config import OffloadConfig
from ._policy import FITS
from ._sizes import size
from ._stats import Counters

# Whether the model is in training mode, and its arguments in the order in which they are found (`_shapes`).
Shapes = tuple[bool, tuple[tuple[Any, ...], ...]]

# What must be left beyond what a step kept for it to have fitted with room, as a part of that.
_SPARE = 0.25
_MOST_SHAPES = 16
_MOST_ENTRIES = 1000  # without a look


class Rest:
    """Whether the hooks may stay off.

    Args:
        possible: whether they ever may.
        model: gives the model, or None once it has died.
        room: gives the bytes that saved tensors may take now.
        fixed: whether that is a setting, so that there is no use in looking again.
    """

    def __init__(
        self, possible: bool, model: Callable[[], nn.Module | None], room: Callable[[], int], *, fixed: bool
    ) -> None:
        self.possible = possible
        self.resting = False
        self._model = model
        self._room = room
        self._fixed = fixed
        self._kept_bytes = 0
        self._fitted: list[Shapes] = []
        self._met: list[Shapes] = []  # in this step, with the hooks on
        self._met_next: list[Shapes] = []  # in the next one
        self._trained = 0
        self._entries_left = 0
        self._before = 0, 0, 0  # bytes kept and moved, and errors, when the last step ended
        self._told = False

    @classmethod
    def of(cls, config: OffloadConfig, model: Callable[[], nn.Module | None], room: Callable[[], int]) -> Rest:
        """What the settings allow: the tier lets tensors stay, no codec has to see them, and the model is known."""
        possible = config.tier == "auto" and config.compress is None and model() is not None
        return cls(possible, model, room, fixed=config.memory_budget is not None)

    def end_step(self, counters: Counters, room_bytes: int) -> None:
        """A step (micro-batch) whose tensors were seen has ended, where memory had room for so much."""
        if not self.possible:
            return
        now = counters.kept_by_reason.get(FITS, 0), counters.offloaded_bytes, counters.errors
        kept_bytes, moved_bytes, errors = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        met, self._met, self._met_next = self._met, self._met_next, []
        fits = not (moved_bytes or errors) and kept_bytes * (1 + _SPARE) <= room_bytes
        self._tell(kept_bytes, moved_bytes, room_bytes, rests=bool(met and fits))
        if met and fits:
            for shapes in met:
                if not any(covers(known, shapes) for known in self._fitted):
                    self._fitted = [*self._fitted[1 - _MOST_SHAPES :], shapes]
            self._kept_bytes = max(self._kept_bytes, kept_bytes)
            self._trained = self._count_trained()
            self._entries_left = 0
            self.resting = True

    def _tell(self, kept_bytes: int, moved_bytes: int, room_bytes: int, *, rests: bool) -> None:
        """Say once what was decided, and why."""
        if self._told or os.environ.get("RANK", "0") != "0":
            return
        self._told = True
        logging.getLogger("tba").warning(decision(kept_bytes, moved_bytes, room_bytes, rests=rests))

    def goes_on(self) -> bool:
        """At an entry of the context: whether the hooks stay off."""
        if not self.resting:
            return False
        if self._entries_left:
            self._entries_left -= 1
            return True
        looks = self._kept_bytes and not self._fixed
        room_bytes = self._room() if looks else 0
        if (looks and room_bytes < self._kept_bytes * (1 + _SPARE)) or self._count_trained() != self._trained:
            self.resting = False
            self._fitted.clear()
            self._kept_bytes = 0
            return False
        entries = room_bytes // (2 * self._kept_bytes) if looks else _MOST_ENTRIES
        self._entries_left = max(1, min(entries, _MOST_ENTRIES)) - 1
        return True

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, next_step: bool = False) -> bool:
        """The model's forward begins, with these arguments: whether the hooks stay off.

        `next_step`: backward has run since the last, so what this one saves first will end the step.
        """
        if not self.possible:
            return False
        model = self._model()
        try:
            shapes = model is not None and model.training, tuple(_shapes((args, kwargs), 4))
        except Unknown:
            self.resting = self.possible = False
            return False
        if self.resting and any(covers(known, shapes) for known in self._fitted):
            return True
        self.resting = False
        met = self._met_next if next_step else self._met
        if shapes not in met:
            met.append(shapes)
            del met[:-_MOST_SHAPES]
        return False

    def _count_trained(self) -> int:
        model = self._model()
        return sum(parameter.requires_grad for parameter in model.parameters()) if model is not None else 0


def decision(kept_bytes: int, moved_bytes: int, room_bytes: int, *, rests: bool) -> str:
    """What tier `auto` has decided in the first step, in a line."""
    found = f'tier "auto": the first step saved {size(kept_bytes + moved_bytes)}'
    if room_bytes:  # else it was not worth a look
        found += f", memory has room for {size(room_bytes)} of it"
    if moved_bytes:
        return f"{found}: {size(moved_bytes)} went out of memory"
    then = "the hooks are off until shapes, memory or the model change" if rests else "the hooks stay on"
    return f"{found}: nothing moves, {then}"


def covers(known: Shapes, new: Shapes) -> bool:
    """Whether what fitted with the arguments `known` fits with `new`: tensors no larger, everything else equal."""
    if known[0] != new[0] or len(known[1]) != len(new[1]):
        return False
    return all(
        one == other or (len(one) == len(other) and one[0] == other[0] and all(map(operator.ge, one[1:], other[1:])))
        for one, other in zip(known[1], new[1], strict=True)
    )


class Unknown(Exception):
    """An argument that does not tell how large it is."""


def _shapes(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """A tensor as its dtype and sizes, a plain value as itself. Raises Unknown."""
    if isinstance(value, Tensor):
        yield value.dtype, *value.shape
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield (value,)
    elif depth and isinstance(value, (tuple, list)):
        for each in value:
            yield from _shapes(each, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key in value:
            yield (str(key),)
            yield from _shapes(value[key], depth - 1)
    else:
        raise Unknown
