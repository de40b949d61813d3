"""The replay benchmark: the transfers of planned steps on a throttled link beside those of their plans as simulated.

Both run in one order, so the first write is compared with the first, and so on. A plan is simulated at the paces that
the step's forward and backward had: other programs slow a computation down, now the one and now the other, and what is
asked here is whether transfers come when they should.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ._processes.arms import Spec, in_turns, running
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.results import Grid, Result, mib

BUDGETS = {"gpt": 160 << 20, "conv": 72 << 20}
KINDS = ("write", "read")
PACES = ("forward_pace", "backward_pace")
_WARM_UP = 8
_BAR = 0.15


def run_replay(
    families: Sequence[str], *, rates: Sequence[float], rounds: int, threads: int, budgets: Mapping[str, int] = BUDGETS
) -> Result:
    """Trace `rounds` planned steps of each family at each rate."""
    specs = [_arm(family, rate, threads, budgets[family]) for family in families for rate in rates]
    steps: dict[str, list[dict[str, Any]]] = {spec.name: [] for spec in specs}
    allocators = {}
    with progress("replay", len(specs) * (_WARM_UP + rounds)) as bar:
        for spec in specs:
            with running([spec]) as arms:
                for _, number, answer in in_turns(arms, range(_WARM_UP + rounds)):
                    if number >= _WARM_UP and "replay" in answer:
                        steps[spec.name].append(answer["replay"])
                    bar.advance(f"{spec.name}: {answer['wall_s']:.2f} s")
                allocators[spec.name] = arms[0].allocator
                arms[0].close()
    found = {name: {kind: compare(each, kind) for kind in KINDS} for name, each in steps.items() if each}
    bars = [
        Bar(what=f"{name}: {kind}s, most that one is off, share of the step", measured=row["most"], limit=_BAR)
        for name, kinds in found.items()
        for kind, row in kinds.items()
        if row["compared"]
    ]
    data = {"arms": found, "steps": steps, "bars": [bar.data() for bar in bars]}
    tables = [_table(found, steps), bar_table(bars, "Bars")]
    return Result(theme="replay", tables=tables, data=data, environment=environment_block(allocators, threads=threads))


def compare(steps: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """Compare each transfer of a kind with the plan's: by how much it starts and ends apart, median over the steps."""
    starts: dict[int, list[float]] = {}
    ends: dict[int, list[float]] = {}
    counts: dict[str, list[int]] = {"seen": [], "simulated": []}
    for step in steps:
        seen, simulated = (sorted(each[1:] for each in step[side] if each[0] == kind) for side in counts)
        counts["seen"].append(len(seen))
        counts["simulated"].append(len(simulated))
        for number, (real, model) in enumerate(zip(seen, simulated, strict=False)):
            starts.setdefault(number, []).append((real[0] - model[0]) / step["step_s"])
            ends.setdefault(number, []).append((real[1] - model[1]) / step["step_s"])
    apart = [abs(median(each)) for side in (starts, ends) for each in side.values()]
    return {
        "seen": median(counts["seen"]),
        "simulated": median(counts["simulated"]),
        "compared": len(starts),
        "start": median(map(median, starts.values())) if starts else 0.0,
        "end": median(map(median, ends.values())) if ends else 0.0,
        "most": max(apart, default=0.0),
        "within": sum(each <= _BAR for each in apart) / len(apart) if apart else 1.0,
    }


def _arm(family: str, rate: float, threads: int, budget_bytes: int) -> Spec:
    settings = {"max_write_rate": rate, "max_read_rate": rate, "memory_budget": budget_bytes}
    options = {"family": family, "tier": "auto", "settings": settings, "replays": True}
    name = f"{family}, {mib(budget_bytes)} MiB, {rate / 1e6:,.0f} MB/s"
    return Spec(name=name, role="family:FamilyArm", options=options, allocator="auto", threads=threads)


def _table(found: Mapping[str, Mapping[str, Any]], steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> Grid:
    rows = []
    for name, kinds in found.items():
        for kind, row in kinds.items():
            rows.append(
                (
                    f"{name}: {kind}s",
                    f"{row['simulated']:.0f}",
                    f"{row['seen']:.0f}",
                    f"{row['start']:+.1%}",
                    f"{row['end']:+.1%}",
                    f"{row['most']:.1%}",
                    f"{row['within']:.0%}",
                    f"{median(step['step_s'] for step in steps[name]):.2f}",
                    f"{median(step['predicted_s'] for step in steps[name]):.2f}",
                    " / ".join(f"{median(step[pace] for step in steps[name]):.2f}" for pace in PACES),
                )
            )
    heads = ("transfers", "planned", "seen", "start", "end", "most", "within 15%", "step s", "planned s", "paces")
    note = (
        "Start, end: by how much a transfer is late against the simulated one, share of the step; medians over steps, "
        "then over transfers. Most: the largest of any transfer's start or end, median over steps. Paces: computation "
        "against the plan's, at which the simulated forward and backward take as long as the real ones; so they are "
        "simulated."
    )
    return Grid("Replay", heads, rows, note)
