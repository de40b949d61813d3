"""Curve: throughput against peak memory, whether an arm of ours is above and left of the others, and plans kept to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from .bar import Bar
from .ratios import doubt, ratios
from .results import Grid, mib
from .steps import Measured, memory_share

# A peak counts as no higher up to here: two processes of one arm differ by about so much.
_NO_HIGHER = 1.02
_PEAK_OFF, _STEP_OFF = 0.05, 0.10  # by how much a plan's prediction may be off


def per_second(arm: Measured) -> float:
    """Compute the throughput of an arm: what its batch holds over the median step."""
    return float(arm.about["units"]) / median(arm.wall_s)


def best_within(peer: Measured, ours: Sequence[Measured]) -> Measured | None:
    """Find the fastest arm of ours whose peak is no higher than the peer's."""
    low = [arm for arm in ours if arm.peak_bytes <= _NO_HIGHER * peer.peak_bytes]
    return max(low, key=lambda arm: median(ratios(peer.wall_s, arm.wall_s)), default=None)


def curve_bars(where: str, arms: Mapping[str, Measured], peers: Sequence[str], ours: Sequence[str]) -> list[Bar]:
    """Compare each peer with the fastest arm of ours that needs no more memory; doubt decides for ours."""
    bars = []
    for name in peers:
        peer = arms[name]
        best = best_within(peer, [arms[other] for other in ours])
        if best is None:
            lowest = min((arms[other] for other in ours), key=lambda arm: arm.peak_bytes)
            what = f"{where}: peak of {lowest.name}, our lowest / {name}"
            bars.append(Bar(what=what, measured=memory_share(lowest, peer), limit=_NO_HIGHER))
            continue
        found = ratios(peer.wall_s, best.wall_s)
        what, off = f"{where}: throughput of {best.name} / {name}, at no higher peak", doubt(found)
        bars.append(Bar(what=what, measured=median(found), limit=1.0, sign=">=", spread=off, noise=off))
    return bars


def plan_bars(what: str, moved: Mapping[str, float]) -> list[Bar]:
    """Limit what saved tensors hold to the budget, and how far a plan's prediction is off; none without a plan."""
    if "predicted_step" not in moved:
        return []
    held = moved["held_bytes_by_plan"] / moved["budget_bytes"]
    peak, step = abs(moved["predicted_peak"] - 1), abs(moved["predicted_step"] - 1)
    return [
        Bar(what=f"{what}: held / budget", measured=held, limit=1.0),
        Bar(what=f"{what}: |predicted / held - 1|", measured=peak, limit=_PEAK_OFF),
        Bar(what=f"{what}: |predicted / measured step - 1|", measured=step, limit=_STEP_OFF),
    ]


def curve_table(title: str, arms: Mapping[str, Measured], note: str) -> Grid:
    """Make the table beneath a curve: where each arm lies, and what it moved."""
    plain, rows = arms["plain"], []
    for arm in arms.values():
        moved = arm.moved
        faster = ratios(plain.wall_s, arm.wall_s)
        rows.append(
            (
                arm.name,
                mib(arm.peak_bytes),
                f"{memory_share(arm, plain):.2f}",
                f"{per_second(arm):,.0f}",
                f"{median(faster):.3f} ± {doubt(faster):.3f}",
                mib(moved["written_bytes"]) if moved else "-",
                mib(moved["read_bytes"]) if moved else "-",
                f"{moved['recomputed']:.0f} of {moved['blocks']:.0f}" if "blocks" in moved else "-",
                f"{median(arm.waited_share):.2%}" if moved else "-",
                "yes" if arm.exact else "no, on purpose",
            )
        )
    unit = plain.about["unit"]
    heads = ("arm", "peak MiB", "/ plain", f"{unit}/s", "/ plain", "written MiB", "read MiB", "blocks run again")
    return Grid(title, (*heads, "waited", "exact"), rows, note)
