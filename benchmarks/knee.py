"""The knee benchmark: step time and waiting on links from slow to free, and where a link begins to bind.

What predicts it is read from a plan's facts, before any step on a slower link: the bytes and times of what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ._pictures.knee import draw_knee
from ._processes.arms import Spec
from ._processes.measure import count_saved_bytes, measure
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.ratios import median_ratio
from ._report.results import CannotMeasure, Grid, Result, mib
from ._report.steps import Measured, same_gradients
from ._workload.families import FAMILIES
from ._workload.link_need import HARDLY, begins_to_wait

RATES = (50e6, 100e6, 200e6, 400e6)
# Around the prediction, where the measured point has to be found.
NEAR = (0.6, 0.75, 0.9, 1.0, 1.15, 1.35, 1.8)
PLAIN, NVME, AUTO = "plain", "nvme", "auto"
# A limit that never binds: a link with a limit writes record by record, which costs what a free one does not.
_LOOSE = 100e9
_SHARE = 0.4  # of what plain saves: the budget of tier auto
_WARM_UP, _PROBE_STEPS = 4, 8
_BAR = 0.15
_FLOOR_SHARE = 2 * HARDLY  # of plain's step: waiting above that of a free link from which it counts


def run_knee(
    family: str,
    *,
    rates: Sequence[float],
    near: Sequence[float],
    rounds: int,
    threads: int,
    out: Path,
    layers: int | None = None,
    batch: int = 8,
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Predict the knee of a family's step, then measure steps on the links `rates` and `near` it (as multiples)."""
    options = {"family": family, "layers": layers, "batch": batch}
    given = dict(settings or {})
    given_auto = {**given, "memory_budget": int(_SHARE * count_saved_bytes({**options, "settings": given}, threads))}

    def arm(name: str, tier: str | None, rate: float | None, fields: Mapping[str, Any]) -> Spec:
        limits = {} if rate is None else {"max_write_rate": rate, "max_read_rate": rate}
        chosen = {**options, "tier": tier, "settings": {**fields, **limits} if tier else {}}
        return Spec(name=name, role="family:FamilyArm", options=chosen, allocator="auto", threads=threads)

    probe = measure([arm(AUTO, "auto", _LOOSE, given_auto)], rounds=0, title=f"plan {family}", warm_up=_PROBE_STEPS)
    moved = probe[AUTO].moved
    if "needed_bytes_per_s" not in moved:
        raise CannotMeasure(f"no plan was made for {family}: its step saves too little; take a larger one")
    moving = sorted({*rates, *(round(share * moved["needed_bytes_per_s"], -6) for share in near)} - {0.0})
    specs = [arm(PLAIN, None, None, {})]
    specs += [arm(link_name(NVME, rate), "nvme", rate, given) for rate in [*moving, _LOOSE, None]]
    specs += [arm(link_name(AUTO, rate), "auto", rate, given_auto) for rate in [*rates, _LOOSE, None]]
    arms = measure(specs, rounds=rounds, title=f"knee {family}", warm_up=_WARM_UP)
    plain, planned = arms[PLAIN], arms[link_name(AUTO, _LOOSE)].moved
    # What was planned in the same rounds, as the machine may have become slower or faster since.
    need, thumb = (planned.get(key, moved[key]) for key in ("needed_bytes_per_s", "rule_of_thumb_bytes_per_s"))
    waited = [_waited_s(arms[link_name(NVME, rate)]) for rate in moving]
    floor_s = _waited_s(arms[link_name(NVME, _LOOSE)]) + _FLOOR_SHARE * median(plain.wall_s)
    measured = begins_to_wait(moving, waited, floor_s=floor_s)
    bars = make_bars(need, thumb, measured)
    equal = same_gradients(list(arms.values()))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "knee.png"
    lines = {
        "nvme: all moves": [_place(arms[link_name(NVME, rate)], plain, rate) for rate in moving],
        f"auto, {_SHARE:.0%} of what plain saves": [_place(arms[link_name(AUTO, rate)], plain, rate) for rate in rates],
    }
    marks = {"begins to bind, predicted": need, "the paper's rule of thumb": thumb}
    if measured is not None:
        marks = {"begins to bind, measured": measured, **marks}
    title = f"{FAMILIES[family].of(layers)}, batch {batch}: step time against the link"
    draw_knee(lines, picture, marks=marks, title=title)
    data = {
        "family": family,
        "predicted_bytes_per_s": need,
        "rule_of_thumb_bytes_per_s": thumb,
        "measured_bytes_per_s": measured,
        "arms": {name: vars(found) for name, found in arms.items()},
        "gradients_bit_equal": equal,
        "bars": [bar.data() for bar in bars],
    }
    tables = [_table(title, arms, equal), bar_table(bars, "Where the link begins to bind", _note(measured))]
    environment = environment_block({name: found.allocator for name, found in arms.items()}, threads=threads)
    return Result(theme="knee", tables=tables, data=data, files=[picture], picture=picture, environment=environment)


_NOTE = (
    "Predicted: from the times at which a step whose limit never binds (100 GB/s) saves its tensors and asks for them, "
    "what each byte that moves takes from it, and what may be under way and read ahead: the rate at which a step that "
    "moves all waits for half a percent of its time. The paper's "
    "rule: bytes saved over half of the step. Measured: where the line of waiting over 1 / rate leaves what that limit "
    "waits for, by half a percent of the step. A link with a limit writes record by record, a free one in bursts."
)


def _note(measured: float | None) -> str:
    return _NOTE if measured is not None else f"{_NOTE} Not measured: fewer than two of these links made nvme wait."


def link_name(tier: str, rate: float | None) -> str:
    """Name of an arm in tables."""
    return f"{tier}, free" if rate is None else f"{tier}, {rate / 1e6:,.0f} MB/s"


def make_bars(need: float, thumb: float, measured: float | None) -> list[Bar]:
    """Limit how far the prediction is off; the rule of thumb is only shown."""
    bars = [
        Bar(what="predicted", measured=need / 1e6, limit=None, unit=" MB/s"),
        Bar(what="the paper's rule of thumb", measured=thumb / 1e6, limit=None, unit=" MB/s"),
    ]
    if measured is None:
        return bars
    return [
        Bar(what="measured", measured=measured / 1e6, limit=None, unit=" MB/s"),
        *bars,
        Bar(what="|predicted / measured - 1|", measured=abs(need / measured - 1), limit=_BAR),
        Bar(what="|the paper's rule / measured - 1|", measured=abs(thumb / measured - 1), limit=None),
    ]


def _waited_s(arm: Measured) -> float:
    return median(share * wall for share, wall in zip(arm.stalled_share, arm.wall_s, strict=True))


def _place(arm: Measured, plain: Measured, rate: float) -> tuple[float, float, float]:
    return rate, median_ratio(arm.wall_s, plain.wall_s), median(arm.stalled_share)


def _table(title: str, arms: Mapping[str, Measured], equal: bool) -> Grid:
    plain, rows = arms[PLAIN], []
    for name, arm in arms.items():
        moved = arm.moved
        rows.append(
            (
                name,
                f"{median(arm.wall_s):.3f}",
                f"{median_ratio(arm.wall_s, plain.wall_s):.3f}",
                f"{median(arm.stalled_share):.1%}" if moved else "-",
                f"{median(arm.waited_share):.1%}" if moved else "-",
                mib(arm.peak_bytes),
                mib(moved["written_bytes"]) if moved else "-",
                f"{moved['recomputed']:.0f} of {moved['blocks']:.0f}" if "blocks" in moved else "-",
            )
        )
    heads = ("link", "step s", "/ plain", "waited", "of it in backward", "peak MiB", "written MiB", "blocks run again")
    note = f"Limits are for each direction. Losses and gradients of all arms bit-equal: {'yes' if equal else 'NO'}."
    return Grid(title, heads, rows, note)
