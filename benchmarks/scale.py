"""The scale benchmark: how time and peak grow with layers, width, sequence, batch, threads and saved tensors.

Then what a limit of memory does: a step that saves far more than its cgroup holds, and steps whose free memory is a
share of what plain needs. Plain's gradients there are those of full checkpointing, which runs plain's operators on
plain's bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ._growth.cgroup import memory_cgroup
from ._pictures.growth import Line, draw_growth
from ._processes.arms import Spec, in_turns, running
from ._processes.child import ChildError
from ._processes.measure import measure
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.ratios import median_ratio
from ._report.results import MIB, CannotMeasure, Grid, Result, mib
from ._report.steps import Measured, memory_share, same_gradients
from ._workload.sizes import Model

PLAIN, NVME = "plain", "nvme"
_FLAT_BAR, _PEAK_BAR = 1.20, 0.20


def gpt(layers: int, width: int, sequence: int, batch: int, **settings: Any) -> Model:
    """Give a GPT with heads of 32."""
    return Model(layers=layers, width=width, heads=width // 32, sequence=sequence, batch=batch, settings=settings)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run.

    Attributes:
        sweeps: per name its sizes and the models of these sizes.
        records: numbers of saved tensors.
        threads: numbers of compute threads, for `limited`.
        large, large_bytes: the step that is to finish in a cgroup of so many bytes.
        limited: the model of `shares`, the free memory as shares of plain's peak.
    """

    sweeps: Mapping[str, Mapping[int, Model]] = field(
        default_factory=lambda: {
            "layers": {n: gpt(n, 128, 256, 8) for n in (4, 8, 16, 32, 64, 96)},
            "width": {n: gpt(4, n, 256, 4) for n in (128, 256, 512, 1024)},
            "sequence": {n: gpt(4, 128, n, 4) for n in (128, 256, 512, 1024, 2048, 4096)},
            "batch": {n: gpt(8, 256, 256, n) for n in (1, 2, 4, 8, 16, 32)},
        }
    )
    records: Sequence[int] = (100, 1000, 10_000, 100_000)
    threads: Sequence[int] = (1, 2)
    large: Model = field(default_factory=lambda: gpt(96, 128, 256, 132))
    large_bytes: int = 4 << 30
    limited: Model = field(default_factory=lambda: gpt(24, 256, 256, 8))
    shares: Sequence[float] = (1.1, 0.7, 0.4)


def tiny() -> Sizes:
    """Give sizes that show that all works."""
    sweep = {n: gpt(n, 64, 64, 4, min_tensor_bytes=0, prefetch_bytes=1 << 16) for n in (2, 4)}
    model = gpt(12, 128, 128, 16)
    return Sizes(
        sweeps={"layers": sweep},
        records=(100, 1000),
        threads=(1,),
        large=model,
        large_bytes=160 * MIB,
        limited=model,
        shares=(0.4,),
    )


def run_scale(sizes: Sizes, *, rounds: int, threads: int, out: Path) -> Result:
    """Run all parts; one that this machine cannot run is named, with the reason."""
    bars: list[Bar] = []
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    panels: dict[str, dict[str, dict[str, Line]]] = {}
    for name, models in sizes.sweeps.items():
        arms = {size: _pair(model, threads, rounds, f"{name} {size}") for size, model in models.items()}
        panels[name] = lines(arms)
        tables.append(_sweep_table(name, models, arms, panels[name]))
        data[name] = {str(size): {each: vars(arm) for each, arm in pair.items()} for size, pair in arms.items()}
        if name == "layers":
            what = "layers: exponent of nvme's peak, less its gradients"
            exponent = panels[name]["peak less gradients, MiB"][NVME].exponent
            bars.append(Bar(what=what, measured=exponent, limit=_PEAK_BAR, unit=""))
    by_threads = {n: _pair(sizes.limited, n, rounds, f"threads {n}") for n in sizes.threads}
    tables.append(_threads_table(by_threads))
    data["threads"] = {str(n): {name: vars(arm) for name, arm in pair.items()} for n, pair in by_threads.items()}
    per_tensor = _records(sizes.records, rounds)
    tables.append(_records_table(per_tensor))
    data["records_s"] = {str(size): found for size, found in per_tensor.items()}
    for clock in ("wall", "cpu"):
        added = [row[f"added_{clock}_us"] for row in per_tensor.values()]
        what = f"time per saved tensor, most / least, {clock}"
        bars.append(Bar(what=what, measured=max(added) / min(added), limit=_FLAT_BAR))
    plain = max((pair[PLAIN] for pair in by_threads.values()), key=lambda arm: arm.peak_bytes)
    limits, missing = _limits(sizes, plain.peak_bytes, threads)
    tables.append(_limits_table(limits, missing))
    data |= {"limits": limits, "missing": missing}
    for row in limits:
        bars.append(Bar(what=f"{row['what']}: other gradients", measured=float(not row["equal"]), limit=0, unit=""))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "scale.png"
    draw_growth(panels, picture, title="Time and peak of a step against its size")
    data["bars"] = [bar.data() for bar in bars]
    environment = environment_block({PLAIN: by_threads[sizes.threads[0]][PLAIN].allocator}, threads=threads)
    return Result(
        theme="scale",
        tables=[bar_table(bars), *tables],
        data=data,
        files=[picture],
        picture=picture,
        environment=environment,
    )


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit the exponent of a power law through values at sizes."""
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


def lines(arms: Mapping[int, Mapping[str, Measured]]) -> dict[str, dict[str, Line]]:
    """Collect time and peak of plain and nvme over the sizes of a sweep."""
    quantities = {
        "step, s": lambda arm: median(arm.wall_s),
        "peak less gradients, MiB": lambda arm: max(1.0, (arm.peak_bytes - 4 * arm.about["parameters"]) / MIB),
    }
    sizes = list(arms)
    found: dict[str, dict[str, Line]] = {}
    for quantity, value in quantities.items():
        for name in (PLAIN, NVME):
            values = [value(arms[size][name]) for size in sizes]
            found.setdefault(quantity, {})[name] = Line(sizes, values, exponent(sizes, values))
    return found


def _pair(model: Model, threads: int, rounds: int, title: str) -> dict[str, Measured]:
    specs = [_spec(name, model, threads, tier=tier) for name, tier in ((PLAIN, None), (NVME, "nvme"))]
    return measure(specs, rounds=rounds, title=f"scale {title}")


def _spec(name: str, model: Model, threads: int, **more: Any) -> Spec:
    options = {**asdict(model), **more}
    return Spec(name=name, role="_growth.arms:LimitedArm", options=options, allocator="auto", threads=threads)


def _records(sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    spec = Spec(name="records", role="_growth.arms:RecordsArm", options={"sizes": list(sizes)}, threads=1)
    answers = []
    with progress("scale, saved tensors", rounds + 1) as bar, running([spec]) as arms:
        for _, number, answer in in_turns(arms, range(rounds + 1)):
            answers += [answer] if number else []  # the first one warms up
            bar.advance()
        arms[0].close()
    found: dict[int, dict[str, float]] = {}
    for size in sizes:
        for clock in ("wall", "cpu"):
            plain, ours = (median(answer[arm][str(size)][clock] for answer in answers) for arm in ("plain", "offload"))
            added = {f"plain_{clock}_us": 1e6 * plain / size, f"added_{clock}_us": 1e6 * (ours - plain) / size}
            found.setdefault(size, {}).update(added)
    return found


def _limits(sizes: Sizes, plain_bytes: int, threads: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run the steps under a limit, and the same steps checkpointed without one."""
    cases = [("large", sizes.large, "nvme", sizes.large_bytes)]
    cases += [(f"{share:g} of plain", sizes.limited, "auto", int(share * plain_bytes)) for share in sizes.shares]
    rows, missing = [], {}
    for what, model, tier, limit_bytes in cases:
        free = measure([_spec("free", model, threads, checkpoint=True)], rounds=1, title=f"scale {what}", warm_up=1)
        try:
            with memory_cgroup(limit_bytes) as path:
                spec = _spec("limited", model, threads, tier=tier, cgroup=str(path))
                limited = measure([spec], rounds=1, title=f"scale {what}, limited", warm_up=1)["limited"]
        except CannotMeasure as error:
            missing[what] = str(error)
            continue
        except ChildError as error:
            # Killed for its memory it says nothing itself; its exit status, -9, tells.
            how = str(error).partition("; its standard error")[0]
            missing[what] = f"did not finish in {mib(limit_bytes)} MiB: {how}; {error.words.splitlines()[-1][:160]}"
            continue
        rows.append(
            {
                "what": f"{what}: {model.describe()}",
                "tier": tier,
                "limit_bytes": limit_bytes,
                "saved_bytes": limited.moved["saved_bytes"],
                "written_bytes": limited.moved["written_bytes"],
                "peak_bytes": limited.peak_bytes,
                "wall_s": median(limited.wall_s),
                "checkpointed_s": median(free["free"].wall_s),
                "equal": same_gradients([free["free"], limited]),
            }
        )
    return rows, missing


def _sweep_table(
    name: str,
    models: Mapping[int, Model],
    arms: Mapping[int, Mapping[str, Measured]],
    found: Mapping[str, Mapping[str, Line]],
) -> Grid:
    rows = []
    for size, pair in arms.items():
        plain, ours = pair[PLAIN], pair[NVME]
        ratio = f"{median_ratio(ours.wall_s, plain.wall_s):.3f}"
        peaks = mib(plain.peak_bytes), mib(ours.peak_bytes), f"{memory_share(ours, plain):.2f}"
        rows.append((models[size].describe(), f"{median(plain.wall_s):.3f}", ratio, *peaks))
    fits = "; ".join(
        f"{quantity.partition(',')[0]}, {arm}: {name}^{line.exponent:.2f}"
        for quantity, by_arm in found.items()
        for arm, line in by_arm.items()
    )
    heads = ("model", "plain step s", "nvme / plain", "plain peak MiB", "nvme peak MiB", "nvme / plain")
    return Grid(f"By {name}", heads, rows, f"Fitted: {fits}.")


def _threads_table(by_threads: Mapping[int, Mapping[str, Measured]]) -> Grid:
    rows = []
    for threads, pair in by_threads.items():
        plain, ours = pair[PLAIN], pair[NVME]
        ratios = median_ratio(ours.wall_s, plain.wall_s), median_ratio(ours.cpu_s, plain.cpu_s)
        rows.append((str(threads), f"{median(plain.wall_s):.3f}", *(f"{ratio:.3f}" for ratio in ratios)))
    return Grid("By compute threads", ("threads", "plain step s", "nvme / plain", "CPU s / plain"), rows)


def _records_table(per_tensor: Mapping[int, Mapping[str, float]]) -> Grid:
    keys = ("plain_wall_us", "added_wall_us", "added_cpu_us")
    rows = [(f"{size:,}", *(f"{row[key]:.1f}" for key in keys)) for size, row in per_tensor.items()]
    note = (
        "Tensors of 4 KiB, each written before backward begins, and read back; forward and backward on one thread, "
        "nothing computed between, so that wall is what the disk takes for transfers. CPU: of the calling thread."
    )
    return Grid("By saved tensors", ("saved tensors", "plain us each", "nvme adds us each", "CPU us each"), rows, note)


def _limits_table(rows: Sequence[Mapping[str, Any]], missing: Mapping[str, str]) -> Grid:
    cells = [
        (
            row["what"],
            row["tier"],
            mib(row["limit_bytes"]),
            mib(row["saved_bytes"]),
            mib(row["written_bytes"]),
            mib(row["peak_bytes"]),
            f"{row['wall_s']:.2f}",
            f"{row['checkpointed_s']:.2f}",
            "yes" if row["equal"] else "NO",
        )
        for row in rows
    ]
    cells += [(what, why, *[""] * 7) for what, why in missing.items()]
    heads = ("step", "tier", "limit MiB", "saved MiB", "written MiB", "peak MiB", "step s", "checkpointed, free, s")
    note = (
        "The limit is of what the process allocates once its model is built. Bit-equal: to the same step checkpointed."
    )
    return Grid("Under a limit of memory", (*heads, "bit-equal"), cells, note)
