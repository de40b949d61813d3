"""Call: what one call of a block's forward was given and began in, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._device.generators import DeviceStates
from .._errors import edited_in_place
from .._state.found import Found, plain_leaves
from .._state.holders import equal_bits, version
from .._torch import modes
from .._torch.hook_stack import steps_aside
from .._torch.private import innermost, sizes


class Call:
    """One call, described before it begins.

    Attributes:
        found: what the block reaches, as the call found it.
        tensors: that it is given, in order, until it has ended.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Found) -> None:
        self.found = found
        self.tensors = [leaf for leaf in plain_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {id(each): number for number, each in enumerate(self.tensors)}
        self._values = _replaced((args, kwargs), lambda leaf: _Place(places[id(leaf)]))  # lists may grow in the call
        self._versions = [version(each) for each in self.tensors]
        self._positional = {id(each) for each in args if isinstance(each, Tensor)}
        self._surroundings = _Surroundings()
        self._kept: list[tuple[Any, bool, bool]] = []  # whether by `keep`, and whether it needs a gradient

    def change(self) -> str:
        """Name what has changed since it began and would be found changed by a second call; "" for nothing."""
        if change := self.found.block.change():
            return change
        if self._versions != [version(each) for each in self.tensors]:
            return "what it is given"
        if lost := self.found.given.lost():
            return f"{lost} that it is given"
        return ""

    def keep(self, keep: Callable[[Tensor], Any], *, positional: bool = False) -> None:
        """Keep the tensors that it is given by `keep`; if `positional`, of others only those that need a gradient."""
        packs = [not positional or each.requires_grad or id(each) in self._positional for each in self.tensors]
        self._kept = [
            (keep(each) if packed else each, packed, each.requires_grad)
            for each, packed in zip(self.tensors, packs, strict=True)
        ]

    def end(self) -> None:
        """Let go of what was given: whoever is to have it has it."""
        self.tensors = []

    @contextmanager
    def repeated(
        self, give: Callable[[Any], Tensor], note: Callable[[Tensor], Any], noted: Callable[[Any], Tensor]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Give the arguments for a second call, in a region where all is as it was when the first began.

        Args:
            give: gives back what was kept.
            note, noted: the pair of hooks for what the second call saves.

        Raises:
            RuntimeError: PyTorch's own, for a tensor that was edited in place since.
        """
        tensors = []
        for (kept, packed, needs), before in zip(self._kept, self._versions, strict=True):
            if not packed and version(kept) != before:
                raise edited_in_place(f"{kept.type()} {list(sizes(kept))}", version(kept), before)
            tensors.append((give(kept) if packed else kept).detach().requires_grad_(needs))
        with self.found.as_found(), modes.without_programs(), self._surroundings.restored(note, noted):
            yield _filled(self._values, tensors)


def kept_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """List the arguments that a block keeps where it recomputes: those of `Call.keep`, and what is no tensor."""
    return [*args, *(each for each in kwargs.values() if isinstance(each, Tensor) and each.requires_grad)]


def shape(tensor: Tensor) -> tuple[Any, ...]:
    """Describe a saved tensor, for two calls to be compared by."""
    return tensor.dtype, *sizes(tensor)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; of DTensors the parts that this rank has, as it is alone with them."""
    parts, others = innermost(one), innermost(other)
    return one.shape == other.shape and len(parts) == len(others) and all(map(equal_bits, parts, others))


def as_saved(tensor: Tensor) -> Tensor:
    """Give back, as an unpack hook, what a second call has saved: its forward may go through its own graph."""
    return tensor


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments."""

    number: int


def _replaced(value: Any, by: Callable[[Tensor], Any]) -> Any:
    """Copy tuples, lists and dictionaries that are nothing else, with something else in place of each tensor."""
    if type(value) in (tuple, list):
        return type(value)(_replaced(each, by) for each in value)
    if type(value) is dict:
        return {key: _replaced(each, by) for key, each in value.items()}
    return by(value) if isinstance(value, Tensor) else value


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    """Copy such containers with tensors in their places again."""
    if type(value) in (tuple, list):
        return type(value)(_filled(each, tensors) for each in value)
    if type(value) is dict:
        return {key: _filled(each, tensors) for key, each in value.items()}
    return tensors[value.number] if isinstance(value, _Place) else value


class _Surroundings:
    """The state of random generators and of autocast that a forward begins in."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = DeviceStates()
        kinds = ("cpu",) if self._devices.kind is None else ("cpu", self._devices.kind)
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self, note: Callable[[Tensor], Any], noted: Callable[[Any], Tensor]) -> Iterator[None]:
        """Restore it for a region whose graph is its own."""
        with ExitStack() as stack:
            stack.enter_context(self._devices.forked())
            torch.set_rng_state(self._cpu)
            self._devices.restore()
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            stack.enter_context(torch.enable_grad())
            steps_aside(note)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, noted))
            yield
