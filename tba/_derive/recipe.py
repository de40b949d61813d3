"""Recipe: the operators to run, in which state, on which packed objects, to have one tensor again.

Guarantees: `compute` runs each operator as it ran in forward: without autocast (its casts are operators of their own),
under the recorded number of threads, deterministic setting and use of mkldnn. It gives the recorded dtype, shape and
strides, or raises; it leaves the state as it found it. What `settled` gives depends on its stored sources alone, so
that what has come out right once comes out right again. A recipe never changes, holds no node of the graph and takes
no lock.

Assumptions: kernels are deterministic, given that state and `torch.set_flush_denormal`, which nobody can ask for. All
of it but the number of threads belongs to the process: where it differs, another thread may see the recorded one for a
moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._record.user_code import asks_for_operators
from .._torch.private import enable_mkldnn, mkldnn_enabled
from .operators import Operator, Output, Scalars

asks_for_operators(globals())

# Packed objects are opaque here: this hook, which they were packed for, brings them back.
Unpack = Callable[[Any], Tensor]
# (packed object, its tensor) -> both where nobody can edit them unnoticed. Raises RuntimeError where that is too dear.
Hold = Callable[[Any, Tensor], tuple[Any, Tensor]]


class Saved(NamedTuple):
    """An operand that some node saved."""

    packed: Any
    key: Hashable


class Step(NamedTuple):
    """An operator to run. An operand is `Saved`, `Step`, a Python number, or None where the operator had none."""

    operator: Operator
    operands: tuple[Any, ...]
    scalars: Scalars
    output: Output
    key: Hashable


class State(NamedTuple):
    """What kernels depend on besides their operands."""

    threads: int
    deterministic: bool
    warn_only: bool
    mkldnn: bool


class Found(Protocol):
    """What a search for operands has met: see `Recipe`."""

    sources: list[Any]
    depth: int
    amplifies: bool


class Recipe:
    """How to make one tensor again.

    Attributes:
        signature: equal for two recipes that run the same operators with the same scalars in the same state, on
            operands of the same dtypes and shapes where autograd knows them, for results of the same dtype, shape and
            strides. Strides of operands are not part of it: the operators run on the operands as they were.
        sources: the packed objects it asks for, each as often as it does.
        depth: the most operators on a path to what is really kept, recipes underneath included.
        amplifies: whether a small error of a source may be a large one of the tensor.
    """

    __slots__ = (
        *("__weakref__", "_state", "_step", "_strides", "_unpack"),
        *("amplifies", "depth", "signature", "sources"),
    )

    def __init__(self, step: Step, strides: tuple[int, ...], unpack: Unpack, found: Found) -> None:
        self._step = step
        self._strides = strides
        self._unpack = unpack
        self._state = _state()
        self.sources = tuple(found.sources)
        self.depth = found.depth
        self.amplifies = found.amplifies
        self.signature: Hashable = (step.key, strides, self._state)

    def compute(self) -> Tensor:
        """The tensor, without grad: dtype, shape, strides and device as they were; in memory of its own unless the
        last operator is a view.

        To be asked of a `settled` recipe. Runs on the calling thread and current stream, and calls the unpack hook for
        each source without any lock.

        Raises:
            RuntimeError: what an unpack hook raises; or an operator gave another dtype or shape than in forward.
        """
        with self._as_in_forward():
            return self._strided(self._run(self._step))

    def settled(self, hold: Hold) -> tuple[Recipe, Tensor]:
        """The recipe to use from now on, and what it gives.

        It starts from what `hold` gives for each source, and has the scalars that autograd does not save, which are
        found from what the operator saved besides. Raises what `compute` does, and RuntimeError where there are none.
        """
        sources: list[Any] = []
        with self._as_in_forward():
            step, result = self._settle(self._step, hold, sources)
            result = self._strided(result)
        settled = copy(self)
        settled._step, settled.sources = step, tuple(sources)
        return settled, result

    def _as_in_forward(self) -> AbstractContextManager[None]:
        return _restored(self._state, self._step.output.device.type)

    def _strided(self, result: Tensor) -> Tensor:
        if result.stride() == self._strides:
            return result
        exact = torch.empty_strided(result.shape, self._strides, dtype=result.dtype, device=result.device)
        return exact.copy_(result)

    def _run(self, step: Step) -> Tensor:
        operands = [self._run(each) if type(each) is Step else self._given(each) for each in step.operands]
        return _as_recorded(step.operator.run(operands, step.scalars, step.output), step.output)

    def _settle(self, step: Step, hold: Hold, sources: list[Any]) -> tuple[Step, Tensor]:
        operands, found = [], []
        for place, operand in enumerate(step.operands):
            if type(operand) is Step:
                operand, tensor = self._settle(operand, hold, sources)
            else:
                tensor = self._given(operand)
                if type(operand) is Saved and place < len(step.operator.operands):
                    packed, tensor = hold(operand.packed, tensor)
                    sources.append(packed)
                    operand = operand._replace(packed=packed)
            operands.append(operand)
            found.append(tensor)
        scalars, find = step.scalars, step.operator.find
        if find is not None:
            scalars, result = find(found, scalars)
        else:
            result = step.operator.run(found, scalars, step.output)
        kept = tuple(operands[: len(step.operator.operands)])  # the extras have served to find scalars
        return step._replace(operands=kept, scalars=scalars), _as_recorded(result, step.output)

    def _given(self, operand: Any) -> Any:
        return _there(self._unpack(operand.packed).detach()) if type(operand) is Saved else operand


def _as_recorded(result: Tensor, output: Output) -> Tensor:
    if result.dtype != output.dtype or result.shape != output.shape:
        raise RuntimeError(
            f"made {result.dtype} {list(result.shape)} again where forward had {output.dtype} {list(output.shape)}; "
            "the operator was run in place or its operands have changed: keep this tensor"
        )
    return result


def _there(operand: Tensor) -> Tensor:
    """A kernel would read from nowhere what was emptied, such as a weight that was gathered for a while."""
    if operand.numel() and not operand.untyped_storage().nbytes():
        raise RuntimeError(
            f"the memory of {operand.dtype} {list(operand.shape)} has been emptied, and another saved tensor is to be "
            "made again from it: fill it before backward, or train without compress="
        )
    return operand


def _state() -> State:
    return State(
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        mkldnn_enabled(),
    )


@contextmanager
def _restored(state: State, device_type: str) -> Iterator[None]:
    """The recorded state, without autocast and grad; touches only what differs."""
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
    if now[1:3] != to[1:3]:
        torch.use_deterministic_algorithms(to.deterministic, warn_only=to.warn_only)
    if now.mkldnn != to.mkldnn:
        enable_mkldnn(to.mkldnn)
