"""Rest: tier `auto` does next to nothing where a run has been seen to fit, until it may not fit any more.

A step that fitted with room to spare fits again while nothing changes. What may change is looked at where each forward
of the model begins:

- what it is given: each tensor must be of a shape that has fitted, or smaller, and everything else equal;
- free memory and which parameters are trained, now and then: the more room there was, the more seldom;
- what cannot be seen (a switch of checkpointing, a depth that is an attribute): every so often a step runs with the
  hooks on.

Hooks that are on cost each saved tensor some microseconds; a run that fits then pays for nothing, as its hooks are off.
Under a limit that was set they stay on, since only they can keep to it, but they only count (`Light`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from io_backends import interrupts

from .._config import OffloadConfig
from .._text import size
from .._torch.user_frames import Notices, speaks

# The modes a forward runs in, and its arguments in the order in which they are found (`_shapes`).
Key = tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...]]

# How many times what a step kept there has to be room for: several forwards before a backward, another mode. Hooks that
# count see either as it comes.
_TIMES = 3
_MOST_KEYS = 16
_MOST_ITEMS = 1000  # of arguments
_MOST_FORWARDS = 64  # without a look
_LEARN_EVERY = 256  # forwards


class Rest:
    """Decision whether the hooks may rest.

    Args:
        possible: whether they ever may.
        counts: whether they stay on then, and count.
        model: gives the model, or None once it has died.

    Attributes:
        fitted_bytes: counted in the largest step that has fitted; None where steps are not counted, or cannot be.
        since: the step from which on they rest; 0 while they do not, and once steps have passed without hooks.
    """

    def __init__(self, possible: bool, model: Callable[[], nn.Module | None], *, counts: bool = False) -> None:
        self.possible = possible
        self.counts = counts
        self.resting = False
        self.since = 0
        self._rests = self._rested = False  # from a forward that began so, to a step that did not fit; ever, hooks off
        self.fitted_bytes = 0 if possible and counts else None
        self._model = model
        self._times = 1 if counts else _TIMES
        self._kept_bytes = 0
        self._fitted: list[Key] = []
        self._met: list[Key] = []  # in this step, with the hooks on
        self._trained = 0
        self._forwards_left = 0  # until the next look
        self._learn_in = _LEARN_EVERY
        self._asked = False  # since the context was entered
        self._tells = False
        self._notices = Notices()

    @classmethod
    def of(cls, config: OffloadConfig, model: Callable[[], nn.Module | None]) -> Rest:
        """Make what the settings allow: no rest where a codec or rule has to see tensors, or without a model."""
        possible = config.tier == "auto" and config.compress is None and config.policy == "budget"
        rest = cls(possible and model() is not None, model, counts=config.memory_budget is not None)
        rest._tells = config.tier == "auto"
        return rest

    @property
    def hooks(self) -> str:
        """What the hooks do: "on", "off", or "count"."""
        return "on" if not self._rests else "count" if self.counts else "off"

    def end_step(
        self, *, kept_bytes: int, moved_bytes: int, failures: int, room_bytes: int, planned: bool = False
    ) -> None:
        """Decide after a micro-batch whose tensors were seen, where memory had room for `room_bytes`.

        One that was `planned` may fit only because some of it was not saved.
        """
        met, self._met = self._met, []
        fitted = not (moved_bytes or failures or planned) and kept_bytes * self._times <= room_bytes
        self.resting = bool(self.possible and met) and fitted
        if not self.resting:
            self._rests, self.since = False, 0
        self._tell(kept_bytes, moved_bytes, room_bytes)
        if self.resting:
            self._fitted = [*met, *(known for known in self._fitted if known not in met)][:_MOST_KEYS]
            self._kept_bytes = max(self._kept_bytes, kept_bytes)
            self._trained = self._count_trained()
            self._forwards_left, self._learn_in = 0, _LEARN_EVERY

    def learn(self, counted_bytes: int, room_bytes: int, *, countable: bool) -> None:
        """Learn how many bytes were counted in a step; `countable`: each of its tensors told where its memory is."""
        if self.fitted_bytes is None or not countable:
            self.fitted_bytes = None
        elif not self.resting:
            self.fitted_bytes = 0
        elif counted_bytes <= room_bytes:
            self.fitted_bytes = max(self.fitted_bytes, counted_bytes)

    def enter(self) -> bool:
        """Enter the context; whether the hooks stay off."""
        self._asked = False
        return self.resting and not self.counts

    def leave(self, *, failed: bool) -> None:
        """Leave the context. A step that failed tells nothing, nor does one without a forward."""
        if failed:
            self._met.clear()
        if not self._asked:
            self.resting = False

    def looks(self, key: Key | None) -> bool:
        """Whether the next forward, called as `key` describes, is to be told how much room memory has."""
        due = self._forwards_left <= 0 or self._learn_in <= 1
        return due and self._kept_bytes > 0 and self.resting and self._has_fitted(key)

    def begins(self, key: Key | None, *, room_bytes: int = 0, watched: bool = False, step: int = 0) -> bool:
        """Begin a forward of the model that is called as `key` describes; whether the hooks are to rest.

        Args:
            key: None if the arguments do not tell.
            room_bytes: that saved tensors may take now, where it `looks`.
            watched: somebody wants to know what it saves, so they are not.
            step: its number.
        """
        self._asked = True
        if not self.possible:
            return False
        if key is None:
            self.resting = self.possible = False
            return False
        if not watched and self.resting and self._has_fitted(key) and self._fits_still(room_bytes):
            if not self._rests:
                self._rests, self.since = True, 0 if self._rested else step
                self._rested = not self.counts
            return True
        self.resting = False
        if key not in self._met:
            self._met.append(key)
            del self._met[:-_MOST_KEYS]
        return False

    def _has_fitted(self, key: Key | None) -> bool:
        return key is not None and any(covers(known, key) for known in self._fitted)

    def _fits_still(self, room_bytes: int) -> bool:
        self._learn_in -= 1
        self._forwards_left -= 1
        if self._forwards_left >= 0 and self._learn_in:
            return True
        if room_bytes < self._kept_bytes * self._times or self._count_trained() != self._trained:
            self._fitted.clear()
            self._kept_bytes = 0
            return False
        forwards = room_bytes // (2 * self._times * self._kept_bytes) if self._kept_bytes else _MOST_FORWARDS
        self._forwards_left = max(1, min(forwards, _MOST_FORWARDS)) - 1
        return self._learn_in > 0

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """Describe how a forward is called; None where an argument does not tell how large it is."""
        tracer = interrupts.tracer()
        try:
            return self._key(args, kwargs)
        except Exception as error:  # whatever an object raises that is looked at
            interrupts.pass_on(error, tracer)
            return None

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        model = self._model()
        modes = (
            model is not None and model.training,
            *(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        )
        shapes = tuple(islice(_shapes((args, kwargs), 4), _MOST_ITEMS + 1))
        if len(shapes) > _MOST_ITEMS:
            raise Unknown
        return modes, shapes

    def _count_trained(self) -> int:
        """Count the elements of trained parameters."""
        model = self._model()
        return sum(p.numel() for p in model.parameters() if p.requires_grad) if model is not None else 0

    def _tell(self, kept_bytes: int, moved_bytes: int, room_bytes: int) -> None:
        """Say once what was decided, and why."""
        if self._tells and speaks():
            level = logging.WARNING if moved_bytes else logging.INFO
            self._notices.say("decision", self._decision(kept_bytes, moved_bytes, room_bytes), level=level)

    def _decision(self, kept_bytes: int, moved_bytes: int, room_bytes: int) -> str:
        """Tell in one line what tier `auto` has decided in the first step."""
        found = f'tier "auto": the first step saved {size(kept_bytes + moved_bytes)}'
        if room_bytes:  # else it was not worth a look
            found += f", memory has room for {size(room_bytes)} of it"
        if moved_bytes:
            return f"{found}: {size(moved_bytes)} went out of memory"
        rest = "the hooks only count" if self.counts else "the hooks are off"
        then = f"{rest} until shapes, memory or the model change" if self.resting else "the hooks stay on"
        return f"{found}: nothing moves, {then}"


def covers(known: Key, new: Key) -> bool:
    """Whether what fitted with `known` fits with `new`: tensors no larger, everything else equal."""
    if known[0] != new[0] or len(known[1]) != len(new[1]):
        return False
    return all(
        one == other or (len(one) == len(other) and one[:2] == other[:2] and all(map(operator.ge, one[2:], other[2:])))
        for one, other in zip(known[1], new[1], strict=True)
    )


class Unknown(Exception):
    """An argument that does not tell how large it is."""


def _shapes(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """Describe a tensor by dtype, need of a gradient, and sizes; a plain value by itself. Raises Unknown."""
    if isinstance(value, Tensor) and not value.is_nested:
        if any(type(dimension) is not int for dimension in value.shape):
            raise Unknown
        yield value.dtype, value.requires_grad, *value.shape
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
