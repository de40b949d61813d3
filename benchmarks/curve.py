"""The curve benchmark: throughput against peak memory, for models of five families, under a set of arms.

The sets are data: `SETS` says what each of them trains, and under which arms. Each arm trains the same way, in its own
process. Only exact arms of tba are compared with peers: lossy presets are drawn and never counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ._peers.registry import CHECKPOINT, HALF, PEERS, REMAT, SELECTIVE
from ._pictures.curves import Panel, Point, draw_curves
from ._pictures.pictures import check_pictures
from ._processes.arms import Spec
from ._processes.device import CPU, DEVICES, Device
from ._processes.measure import count_saved_bytes, measure, measure_together
from ._report.bar import Bar, bar_table
from ._report.curve import curve_bars, curve_table, faster_bar, plan_bars, time_bars
from ._report.environment import environment_block
from ._report.options import OUT, Out, Quick, Threads, check_names, parse_rate
from ._report.options import Device as DeviceName
from ._report.ratios import median_ratio
from ._report.results import Grid, Result, mib
from ._report.steps import Measured, equal_text, memory_share, same_gradients
from ._workload.accelerator import SIMULATED
from ._workload.families import BY_SIZE, FAMILIES
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
        rate_bytes_per_s: limit of the link to files, for each direction.
        compiled: PyTorch's `activation_memory_budget`, under which the whole model is compiled; None: it is not.
        families: that have this arm; if empty, all.
        one_batch: whether it is measured at one batch only, the family's own or the next smaller one. The processes of
            all arms are alive at once, and each holds what its largest step took.
        times_only: whether it is measured only where all arms are in one process: its peak is plain's.
    """

    name: str
    peer: str = ""
    tier: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rate_bytes_per_s: float | None = None
    compiled: float | None = None
    families: Sequence[str] = ()
    one_batch: bool = False
    times_only: bool = False

    def options(self, saved_bytes: int, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of its process; `common` are settings of every arm of tba."""
        if self.tier is None:
            return {"peer": self.peer, "compiled": self.compiled}
        rate = self.rate_bytes_per_s
        limits = {} if rate is None else {"max_write_rate": rate, "max_read_rate": rate}
        in_bytes = {name: int(share * saved_bytes) for name, share in self.shares.items()}
        settings = {**common, **limits, **self.settings, **in_bytes}
        return {"tier": self.tier, "settings": settings, "compiled": self.compiled}


@dataclass(frozen=True, kw_only=True)
class Set:
    """What is trained, and under which arms.

    Attributes:
        arms: the first is plain.
        few: names of those that `--quick` runs.
        families: names of families.
        scales: batches, as multiples of `batch`.
        batch: in examples; None: each family's own.
        layers: of each model; None: its own number.
        settings: fields of `OffloadConfig` for every arm of tba.
        link_bytes_per_s: bandwidth between a simulated device and the host, each way; None for no limit.
        warm_up: steps before the timed ones: two that are watched, three by a plan, six by a rival.
        rounds: timed steps of each arm.
        starts: sets of processes that these steps are spread over.
        together: all arms are in one process, which tells nothing of their peaks.
    """

    arms: Sequence[Arm]
    few: Sequence[str]
    families: Sequence[str] = ("gpt", "bert", "t5", "llama", "conv")
    scales: Sequence[float] = (1.0,)
    batch: int | None = None
    layers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    warm_up: int = 11
    rounds: int = 6
    starts: int = 1
    together: bool = False

    def limited(self, rate_bytes_per_s: float) -> Set:
        """Return the set with a limit on every link that has none."""
        arms = [replace(arm, rate_bytes_per_s=arm.rate_bytes_per_s or rate_bytes_per_s) for arm in self.arms]
        return replace(self, arms=arms)

    def tiny(self) -> Set:
        """Return the set that `--quick` runs: few arms, on two layers."""
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
    # torch_remat finds the attention in these; T5's blocks return what it does not take, a convolution has none.
    Arm(name=REMAT, peer=REMAT, families=("gpt", "bert", "llama")),
)
# PyTorch's own hooks, which keep everything on a CPU: what hooks in Python cost that do nothing.
_HOOKS = Arm(name="save_on_cpu", peer="save_on_cpu", times_only=True)
_LINKS = (50e6, 100e6, 200e6, 400e6, None)
_WIDE = "nvme, 14% held back"
_FITS = 1.1  # a budget that everything fits: nothing may move
_HOST = "cpu"
# Host memory for a fifth of what a plain step saves.
_FIFTH = {"cpu_budget": 0.2}
# Everything moves to one place but for a tenth, which prefetching may hold, and a tenth on its way out.
_WINDOWS = {"prefetch_bytes": 0.1, "staging_bytes": 0.1}
_ONE_LINK = (Arm(name=NVME, tier=NVME, shares=_WINDOWS | _FIFTH), Arm(name=_HOST, tier=_HOST, shares=_WINDOWS))
# With host memory for all that moves, and with so little that a plan needs the file too.
_AMPLE, _SCARCE = (
    tuple(
        Arm(name=f"auto {share:.2f}, {host}", tier="auto", shares={"memory_budget": share, **limit})
        for share in (0.25, 0.4, 0.55)
    )
    for host, limit in (("ample host memory", {}), ("two links", _FIFTH))
)

SETS: Mapping[str, Set] = {
    # Recompute, offload, keep. The lowest budget is less than what full checkpointing keeps.
    "rok": Set(
        arms=(
            *(_PLAIN, *_PEERS, _HOOKS, _RULE, _FREE),
            *map(_auto, (0.05, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, _FITS)),
            *(_nvme(), *_presets("exact", "safe8", "balanced")),
        ),
        few=(PLAIN, CHECKPOINT, SELECTIVE, _HOOKS.name, RULE, "auto 0.40", NVME, "keep, safe8"),
        scales=(0.5, 1.0, 2.0),
    ),
    # For a GPU, where each arm is alone and a step moves gigabytes: under ten minutes, mostly for hashing gradients.
    "card": Set(
        arms=(
            *(_PLAIN, *(Arm(name=name, peer=name) for name in (CHECKPOINT, SELECTIVE))),
            *(*map(_auto, (0.25, 0.4, 0.55, 0.7, 0.85)), Arm(name="cpu", tier="cpu")),
        ),
        few=(PLAIN, CHECKPOINT, "auto 0.55", "cpu"),
        families=("llama",),
        rounds=4,
    ),
    # Budgets beside the fixed policies.
    "auto": Set(
        arms=(_PLAIN, _nvme(), _PEERS[0], _RULE, _FREE, *map(_auto, (0.05, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, _FITS))),
        few=(PLAIN, NVME, CHECKPOINT, "auto 0.40", f"auto {_FITS:.2f}"),
        rounds=12,
        starts=2,
    ),
    # The figure of the TBA/SSDTrain paper, with nvme's own window and with one that depends on what a step saves.
    "paper": Set(
        arms=(_PLAIN, _nvme(), Arm(name=_WIDE, tier="nvme", shares={"prefetch_bytes": 0.14})),
        few=(PLAIN, NVME, _WIDE),
        families=("gpt", "bert", "t5"),
        batch=16,
        layers=8,
        warm_up=2,
    ),
    # A device with two links, against all in host memory, all in files, and full checkpointing.
    "two-links": Set(
        arms=(_PLAIN, _PEERS[0], *_ONE_LINK, *_AMPLE, *_SCARCE),
        few=(PLAIN, CHECKPOINT, NVME, _HOST, _AMPLE[1].name, _SCARCE[1].name),
        families=("gpt",),
    ),
    # A model compiled as one graph, beside PyTorch's own way to a budget, which recomputes within the graph.
    "compiled": Set(
        arms=(
            *(Arm(name=PLAIN, compiled=1.0), replace(_nvme(), compiled=1.0)),
            *(Arm(name="plain, not compiled"), replace(_nvme(), name="nvme, not compiled")),
            *(Arm(name=f"activation_memory_budget {share}", compiled=share) for share in (0.8, 0.6, 0.4, 0.2)),
            *(replace(_auto(share), compiled=1.0) for share in (0.25, 0.4, 0.55, 0.6, 0.7, 0.85)),
        ),
        few=(PLAIN, NVME, "activation_memory_budget 0.4", "auto 0.40"),
        families=("gpt",),
        warm_up=3,
    ),
    # Links from slow to unlimited.
    "links": Set(
        arms=(_PLAIN, *map(_nvme, _LINKS), *(_auto(0.4, rate) for rate in _LINKS)),
        few=(PLAIN, "nvme, 50 MB/s", NVME, "auto 0.40, 50 MB/s"),
        families=("gpt",),
        rounds=5,
    ),
}


def curve(
    arms: Annotated[
        str | None, typer.Option(help=f"Set of arms: {', '.join(SETS)} (default: rok; on a device card).")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: the set's).")] = None,
    batch: Annotated[list[float] | None, typer.Option(help="Multiples of the set's batch (default: its own).")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms beside the first (default: all).")] = None,
    budget: Annotated[
        list[float] | None, typer.Option(help="Also this budget, as a share of what a plain step saves (such as 0.2).")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model (default: the set's).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds of each arm (default: the set's).")] = None,
    starts: Annotated[int | None, typer.Option(min=1, help="Sets of processes (default: the set's).")] = None,
    rate: Annotated[str | None, typer.Option(help="Limit each link to files to this rate, such as 100MB/s.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Give a simulated device this link to the host, such as 2GB/s.")
    ] = None,
    together: Annotated[
        bool, typer.Option(help="All arms in one process: for times within a few percent. Peaks mean nothing then.")
    ] = False,
    threads: Threads = 2,
    device: DeviceName = "cpu",
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Throughput against peak memory under a set of arms: recomputed, moved, by budget (15 minutes a batch)."""
    check_pictures()
    arms, here = arms or ("rok" if device == "cpu" else "card"), DEVICES[device]
    check_names([arms], SETS, "set of arms")
    check_names(family or (), FAMILIES, "family")
    chosen, parts = SETS[arms], [arms, *(family or ())]
    if quick:
        chosen, here = chosen.tiny(), replace(here, size="small")
    if not together:
        chosen = replace(chosen, arms=[each for each in chosen.arms if not each.times_only])
    if arm:
        check_names(arm, [each.name for each in chosen.arms], "arm")
        chosen = replace(chosen, arms=[each for at, each in enumerate(chosen.arms) if at == 0 or each.name in arm])
    if budget:
        every = {each.name: each for each in (*chosen.arms, *map(_auto, budget))}
        chosen = replace(chosen, arms=list(every.values()))
        parts.append("budget" + "-".join(f"{each:g}" for each in budget))
    if rate is not None:
        limit = parse_rate(rate)
        chosen = chosen.limited(limit)
        parts.append(f"{limit / 1e6:.0f}MBps")
    if link is not None:
        if device != "simulated":
            raise typer.BadParameter("--link is of a simulated device: name it with --device simulated")
        chosen = replace(chosen, link_bytes_per_s=parse_rate(link))
        parts.append(f"link{parse_rate(link) / 1e6:.0f}MBps")
    if batch and batch != [1]:  # what is filed of the own batch alone is named after the family
        parts.append("batch" + "-".join(f"{each:g}" for each in batch))
    given = {"families": family, "scales": batch, "layers": layers, "rounds": rounds, "starts": starts}
    given["together"] = together
    chosen = replace(chosen, **{name: value for name, value in given.items() if value})
    if layers is not None:
        parts.append(f"{layers}layers")
    if together:
        if any(each.compiled is not None for each in chosen.arms):
            raise typer.BadParameter("--together compiles nothing: PyTorch has one memory budget for a process")
        parts.append("together")
    return _run("-".join(parts), chosen, threads, out, here)


def _run(name: str, chosen: Set, threads: int, out: Path, here: Device) -> Result:
    """Measure every family of a set at every batch; `name` is what the result is filed under."""
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    bars: list[Bar] = []
    every: dict[str, Measured] = {}
    panels: dict[str, Panel] = {}
    own = max((scale for scale in chosen.scales if scale <= 1), default=min(chosen.scales))
    for member, scale in ((member, scale) for member in chosen.families for scale in chosen.scales):
        count = max(1, round(scale * (chosen.batch or BY_SIZE[here.size][member].examples)))
        title = f"{BY_SIZE[here.size][member].of(chosen.layers)}, batch {count}"
        measured, found, saved_bytes = _measure(chosen, member, count, threads, here, every=scale == own)
        peak = "All arms in one process." if chosen.together else f"Peak: {here.memory}, over idle, worst of all steps."
        note = f"A plain step saves {mib(saved_bytes)} MiB. {peak}"
        # A compiled model computes other bits than the same model as it is.
        whole = {arm.name for arm in chosen.arms if arm.compiled is not None}
        groups = [[arm for arm in measured.values() if (arm.name in whole) == compiled] for compiled in (True, False)]
        groups = [group for group in groups if group]
        tables.append(curve_table(title, measured, f"{note} {equal_text(*groups)}", peaks=not chosen.together))
        bars += found
        data.setdefault(member, {})[str(count)] = {
            "saved_bytes": saved_bytes,
            "arms": {arm.name: vars(arm) for arm in measured.values()},
            "bars": [bar.data() for bar in found],
            "gradients_bit_equal": all(map(same_gradients, groups)),
        }
        every |= measured
        if not chosen.together:
            panels[title] = Panel(points(measured), "peak / plain's", "throughput / plain's")
    picture = None
    if panels:
        out.mkdir(parents=True, exist_ok=True)
        picture = out / "curve.png"
        draw_curves(panels, picture)
    missing = {arm.peer: why for arm in chosen.arms if arm.peer and (why := PEERS[arm.peer].missing())}
    return Result(
        theme=here.theme(name),
        tables=[*_misses(bars), bar_table(bars, "Bars", "Behind ±: about 95 % confidence."), *tables],
        data={"families": data, "missing": missing},
        files=[picture] if picture else [],
        picture=picture,
        environment=environment_block(every, threads=threads, card=here.card, starts=chosen.starts),
    )


def _measure(
    chosen: Set, family: str, batch: int, threads: int, here: Device, *, every: bool
) -> tuple[dict[str, Measured], list[Bar], int]:
    """Measure one family at one batch; return its arms, their bars, and the bytes that a plain step saves."""
    options = {
        "family": family,
        "batch": batch,
        "layers": chosen.layers,
        "link_bytes_per_s": chosen.link_bytes_per_s,
    }
    counted = {**options, "settings": chosen.settings, "compiled": chosen.arms[0].compiled}
    saved_bytes = count_saved_bytes(counted, threads, here)
    specs = make_specs(chosen, options, saved_bytes, threads, here, every=every)
    apart = here.apart and here.name != SIMULATED  # a card has no room for all arms at once, the host's memory has
    where = f"{family}, batch {batch}"
    turns = {"title": where, "rounds": chosen.rounds, "warm_up": chosen.warm_up, "starts": chosen.starts}
    if chosen.together:
        arms = measure_together(specs, **turns)
        bars = time_bars(where, arms, arms[PLAIN], _auto(_FITS).name, _HOOKS.name)
        return arms, bars + budget_bars(where, arms, chosen), saved_bytes
    arms = measure(specs, apart=apart, **turns)
    return arms, curve_bars(where, arms, *sides(arms)) + budget_bars(where, arms, chosen), saved_bytes


def make_specs(
    chosen: Set, options: Mapping[str, Any], saved_bytes: int, threads: int, device: Device = CPU, *, every: bool = True
) -> list[Spec]:
    """Describe the processes of the arms that a family has and that run here; with `every`, those of one batch too."""
    return [
        device.spec(arm.name, {**options, **arm.options(saved_bytes, chosen.settings)}, threads=threads)
        for arm in chosen.arms
        if not (arm.peer and PEERS[arm.peer].missing())
        and (not arm.families or options["family"] in arm.families)
        and (every or not arm.one_batch)
    ]


def sides(arms: Mapping[str, Measured]) -> tuple[list[str], list[str]]:
    """Separate the peers from the arms of tba that are compared with them: exact ones that follow our own rule."""
    peers = [name for name, arm in arms.items() if not arm.moved or name == RULE]
    return peers, [name for name, arm in arms.items() if name not in peers and arm.exact]


def budget_bars(where: str, arms: Mapping[str, Measured], chosen: Set) -> list[Bar]:
    """Limit what is held and predicted under each budget; under one that everything fits, nothing may move."""
    bars = []
    for name, share in ((arm.name, arm.shares.get("memory_budget", 0)) for arm in chosen.arms):
        if share > 1:
            nbytes = arms[name].moved["written_bytes"] + arms[name].moved["read_bytes"]
            bars.append(Bar(what=f"{where}: {name}, which fits: moved", measured=nbytes, limit=0, unit=" bytes"))
        elif share:
            bars += plan_bars(f"{where}: {name}", arms[name].moved)
    # Everything in host memory is no rival of a plan that may use a fifth of it.
    for plans, others in ((_AMPLE, (_HOST, NVME, CHECKPOINT)), (_SCARCE, (NVME, CHECKPOINT))):
        bars += [faster_bar(where, arms[arm.name], arms[each]) for arm in plans if arm.name in arms for each in others]
    return bars


def points(arms: Mapping[str, Measured]) -> list[Point]:
    """Place every arm in the picture, relative to plain, so that models can be compared."""
    plain, (peers, ours) = arms[PLAIN], sides(arms)

    def kind(name: str) -> str:
        if name == PLAIN or (name.startswith(("auto 0", "auto 1")) and "MB/s" not in name):
            return "plain" if name == PLAIN else "auto"
        return "peer" if name in peers else "ours" if name in ours else "lossy"

    return [
        Point(name, kind(name), memory_share(arm, plain), median_ratio(plain.wall_s, arm.wall_s))
        for name, arm in arms.items()
    ]


def _misses(bars: Sequence[Bar]) -> list[Grid]:
    rows = [(bar.what, bar.row()[2]) for bar in bars if bar.met is False]
    return [Grid("Where a bar is not met", ("comparison", "measured"), rows)] if rows else []
