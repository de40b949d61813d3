"""The demo: train a GPT on Python's standard library, plain and offloaded, and show memory, time, bytes and loss."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ._pictures.pictures import check_pictures, draw_memory
from ._processes.arms import Arm, in_turns, running
from ._processes.device import CPU
from ._report.environment import environment_block
from ._report.options import OUT, Out, Quick, Threads
from ._report.progress import ProgressBar, progress
from ._report.results import Grid, Result, mib
from ._report.steps import AS_IS, Measured, arm_table, equal_text, same_gradients
from ._workload.sizes import CPU_MODELS, TINY, Model

_LEARNING_RATE = 6e-4
_SAMPLE_INTERVAL_S = 0.01
# Rounds whose time does not count, if there are enough: pages are touched and the order is learned in them.
_WARM_UP_ROUNDS = 2
PLAIN, OFFLOAD = "plain", "offload nvme"

# Counters of the offloader, shown of the last step.
_BYTES = {
    "saved_bytes": "saved by autograd",
    "weight_bytes": "recognized as weights",
    "duplicate_bytes": "recognized as duplicate",
    "kept_bytes": "kept in memory",
    "written_bytes": "written",
    "read_bytes": "read",
    "forwarded_bytes": "forwarded (still in memory)",
}


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="About how long all arms take together.")] = 150,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps.")] = 60,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Train a GPT on Python's standard library, plain and offloaded: memory, time, bytes and loss of both."""
    check_pictures()
    until_s = time.monotonic() + seconds
    model, steps = (TINY, min(steps, 3)) if quick else (CPU_MODELS["24x256"], steps)
    common = {
        "adamw": True,
        "learning_rate": _LEARNING_RATE,
        "sample_interval_s": _SAMPLE_INTERVAL_S,
        "threads": threads,
    }
    specs = [
        CPU.gpt(AS_IS, model, allocator="as-is", **common),
        CPU.gpt(PLAIN, model, allocator="auto", **common),
        CPU.gpt(OFFLOAD, model, allocator="auto", tier="nvme", **common),
    ]
    with progress(f"training {model.name}", steps) as bar:
        bar.note("starting the three arms")
        with running(specs) as arms:
            text = arms[0].about
            under = f"arms run under {arms[1].allocator}: {arms[1].allocator_reason}"
            bar.say(f"{model.describe()}; text {text['text_sha256']}, {text['text_bytes'] / 1e6:.1f} MB; {under}")
            answers = _train(arms, steps, until_s, bar, text["text_sha256"])
            for arm in arms:
                arm.close()
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo_memory.png"
    found = {arm.spec.name: _measured(arm, answers[arm.spec.name]) for arm in arms}
    labels = {name: name if name == AS_IS else f"{name}, {arm.allocator}" for name, arm in found.items()}
    courses = {labels[name]: [each["memory"] for each in steps] for name, steps in answers.items()}
    draw_memory(courses, picture, title=f"{model.describe()}, AdamW: resident memory over idle")
    data = {
        "model": {**model.options(), "parameters": text["parameters"]},
        "text_sha256": text["text_sha256"],
        "steps": len(answers[PLAIN]),
        "arms": {name: vars(arm) for name, arm in found.items()},
        "stats": arms[-1].final["stats"],
        "gradients_bit_equal": same_gradients(list(found.values())),
    }
    environment = environment_block(found, threads=threads)
    return Result(theme="demo", tables=_tables(model, found, text), data=data, files=[picture], environment=environment)


def _train(arms: list[Arm], steps: int, until_s: float, bar: ProgressBar, text: str) -> dict[str, list[dict[str, Any]]]:
    """Train at least one round, and stop before time is up; all arms train the same steps. Return their answers."""
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


def _measured(arm: Arm, steps: list[dict[str, Any]]) -> Measured:
    skipped = _WARM_UP_ROUNDS if len(steps) > 2 * _WARM_UP_ROUNDS else 0
    found = Measured(name=arm.spec.name, allocator=arm.allocator)
    for number, step in enumerate(steps):
        found.take(number, step, timed=number >= skipped)
    return found


def _tables(model: Model, found: Mapping[str, Measured], text: Mapping[str, Any]) -> list[Grid]:
    offload, last = found[OFFLOAD], len(found[PLAIN].losses)
    losses = "; ".join(
        f"loss at step {step}, text {text['text_sha256']}: "
        + ", ".join(f"{name} {arm.losses[step - 1]:.6f}" for name, arm in found.items())
        for step in sorted({1, last})
    )
    note = f"{last} steps; {losses}. {equal_text(list(found.values()))} Peak: the worst step."
    title = f"{model.describe()}, AdamW, {text['parameters'] / 1e6:.1f} M parameters"
    rows = [(what, mib(offload.moved[counter])) for counter, what in _BYTES.items()]
    waited = f"Backward waited {1e3 * offload.moved['wait_s']:.2f} ms."
    return [arm_table(title, found, note), Grid(f"{OFFLOAD}, the last step", ("what", "MiB"), rows, waited)]
