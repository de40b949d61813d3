"""The bert benchmark: memory of fine-tuning BERT-base in fp32, plain against CompAct, in memory and on NVMe.

Every arm of every round is a process of its own, so that each peak begins from nothing. Arms take turns round by
round, every other one in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ._processes.arms import Spec, ask
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.ratios import median_ratio
from ._report.results import Grid, Result, mib

AS_IS, PLAIN, KEEP, NVME = "plain, as Python comes", "plain", "CompAct, keep", "CompAct, nvme"
_BARS = {KEEP: 0.55, NVME: 0.35}
RANK = 8
_BATCH, _SEQUENCE, _STEPS = 8, 128, 3
# `--quick`: everything is moved, however small.
_TINY_MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}
_TINY_SETTINGS = {"min_tensor_bytes": 0, "staging_bytes": 1 << 16, "prefetch_bytes": 1 << 16}


@dataclass(kw_only=True)
class Measured:
    """What one arm showed: the worst step of all rounds, and seconds of a step by round."""

    allocator: str = ""
    peak_bytes: int = 0
    idle_bytes: int = 0
    over_bare_bytes: int = 0
    wall_s: list[float] = field(default_factory=list)
    first_losses: list[float] = field(default_factory=list)
    parameters: int = 0
    converted: int = 0
    written_bytes: int = 0

    def take(self, answer: Mapping[str, Any], allocator: str) -> None:
        """Add one process's answer. Its first step warms up: its memory counts, its time does not if there are more."""
        self.allocator = allocator
        self.idle_bytes = answer["idle_bytes"]
        peak = max(answer["peak_bytes"])
        self.peak_bytes = max(self.peak_bytes, peak)
        self.over_bare_bytes = max(self.over_bare_bytes, answer["idle_bytes"] + peak - answer["bare_bytes"])
        self.wall_s.append(median(answer["wall_s"][1:] or answer["wall_s"]))
        self.first_losses.append(answer["losses"][0])
        self.parameters, self.converted = answer["parameters"], answer["converted"]
        self.written_bytes = answer["written_bytes"]


def run_bert(*, rounds: int, threads: int, rank: int = RANK, quick: bool = False) -> Result:
    """Measure `rounds` processes of each arm; `quick` runs a tiny model, which shows that all works."""
    specs = make_arms(rank, threads, quick=quick)
    found = {spec.name: Measured() for spec in specs}
    steps = specs[0].options["steps"]
    with progress("bert", rounds * len(specs) * steps) as bar:
        for number in range(rounds):
            for spec in specs if number % 2 == 0 else reversed(specs):
                # mypy infers no lambda with a default.
                answer = ask(spec, tell=lambda note, spec=spec: bar.advance(f"{spec.name}: {note}"))  # type: ignore[misc]
                found[spec.name].take(answer.body, answer.allocator)
    bars = make_bars(found)
    what = f"BERT-base, fp32, batch {_BATCH}, sequence {_SEQUENCE}" if not quick else "a tiny BERT"
    tables = [
        _table(what, found, rank, rounds),
        bar_table(bars),
    ]
    data = {
        "model": what,
        "rank": rank,
        "steps": steps,
        "rounds": rounds,
        "arms": {name: vars(one) for name, one in found.items()},
        "bars": [bar.data() for bar in bars],
    }
    environment = environment_block({name: one.allocator for name, one in found.items()}, threads=threads)
    return Result(theme="bert", tables=tables, data=data, environment=environment)


def make_arms(rank: int, threads: int, *, quick: bool = False) -> list[Spec]:
    """Plain as Python comes and under the allocator that the others have; CompAct with nothing moved and on NVMe."""
    common: dict[str, Any] = {"batch": _BATCH, "sequence": _SEQUENCE, "steps": _STEPS, "threads": threads}
    settings: dict[str, Any] = {}
    if quick:
        common |= {"batch": 2, "sequence": 16, "steps": 2, "model": _TINY_MODEL}
        settings = _TINY_SETTINGS

    def arm(name: str, allocator: str, **options: Any) -> Spec:
        return Spec(name=name, role="bert", options={**common, **options}, allocator=allocator, threads=threads)

    return [
        arm(AS_IS, "as-is"),
        arm(PLAIN, "auto"),
        arm(KEEP, "auto", rank=rank, tier="keep", settings=settings),
        arm(NVME, "auto", rank=rank, tier="nvme", settings=settings),
    ]


def make_bars(found: Mapping[str, Measured]) -> list[Bar]:
    """Peaks over idle against plain under the same allocator; against the other plain, and over bare, only shown."""
    bars = []
    for name, limit in _BARS.items():
        one, plain, as_is = found[name], found[PLAIN], found[AS_IS]
        share = one.peak_bytes / max(1, plain.peak_bytes)
        bars.append(Bar(what=f"{name}: peak over idle / plain, same allocator", measured=share, limit=limit))
        share = one.peak_bytes / max(1, as_is.peak_bytes)
        bars.append(Bar(what=f"{name}: peak over idle / plain as Python comes", measured=share, limit=None))
        share = one.over_bare_bytes / max(1, plain.over_bare_bytes)
        what = f"{name}: with weights and optimizer / plain, same allocator"
        bars.append(Bar(what=what, measured=share, limit=None))
        slower = median_ratio(one.wall_s, plain.wall_s)
        bars.append(Bar(what=f"{name}: wall per step / plain, same allocator", measured=slower, limit=None))
    return bars


def _table(what: str, found: Mapping[str, Measured], rank: int, rounds: int) -> Grid:
    plain = found[PLAIN]
    rows = [
        (
            name,
            one.allocator,
            mib(one.peak_bytes),
            f"{one.peak_bytes / max(1, plain.peak_bytes):.2f}",
            mib(one.over_bare_bytes),
            f"{one.over_bare_bytes / max(1, plain.over_bare_bytes):.2f}",
            f"{median(one.wall_s):.2f}",
            str(one.converted),
            mib(one.written_bytes),
        )
        for name, one in found.items()
    ]
    columns = (
        "arm",
        "allocator",
        "peak MiB",
        "/ plain",
        "with weights MiB",
        "/ plain",
        "step s",
        "compact layers",
        "written MiB",
    )
    note = (
        f"{plain.parameters / 1e6:.0f} M parameters; CompAct: convert(rank={rank}) and CompActAdamW. Peak: resident, "
        "over what was there before the first step, model and optimizer with its state built; the worst step of "
        f"{rounds} rounds. With weights: the same peak, over what was there before the model."
    )
    return Grid(f"Fine-tuning {what}", columns, rows, note)
