"""Observe: runs a step without memory and without arithmetic, and learns of it what a planner learns of real ones.

The model is built of fake tensors: shapes, storages and autograd's graph are real, values are not there. So what each
operator saves is exact, in bytes and in order; only times come from a table of figures (`Device.seconds`).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from .._audit.calls import call, scalar
from .._blocks import find
from .._blocks.call import kept_of
from .._blocks.given import Given, Input
from .._errors import ConfigError
from .._plan.facts import OUTSIDE, Block, Place, Saved
from .._record.sighting import SMALL, Chains, Sighting, Sizes, recognise
from .._record.view import view_and_span
from .._torch.hook_stack import steps_aside
from .._torch.weights import MARK
from .._torch.weights import WEIGHT as WEIGHT_MARK
from .as_cuda import AsCuda
from .causal import leave_masks_out
from .clock import GRADIENT, SAVED, WEIGHT, Clock
from .cut import cut
from .hardware import Device

# Attribute of a storage, which lives as long as its memory: (version, begin, end, entry) of what is saved of it.
_KNOWN, _SMALL = "_tba_forecast", "_tba_forecast_small"
Subject = Callable[[], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Observed:
    """What a fake step has shown.

    Attributes:
        saved, blocks, forward_s, backward_s: as in `Facts`.
        weight_bytes, trained_bytes: of parameters and buffers; of parameters that get a gradient.
        trained: their count of elements.
        block_weight_bytes: of the largest block.
        outside_weight_bytes: of parameters that are in no block.
        other_bytes: most that live at once besides weights, gradients and what is saved: what operators work on, and
            what is saved in storages that are too small to plan.
        plain_bytes: most that live at once besides weights, in a step that keeps everything.
        tokens: of a batch, if it has any: elements of its largest tensor of whole numbers; else 0.
        small_bytes: saved in storages that are too small to plan, each counted once.
        model, parameters, dtype: the model's class, its number of parameters, before it was cut, and what most are.
        batch: the shape of the batch's largest tensor of whole numbers, or else of its largest tensor.
    """

    saved: tuple[Saved, ...]
    blocks: tuple[Block, ...]
    forward_s: float
    backward_s: float
    weight_bytes: int
    trained_bytes: int
    trained: int
    block_weight_bytes: int
    outside_weight_bytes: int
    other_bytes: int
    plain_bytes: int
    flops: int
    tokens: int
    small_bytes: int
    model: str
    parameters: int
    dtype: str
    batch: tuple[int, ...]


@dataclass
class _Visit:
    """One call of a module that may be a block."""

    module: nn.Module
    begin_s: float
    given: Input
    within: tuple[int, ...]
    end_s: float = 0.0


@dataclass
class _Entry:
    """One storage saved: within which visits, from outside in; and where it was saved again."""

    nbytes: int
    saved_s: float
    within: tuple[int, ...]
    again_within: set[tuple[int, ...]] = field(default_factory=set)
    wanted_s: float | None = None


@dataclass
class _Watch:
    """The hooks of one step."""

    clock: Clock
    sizes: Sizes
    visits: list[_Visit] = field(default_factory=list)
    given: dict[type, Given] = field(init=False)
    open: list[int] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)
    small_bytes: int = 0
    _chains: Chains = field(default_factory=Chains)
    _asked_s: float = 0.0

    def __post_init__(self) -> None:
        self.given = defaultdict(partial(Given, self.sizes.storage_bytes))

    def pack(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        return tensor.detach(), self._entry(tensor)  # detached: a node that holds its own output would be a cycle

    def unpack(self, packed: tuple[Tensor, int | None]) -> Tensor:
        tensor, index = packed
        if index is not None and self.entries[index].wanted_s is None:
            # Those that one operator asks for are asked for in turn.
            self._asked_s = max(self.clock.now_s, math.nextafter(self._asked_s, math.inf))
            self.entries[index].wanted_s = self._asked_s
        return tensor

    def _entry(self, tensor: Tensor) -> int | None:
        seen = recognise(tensor, self.sizes, self._chains, plain=type(tensor))
        if seen is SMALL:
            self._note_small(tensor)
        if type(seen) is not Sighting or seen.cast or not seen.nbytes:
            return None
        _, begin, end = view_and_span(tensor)
        root = tensor if tensor._base is None else tensor._base
        known: list[tuple[int, int, int, int]] = vars(seen.storage).setdefault(_KNOWN, [])
        for version, first, last, index in known:
            if version == root._version and first <= begin and end <= last:
                self.entries[index].again_within.add(tuple(self.open))
                return index
        if (place := seen.range_to_move(begin, end, self.sizes)) is None:
            return None
        known.append((root._version, *place, len(self.entries)))
        self.clock.call(seen.storage, SAVED)
        self.entries.append(_Entry(place[1] - place[0], self.clock.now_s, tuple(self.open)))
        return len(self.entries) - 1

    def _note_small(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not hasattr(storage, MARK) and not hasattr(storage, _SMALL) and not self._chains.lead_to_parameter(tensor):
            setattr(storage, _SMALL, True)
            self.small_bytes += storage.nbytes()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self.given[type(module)].take(arg for arg in kept_of(args, kwargs) if isinstance(arg, Tensor))
        self.visits.append(_Visit(module, self.clock.now_s, given, tuple(self.open)))
        self.open.append(len(self.visits) - 1)

    def leave(self, *_: Any) -> None:
        self.visits[self.open.pop()].end_s = self.clock.now_s


def observe(
    make: Subject,
    device: Device,
    *,
    min_tensor_bytes: int = 1 << 20,
    autocast: torch.dtype | None = None,
    tensor: int = 1,
) -> Observed:
    """Build a model and run one step of it, without memory.

    Args:
        make: makes a model and its batch.
        device: whose times count.
        min_tensor_bytes: of storages that are planned.
        autocast: run forward under it.
        tensor: ranks that the model's layers are cut among (`cut`); the step is that of the first.

    Raises:
        ConfigError: the model needs values that fake tensors do not have, gives no loss, trains nothing, or cannot be
            cut.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _quiet():
        try:
            model, batch = make()
            return _observe(model, batch, device, min_tensor_bytes, autocast, tensor)
        except (ConfigError, ModuleNotFoundError):
            raise
        except Exception as error:
            if not _needs_values(error):
                raise
            raise ConfigError(
                f"the model cannot be run without values ({type(error).__name__}: {_first_line(error)}): it looks at "
                "the contents of a tensor, as .item(), .tolist(), nonzero() or a branch on a comparison do. Leave "
                "that out of the step, or turn it off by an option of the model; what the fake step cannot do, "
                "`offload_context(model, memory_budget=...)` plans from real steps"
            ) from error


def _observe(
    model: nn.Module,
    batch: Any,
    device: Device,
    min_tensor_bytes: int,
    autocast: torch.dtype | None,
    tensor: int = 1,
) -> Observed:
    model.train()
    leave_masks_out(model, batch)
    parameters = sum(p.numel() for p in model.parameters())
    cut(model, tensor)
    clock = Clock(device.seconds)
    weights = {id(storage): storage for storage in map(Tensor.untyped_storage, [*model.parameters(), *model.buffers()])}
    for storage in weights.values():
        setattr(storage, MARK, WEIGHT_MARK)
        clock.call(storage, WEIGHT)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter that requires a gradient: nothing would train")
    watch = _Watch(clock, Sizes.of(min_tensor_bytes))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda p: _note_gradient(clock, p))
    with AsCuda() if device.like_cuda else nullcontext(), clock:
        with ExitStack() as stack:
            for module in find.candidates(model):
                stack.callback(module.register_forward_pre_hook(watch.enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(watch.leave, always_call=True).remove)
            if autocast is not None:
                stack.enter_context(torch.autocast("cpu", autocast))
            steps_aside(watch.pack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack))
            loss = scalar(call(model, batch, "tba plan"), None, "tba plan")
        turn_s = clock.now_s
        loss.backward()
    blocks, saved = _placed(watch, turn_s, clock.now_s)
    inside = [list(watch.visits[visit].module.parameters()) for visit in blocks]
    sizes = [sum(p.nbytes for p in each) for each in inside]
    outside = set(model.parameters()).difference(*inside)
    return Observed(
        saved=saved,
        blocks=tuple(_block(watch.visits[visit]) for visit in blocks),
        forward_s=turn_s,
        backward_s=clock.now_s - turn_s,
        weight_bytes=sum(storage.nbytes() for storage in weights.values()),
        trained_bytes=sum(p.nbytes for p in trained),
        trained=sum(p.numel() for p in trained),
        block_weight_bytes=max(sizes, default=0),
        outside_weight_bytes=sum(p.nbytes for p in outside),
        other_bytes=clock.most_other_bytes,
        plain_bytes=clock.most_bytes,
        flops=clock.flops,
        tokens=math.prod(shape) if (shape := _tokens(batch)) else 0,
        small_bytes=watch.small_bytes,
        model=type(model).__name__,
        parameters=parameters,
        dtype=_dtype(trained),
        batch=shape or _largest(batch),
    )


def _placed(watch: _Watch, turn_s: float, end_s: float) -> tuple[list[int], tuple[Saved, ...]]:
    """Choose the blocks, and tell for each storage in which of them it is saved."""
    inside: dict[nn.Module, int] = {}
    for entry in watch.entries:
        for visit in entry.within:
            module = watch.visits[visit].module
            inside[module] = inside.get(module, 0) + entry.nbytes
    chosen = set(find.blocks(inside))
    blocks: list[int] = []
    numbers: dict[int, int] = {}
    for visit, each in enumerate(watch.visits):
        if each.module in chosen and not any(outer in numbers for outer in each.within):
            numbers[visit] = len(blocks)
            blocks.append(visit)

    def block_of(within: tuple[int, ...]) -> int:
        return next((numbers[visit] for visit in within if visit in numbers), OUTSIDE)

    counts: dict[int, int] = {}
    saved: list[Saved] = []
    shared = 0
    for entry in watch.entries:
        block = block_of(entry.within)
        place = Place(block, counts.get(block, 0))
        counts[block] = place.number + 1
        if block != OUTSIDE and any(block_of(within) != block for within in entry.again_within):
            shared += 1  # saved elsewhere too, it is none of the block's, as in `SharedStorages`
            place = Place(OUTSIDE, -shared)
        wanted_s = end_s if entry.wanted_s is None else entry.wanted_s
        saved.append(Saved(place, entry.nbytes, entry.saved_s, wanted_s - turn_s))
    return blocks, tuple(saved)


def _block(visit: _Visit) -> Block:
    given = visit.given
    return Block(visit.begin_s, visit.end_s - visit.begin_s, given.nbytes, stays_bytes=given.stays_bytes)


def _note_gradient(clock: Clock, parameter: Tensor) -> None:
    if parameter.grad is not None:
        clock.call(parameter.grad.untyped_storage(), GRADIENT)


def _tokens(batch: Any) -> tuple[int, ...]:
    """Shape of the largest tensor of whole numbers with more than one dimension; () if there is none."""
    whole = [
        leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dtype is torch.int64 and leaf.dim() > 1
    ]
    return max((tuple(leaf.shape) for leaf in whole), key=math.prod, default=())


def _largest(batch: Any) -> tuple[int, ...]:
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max(shapes, key=math.prod, default=())


def _dtype(parameters: list[nn.Parameter]) -> str:
    counts: dict[torch.dtype, int] = {}
    for parameter in parameters:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return str(max(counts, key=counts.__getitem__)).removeprefix("torch.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from logging an error that is raised too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _needs_values(error: Exception) -> bool:
    """Whether an error says that a fake tensor has no values, and not that the model is wrong."""
    kinds = {kind.__module__ for kind in type(error).__mro__}
    text = str(error)
    return (
        "torch._subclasses.fake_tensor" in kinds
        or "torch.fx.experimental.symbolic_shapes" in kinds
        or "fake tensor" in text.lower()
        or "FakeTensor" in text
        or "meta tensor" in text
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
