"""Curve: throughput against peak memory, the arms of others that ours do not beat, and how far plans were off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from .bar import Bar
from .ratios import doubt, ratios
from .results import Grid, mib
from .steps import Measured, arm_table, memory_share, time_bar

# A peak counts as no higher up to this factor: two processes of one arm differ by about as much.
_NO_HIGHER = 1.02
_PEAK_OFF, _STEP_OFF = 0.05, 0.10  # by how much a plan's prediction may be off

_FITS_COST = 1.005  # of a budget that all fits, as a share of a plain step
_LEAST = {"keep, exact": 0.96, "auto 0.70": 0.95}  # throughput as a share of plain's


def per_second(arm: Measured) -> float:
    """Compute the throughput of an arm: units of its batch over the median step."""
    return float(arm.about["units"]) / median(arm.wall_s)


def best_within(peer: Measured, ours: Sequence[Measured]) -> Measured | None:
    """Find the fastest arm of ours whose peak is no higher than the peer's."""
    low = [arm for arm in ours if arm.peak_bytes <= _NO_HIGHER * peer.peak_bytes]
    return max(low, key=lambda arm: median(ratios(peer.wall_s, arm.wall_s)), default=None)


def curve_bars(where: str, arms: Mapping[str, Measured], peers: Sequence[str], ours: Sequence[str]) -> list[Bar]:
    """Compare each peer with the fastest arm of ours that needs no more memory; a tie within doubt counts as met."""
    bars = []
    for name in peers:
        peer = arms[name]
        best = best_within(peer, [arms[other] for other in ours])
        if best is None:
            lowest = min((arms[other] for other in ours), key=lambda arm: arm.peak_bytes)
            what = f"{where}: peak of {lowest.name}, our lowest / {name}"
            bars.append(Bar(what=what, measured=memory_share(lowest, peer), limit=_NO_HIGHER))
            continue
        bars.append(faster_bar(where, best, peer, ", at no higher peak"))
    return bars


def faster_bar(where: str, arm: Measured, other: Measured, suffix: str = "") -> Bar:
    """Compare the throughput of two arms; a tie within doubt counts as met."""
    found = ratios(other.wall_s, arm.wall_s)
    what, off = f"{where}: throughput of {arm.name} / {other.name}{suffix}", doubt(found)
    return Bar(what=what, measured=median(found), limit=1.0, sign=">=", spread=off, noise=off)


def plan_bars(what: str, moved: Mapping[str, float]) -> list[Bar]:
    """Limit what saved tensors hold to the budget, and how far a plan's prediction is off, if there is one."""
    if "held_bytes_by_plan" not in moved:
        return []
    held = moved["held_bytes_by_plan"] / moved["budget_bytes"]
    holds = Bar(what=f"{what}: held / budget", measured=held, limit=1.0)
    if "predicted_step" not in moved:
        return [holds]
    peak, step = abs(moved["predicted_peak"] - 1), abs(moved["predicted_step"] - 1)
    return [
        holds,
        Bar(what=f"{what}: |predicted / held - 1|", measured=peak, limit=_PEAK_OFF),
        Bar(what=f"{what}: |predicted / measured step - 1|", measured=step, limit=_STEP_OFF),
    ]


def time_bars(where: str, arms: Mapping[str, Measured], plain: Measured, fits: str, hooks: str) -> list[Bar]:
    """Limit what is paid where all `fits`, and where 0.7 of what a step saves is held; show what bare `hooks` cost."""
    bars = []
    for name, other, limit in ((fits, plain, _FITS_COST), (hooks, plain, None), (fits, arms.get(hooks), None)):
        if name in arms and other is not None:
            base = "plain" if other is plain else hooks
            wall, cpu = ratios(arms[name].wall_s, other.wall_s), ratios(arms[name].cpu_s, other.cpu_s)
            bars.append(time_bar(f"{where}: wall seconds of {name} / {base}", wall, limit))
            bars.append(time_bar(f"{where}: CPU seconds of {name} / {base}", cpu, limit))
    for name, least in _LEAST.items():
        if name in arms:
            found = ratios(plain.wall_s, arms[name].wall_s)
            bars.append(time_bar(f"{where}: throughput of {name} / plain", found, least, sign=">="))
    return bars


def curve_table(title: str, arms: Mapping[str, Measured], note: str, *, peaks: bool = True) -> Grid:
    """Make the table beneath a curve: where each arm lies, and what it moved; without `peaks`, its times alone."""

    def recomputed(arm: Measured) -> str:
        return f"{arm.moved['recomputed']:.0f} of {arm.moved['blocks']:.0f}" if "blocks" in arm.moved else "-"

    return arm_table(
        title,
        arms,
        note,
        (f"{arms['plain'].about['unit']}/s", lambda arm: f"{per_second(arm):,.0f}"),
        ("read MiB", lambda arm: mib(arm.moved["read_bytes"]) if arm.moved else "-"),
        ("blocks recomputed", recomputed),
        ("exact", lambda arm: "yes" if arm.exact else "no, lossy"),
        peaks=peaks,
    )
