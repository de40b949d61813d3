"""State: what a block's forward may change, as it was when a call began; compared with now, and restored.

A forward that runs again must find what it found the first time, and leave no trace. So its state is read before its
first run and restored for the second; the state in between is restored after that.

Guarantees:

1. Reading, comparing and restoring run none of the program's code.
2. After a region of `as_found` everything that was read is as before it, whatever the region did and however it ended,
   except what `lost` names: the contents of a large tensor that was edited in place.

Assumption: no other thread changes it in that region; such a change is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from .._torch.private import innermost
from .generators import SHARED_GENERATORS
from .holders import PLAIN, Holder, Reading, equal, version
from .reach import Reach

_NOTE = "_tba_state"
_GLOBAL_HOOKS = tuple(getattr(modules, name, None) for name in ("_global_forward_hooks", "_global_forward_pre_hooks"))


class State:
    """What holders hold when this is made.

    Attributes:
        unseen: why not everything can be read; "" if it can.
    """

    def __init__(
        self,
        holders: list[Holder],
        weights: list[nn.Parameter],
        unseen: str,
        readings: list[Reading] | None = None,
    ) -> None:
        self.unseen = unseen
        self._holders = holders
        self._weights = weights
        self._readings = [holder.read() for holder in holders] if readings is None else readings
        self._versions = [version(weight) for weight in weights]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Become None in a copy of the module that keeps it."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def again(self) -> State:
        return State(self._holders, self._weights, self.unseen)

    def beside(self, holders: list[Holder]) -> State:
        """Return the same with what more holders hold now."""
        readings = [*self._readings, *(holder.read() for holder in holders)]
        return State([*self._holders, *holders], self._weights, self.unseen, readings)

    def now(self) -> State | None:
        """Return the current state if nothing but weights has changed since, as they do in each step; else None."""
        if self.unseen or self._difference():
            return None
        return State(self._holders, self._weights, self.unseen, self._readings)

    def change(self) -> str:
        """Name something that has changed since; "" if nothing has."""
        return self._difference() or ("its weights" if self.weights_changed() else "")

    def _difference(self) -> str:
        for holder, reading in zip(self._holders, self._readings, strict=True):
            now = holder.read()
            if not equal(reading, now):
                return holder.difference(reading, now)
        return ""

    def lost(self) -> str:
        """Name something that has changed since and cannot be restored; "" if everything can."""
        for holder, reading in zip(self._holders, self._readings, strict=True):
            if not holder.undoes and not equal(reading, holder.read()):
                return holder.name
        return "its weights" if self.weights_changed() else ""

    def weights_changed(self) -> bool:
        """Whether a weight was edited in place since."""
        return any(version(weight) != before for weight, before in zip(self._weights, self._versions, strict=True))

    def put_back(self, now: State | None = None) -> None:
        """Make all holders hold what they held; `now` is what they hold, if that was read. Weights stay."""
        readings = (holder.read() for holder in self._holders) if now is None else now._readings
        for holder, before, found in zip(self._holders, self._readings, readings, strict=True):
            if not equal(before, found):
                holder.write(before)


class Found:
    """What a call of a block's forward finds: the state of the block, and of the objects passed to it.

    A cache that is passed in may change in the call; the block itself may not, if it is to run twice.
    """

    def __init__(self, block: State, given: State) -> None:
        self.block = block
        self.given = given

    @classmethod
    def of(
        cls, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, tries: bool = False
    ) -> Found:
        """Read it. The block's state is walked again only if it has changed since its last call.

        `tries`: it also reads the generators that Python and NumPy share among all code, which otherwise it does only
        for a block whose code names them: reading them takes longer than all the rest.
        """
        # Kept with the module, so that the garbage collector sees cycles through it; as an attribute of the dictionary
        # of its hooks, where nobody looks.
        notes: dict[str, Any] = getattr(module._forward_hooks, "__dict__", {})
        before: State | None = notes.get(_NOTE)
        known = before.now() if before is not None else None
        if known is None:
            reach = Reach().walk([forward, *_GLOBAL_HOOKS], block=module)
            known = State(reach.holders, reach.weights, reach.unseen)
        notes[_NOTE] = known
        block = known.beside(Reach().walk(SHARED_GENERATORS).holders) if tries else known
        given = Reach()
        leaves = list(plain_leaves((args, kwargs)))
        if any(type(leaf) not in PLAIN and not isinstance(leaf, (Tensor, float)) for leaf in leaves):
            given.walk([args, kwargs], but=[module, *(leaf for leaf in leaves if isinstance(leaf, Tensor))])
        return cls(block, State(given.holders, given.weights, given.unseen))

    @property
    def unseen(self) -> str:
        return self.block.unseen or self.given.unseen

    def lost(self) -> str:
        return self.block.lost() or self.given.lost()

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Restore it for a region; afterwards everything is as before the region."""
        block, given = self.block.again(), self.given.again()
        try:
            self.block.put_back(block)
            self.given.put_back(given)
            yield
        finally:
            block.put_back()
            given.put_back()


def plain_leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in plain tuples, lists and dictionaries, not in subclasses."""
    if type(value) in (tuple, list):
        for each in value:
            yield from plain_leaves(each)
    elif type(value) is dict:
        for each in value.values():
            yield from plain_leaves(each)
    else:
        yield value


def fingerprint(weights: Sequence[Tensor]) -> list[Tensor]:
    """Sum the bytes of weights, eight at a time, to detect edits that bump no version counter (`weight.data`)."""
    sums = []
    for part in (part for weight in weights for part in innermost(weight.detach())):
        if part.device.type == "meta" or part.layout is not torch.strided or not part.numel():
            continue
        flat = part.contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        sums.append(flat[:whole].view(torch.int64).sum() + flat[whole:].sum())
    return sums
