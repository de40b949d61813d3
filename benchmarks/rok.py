"""The rok benchmark: recompute, offload or keep: throughput against peak memory, for five families of models.

Each arm trains alike in a process of its own, at several batch sizes. What may stand for tba against a peer is exact:
lossy presets are drawn and never counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ._peers.registry import CHECKPOINT, HALF, PEERS, REMAT, SELECTIVE
from ._pictures.curves import Panel, Point, draw_curves
from ._processes.arms import Spec
from ._processes.device import CPU, Device
from ._processes.measure import count_saved_bytes, measure
from ._report.bar import Bar, bar_table
from ._report.curve import curve_bars, curve_table, per_second
from ._report.environment import environment_block
from ._report.ratios import median_ratio
from ._report.results import MIB, Grid, Result, mib
from ._report.steps import Measured, same_gradients
from ._workload.families import BY_SIZE

SHARES, SCALES = (0.25, 0.4, 0.55, 0.7, 0.85), (0.5, 1.0, 2.0)
PLAIN, NVME, AUTO, RULE = "plain", "nvme", "auto, nothing set", "SSDTrain's rule"
PRESETS = ("exact", "safe8", "balanced")
# Of these torch_remat can tell the attention; T5's blocks return what it does not take, and a convolution has none.
_REMAT = ("gpt", "bert", "llama")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained: the own sizes of the families by default.

    Attributes:
        scales: batch sizes, as multiples of the family's own.
        shares: budgets of tier auto, as shares of what a plain step saves.
        layers: of each model; None: its own number.
        settings: fields of `OffloadConfig` for every arm of tba.
        presets: values of `compress`, each with tier keep and with nvme, at one batch alone, the family's own or what
            is next below: all arms' processes are alive at once, and hold what their largest step took.
        warm_up: steps before those that are timed: until a plan stands, as for `auto`.
    """

    scales: Sequence[float] = SCALES
    shares: Sequence[float] = SHARES
    layers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    presets: Sequence[str] = PRESETS
    warm_up: int = 6


# For a card, where each arm is alone and a step moves gigabytes.
CARD = Sizes(scales=(1.0,), shares=(0.25, 0.55, 0.85), presets=("exact", "safe8"), warm_up=4)


def run_rok(
    families: Sequence[str],
    *,
    sizes: Sizes,
    rounds: int,
    starts: int,
    threads: int,
    out: Path,
    device: Device = CPU,
) -> Result:
    """Measure the curve of each family."""
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    bars: list[Bar] = []
    allocators: dict[str, str] = {}
    panels: dict[str, Panel] = {}
    turns = {"rounds": rounds, "warm_up": sizes.warm_up, "starts": starts, "apart": device.apart}
    own = max((scale for scale in sizes.scales if scale <= 1), default=min(sizes.scales))
    for family in families:
        member = BY_SIZE[device.size][family]
        title = member.of(sizes.layers)
        for scale in sizes.scales:
            batch = max(1, round(scale * member.examples))
            options = {"family": family, "batch": batch, "layers": sizes.layers}
            saved_bytes = count_saved_bytes({**options, "settings": sizes.settings}, threads, device)
            presets = sizes.presets if scale == own else ()
            specs = make_arms(options, replace(sizes, presets=presets), threads, saved_bytes, device)
            where = f"{family}, batch {batch}"
            arms = measure(specs, title=f"rok {where}", **turns)
            found = curve_bars(where, arms, *sides(arms))
            equal = same_gradients(list(arms.values()))
            tables.append(curve_table(f"{title}, batch {batch}", arms, _note(arms, saved_bytes, equal, device)))
            bars += found
            data.setdefault(family, {})[str(batch)] = {
                "saved_bytes": saved_bytes,
                "arms": {name: vars(arm) for name, arm in arms.items()},
                "bars": [bar.data() for bar in found],
                "gradients_bit_equal": equal,
            }
            allocators |= {name: arm.allocator for name, arm in arms.items()}
            panels[f"{title}, batch {batch}"] = Panel(points(arms), "peak over idle, MiB", f"{member.unit} per second")
    tables = [*_misses(bars), bar_table(bars, "Bars", "Behind ±: about 95 % confidence."), *tables]
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "rok.png"
    draw_curves(panels, picture)
    environment = environment_block(allocators, threads=threads, device=device.name)
    environment["processes"] = f"{starts} of each arm, one after another"
    missing = PEERS[REMAT].missing()
    found_data = {
        "families": data,
        "missing": {REMAT: missing} if missing else {},
    }
    return Result(
        theme=device.theme("rok" if set(families) == set(BY_SIZE[device.size]) else "-".join(["rok", *families])),
        tables=tables,
        data=found_data,
        files=[picture],
        picture=picture,
        environment=environment,
    )


def make_arms(
    options: Mapping[str, Any], sizes: Sizes, threads: int, saved_bytes: int, device: Device = CPU
) -> list[Spec]:
    """List the arms: kept, recomputed, moved, by budget, and with each preset kept and moved."""

    def arm(name: str, *, peer: str = "", tier: str | None = None, **settings: Any) -> Spec:
        given = {**options, "peer": peer, "tier": tier, "settings": {**sizes.settings, **settings} if tier else {}}
        return device.spec(name, given, threads=threads)

    peers = [CHECKPOINT, HALF, SELECTIVE]
    if options["family"] in _REMAT and not PEERS[REMAT].missing():
        peers.append(REMAT)
    return [
        arm(PLAIN),
        *(arm(name, peer=name) for name in peers),
        arm(RULE, tier="auto", policy="tba"),
        arm(AUTO, tier="auto"),
        *(arm(f"auto {s:.2f}", tier="auto", memory_budget=int(s * saved_bytes)) for s in sizes.shares),
        *(arm(tier, tier=tier) for tier in device.tiers),
        *(arm(f"{tier}, {preset}", tier=tier, compress=preset) for tier in ("keep", NVME) for preset in sizes.presets),
    ]


def sides(arms: Mapping[str, Measured]) -> tuple[list[str], list[str]]:
    """Tell the peers from the arms that stand for tba: those that are exact and no rule of somebody else's."""
    peers = [name for name, arm in arms.items() if not arm.moved or name == RULE]
    return peers, [name for name, arm in arms.items() if name not in peers and arm.exact]


def points(arms: Mapping[str, Measured]) -> list[Point]:
    """Place every arm in the picture."""
    peers, ours = sides(arms)

    def kind(name: str) -> str:
        if name == PLAIN or name.startswith("auto 0"):
            return "plain" if name == PLAIN else "auto"
        return "peer" if name in peers else "ours" if name in ours else "lossy"

    return [Point(name, kind(name), arm.peak_bytes / MIB, per_second(arm)) for name, arm in arms.items()]


def own_arms(document: Mapping[str, Any], size: str) -> dict[str, dict[str, Measured]]:
    """Take from a filed result the arms of each family at its own batch."""
    known, found = {each.name for each in fields(Measured)}, {}
    for family, batches in document["families"].items():
        member = BY_SIZE[size][family]
        if (body := batches.get(str(member.examples))) is not None:
            arms = {n: Measured(**{k: v for k, v in arm.items() if k in known}) for n, arm in body["arms"].items()}
            found[f"{member.of(None)}, batch {member.examples}"] = arms
    return found


def shares_panel(arms: Mapping[str, Measured]) -> Panel:
    """Place every arm that is exact by what it is of plain, so that models can be compared."""
    plain = arms[PLAIN]
    placed = [
        point._replace(
            peak=point.peak * MIB / plain.peak_bytes, rate=median_ratio(plain.wall_s, arms[point.name].wall_s)
        )
        for point in points(arms)
        if point.kind != "lossy"
    ]
    return Panel(placed, "peak / plain's", "throughput / plain's")


def shares_table(panels: Mapping[str, Panel]) -> Grid:
    """Make the table of those places: an arm a row, a model a column."""
    names = dict.fromkeys(point.name for panel in panels.values() for point in panel.points)
    places = [{point.name: point for point in panel.points} for panel in panels.values()]
    rows = [
        (name, *(f"{at[name].peak:.2f}, {at[name].rate:.2f}" if name in at else "-" for at in places)) for name in names
    ]
    note = "Peak over idle and throughput, each as a share of plain's: the first should be small, the second large."
    return Grid("Recompute, offload, keep", ("arm", *panels), rows, note)


def _misses(bars: Sequence[Bar]) -> list[Grid]:
    rows = [(bar.what, bar.row()[2]) for bar in bars if bar.met is False]
    if not rows:
        return []
    return [Grid("Where another arm lies above or left of every exact arm of tba", ("comparison", "measured"), rows)]


def _note(arms: Mapping[str, Measured], saved_bytes: int, equal: bool, device: Device) -> str:
    return (
        f"A plain step saves {mib(saved_bytes)} MiB. Peak: {device.memory}, over idle, worst of all steps. Times: "
        f"medians over {len(arms[PLAIN].wall_s)} rounds; losses and gradients of all exact arms bit-equal: "
        f"{'yes' if equal else 'NO'}."
    )
