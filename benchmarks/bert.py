"""The bert benchmark: memory of fine-tuning BERT-base in fp32, plain against CompAct, in memory and on NVMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._processes.arms import Spec
from ._processes.measure import measure
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.ratios import median_ratio
from ._report.results import Result
from ._report.steps import Measured, arm_table, memory_share
from ._workload.sizes import TINY_SETTINGS

AS_IS, PLAIN, KEEP, NVME = "plain, as Python comes", "plain", "CompAct, keep", "CompAct, nvme"
_BARS = {KEEP: 0.55, NVME: 0.35}
RANK = 8
_BATCH, _SEQUENCE = 8, 128
# Steps of each process; one more warms up.
_STEPS = 2
_TINY_MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}


def run_bert(*, rounds: int, threads: int, rank: int = RANK, quick: bool = False) -> Result:
    """Measure `rounds` processes of each arm; `quick` runs a tiny model, which shows that all works."""
    specs, steps = make_arms(rank, threads, quick=quick), 1 if quick else _STEPS
    found = measure(specs, rounds=rounds * steps, title="bert", warm_up=1, starts=rounds)
    bars = make_bars(found)
    what = f"BERT-base, fp32, batch {_BATCH}, sequence {_SEQUENCE}" if not quick else "a tiny BERT"
    note = (
        f"{found[PLAIN].about['parameters'] / 1e6:.0f} M parameters; CompAct: convert(rank={rank}), which makes "
        f"{found[KEEP].about['converted']} layers compact, and CompActAdamW. Peak: resident, over what was there "
        f"before the first step, model and optimizer with its state built; the worst step of {rounds} processes."
    )
    data = {
        "model": what,
        "rank": rank,
        "steps": steps,
        "rounds": rounds,
        "arms": {name: vars(one) for name, one in found.items()},
        "bars": [bar.data() for bar in bars],
    }
    tables = [arm_table(f"Fine-tuning {what}", found, note), bar_table(bars)]
    environment = environment_block({name: one.allocator for name, one in found.items()}, threads=threads)
    return Result(theme="bert", tables=tables, data=data, environment=environment)


def make_arms(rank: int, threads: int, *, quick: bool = False) -> list[Spec]:
    """List the arms: plain, as Python comes and under the others' allocator; CompAct, in memory and on NVMe."""
    common: dict[str, Any] = {"batch": _BATCH, "sequence": _SEQUENCE}
    settings: dict[str, Any] = {}
    if quick:
        common, settings = {"batch": 2, "sequence": 16, "model": _TINY_MODEL}, TINY_SETTINGS

    def arm(name: str, allocator: str, **options: Any) -> Spec:
        return Spec(name=name, role="bert:BertArm", options={**common, **options}, allocator=allocator, threads=threads)

    return [
        arm(AS_IS, "as-is"),
        arm(PLAIN, "auto"),
        arm(KEEP, "auto", rank=rank, tier="keep", settings=settings),
        arm(NVME, "auto", rank=rank, tier="nvme", settings=settings),
    ]


def make_bars(found: Mapping[str, Measured]) -> list[Bar]:
    """Limit peaks over idle, against plain under the same allocator; the other ratios are only shown."""
    bars = []
    for name, limit in _BARS.items():
        one, plain, as_is = found[name], found[PLAIN], found[AS_IS]
        for what, measured, barred in (
            ("peak over idle / plain, same allocator", memory_share(one, plain), limit),
            ("peak over idle / plain as Python comes", memory_share(one, as_is), None),
            ("wall per step / plain, same allocator", median_ratio(one.wall_s, plain.wall_s), None),
        ):
            bars.append(Bar(what=f"{name}: {what}", measured=measured, limit=barred))
    return bars
