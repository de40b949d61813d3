"""The demo: train a GPT on Python's standard library, plain and offloaded, and show memory, time, bytes and loss."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ._pictures.pictures import draw_memory
from ._processes.arms import Arm, Spec, in_turns, running
from ._report.environment import environment_block
from ._report.progress import ProgressBar, progress
from ._report.ratios import median_ratio
from ._report.results import Grid, Result, mib
from ._workload.sizes import Model

_LEARNING_RATE = 6e-4
_SAMPLE_INTERVAL_S = 0.01
# Rounds whose time does not count, where there are enough: pages and the learned order are new in them.
_WARM_UP_ROUNDS = 2

AS_IS, PLAIN, OFFLOAD = "plain, as Python comes", "plain", "offload nvme"

# (what, counter of the offloader), shown per step.
_BYTES = (
    ("saved by autograd", "saved_bytes"),
    ("recognised as weights", "weight_bytes"),
    ("recognised as duplicate", "duplicate_bytes"),
    ("left in memory", "kept_bytes"),
    ("written", "written_bytes"),
    ("read", "read_bytes"),
    ("forwarded (still in memory)", "forwarded_bytes"),
)


def run_demo(
    model: Model,
    *,
    seconds: float,
    steps: int,
    threads: int,
    out: Path,
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Train all arms in turns for at most `steps` steps or about `seconds`, and for one step at least."""
    specs = [
        _arm(AS_IS, model, "as-is", threads),
        _arm(PLAIN, model, "auto", threads),
        _arm(OFFLOAD, model, "auto", threads, tier="nvme", settings=dict(settings or {})),
    ]
    until_s = time.monotonic() + seconds
    with progress(f"training {model.name}", steps) as bar:
        bar.note("starting the three arms")
        with running(specs) as arms:
            text = arms[0].about
            bar.say(
                f"{model.describe()}; text {text['text_sha256']}, {text['text_bytes'] / 1e6:.1f} MB; {_under(arms)}"
            )
            answers = _train(arms, steps, until_s, bar, text["text_sha256"])
            allocators = {arm.spec.name: arm.allocator for arm in arms}
            final = {arm.spec.name: arm.close() for arm in arms}
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo_memory.png"
    labels = {AS_IS: AS_IS, **{name: f"{name}, {allocators[name]}" for name in (PLAIN, OFFLOAD)}}
    courses = {labels[name]: [step["memory"] for step in found] for name, found in answers.items()}
    draw_memory(courses, picture, title=f"{model.describe()}, AdamW: resident memory over idle")
    summary = {name: _summary(found, answers[PLAIN]) for name, found in answers.items()}
    data = {
        "model": {**model.options(), "parameters": text["parameters"]},
        "text_sha256": text["text_sha256"],
        "steps": len(answers[PLAIN]),
        "arms": {name: {"allocator": allocators[name], **row} for name, row in summary.items()},
        "stats": final[OFFLOAD]["stats"],
        "gradients_bit_equal": all(row["gradients_bit_equal"] for row in summary.values()),
        "losses_equal": all(row["losses"] == summary[PLAIN]["losses"] for row in summary.values()),
    }
    table = _table(model, summary, allocators, text)
    environment = environment_block(allocators, threads=threads)
    return Result(theme="demo", tables=[table], data=data, files=[picture], environment=environment)


def _arm(name: str, model: Model, allocator: str, threads: int, **options: Any) -> Spec:
    training = {"optimizer": "adamw", "learning_rate": _LEARNING_RATE, "sample_interval_s": _SAMPLE_INTERVAL_S}
    merged = {**model.options(), **training, **options}
    return Spec(name=name, role="train", options=merged, allocator=allocator, threads=threads)


def _under(arms: list[Arm]) -> str:
    """What `tba run` chose, and why."""
    chosen = arms[1]
    return f"arms run under {chosen.allocator}: {chosen.allocator_reason}"


def _train(arms: list[Arm], steps: int, until_s: float, bar: ProgressBar, text: str) -> dict[str, list[dict[str, Any]]]:
    """Every arm's answers, a round at a time, so that all have trained the same steps when time is up."""
    answers: dict[str, list[dict[str, Any]]] = {arm.spec.name: [] for arm in arms}
    longest_s = 0.0
    for number in range(steps):
        round_s = time.monotonic()
        for arm, _, answer in in_turns(arms, [number]):
            answers[arm.spec.name].append(answer)
            bar.note(f"{arm.spec.name}: {answer['wall_s']:.2f} s, {mib(answer['peak_bytes'])} MiB over idle")
        losses = ", ".join(f"{name} {found[-1]['loss']:.4f}" for name, found in answers.items())
        bar.say(f"step {number + 1:3}  loss: {losses}  (text {text})")
        bar.advance()
        longest_s = max(longest_s, time.monotonic() - round_s)
        if time.monotonic() + longest_s > until_s:
            break
    bar.finish()
    return answers


def _summary(steps: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    skipped = _WARM_UP_ROUNDS if len(steps) > 2 * _WARM_UP_ROUNDS else 0
    timed, base = steps[skipped:], plain[skipped:]

    def column(found: list[dict[str, Any]], name: str) -> list[float]:
        return [step[name] for step in found]

    moved = [step["moved"] for step in timed]
    return {
        "peak_bytes": max(column(steps, "peak_bytes")),
        "wall_s": median(column(timed, "wall_s")),
        "wall_ratio": median_ratio(column(timed, "wall_s"), column(base, "wall_s")),
        "cpu_s": median(column(timed, "cpu_s")),
        "cpu_ratio": median_ratio(column(timed, "cpu_s"), column(base, "cpu_s")),
        "moved": {name: median([step[name] for step in moved]) for name in moved[0]},
        "losses": column(steps, "loss"),
        "gradients_bit_equal": column(steps, "gradients_sha256") == column(plain, "gradients_sha256"),
    }


def _table(
    model: Model, summary: Mapping[str, Mapping[str, Any]], allocators: Mapping[str, str], text: Mapping[str, Any]
) -> Grid:
    plain = summary[PLAIN]
    arms = list(summary.items())
    count = len(plain["losses"])

    def row(what: str, cell: Any) -> tuple[str, ...]:
        return (what, *(cell(arm) for _, arm in arms))

    def moved(counter: str) -> Any:
        return lambda arm: mib(arm["moved"][counter]) if arm["moved"] else "-"

    # With time for one step only, its loss stands there already.
    last = [row(f"loss at step {count}, text {text['text_sha256']}", lambda arm: f"{arm['losses'][-1]:.6f}")]
    last = last if count > 1 else []
    rows = [
        ("allocator", *(allocators[name] for name, _ in arms)),
        row("peak memory over idle, MiB", lambda arm: mib(arm["peak_bytes"])),
        row("  of plain's", lambda arm: f"{arm['peak_bytes'] / plain['peak_bytes']:.2f}"),
        row("step, seconds", lambda arm: f"{arm['wall_s']:.3f}"),
        row("  of plain's", lambda arm: f"{arm['wall_ratio']:.3f}"),
        row("CPU, seconds per step", lambda arm: f"{arm['cpu_s']:.3f}"),
        row("  of plain's", lambda arm: f"{arm['cpu_ratio']:.3f}"),
        *(row(f"{what}, MiB per step", moved(counter)) for what, counter in _BYTES),
        row("backward waited, ms per step", lambda arm: f"{1e3 * arm['moved']['wait_s']:.2f}" if arm["moved"] else "-"),
        row(f"loss at step 1, text {text['text_sha256']}", lambda arm: f"{arm['losses'][0]:.6f}"),
        *last,
        row("gradients bit-equal to plain's", lambda arm: "yes" if arm["gradients_bit_equal"] else "NO"),
    ]
    note = (
        f"{count} steps of every arm, taken in turns; peak: the worst step; times: medians; ratios: medians of rounds."
    )
    return Grid(f"{model.describe()}, AdamW, {text['parameters'] / 1e6:.1f} M parameters", ("", *summary), rows, note)
