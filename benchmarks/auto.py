"""The auto benchmark: tier "auto" at several budgets beside every fixed policy, for five families of models.

A budget is a share of the bytes that a plain step saves in storages of at least the minimum size. A fixed policy meets
it if the peak of its process is within the budget and what plain has beside its saved tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ._processes.arms import Spec, in_turns, running
from ._processes.measure import count_saved_bytes, measure
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.ratios import doubt, median_ratio, ratios
from ._report.results import Grid, Result, mib
from ._report.steps import Measured, memory_share, same_gradients

# The first brings the peak of the process down to about that of full checkpointing.
SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
FITS = 1.1  # a budget that all that is saved is within: nothing may move
PLAIN, NVME, CHECKPOINT, TBA = "plain", "nvme", "checkpoint", "tba"
FIXED = (PLAIN, NVME, CHECKPOINT, TBA)
# Steps until a plan stands: two are watched, and what they were predicted to take is corrected by the next ones.
_WARM_UP = 6
_SLOWER_BAR, _CHECKPOINT_BAR = 1.02, 0.85
_PAIRS = 8  # a round, of steps with and without the hooks where all fits
_IDLE_BAR = 1.005  # of plain's CPU seconds, where nothing moves
_MEETS, _EQUAL = 1.02, 1.05  # a peak so many times another's counts as no higher, as equal


def run_auto(
    families: Sequence[str],
    *,
    rounds: int,
    starts: int,
    threads: int,
    rate_bytes_per_s: float | None = None,
    shares: Sequence[float] = SHARES,
    regions: str = "",
) -> Result:
    """Measure every family at each share.

    Args:
        families: names of `FAMILIES`.
        rounds: timed steps of each arm, in each of `starts` sets of processes.
        starts: sets of processes.
        threads: of a step.
        rate_bytes_per_s: limits the link, for each direction on its own.
        shares: budgets, of what a plain step saves.
        regions: modules that may recompute instead of the blocks that are found, in arms of their own.
    """
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    allocators: dict[str, str] = {}
    for family in families:
        saved_bytes = count_saved_bytes({"family": family}, threads)
        specs = make_arms(family, threads, saved_bytes, rate_bytes_per_s, shares, regions)
        arms = measure(specs, rounds=rounds, title=f"auto {family}", warm_up=_WARM_UP, starts=starts)
        bars = make_bars(arms, saved_bytes)
        if rate_bytes_per_s is None:  # nothing moves
            bars += fits_bars(family, threads, saved_bytes, rounds=_PAIRS * rounds * starts)
        about = arms[PLAIN].about["family"]
        note = (
            f"A plain step saves {mib(saved_bytes)} MiB. Peak: resident, over idle. Held: most bytes that saved "
            "tensors held, of the budget. Predicted: a plan's figure before its step, as a share of what came of it; "
            "medians of the last 16 steps. Times: medians over "
            f"{len(arms[PLAIN].wall_s)} rounds; losses and gradients of all arms bit-equal: "
            f"{'yes' if same_gradients(list(arms.values())) else 'NO'}."
        )
        tables += [_table(about, arms, note), bar_table(bars, f"Bars, {family}")]
        data[family] = {
            "saved_bytes": saved_bytes,
            "arms": {name: vars(arm) for name, arm in arms.items()},
            "bars": [bar.data() for bar in bars],
            "gradients_bit_equal": same_gradients(list(arms.values())),
        }
        allocators |= {name: arm.allocator for name, arm in arms.items()}
    environment = environment_block(allocators, threads=threads)
    environment["processes"] = f"{starts} of each arm, one after another"
    theme = "auto" + (f"-{regions}" if regions else "")
    if rate_bytes_per_s is not None:
        theme += f"-{rate_bytes_per_s / 1e6:.0f}MBps"
    found = {"families": data, "rate_bytes_per_s": rate_bytes_per_s}
    return Result(theme=theme, tables=tables, data=found, environment=environment)


def make_arms(
    family: str,
    threads: int,
    saved_bytes: int,
    rate_bytes_per_s: float | None,
    shares: Sequence[float] = SHARES,
    regions: str = "",
) -> list[Spec]:
    """List the arms: fixed policies, and `auto` at each budget, with `regions` as its blocks besides."""
    limits = {} if rate_bytes_per_s is None else {"max_write_rate": rate_bytes_per_s, "max_read_rate": rate_bytes_per_s}

    def arm(name: str, *, checkpoint: bool = False, tier: str | None = None, **settings: Any) -> Spec:
        options = {"family": family, "checkpoint": checkpoint, "tier": tier, "settings": limits | settings}
        return Spec(name=name, role="family:FamilyArm", options=options, allocator="auto", threads=threads)

    return [
        arm(PLAIN),
        arm(NVME, tier="nvme"),
        arm(CHECKPOINT, checkpoint=True),
        arm(TBA, tier="auto", policy="tba"),
        *(arm(_auto(share), tier="auto", memory_budget=int(share * saved_bytes)) for share in (*shares, FITS)),
        *(
            arm(f"{_auto(share)}, {regions}", tier="auto", memory_budget=int(share * saved_bytes), blocks=regions)
            for share in (shares if regions else ())
        ),
    ]


def make_bars(arms: Mapping[str, Measured], saved_bytes: int) -> list[Bar]:
    """Limit each budget's step against the best fixed policy that meets it, its peak, and what was predicted."""
    bars = []
    shares = [share for share in SHARES if _auto(share) in arms]
    for share in shares:
        auto = arms[_auto(share)]
        room_bytes = int(share * saved_bytes) + max(0, arms[PLAIN].peak_bytes - saved_bytes)
        meet = [arms[name] for name in FIXED if arms[name].peak_bytes <= _MEETS * room_bytes]
        if meet:
            best = min(meet, key=lambda arm: median(arm.wall_s))
            found = ratios(auto.wall_s, best.wall_s)
            what = f"{auto.name}: wall / {best.name}, the fastest with no higher peak"
            bars.append(Bar(what=what, measured=median(found), limit=_SLOWER_BAR, spread=doubt(found)))
        if "predicted_step" in auto.moved:
            moved = auto.moved
            held, peak = moved["held_bytes_by_plan"] / moved["budget_bytes"], abs(moved["predicted_peak"] - 1)
            bars.append(Bar(what=f"{auto.name}: held / budget", measured=held, limit=1.0))
            bars.append(Bar(what=f"{auto.name}: |predicted / held - 1|", measured=peak, limit=0.05))
            step = abs(moved["predicted_step"] - 1)
            bars.append(Bar(what=f"{auto.name}: |predicted / measured step - 1|", measured=step, limit=0.10))
    if (fits := arms.get(_auto(FITS))) is not None:
        moved_bytes = fits.moved["written_bytes"] + fits.moved["read_bytes"]
        bars.append(Bar(what=f"{fits.name}, which fits: moved", measured=moved_bytes, limit=0.0, unit=" bytes"))
    for arm in arms.values():
        budget, _, regions = arm.name.partition(", ")
        if regions:
            found = ratios(arm.wall_s, arms[budget].wall_s)
            what = f"{arm.name}: wall / {budget}"
            bars.append(Bar(what=what, measured=median(found), limit=None, spread=doubt(found)))
    checkpoint = arms[CHECKPOINT]
    near = [arms[_auto(s)] for s in shares if arms[_auto(s)].peak_bytes <= _EQUAL * checkpoint.peak_bytes]
    if near:
        found = ratios(near[-1].wall_s, checkpoint.wall_s)
        what = f"{near[-1].name}: wall / checkpoint, its peak {near[-1].peak_bytes / checkpoint.peak_bytes:.2f} of that"
        bars.append(Bar(what=what, measured=median(found), limit=_CHECKPOINT_BAR, spread=doubt(found)))
    return bars


def fits_bars(family: str, threads: int, saved_bytes: int, *, rounds: int) -> list[Bar]:
    """Limit what tier "auto" costs a step where all fits, with a budget and with none, by pairs in one process."""
    bars = []
    for name, settings in ((f"auto {FITS:.2f}", {"memory_budget": int(FITS * saved_bytes)}), ("auto, no budget", {})):
        options = {"family": family, "settings": settings}
        spec = Spec(name=name, role="fits:FitsArm", options=options, allocator="auto", threads=threads)
        pairs: dict[str, list[float]] = {"cpu_s": [], "wall_s": []}
        with progress(f"{name} {family}", _WARM_UP + rounds) as bar, running([spec]) as arms:
            for arm, number, answer in in_turns(arms, range(_WARM_UP + rounds)):
                for kind in pairs if number >= _WARM_UP else ():
                    pairs[kind].append(answer["fits"][kind] / answer["plain"][kind])
                bar.advance(f"{arm.spec.name}: {answer['fits']['wall_s']:.2f} s")
            moved_bytes = answer["moved_bytes"]
            arms[0].close()
        for kind, limit in (("cpu_s", _IDLE_BAR), ("wall_s", None)):
            what = f"{name}, which fits: {'CPU' if limit else 'wall'} / plain, {rounds} pairs in one process"
            bars.append(Bar(what=what, measured=median(pairs[kind]), limit=limit, spread=doubt(pairs[kind])))
        bars.append(Bar(what=f"{name}, which fits: moved in these", measured=moved_bytes, limit=0.0, unit=" bytes"))
    return bars


def _table(title: str, arms: Mapping[str, Measured], note: str) -> Grid:
    plain, rows = arms[PLAIN], []
    for arm in arms.values():
        moved = arm.moved
        planned = ("-",) * 5
        if "predicted_step" in moved:
            planned = (
                f"{moved['moved_share']:.0%}",
                f"{moved['recomputed']:.0f} of {moved['blocks']:.0f}",
                f"{moved['held_bytes_by_plan'] / moved['budget_bytes']:.0%}",
                f"{moved['predicted_peak']:.2f}",
                f"{moved['predicted_step']:.2f}",
            )
        rows.append(
            (
                arm.name,
                mib(arm.peak_bytes),
                f"{memory_share(arm, plain):.2f}",
                f"{median(arm.wall_s):.3f}",
                f"{median_ratio(arm.wall_s, plain.wall_s):.3f}",
                f"{median_ratio(arm.cpu_s, plain.cpu_s):.3f}",
                f"{mib(int(moved['written_bytes']))} MiB" if "written_bytes" in moved else "-",
                *planned,
            )
        )
    heads = ("arm", "peak MiB", "/ plain", "step s", "/ plain", "CPU / plain", "written")
    of_plans = ("planned to move", "recomputed", "held", "predicted peak", "predicted step")
    return Grid(title, (*heads, *of_plans), rows, note)


def _auto(share: float) -> str:
    return f"auto {share:.2f}"
