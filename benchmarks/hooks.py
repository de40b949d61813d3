"""The hooks benchmark: the cost of one saved tensor on the calling thread, by kind."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import typer

from ._arms.hook_cost import COUNTED, FOLLOWED, KINDS, LIGHT, STORES
from ._processes.arms import Spec
from ._processes.device import DEVICES
from ._processes.measure import run_rounds
from ._report.bar import Bar
from ._report.environment import environment_block
from ._report.options import Device, Quick
from ._report.results import CannotMeasure, Column, Grid, Result

# Microseconds above the empty pair. Passed through: a weight, or a tensor below the minimum size.
_BARS_US = {"weight": 5.0, "below minimum size": 5.0, "further view": 15.0, "new record": 60.0}
_CLOCKS = ("cpu_us", "pack_us", "wall_us")
_CHAIN_CLOCKS = ("wall_us", "cpu_us", "process_us")
# One compute thread: the kernels are scalars, and a second thread would only spin beside the measured one.
_THREADS = 1


def hooks(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each kind.")] = 40,
    device: Device = "cpu",
    quick: Quick = False,
) -> Result:
    """Cost per saved tensor on the calling thread, above an empty pair of hooks."""
    rounds, here = 3 if quick else rounds, DEVICES[device]
    sizes = {"tensors": 16, "records": 64} if quick else {"tensors": 128, "records": 1000}
    options = {**sizes, "device": here.name}
    spec = Spec(name="hooks", role="hook_cost:HookArm", options=options, allocator=here.allocator, threads=_THREADS)
    turns = list(run_rounds([spec], rounds=rounds, title="hooks"))
    arm, answers = turns[0][0], [answer for _, _, answer, timed in turns if timed]
    _check(arm.final)
    bars, kinds = {}, {}
    for kind in KINDS:
        above = {clock: median([_above(answer, kind, clock) for answer in answers]) for clock in _CLOCKS}
        limit = None if here.apart else _BARS_US.get(kind)  # the limits are for a CPU
        bars[kind] = Bar(what=kind, measured=above["cpu_us"], limit=limit, unit="us")
        empty_us = median([answer[kind]["empty"]["cpu_us"] for answer in answers])
        kinds[kind] = {**above, "empty_cpu_us": empty_us, "limit_us": limit, "met": bars[kind].met}
    chains = {
        store: {clock: median([answer[store][clock] for answer in answers]) for clock in _CHAIN_CLOCKS}
        for store in STORES
    }
    data = {"kinds": kinds, "chains": chains, "counters": arm.final, "rounds": rounds, **sizes}
    environment = environment_block({"hooks": arm}, threads=_THREADS, card=here.card)
    tables = [_kind_table(bars, kinds, rounds, sizes["tensors"]), _chain_table(chains, rounds, sizes["records"])]
    return Result(theme=here.theme("hooks"), tables=tables, data=data, environment=environment)


def _kind_table(bars: dict[str, Bar], kinds: dict[str, dict[str, Any]], rounds: int, tensors: int) -> Grid:
    def cell(place: int) -> Callable[[str], str]:
        return lambda kind: bars[kind].row()[place]

    def us(clock: str) -> Callable[[str], str]:
        return lambda kind: f"{kinds[kind][clock]:.1f} us"

    columns: list[Column] = [*((head, cell(place)) for place, head in enumerate(("kind", "bar", "measured", "met")))]
    columns += [("of it pack", us("pack_us")), ("wall", us("wall_us")), ("empty", us("empty_cpu_us"))]
    note = (
        "Pack, unpack and release of one saved tensor: microseconds of the calling thread's CPU time above an empty "
        f"pair of hooks; medians over {rounds} chains of {tensors}. Wall: the same in wall time, without waiting for "
        "the disk. Empty: the whole chain's cost per tensor under the empty pair. Counted: under a memory_budget that "
        "fits. Kept: under a plan that moves some larger tensors saved before."
    )
    return Grid.of("Cost per saved tensor", kinds, columns, note)


def _chain_table(chains: dict[str, dict[str, float]], rounds: int, records: int) -> Grid:
    note = (
        f"{records} records of 1 MiB, saved and unpacked with no computation in between: microseconds per record above "
        f"an empty pair of hooks, medians over {rounds} chains. Wall includes waiting for the disk."
    )
    rows = [(store, *(f"{found[clock]:.1f} us" for clock in _CHAIN_CLOCKS)) for store, found in chains.items()]
    heads = ("through", "wall", "CPU of the thread", "CPU of the process")
    return Grid("Wall per record, without computation", heads, rows, note)


def _above(answer: dict[str, Any], kind: str, clock: str) -> float:
    above: float = answer[kind]["engine"][clock] - answer[kind]["empty"][clock]
    return above


def _check(counters: dict[str, dict[str, int]]) -> None:
    """Check that each kind and chain did what its name says. Raises CannotMeasure."""
    moves, passes = counters["moves"], counters["passes"]
    for name in ("weight_bytes", "duplicate_bytes", "offloaded_bytes", "read_bytes"):
        if not moves[name]:
            raise CannotMeasure(f"the hooks benchmark measured nothing of {name}: the engine counted {moves}")
    if not passes["kept_bytes"] or passes["offloaded_bytes"]:
        raise CannotMeasure(f"tensors below the minimum size were not passed through: the engine counted {passes}")
    for kind in LIGHT:
        if not counters[kind]["kept_bytes"]:
            raise CannotMeasure(f"{kind}: no tensor stayed in memory: the engine counted {counters[kind]}")
    if counters[COUNTED]["offloaded_bytes"] or not counters[FOLLOWED]["offloaded_bytes"]:
        raise CannotMeasure(f"tensors moved under the wrong budget: the engine counted {counters}")
    for store in STORES:
        if not counters[store]["read_bytes"]:
            raise CannotMeasure(f"nothing was read back through {store}: the engine counted {counters[store]}")
