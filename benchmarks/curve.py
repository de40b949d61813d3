"""The curve benchmark: throughput against peak memory, for models of five families, under a set of arms.

The sets are data: `SETS` says what each of them trains, and under which arms. Each arm trains alike, in a process of
its own. What may stand for tba against a peer is exact: lossy presets are drawn and never counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ._peers.registry import CHECKPOINT, HALF, PEERS, REMAT, SELECTIVE
from ._pictures.curves import Panel, Point, draw_curves
from ._processes.arms import Spec
from ._processes.device import CPU, Device
from ._processes.measure import count_saved_bytes, measure
from ._report.bar import Bar, bar_table
from ._report.curve import curve_bars, curve_table, plan_bars
from ._report.environment import environment_block
from ._report.ratios import median_ratio
from ._report.results import Grid, Result, mib
from ._report.steps import Measured, memory_share, same_gradients
from ._workload.families import BY_SIZE
from ._workload.sizes import TINY_SETTINGS

PLAIN, NVME, RULE = "plain", "nvme", "SSDTrain's rule"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm.

    Attributes:
        name: of the arm in tables.
        peer: a key of `PEERS` to train under.
        tier: of tba; None trains without it.
        settings: fields of `OffloadConfig`.
        shares: fields of `OffloadConfig` that are bytes, as shares of the bytes that a plain step saves.
        rate_bytes_per_s: limits the link, for each direction on its own.
        families: that have this arm; none named: all.
        one_batch: whether it is measured at one batch alone, the family's own or what is next below. The processes of
            all arms are alive at once, and each holds what its largest step took.
    """

    name: str
    peer: str = ""
    tier: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rate_bytes_per_s: float | None = None
    families: Sequence[str] = ()
    one_batch: bool = False

    def options(self, saved_bytes: int, common: Mapping[str, Any]) -> dict[str, Any]:
        """Give the options of its process; `common` are settings of every arm of tba."""
        if self.tier is None:
            return {"peer": self.peer}
        rate = self.rate_bytes_per_s
        limits = {} if rate is None else {"max_write_rate": rate, "max_read_rate": rate}
        in_bytes = {name: int(share * saved_bytes) for name, share in self.shares.items()}
        return {"tier": self.tier, "settings": {**common, **limits, **self.settings, **in_bytes}}


@dataclass(frozen=True, kw_only=True)
class Set:
    """What is trained, and under which arms.

    Attributes:
        arms: the first is plain.
        few: names of those that show that all works.
        families: names of families.
        scales: batches, as multiples of `batch`.
        batch: in examples; None: each family's own.
        layers: of each model; None: its own number.
        settings: fields of `OffloadConfig` of every arm of tba.
        warm_up: steps before those that are timed: until a plan stands, where one is made.
        rounds: timed steps of each arm.
        starts: sets of processes that these steps are spread over.
    """

    arms: Sequence[Arm]
    few: Sequence[str]
    families: Sequence[str] = ("gpt", "bert", "t5", "llama", "conv")
    scales: Sequence[float] = (1.0,)
    batch: int | None = None
    layers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    warm_up: int = 6
    rounds: int = 6
    starts: int = 1

    def limited(self, rate_bytes_per_s: float) -> Set:
        """Give the set with every link limited that has no limit of its own."""
        arms = [replace(arm, rate_bytes_per_s=arm.rate_bytes_per_s or rate_bytes_per_s) for arm in self.arms]
        return replace(self, arms=arms)

    def tiny(self) -> Set:
        """Give a set that shows that all works: few arms, on two layers."""
        return replace(
            self,
            arms=[arm for arm in self.arms if arm.name in self.few],
            families=self.families[:1],
            scales=(0.25,),
            layers=2,
            settings=TINY_SETTINGS,
            warm_up=4,
            rounds=1,
            starts=1,
        )


def _auto(share: float, rate_bytes_per_s: float | None = None) -> Arm:
    name = _linked(f"auto {share:.2f}", rate_bytes_per_s)
    return Arm(name=name, tier="auto", shares={"memory_budget": share}, rate_bytes_per_s=rate_bytes_per_s)


def _nvme(rate_bytes_per_s: float | None = None) -> Arm:
    return Arm(name=_linked(NVME, rate_bytes_per_s), tier="nvme", rate_bytes_per_s=rate_bytes_per_s)


def _linked(name: str, rate_bytes_per_s: float | None) -> str:
    return name if rate_bytes_per_s is None else f"{name}, {rate_bytes_per_s / 1e6:,.0f} MB/s"


def _presets(*names: str) -> list[Arm]:
    return [
        Arm(name=f"{tier}, {name}", tier=tier, settings={"compress": name}, one_batch=True)
        for tier in ("keep", "nvme")
        for name in names
    ]


_PLAIN, _RULE = Arm(name=PLAIN), Arm(name=RULE, tier="auto", settings={"policy": "tba"})
_FREE = Arm(name="auto, nothing set", tier="auto")
_PEERS = (
    *(Arm(name=name, peer=name) for name in (CHECKPOINT, HALF, SELECTIVE)),
    # Of these torch_remat can tell the attention; T5's blocks return what it does not take, a convolution has none.
    Arm(name=REMAT, peer=REMAT, families=("gpt", "bert", "llama")),
)
_LINKS = (50e6, 100e6, 200e6, 400e6, None)
_WIDE = "nvme, 14% held back"
_FITS = 1.1  # a budget that all that is saved is within: nothing may move

SETS: Mapping[str, Set] = {
    # Recompute, offload, keep.
    "rok": Set(
        arms=(
            *(_PLAIN, *_PEERS, _RULE, _FREE),
            *map(_auto, (0.25, 0.4, 0.55, 0.7, 0.85)),
            *(_nvme(), *_presets("exact", "safe8", "balanced")),
        ),
        few=(PLAIN, CHECKPOINT, SELECTIVE, RULE, "auto 0.40", NVME, "keep, safe8"),
        scales=(0.5, 1.0, 2.0),
    ),
    # For a card, where each arm is alone and a step moves gigabytes: under ten minutes, most of them hashing gradients.
    "card": Set(
        arms=(
            *(_PLAIN, *(Arm(name=name, peer=name) for name in (CHECKPOINT, SELECTIVE))),
            *(*map(_auto, (0.25, 0.4, 0.55, 0.7, 0.85)), Arm(name="cpu", tier="cpu")),
        ),
        few=(PLAIN, CHECKPOINT, "auto 0.55", "cpu"),
        families=("llama",),
        rounds=4,
    ),
    # Budgets beside the fixed policies. The lowest brings the peak down to about that of full checkpointing.
    "auto": Set(
        arms=(_PLAIN, _nvme(), _PEERS[0], _RULE, _FREE, *map(_auto, (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, _FITS))),
        few=(PLAIN, NVME, CHECKPOINT, "auto 0.40", f"auto {_FITS:.2f}"),
        rounds=12,
        starts=2,
    ),
    # The figure of the paper TBA/SSDTrain, with the window that tier nvme has and with one by what a step saves.
    "paper": Set(
        arms=(_PLAIN, _nvme(), Arm(name=_WIDE, tier="nvme", shares={"prefetch_bytes": 0.14})),
        few=(PLAIN, NVME, _WIDE),
        families=("gpt", "bert", "t5"),
        batch=16,
        layers=8,
        warm_up=2,
    ),
    # Links from slow to free.
    "links": Set(
        arms=(_PLAIN, *map(_nvme, _LINKS), *(_auto(0.4, rate) for rate in _LINKS)),
        few=(PLAIN, "nvme, 50 MB/s", NVME, "auto 0.40, 50 MB/s"),
        families=("gpt",),
        warm_up=4,
        rounds=5,
    ),
}


def run_curve(name: str, chosen: Set, *, threads: int, out: Path, device: Device = CPU) -> Result:
    """Measure every family of a set at every batch; `name` is what the result is filed under."""
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    bars: list[Bar] = []
    allocators: dict[str, str] = {}
    missing = {arm.peer: why for arm in chosen.arms if arm.peer and (why := PEERS[arm.peer].missing())}
    panels: dict[str, Panel] = {}
    turns = {"rounds": chosen.rounds, "warm_up": chosen.warm_up, "starts": chosen.starts, "apart": device.apart}
    own = max((scale for scale in chosen.scales if scale <= 1), default=min(chosen.scales))
    for family in chosen.families:
        member = BY_SIZE[device.size][family]
        for scale in chosen.scales:
            batch = max(1, round(scale * (chosen.batch or member.examples)))
            options = {"family": family, "batch": batch, "layers": chosen.layers}
            saved_bytes = count_saved_bytes({**options, "settings": chosen.settings}, threads, device)
            specs = make_specs(chosen, options, saved_bytes, threads, device, every=scale == own)
            where, title = f"{family}, batch {batch}", f"{member.of(chosen.layers)}, batch {batch}"
            arms = measure(specs, title=f"{name} {where}", **turns)
            found = curve_bars(where, arms, *sides(arms)) + budget_bars(where, arms, chosen)
            equal = same_gradients(list(arms.values()))
            tables.append(curve_table(title, arms, _note(arms, saved_bytes, equal, device)))
            bars += found
            data.setdefault(family, {})[str(batch)] = {
                "saved_bytes": saved_bytes,
                "arms": {arm.name: vars(arm) for arm in arms.values()},
                "bars": [bar.data() for bar in found],
                "gradients_bit_equal": equal,
            }
            allocators |= {arm.name: arm.allocator for arm in arms.values()}
            panels[title] = Panel(points(arms), "peak / plain's", "throughput / plain's")
    tables = [*_misses(bars), bar_table(bars, "Bars", "Behind ±: about 95 % confidence."), *tables]
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "curve.png"
    draw_curves(panels, picture)
    environment = environment_block(allocators, threads=threads, device=device.name)
    environment["processes"] = f"{chosen.starts} of each arm, one after another"
    return Result(
        theme=device.theme(name),
        tables=tables,
        data={"families": data, "missing": missing},
        files=[picture],
        picture=picture,
        environment=environment,
    )


def make_specs(
    chosen: Set, options: Mapping[str, Any], saved_bytes: int, threads: int, device: Device = CPU, *, every: bool = True
) -> list[Spec]:
    """Describe the processes of the arms that a family has and that can run here; all arms with `every`."""
    return [
        device.spec(arm.name, {**options, **arm.options(saved_bytes, chosen.settings)}, threads=threads)
        for arm in chosen.arms
        if not (arm.peer and PEERS[arm.peer].missing())
        and (not arm.families or options["family"] in arm.families)
        and (every or not arm.one_batch)
    ]


def sides(arms: Mapping[str, Measured]) -> tuple[list[str], list[str]]:
    """Tell the peers from the arms that stand for tba: those that are exact and no rule of somebody else's."""
    peers = [name for name, arm in arms.items() if not arm.moved or name == RULE]
    return peers, [name for name, arm in arms.items() if name not in peers and arm.exact]


def budget_bars(where: str, arms: Mapping[str, Measured], chosen: Set) -> list[Bar]:
    """Limit what is held and predicted under each budget; under one that all fits, nothing may move."""
    bars = []
    for name, share in ((arm.name, arm.shares.get("memory_budget", 0)) for arm in chosen.arms):
        if share > 1:
            nbytes = arms[name].moved["written_bytes"] + arms[name].moved["read_bytes"]
            bars.append(Bar(what=f"{where}: {name}, which fits: moved", measured=nbytes, limit=0, unit=" bytes"))
        elif share:
            bars += plan_bars(f"{where}: {name}", arms[name].moved)
    return bars


def points(arms: Mapping[str, Measured]) -> list[Point]:
    """Place every arm in the picture, by what it is of plain, so that models can be compared."""
    plain, (peers, ours) = arms[PLAIN], sides(arms)

    def kind(name: str) -> str:
        if name == PLAIN or (name.startswith("auto 0") and "MB/s" not in name):
            return "plain" if name == PLAIN else "auto"
        return "peer" if name in peers else "ours" if name in ours else "lossy"

    return [
        Point(name, kind(name), memory_share(arm, plain), median_ratio(plain.wall_s, arm.wall_s))
        for name, arm in arms.items()
    ]


def _misses(bars: Sequence[Bar]) -> list[Grid]:
    rows = [(bar.what, bar.row()[2]) for bar in bars if bar.met is False]
    return [Grid("Where a bar is not met", ("comparison", "measured"), rows)] if rows else []


def _note(arms: Mapping[str, Measured], saved_bytes: int, equal: bool, device: Device) -> str:
    return (
        f"A plain step saves {mib(saved_bytes)} MiB. Peak: {device.memory}, over idle, worst of all steps. Times: "
        f"medians over {len(arms[PLAIN].wall_s)} rounds; losses and gradients of all exact arms bit-equal: "
        f"{'yes' if equal else 'NO'}."
    )
