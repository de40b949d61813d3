"""Order: where among the kernels of a compiled graph the operators run that move its tensors.

In forward the write begins behind the kernel that makes a tensor. It is waited for behind the last kernel that reads
the tensor, or later, as long as what is under way stays within a window. In backward a tensor is there ahead of the
first kernel that reads it, and its read begins as soon as a window has room for it. Both windows are in bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from . import inductor
from .operators import AHEAD, BACK, DONE, OUT, Item, item

_OURS = (OUT, DONE, AHEAD, BACK)


class Use(NamedTuple):
    """A tensor among the kernels: the place of the one that makes it (-1: none), its first and last readers (or that of
    the first that may not run before, for `end`), and its bytes."""

    nbytes: int
    made: int
    first: int
    last: int


def order_out(uses: Sequence[Use], window_bytes: int) -> list[tuple[int, int]]:
    """Return, for each tensor, behind which kernels its write begins and is waited for."""
    found = [(use.made, use.last) for use in uses]
    under_way: deque[int] = deque()
    under_way_bytes = 0
    for number in sorted(range(len(uses)), key=lambda number: uses[number].made):
        while under_way and under_way_bytes + uses[number].nbytes > window_bytes:
            oldest = under_way.popleft()
            under_way_bytes -= uses[oldest].nbytes
            found[oldest] = found[oldest][0], max(uses[oldest].last, uses[number].made)
        under_way.append(number)
        under_way_bytes += uses[number].nbytes
    for number in under_way:
        found[number] = found[number][0], 1 << 62
    return found


def order_back(uses: Sequence[Use], window_bytes: int) -> list[tuple[int, int]]:
    """Return, for each tensor, ahead of which kernels its read begins and is waited for."""
    found = [(use.first, use.first) for use in uses]
    here: deque[int] = deque()
    here_bytes, at = 0, -1
    for number in sorted(range(len(uses)), key=lambda number: uses[number].first):
        while here and here_bytes + uses[number].nbytes > window_bytes:
            oldest = here.popleft()
            here_bytes -= uses[oldest].nbytes
            at = uses[oldest].first
        here.append(number)
        here_bytes += uses[number].nbytes
        found[number] = at, uses[number].first
    return found


def arrange(nodes: list[Any]) -> list[Any]:
    """Put the operators among the kernels of one graph."""
    ours: defaultdict[tuple[int, Any], list[Any]] = defaultdict(list)
    kernels: list[Any] = []
    steps: dict[str, tuple[int, Any]] = {}
    for node in nodes:
        step = steps.get(_source(node)) or _step(node.node)
        if step is None:
            kernels.append(node)
            continue
        ours[step].append(node)
        steps.update(dict.fromkeys(node.get_buffer_names(), step))
    if not ours:
        return nodes
    numbers = list(dict.fromkeys(number for number, _ in ours))
    places = _Places.of(kernels)
    uses = {number: _use(places, ours, number, steps) for number in numbers}
    windows = item(numbers[0]).windows
    placed: list[tuple[int, int, int, list[Any]]] = []  # behind which kernel, in which order there
    out = [number for number in numbers if (number, OUT) in ours]
    found = order_out([uses[number] for number in out], windows.out_bytes)
    for number, (begins, ends) in zip(out, found, strict=True):
        _learn(item(number), ours[number, OUT][0])
        placed += [(begins, 1, number, ours[number, OUT]), (ends, 0, number, ours[number, DONE])]
        if ends == begins:
            placed[-1] = (ends, 2, number, ours[number, DONE])
    # One that makes room comes ahead of the one that takes it.
    back = sorted((number for number in numbers if (number, BACK) in ours), key=lambda number: uses[number].first)
    found = order_back([uses[number] for number in back], windows.ahead_bytes)
    for at, (number, (begins, ends)) in enumerate(zip(back, found, strict=True)):
        placed += [(begins - 1, 3, 2 * at, ours[number, AHEAD]), (ends - 1, 3, 2 * at + 1, ours[number, BACK])]
    result = _merge(kernels, sorted(placed, key=lambda each: each[:3]))
    return result if len(result) == len(nodes) and _holds(result) else nodes


def _merge(kernels: list[Any], placed: Sequence[tuple[int, int, int, list[Any]]]) -> list[Any]:
    result: list[Any] = []
    done = 0
    for behind, _, _, nodes in placed:
        upto = max(done, min(behind + 1, len(kernels)))
        result += kernels[done:upto]
        result += nodes
        done = upto
    return result + kernels[done:]


def _holds(nodes: Iterable[Any]) -> bool:
    """Whether each node comes after all that it needs."""
    listed = list(nodes)
    places = {name: place for place, node in enumerate(listed) for name in node.get_buffer_names()}
    return all(
        places.get(dependency.name, -1) < place or dependency.name in node.get_buffer_names()
        for place, node in enumerate(listed)
        for dependency in node.unmet_dependencies
    )


def _step(node: Any) -> tuple[int, Any] | None:
    """Tell which of our operators a kernel is, and for which item; None for any other."""
    if isinstance(node, inductor.take("FallbackKernel")) and node.op_overload in _OURS:
        return int(node.constant_args[-1]), node.op_overload
    return None


def _source(node: Any) -> str:
    """The operator whose result a node takes out of its tuple; "" for any other node."""
    within = node.node
    return str(within.inputs[0].get_name()) if isinstance(within, inductor.take("MultiOutput")) else ""


class _Places(NamedTuple):
    """Where among the kernels each buffer is made, read and waited for; `total`: of the kernels."""

    made: dict[str, int]
    read: defaultdict[str, list[int]]
    awaited: defaultdict[str, list[int]]
    total: int

    @staticmethod
    def of(kernels: Sequence[Any]) -> _Places:
        found = _Places({}, defaultdict(list), defaultdict(list), len(kernels))
        for place, node in enumerate(kernels):
            found.made.update(dict.fromkeys(node.get_buffer_names(), place))
            for dependency in node.read_writes.reads:
                found.read[dependency.name].append(place)
            for dependency in node.unmet_dependencies:
                found.awaited[dependency.name].append(place)
        return found


def _use(places: _Places, ours: dict[tuple[int, Any], list[Any]], number: int, steps: dict[str, Any]) -> Use:
    """Find who makes and who reads a tensor."""
    if (number, OUT) in ours:
        reads = {dependency.name for dependency in ours[number, OUT][0].read_writes.reads}
        names = {name for name in reads if name not in steps}
    else:
        names = {name for node in ours[number, BACK] for name in node.get_buffer_names()}
    made = max((places.made.get(name, -1) for name in names), default=-1)
    readers = [place for name in names for place in places.read[name]]
    # Whoever edits the memory waits for `done`: it may not come later.
    ends = {name for node in ours.get((number, DONE), ()) for name in node.get_buffer_names()}
    waits = [place - 1 for name in ends for place in places.awaited[name]]
    last = min([max([made, *readers]), *waits])
    return Use(item(number).nbytes, made, min(readers, default=places.total), last)


def _learn(moved: Item, node: Any) -> None:
    """Note how the compiled forward lays a tensor out, and whether others may edit its memory."""
    graph = inductor.take("V").graph
    tensor = node.node.inputs[0]
    moved.laid_out(tuple(_size(stride, graph) for stride in tensor.get_stride()))
    name = tensor.get_name()
    if name in graph.graph_inputs or name in graph.constants or name in graph.get_output_names():
        moved.share()


def _size(size: Any, graph: Any) -> Any:
    """Turn a size of the compiler's into one that fake tensors have."""
    known = getattr(size, "is_number", True)
    return int(size) if known else graph.sizevars.shape_env.create_symintnode(size, hint=None)
