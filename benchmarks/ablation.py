"""The ablation benchmark: one step decided on by the library, a linear program and fixed rules, all simulated.

Links are given as a share of what would carry all that the step saves during its forward; budgets as a share of what it
saves. What each decision is predicted to take is told as its gap above the certified lower bound, in shares of a step
that keeps all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tba._plan.facts import Facts
from tba._plan.greedy import decide, make
from tba._plan.plan import Plan
from tba._plan.prefix import prefix

from ._plans.cases import large, recorded
from ._plans.linear import decide_linear
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.results import Grid, Result

SHARES = (0.3, 0.7)
LINKS = (2.0, 0.5, 0.2, 0.05)
LARGE = "10,032 storages"


def _move_all(facts: Facts, budget_bytes: int) -> Plan:
    return make(facts, budget_bytes, frozenset(range(len(facts.saved))), frozenset())


def _recompute_all(facts: Facts, budget_bytes: int) -> Plan:
    may = frozenset(number for number, block in enumerate(facts.blocks) if block.replay_s is not None)
    return make(facts, budget_bytes, frozenset(), may)


DECIDERS: dict[str, Callable[[Facts, int], Plan]] = {
    "greedy": decide,
    "LP": decide_linear,
    "uniform": lambda facts, budget_bytes: decide(facts, budget_bytes, recomputes=False),
    "recompute": lambda facts, budget_bytes: decide(facts, budget_bytes, moves=False),
    "move all": _move_all,
    "recompute all": _recompute_all,
    "tba": prefix,
}


def run_ablation(families: Sequence[str], *, scratch: Path, threads: int, with_large: bool = True) -> Result:
    """Record facts of each family, and decide on each at every budget and link."""
    cases: dict[str, Facts] = {}
    with progress("ablation", len(families) + with_large) as bar:
        for family in families:
            cases[family] = recorded(family, scratch, threads)
            bar.advance(family)
        if with_large:
            cases[LARGE] = large()
            bar.advance(LARGE)
    found = {name: _case(facts) for name, facts in cases.items()}
    tables = [_table(name, cases[name], rows) for name, rows in found.items()]
    tables.insert(0, _summary(found))
    return Result(
        theme="ablation", tables=tables, data={"cases": found}, environment=environment_block({}, threads=threads)
    )


def _case(facts: Facts) -> list[dict[str, Any]]:
    rows = []
    for link_share in LINKS:
        rate = link_share * facts.saved_bytes / facts.forward_s
        linked = replace(facts, link=replace(facts.link, write_bytes_per_s=rate, read_bytes_per_s=rate))
        for share in SHARES:
            row: dict[str, Any] = {"link": link_share, "budget": share, "rate_bytes_per_s": rate, "plans": {}}
            for name, decider in DECIDERS.items():
                begun_s = time.perf_counter()
                plan = decider(linked, int(share * facts.saved_bytes))
                took_s = time.perf_counter() - begun_s
                row["plans"][name] = {
                    "fits": plan.fits,
                    "step_s": plan.predicted.step_s,
                    "gap": (plan.predicted.step_s - plan.bound_s) / facts.step_s,
                    "moved": plan.predicted.moved_bytes / facts.saved_bytes,
                    "recomputed": len(plan.recomputed),
                    "decided_s": took_s,
                }
                row["bound"] = plan.bound_s / facts.step_s
            rows.append(row)
    return rows


def _summary(found: dict[str, list[dict[str, Any]]]) -> Grid:
    lines = []
    for case, rows in found.items():
        for name in DECIDERS:
            plans = [row["plans"][name] for row in rows]
            gaps = [plan["gap"] for plan in plans if plan["fits"]]
            lines.append(
                (
                    f"{case}: {name}",
                    f"{len(gaps)} of {len(plans)}",
                    f"{median(gaps):.2%}" if gaps else "-",
                    f"{max(gaps):.2%}" if gaps else "-",
                    f"{max(plan['decided_s'] for plan in plans):.3f}",
                )
            )
    heads = ("decided by", "fits", "gap, median", "gap, largest", "decided in, most s")
    return Grid("Gap above the certified lower bound, share of a step that keeps all", heads, lines, _NOTE)


_NOTE = (
    "Greedy: the library. LP: fluid, time-indexed, solved by HiGHS, rounded, repaired in the simulator. Uniform: just "
    "enough moves, evenly, and nothing recomputes; recompute: the other way round; move all, recompute all: fixed; "
    "tba: the paper's rule. Only plans that fit the budget have a gap. The bound does not count the memory that a "
    "block takes as it comes back, and so may be below what any plan can do where few large blocks meet a small budget."
)


def _table(title: str, facts: Facts, rows: Sequence[dict[str, Any]]) -> Grid:
    lines = []
    for row in rows:
        cells = [f"{plan['gap']:.2%}" if plan["fits"] else "over" for plan in row["plans"].values()]
        link = f"{row['link']:g} x, {row['rate_bytes_per_s'] / 1e6:,.0f} MB/s"
        lines.append((link, f"{row['budget']:.0%}", f"{row['bound']:.3f}", *cells))
    note = (
        f"{len(facts.saved):,} storages, {len(facts.blocks)} blocks, {facts.saved_bytes / 1e6:,.0f} MB saved; forward "
        f"{facts.forward_s:.3f} s, backward {facts.backward_s:.3f} s. Bound: shares of a step that keeps all."
    )
    return Grid(f"Ablation, {title}", ("link", "budget", "bound", *DECIDERS), lines, note)
