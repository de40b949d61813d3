"""The sim benchmark: on hardware that is not here, the share of the activations that can leave at 2% of a step.

All of it is simulation: steps of Llama models observed on fake tensors, with times from data sheets, replayed by the
planner's event simulator. Beside it stands the simulator against throttled steps that ran on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from ._pictures.leaving import draw_leaving
from ._plans.leaving import Leaving, room_bytes, told
from ._plans.machines import DRIVES, HOST, MACHINES, Machine, linked
from ._plans.models import MODELS, TOKENS, observed
from ._report.progress import progress
from ._report.results import Grid, Result
from .replay import run_replay

SLOWDOWN = 1.02
SHARDS = (8, 64, 256, 1024)
SHARDED_DRIVES = 4
SHARDED_SEQUENCES = {"1B": 8, "3B": 4, "8B": 4, "70B": 1, "405B": 1}
OPTIMIZER = "adamw-master"
_DRAWN = ("8B", ("rtx4060-laptop", "rtx4090", "a100", "h100", "b200", "b300", "gb200"))

Row = tuple[str, Machine]


def run_sim(
    *, rates: Sequence[float], families: Sequence[str], rounds: int, threads: int, out: Path, quick: bool = False
) -> Result:
    """Simulate every model and machine of the tables; run throttled steps of `families` to check the simulator."""
    sections, sharded = _sections(), _sharded()
    if quick:
        sections, sharded = {title: rows[:1] for title, rows in sections.items()}, sharded[:1]
    rows = {title: _each(title, each, _simulate) for title, each in sections.items()}
    shards = _each("shards", sharded, _shard)
    check = run_replay(families, rates=rates, rounds=rounds, threads=threads)
    checked = _checked(check.data["steps"])
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "sim.png"
    drawn = [row for row in rows["cards"] if quick or (row["model"] == _DRAWN[0] and row["card"] in _DRAWN[1])]
    title = f"Simulation, not measured: Llama {drawn[0]['model']}, what can leave at 2% of a step"
    draw_leaving(drawn, picture, title=title)
    tables = [_table(title, each) for title, each in rows.items()]
    tables += [_shards_table(shards), _check_table(checked), *check.tables]
    data = {
        "simulated": True,
        "rows": rows,
        "shards": shards,
        "check": {"arms": checked, "transfers": check.data["arms"], "bars": check.data["bars"]},
    }
    return Result(
        theme="sim",
        tables=tables,
        data=data,
        files=[picture],
        picture=picture,
        environment={"SIMULATION": "no card and no drive of the tables was measured; only the check ran here"}
        | dict(check.environment),
    )


def _sections() -> dict[str, list[Row]]:
    """Which models on which machines, by what is compared."""
    return {
        "cards": [(name, machine) for name in ("8B", "1B") for machine in MACHINES.values()],
        "models": [(name, MACHINES[card]) for name in MODELS for card in ("rtx4090", "h100", "b200", "gb200")],
        "links": [(name, machine) for name in ("8B", "405B") for machine in linked()],
    }


def _sharded() -> list[Row]:
    return [(name, MACHINES[card]) for name in MODELS for card in ("h100", "h200", "b200", "gb200")]


def _each(title: str, rows: Sequence[Row], simulate: Callable[[str, Machine], dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    with progress(title, len(rows)) as bar:
        for name, machine in rows:
            found.append(simulate(name, machine))
            bar.advance(f"{name} on {machine.card}")
    return found


@cache
def _observed(name: str, card: str, sequences: int = 1) -> Any:
    """Observe a model on a card; its link and drives play no part in that."""
    return observed(replace(MODELS[name], sequences=sequences), MACHINES[card].device)


def _simulate(name: str, machine: Machine) -> dict[str, Any]:
    seen = _observed(name, machine.card)
    found: dict[str, Any] = {"model": name, "card": machine.card, "link": machine.link, "leaves": {}}
    for drives in (*DRIVES, HOST):
        facts = machine.facts(seen, drives)
        found |= {"step_s": facts.step_s, "saved_bytes": facts.saved_bytes}
        found["leaves"][str(drives or "host")] = told(Leaving(facts).most(SLOWDOWN), machine.disk(drives))
    return found


def _shard(name: str, machine: Machine) -> dict[str, Any]:
    sequences = SHARDED_SEQUENCES[name]
    seen = _observed(name, machine.card, sequences)
    leaving = Leaving(machine.facts(seen, SHARDED_DRIVES))
    found: dict[str, Any] = {"model": name, "sequences": sequences, "card": machine.card, "shards": {}}
    for shards in SHARDS:
        room = room_bytes(seen, machine.device, OPTIMIZER, shards)
        plan = None if room is None else leaving.least(room)
        needs = {} if plan is None else {"kept": plan.idle, **told(plan, machine.disk(SHARDED_DRIVES))}
        found["shards"][str(shards)] = {"room_bytes": room, **needs}
    return found


def _checked(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Compare what plans foresaw with what their steps did: medians over the steps of each arm."""
    return {
        name: {
            "simulated_s": median(step["predicted_s"] for step in each),
            "measured_s": median(step["step_s"] for step in each),
            "measured_by_simulated": median(step["step_s"] / step["predicted_s"] for step in each),
            "simulated_bytes": median(_bytes(step["simulated"]) for step in each),
            "measured_bytes": median(_bytes(step["seen"]) for step in each),
        }
        for name, each in steps.items()
        if each
    }


def _bytes(transfers: Sequence[Sequence[Any]]) -> int:
    return sum(nbytes for _, _, _, nbytes in transfers)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Grid:
    lines = [
        (
            f"{row['model']}, {row['card']}",
            row["link"],
            f"{row['step_s']:.2f}",
            f"{row['saved_bytes'] / 1e9:.0f}",
            *(_leaves(each) for each in row["leaves"].values()),
        )
        for row in rows
    ]
    heads = ("model, card", "link", "step s", "saves GB", *(f"{n} drive{'s'[: n > 1]}" for n in DRIVES), "host memory")
    return Grid(f"Simulation: what can leave at 2% of the step, by {title}", heads, lines, _NOTES[title])


_ALL = (
    f"Simulated, not measured. One sequence of {TOKENS:,} tokens a card, bf16, nothing recomputed; whether all else "
    "fits the card is not asked here. Percent: the share of the saved bytes that leaves and comes back, evenly spread, "
    "in the largest plan found whose simulated forward and backward take at most 1.02 of those of a step that keeps "
    "all; what cards send one another is in neither. What leaves is read from the card's memory and written to it "
    "again, which on a fast link is what takes the 2%; where layers are large, what may be in flight at once (1 GiB, "
    "at most a sixteenth of the card's memory) is the limit. Days (d) and years (y): until the drives' rated endurance "
    "is used up by such steps without a pause. Drives are a card's own, striped, of its link's generation (C2C: 5)."
)
_NOTES = {
    "cards": _ALL,
    "models": "Simulated, not measured; as above.",
    "links": "Simulated, not measured; as above. An H100 as if it had been built with each link (C2C: drives of "
    "PCIe 6).",
}


def _leaves(each: Mapping[str, Any]) -> str:
    share = f"{each['share']:.0%}"
    years = each["years"]
    if years is None:
        return share
    return f"{share}, {_life(years)}"


def _life(years: float) -> str:
    return f"{365 * years:.0f} d" if years < 1 else f"{years:.1f} y"


def _shards_table(rows: Sequence[Mapping[str, Any]]) -> Grid:
    lines = [
        (f"{row['model']} x {row['sequences']}, {row['card']}", *map(_needs, row["shards"].values())) for row in rows
    ]
    note = (
        f"Simulated, not measured; as above, with {SHARDED_DRIVES} drives a card; weights, gradients and optimizer "
        f"({OPTIMIZER}) are spread over all cards. The least share of the saved bytes that has to leave for the step "
        "to fit the card, how long the step then takes against one that keeps all, were there memory, and how long the "
        "drives last. Kept: all fits; no: with all gone it still does not; -: what is no saved tensor does not fit. "
        "Above 1.02x recomputing some blocks may take less: `tba plan --shards`."
    )
    heads = ("model x sequences, card", *(f"{count:,} cards" for count in SHARDS))
    return Grid("Simulation: what has to leave under FSDP", heads, lines, note)


def _needs(each: Mapping[str, Any]) -> str:
    if each["room_bytes"] is None:
        return "-"
    if "share" not in each:
        return "no"
    if each["kept"]:
        return "kept"
    return f"{each['share']:.0%}, {each['slowdown']:.2f}x, {_life(each['years'])}"


def _check_table(checked: Mapping[str, Mapping[str, float]]) -> Grid:
    lines = [
        (
            name,
            f"{each['simulated_s']:.2f}",
            f"{each['measured_s']:.2f}",
            f"{each['measured_by_simulated']:.2f}",
            f"{each['simulated_bytes'] / 1e6:,.0f}",
            f"{each['measured_bytes'] / 1e6:,.0f}",
        )
        for name, each in checked.items()
    ]
    note = (
        "Measured here: real steps on a link that is throttled, beside the simulation of their own plans from facts "
        "that earlier steps gave; medians. It checks the simulator, not the data sheets. Below, transfer by transfer."
    )
    heads = ("steps", "simulated s", "measured s", "measured / simulated", "moves MB, simulated", "measured")
    return Grid("Check: simulated beside measured", heads, lines, note)
