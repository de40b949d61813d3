"""Recipe: which operators to run, in which state, on which packed objects, to recompute one tensor.

Guarantees:

1. `compute` runs each operator as it ran in forward: without autocast (its casts are operators of their own), with the
   recorded number of threads and use of oneDNN. It gives the recorded dtype, shape and strides, or raises, and it
   leaves the state as it found it.
2. The result of a settled recipe depends only on its sources, so a recipe that was right once stays right.
3. A recipe never changes, holds no node of the graph and takes no lock.
4. A recipe with a `Check` gives the bits that the check knows, or raises `EditedError`.

Assumptions: kernels are deterministic, given that state and `torch.set_flush_denormal`, which cannot be queried. The
use of oneDNN belongs to the process: if it differs, another thread may briefly see the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.private import enable_mkldnn, mkldnn_enabled
from .check import Check
from .operators import Operator, Output, Scalars

# The unpack hook of packed objects, which are opaque here.
Unpack = Callable[[Any], Tensor]
# (packed object, what gives its tensor) -> a packed object safe from unnoticed edits, and its tensor if that is a copy.
# Raises RuntimeError if that costs too much.
Hold = Callable[[Any, Callable[[], Tensor]], tuple[Any, Tensor | None]]


class Operand(NamedTuple):
    """An operand that some node saved, as a packed object."""

    packed: Any


class Expression(NamedTuple):
    """An operator on operands: each an `Operand`, an `Expression`, a Python number, or None if absent."""

    operator: Operator
    operands: tuple[Any, ...]
    scalars: Scalars
    output: Output


class State(NamedTuple):
    """What kernels depend on besides their operands."""

    threads: int
    mkldnn: bool


def _state() -> State:
    return State(torch.get_num_threads(), mkldnn_enabled())


@dataclass(slots=True, weakref_slot=True, eq=False)
class Recipe:
    """How to recompute one tensor.

    Attributes:
        expression: what to compute.
        strides: of the tensor.
        unpack: the unpack hook of its packed objects.
        sources: the packed objects that it asks for, each as often as it does.
        depth: the largest number of operators on a path to kept tensors, including recipes underneath.
        amplifies: a small error of a source may become a large error of the tensor.
        searches: it has an operator whose scalars have to be found.
        names: of its operators, the last to run first.
        signature: equal for two recipes that run the same operators for results of one dtype and layout.
        state: recorded in forward.
        check: of the tensor's bits; None if they need not be equal, or were not taken.
    """

    expression: Expression
    strides: tuple[int, ...]
    unpack: Unpack
    sources: tuple[Any, ...]
    depth: int
    amplifies: bool
    searches: bool
    names: tuple[str, ...]
    signature: Hashable
    state: State = field(default_factory=_state)
    check: Check | None = None

    def compute(self, *, checked: bool = True) -> Tensor:
        """Compute the tensor, without grad, with its dtype, shape, strides and device.

        It has its own memory unless the last operator is a view. Call it on a `settled` recipe. Runs on the calling
        thread and the current stream, and calls the unpack hook for each source without any lock. If it is not
        `checked`, nothing is compared.

        Raises:
            RuntimeError: an unpack hook raised it, or an operator gave another dtype or shape than in forward.
            EditedError: the result is not what the check knows. On a device, backward raises it as it ends.
        """
        made = self._made(None)[1]
        if checked and self.check is not None:
            self.check.compare(made, self.names)
        return made

    def settled(self, hold: Hold) -> tuple[Recipe, Tensor]:
        """Return the recipe to use from now on, and its result.

        Its sources are those that `hold` returns. It has the scalars that autograd does not save, found from other
        tensors that the operator saved. Raises as `compute` does, and RuntimeError if no scalars are found.
        """
        sources: list[Any] = []

        def held(packed: Any, operand: Callable[[], Tensor]) -> tuple[Any, Tensor | None]:
            packed, copy = hold(packed, operand)
            sources.append(packed)
            return packed, copy

        expression, result = self._made(held)
        return replace(self, expression=expression, sources=tuple(sources)), result

    @property
    def found(self) -> tuple[Scalars, ...]:
        """The scalars that autograd does not save, of a settled recipe, in the order in which operators run."""
        return tuple(_found(self.expression))

    def as_before(
        self, hold: Hold, at_hand: Callable[[Any], Tensor | None], found: tuple[Scalars, ...]
    ) -> Recipe | None:
        """Return the recipe to use from now on as `settled` does, but run nothing; None if only running it tells.

        Args:
            at_hand: a packed object's tensor if that is in memory.
            found: by a recipe of the same signature, whose result was right.
        """
        sources: list[Any] = []
        expression = self._as_before(self.expression, hold, at_hand, iter(found), sources)
        return None if expression is None else replace(self, expression=expression, sources=tuple(sources))

    def _as_before(
        self,
        expression: Expression,
        hold: Hold,
        at_hand: Callable[[Any], Tensor | None],
        found: Iterator[Scalars],
        sources: list[Any],
    ) -> Expression | None:
        operator, operands = expression.operator, list(expression.operands)
        kept = len(operator.operands)  # behind them are the extras
        for place, operand in enumerate(operands[:kept]):
            if type(operand) is Expression:
                operands[place] = self._as_before(operand, hold, at_hand, found, sources)
                if operands[place] is None:
                    return None
            elif type(operand) is Operand:
                packed, _ = hold(operand.packed, partial(self._operand, operand.packed))
                sources.append(packed)
                operands[place] = Operand(packed)
        scalars = expression.scalars
        if operator.holds is not None:
            tensors = [at_hand(each.packed) if type(each) is Operand else each for each in operands]
            known = next(found, None)
            if known is None or not operator.holds(tensors, known):
                return None
            scalars = known
        return expression._replace(operands=tuple(operands[:kept]), scalars=scalars)

    def _operand(self, packed: Any) -> Tensor:
        return _there(self.unpack(packed).detach())

    def _made(self, hold: Hold | None) -> tuple[Expression, Tensor]:
        with _restored(self.state, self.expression.output.device.type):
            expression, result = self._run(self.expression, hold)
            if result.stride() != self.strides:
                exact = torch.empty_strided(result.shape, self.strides, dtype=result.dtype, device=result.device)
                result = exact.copy_(result)
        return expression, result

    def _run(self, expression: Expression, hold: Hold | None) -> tuple[Expression, Tensor]:
        """Run an expression. Return the expression to use from now on (without `hold`: this one) and its result."""
        operator, operands, found = expression.operator, list(expression.operands), []
        for place, operand in enumerate(expression.operands):
            tensor = operand
            if type(operand) is Expression:
                operands[place], tensor = self._run(operand, hold)
            elif type(operand) is Operand:
                tensor = self._operand(operand.packed)
                if hold is not None and place < len(operator.operands):
                    packed, copy = hold(operand.packed, partial(_same, tensor))
                    operands[place] = Operand(packed)
                    tensor = tensor if copy is None else copy
            found.append(tensor)
        scalars, output = expression.scalars, expression.output
        if hold is not None and operator.find is not None:
            scalars, result = operator.find(found, scalars)
        else:
            result = operator.run(found, scalars, output)
        if hold is not None:
            kept = tuple(operands[: len(operator.operands)])  # without the extras, which only find scalars
            expression = expression._replace(operands=kept, scalars=scalars)
        return expression, _as_recorded(result, output)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _found(expression: Expression) -> Iterator[Scalars]:
    for operand in expression.operands:
        if type(operand) is Expression:
            yield from _found(operand)
    if expression.operator.find is not None:
        yield expression.scalars


def _as_recorded(result: Tensor, output: Output) -> Tensor:
    if result.dtype != output.dtype or result.shape != output.shape:
        raise RuntimeError(
            f"recomputed {result.dtype} {list(result.shape)}, but forward had {output.dtype} {list(output.shape)}; the "
            "operator ran in place or its operands have changed: keep this tensor"
        )
    return result


def _there(operand: Tensor) -> Tensor:
    """Return an operand. Raises RuntimeError if its memory was emptied (a gathered weight): a kernel would crash."""
    if operand.numel() and not operand.untyped_storage().nbytes():
        raise RuntimeError(
            f"the memory of {operand.dtype} {list(operand.shape)} was emptied, but another saved tensor is to be "
            "recomputed from it: fill it before backward, or train without compress="
        )
    return operand


@contextmanager
def _restored(state: State, device_type: str) -> Iterator[None]:
    """Run a region in the recorded state, without autocast and grad. Sets only settings that differ."""
    now = _state()
    casting = torch.is_autocast_enabled(device_type)
    try:
        _switch(now, state)
        casts = torch.autocast(device_type, enabled=False) if casting else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), casts:
            yield
    finally:
        _switch(state, now)


def _switch(now: State, to: State) -> None:
    if now.threads != to.threads:
        torch.set_num_threads(to.threads)
    if now.mkldnn != to.mkldnn:
        enable_mkldnn(to.mkldnn)
