"""The hooks benchmark: the cost of one saved tensor on the calling thread, by kind."""

from __future__ import annotations

from statistics import median
from typing import Any

from ._arms.hook_cost import COUNTED, FOLLOWED, KINDS, LIGHT, STORES
from ._processes.arms import Spec, in_turns, running
from ._processes.device import CPU, Device
from ._report.bar import Bar
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.results import CannotMeasure, Grid, Result

# Microseconds above the empty pair. Passed through: a weight, or a tensor below the minimum size.
_BARS_US = {"weight": 5.0, "below minimum size": 5.0, "further view": 15.0, "new record": 60.0}
_CLOCKS = ("cpu_us", "pack_us", "wall_us")
_CHAIN_CLOCKS = ("wall_us", "cpu_us", "process_us")
_WARM_UP_ROUNDS = 2
# One compute thread: the kernels are scalars, and a second thread would only spin beside the measured one.
_THREADS = 1


def run_hooks(*, rounds: int, tensors: int, records: int, device: Device = CPU) -> Result:
    """Measure every kind in `rounds` pairs of chains of `tensors` saved tensors, and chains of `records` of 1 MiB."""
    sizes = {"tensors": tensors, "records": records}
    options = {**sizes, "device": device.name}
    spec = Spec(name="hooks", role="hook_cost:HookArm", options=options, allocator=device.allocator, threads=_THREADS)
    answers: list[dict[str, Any]] = []
    with progress("hooks", _WARM_UP_ROUNDS + rounds) as bar, running([spec]) as arms:
        for _, number, answer in in_turns(arms, range(_WARM_UP_ROUNDS + rounds)):
            if number >= _WARM_UP_ROUNDS:
                answers.append(answer)
            bar.advance(f"new record: {_above(answer, 'new record', 'cpu_us'):.1f} us")
        counters = arms[0].close()
        allocator = arms[0].allocator
    _check(counters)
    rows, bars, kinds = [], [], {}
    for kind in KINDS:
        above = {clock: median([_above(answer, kind, clock) for answer in answers]) for clock in _CLOCKS}
        empty = median([answer[kind]["empty"]["cpu_us"] for answer in answers])
        limit = None if device.apart else _BARS_US.get(kind)  # limits are a processor's
        bars.append(Bar(what=kind, measured=above["cpu_us"], limit=limit, unit="us"))
        rows.append((*bars[-1].row(), *(f"{value:.1f} us" for value in (above["pack_us"], above["wall_us"], empty))))
        kinds[kind] = {**above, "empty_cpu_us": empty, "limit_us": limit, "met": bars[-1].met}
    note = (
        "Pack, unpack and release of one saved tensor: microseconds of the calling thread's CPU time above an empty "
        f"pair of hooks; medians over {rounds} chains of {tensors}. Wall: the same by the clock on the wall, waiting "
        "for the disk apart. Empty: the whole chain's cost per tensor under the empty pair. Counted, let pass: under a "
        "memory_budget that fits, or by a plan that moves some larger tensors that were saved before."
    )
    table = Grid("Cost per saved tensor", ("kind", "bar", "measured", "met", "of it pack", "wall", "empty"), rows, note)
    chains = {
        store: {clock: median([answer[store][clock] for answer in answers]) for clock in _CHAIN_CLOCKS}
        for store in STORES
    }
    chain_note = (
        f"{records} records of 1 MiB, saved and asked for again with nothing computed between: microseconds a record "
        f"above an empty pair of hooks, medians over {rounds} chains. Wall includes the waiting for the disk."
    )
    rows = [(store, *(f"{chains[store][clock]:.1f} us" for clock in _CHAIN_CLOCKS)) for store in STORES]
    heads = ("through", "wall", "CPU of the thread", "CPU of the process")
    chain_table = Grid("Wall per record, with nothing else to do", heads, rows, chain_note)
    data = {"kinds": kinds, "chains": chains, "counters": counters, "rounds": rounds, **sizes}
    environment = environment_block({"hooks": allocator}, threads=_THREADS, device=device.name)
    return Result(theme=device.theme("hooks"), tables=[table, chain_table], data=data, environment=environment)


def _above(answer: dict[str, Any], kind: str, clock: str) -> float:
    above: float = answer[kind]["engine"][clock] - answer[kind]["empty"][clock]
    return above


def _check(counters: dict[str, dict[str, int]]) -> None:
    """Raise CannotMeasure if a kind or a chain went another way than its name says."""
    moves, passes = counters["moves"], counters["passes"]
    for name in ("weight_bytes", "duplicate_bytes", "offloaded_bytes", "read_bytes"):
        if not moves[name]:
            raise CannotMeasure(f"the hooks benchmark measured nothing of {name}: the engine counted {moves}")
    if not passes["kept_bytes"] or passes["offloaded_bytes"]:
        raise CannotMeasure(f"tensors below the minimum size were not passed through: the engine counted {passes}")
    for kind in LIGHT:
        if not counters[kind]["kept_bytes"]:
            raise CannotMeasure(f"{kind}: nothing was let pass: the engine counted {counters[kind]}")
    if counters[COUNTED]["offloaded_bytes"] or not counters[FOLLOWED]["offloaded_bytes"]:
        raise CannotMeasure(f"a budget was not kept as it was meant to be: the engine counted {counters}")
    for store in STORES:
        if not counters[store]["read_bytes"]:
            raise CannotMeasure(f"nothing was read back through {store}: the engine counted {counters[store]}")
