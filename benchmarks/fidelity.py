"""The fidelity benchmark: the validation loss that saving less costs, at equal tokens and an equally tuned rate.

Every arm trains the same GPT on the same batches from the same weights, seed by seed, on Python's standard library
without the packages it is validated on. The first seed is trained at each rate of one grid; the rate that validated
best trains the other seeds. Gaps are differences to `exact` within a seed, so that the seed's own share cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ._arms.fidelity import FidelityOptions
from ._processes.arms import Spec, ask_all
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.results import Grid, Result

EXACT = "exact"
RATES = (3e-4, 1e-3, 3e-3)
ARMS: Mapping[str, Mapping[str, Any]] = {
    **{preset: {"settings": {"compress": preset}} for preset in (EXACT, "safe8", "balanced", "max")},
    "CompAct n/2": {"convert_rank": 1 / 2},
    "CompAct n/4": {"convert_rank": 1 / 4},
    "CompAct n/8": {"convert_rank": 1 / 8},
    "fresh Gaussian n/4, Adam": {"settings": {"compress": "compact", "rank": 1 / 4}},
}
# Some twenty minutes for 40 runs, two at a time.
DEFAULT = FidelityOptions(layers=2, width=128, heads=4, sequence=128, batch=16, steps=300)
TINY = FidelityOptions(layers=1, width=32, heads=2, sequence=32, batch=4, steps=4, validation_batches=2)
_GAP_BAR = 0.01  # nats
_WITHIN_NOISE = ("safe8", "balanced")
_RANKS = ("CompAct n/2", "CompAct n/4", "CompAct n/8")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measurements of one arm.

    Attributes:
        rate: the learning rate that was best for the first seed.
        losses: validation loss by seed, at that rate.
        gaps: by seed, to `exact` of the same seed.
        stored_share: bytes stored between forward and backward, as a share of plain PyTorch's.
    """

    rate: float
    losses: Mapping[int, float]
    gaps: Mapping[int, float]
    stored_bytes: int
    stored_share: float

    @property
    def loss(self) -> float:
        """Mean loss over the seeds."""
        return sum(self.losses.values()) / len(self.losses)

    @property
    def gap(self) -> float:
        """Mean gap over the seeds."""
        return sum(self.gaps.values()) / len(self.gaps)


def run_fidelity(
    base: FidelityOptions = DEFAULT,
    *,
    seeds: int = 3,
    rates: Sequence[float] = RATES,
    jobs: int = 2,
    out: Path,
    arms: Mapping[str, Mapping[str, Any]] = ARMS,
) -> Result:
    """Train all arms, `jobs` at a time, one thread each.

    Args:
        base: size and length of a run; seed and rate are set here.
        seeds: number of seeds.
        rates: the grid of learning rates.
        jobs: arms at a time.
        out: the folder of the picture.
        arms: fields of `FidelityOptions` by name; `exact` must be among them.
    """
    from ._pictures.pareto import draw_pareto  # here, so that a machine without matplotlib says so before it trains

    options = {"rates": list(rates), "seeds": list(range(seeds))}
    specs = [
        Spec(name=name, role="fidelity:train_arm", options={**options, "run": {**asdict(base), **how}}, threads=1)
        for name, how in arms.items()
    ]
    with progress("fidelity", len(arms) * (len(rates) + seeds - 1)) as bar:
        answers = ask_all(specs, jobs=jobs, tell=lambda spec, note: bar.advance(f"{spec.name}: {note}"))
    raw = {answer.spec.name: answer.about for answer in answers}
    found = summarise(raw)
    bars = make_bars(found)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "fidelity.png"
    points = {name: (one.stored_share, list(one.gaps.values())) for name, one in found.items() if name != EXACT}
    draw_pareto(points, picture, exact_share=found[EXACT].stored_share, spread=spread(found), title=_title(base))
    data = {
        "run": asdict(base),
        "tokens": base.steps * base.batch * base.sequence,
        "seeds": options["seeds"],
        "rates": options["rates"],
        "arms": {name: {**vars(one), "loss": one.loss, "gap": one.gap} for name, one in found.items()},
        "runs": {name: body["runs"] for name, body in raw.items()},
        "seed_spread": spread(found),
        "bars": [bar.data() for bar in bars],
    }
    tables = [_table(base, found, rates), bar_table(bars)]
    environment = environment_block({"every arm": answers[0].allocator}, threads=1)
    return Result(theme="fidelity", tables=tables, data=data, files=[picture], picture=picture, environment=environment)


def summarise(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, Found]:
    """Compute losses and gaps of each arm from the answers of their processes."""
    found: dict[str, Found] = {}
    exact = _losses(raw[EXACT])
    for name, body in raw.items():
        losses = _losses(body)
        found[name] = Found(
            rate=body["best_rate"],
            losses=losses,
            gaps={seed: loss - exact[seed] for seed, loss in losses.items()},
            stored_bytes=body["stored_bytes"],
            stored_share=body["stored_bytes"] / body["plain_bytes"],
        )
    return found


def spread(found: Mapping[str, Found]) -> float:
    """Spread of the exact arm's seeds: the highest loss less the lowest."""
    losses = found[EXACT].losses.values()
    return max(losses) - min(losses)


def make_bars(found: Mapping[str, Found]) -> list[Bar]:
    """Limit the gaps of the mild presets; the losses of CompAct must fall as its rank rises."""
    bars = []
    for name in _WITHIN_NOISE:
        if name in found:
            gap, seeds = found[name].gap, spread(found)
            bars.append(Bar(what=f"{name}: gap to exact", measured=gap, limit=_GAP_BAR, unit=" nats"))
            bars.append(Bar(what=f"{name}: gap, within the spread of seeds", measured=gap, limit=seeds, unit=" nats"))
    for better, worse in pairwise(_RANKS):
        if better in found and worse in found:
            less = found[better].loss - found[worse].loss
            bars.append(Bar(what=f"loss of {better} less that of {worse}", measured=less, limit=0.0, unit=" nats"))
    barred = (EXACT, *_WITHIN_NOISE)
    for name, one in found.items():
        if name not in barred:
            bars.append(Bar(what=f"{name}: gap to exact", measured=one.gap, limit=None, unit=" nats"))
    return bars


def _losses(body: Mapping[str, Any]) -> dict[int, float]:
    return {r["seed"]: r["validation_loss"] for r in body["runs"] if r["learning_rate"] == body["best_rate"]}


def _title(base: FidelityOptions) -> str:
    tokens = base.steps * base.batch * base.sequence
    return f"GPT {base.layers}x{base.width}, {base.steps} steps, {tokens / 1e3:,.0f} thousand bytes of Python"


def _table(base: FidelityOptions, found: Mapping[str, Found], rates: Sequence[float]) -> Grid:
    rows = []
    for name, one in found.items():
        edge = len(rates) > 1 and one.rate in (min(rates), max(rates))
        rows.append(
            (
                name,
                f"{one.stored_share:.3f}",
                f"{one.rate:g}{' (edge)' if edge else ''}",
                f"{one.loss:.4f}",
                " ".join(f"{loss:.4f}" for loss in one.losses.values()),
                f"{one.gap:+.4f}",
                " ".join(f"{gap:+.4f}" for gap in one.gaps.values()),
            )
        )
    columns = ("arm", "stored / plain", "rate", "loss, nats", "by seed", "gap", "by seed")
    note = (
        f"Validation loss in nats per byte on {base.validation_batches * base.batch * base.sequence:,} bytes of "
        f"held-out packages, mean over the seeds. Spread of exact's seeds: {spread(found):.4f}. Rate: the best of "
        f"{', '.join(f'{rate:g}' for rate in rates)} for the first seed (edge: the best lies at an end of the grid). "
        "Stored: bytes between forward and backward, of what autograd saves without its duplicates."
    )
    return Grid(_title(base), columns, rows, note)
