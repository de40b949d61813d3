"""The step benchmark: what a training step costs and saves, plain against offloaded against checkpointed.

Every arm trains the same GPT from the same seed on the same batches, in its own process. Ratios are medians over
rounds; memory is the worst step of all, over what was resident just before the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._bars import Bar, cpu_bars, cuda_bars
from ._harness import Grid, Result, environment_block, median, median_ratio, mib, progress
from ._processes import Spec, available, in_turns, running

# Rounds that only warm up: their memory counts, their time does not.
WARM_UP_ROUNDS = 2
# Two processes that do the same may differ for as long as they live: plain steps of 2.68 and 3.05 s have been seen. So
# many sets of processes with few rounds in each say more than many rounds in one.
STARTS = 8
# The arm under another allocator shows its memory only.
MEMORY_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Model:
    """A size to measure: the fields of `GPTConfig` and the batch."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.width}"

    def describe(self) -> str:
        return f"GPT {self.name}, {self.heads} heads, sequence {self.sequence}, batch {self.batch}"

    def options(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("layers", "width", "heads", "sequence", "batch")}


CPU_MODELS = {
    "24x256": Model(layers=24, width=256, heads=8, sequence=256, batch=8),
    "8x512": Model(layers=8, width=512, heads=8, sequence=512, batch=4),
}
# In bf16: 4 GiB and 26 GB of activations a step.
CUDA_MODELS = {
    "16x1024": Model(layers=16, width=1024, heads=16, sequence=1024, batch=8),
    "24x2048": Model(layers=24, width=2048, heads=16, sequence=2048, batch=8),
}
# What `--quick` runs. Every tensor is moved; with so little read-ahead next to nothing is held back for it, and with so
# little in flight forward waits for the writes, so that bytes go through the file however short the step is.
TINY = Model(layers=3, width=64, heads=2, sequence=64, batch=4)
TINY_SETTINGS = {"min_tensor_bytes": 0, "staging_bytes": 1 << 16, "prefetch_bytes": 1 << 16}


@dataclass(kw_only=True)
class Measured:
    """What one arm showed, a value per timed round in each list."""

    name: str
    allocator: str
    idle_bytes: int = 0
    peak_bytes: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    waited_share: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, str] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    def take(self, number: int, answer: Mapping[str, Any], *, timed: bool) -> None:
        """Add the answer of round `number`."""
        self.idle_bytes = answer["idle_bytes"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.losses[number] = answer["loss"]
        self.gradients[number] = answer["gradients_sha256"]
        self.moved = answer["moved"]
        if timed:
            self.wall_s.append(answer["wall_s"])
            self.cpu_s.append(answer["cpu_s"])
            self.waited_share.append(answer["moved"].get("wait_s", 0.0) / answer["wall_s"])


def run_step(
    models: Sequence[Model],
    *,
    device: str = "cpu",
    rounds: int = 16,
    starts: int = 1,
    threads: int = 2,
    floor: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Measure every model; at least `rounds` pairs each, spread over `starts` sets of processes."""
    starts = min(starts, rounds)
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    allocators: dict[str, str] = {}
    for model in models:
        if device == "cuda":
            specs, memory_only = cuda_arms(model, settings or {}), ()
        else:
            specs, memory_only = cpu_arms(model, threads, settings or {}, floor=floor)
        arms = measure(specs, rounds=rounds, title=f"step {model.name}", starts=starts)
        if memory_only:
            arms |= measure(memory_only, rounds=0, title=f"memory {model.name}", warm_up=min(rounds, MEMORY_ROUNDS))
        bars = cuda_bars(arms) if device == "cuda" else cpu_bars(model.name, arms)
        tables += [_arm_table(model, arms, device), _bar_table(model, bars)]
        data[model.name] = {
            "model": model.options(),
            "arms": {name: vars(arm) for name, arm in arms.items()},
            "bars": [{**vars(bar), "met": bar.met} for bar in bars],
            "gradients_bit_equal": same_gradients(list(arms.values())),
        }
        allocators |= {name: arm.allocator for name, arm in arms.items()}
    environment = environment_block(allocators, threads=threads, device=device)
    environment["processes"] = f"{starts} of each arm, one after another"
    theme = "step" if device == "cpu" else f"step-{device}"
    return Result(theme=theme, tables=tables, data={"models": data}, environment=environment)


def cpu_arms(model: Model, threads: int, settings: Mapping[str, Any], *, floor: bool) -> tuple[list[Spec], list[Spec]]:
    """The arms in turns, and those of which only the memory is of interest."""

    def arm(name: str, allocator: str, **more: Any) -> Spec:
        return Spec(name=name, role="train", options={**model.options(), **more}, allocator=allocator, threads=threads)

    offload = {"tier": "nvme", "settings": dict(settings)}
    turns = [
        arm("plain, as Python comes", "as-is"),
        arm("plain", "auto"),
        arm("offload nvme", "auto", **offload),
        arm("checkpoint", "auto", checkpoint=True),
    ]
    if floor:
        turns.append(arm("empty hooks", "auto", empty_hooks=True))
    return turns, [arm("offload nvme, mimalloc", "mimalloc", **offload)] if available("mimalloc") else []


def cuda_arms(model: Model, settings: Mapping[str, Any]) -> list[Spec]:
    """Arms on a GPU: torch's own allocator there, so the process's one is left as it is."""

    def arm(name: str, **more: Any) -> Spec:
        options = {**model.options(), "device": "cuda", "dtype": "bfloat16", **more}
        # cuBLAS is deterministic with a fixed workspace only; gradients are compared bit for bit.
        return Spec(name=name, role="train", options=options, environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})

    return [
        arm("plain"),
        arm("offload nvme", tier="nvme", settings=dict(settings)),
        arm("offload cpu", tier="cpu", settings=dict(settings)),
        arm("checkpoint", checkpoint=True),
    ]


def measure(
    specs: Sequence[Spec], *, rounds: int, title: str, warm_up: int = WARM_UP_ROUNDS, starts: int = 1
) -> dict[str, Measured]:
    """All arms in turns, at least `rounds` timed rounds, in `starts` sets of processes with `warm_up` others each."""
    each = warm_up + -(-rounds // starts)
    found: dict[str, Measured] = {}
    with progress(title, starts * each * len(specs)) as bar:
        for start in range(starts):
            with running(specs) as arms:
                for arm, number, answer in in_turns(arms, range(start * each, (start + 1) * each)):
                    one = found.setdefault(arm.spec.name, Measured(name=arm.spec.name, allocator=arm.allocator))
                    one.take(number, answer, timed=number >= start * each + warm_up)
                    bar.advance(f"{arm.spec.name}: {answer['wall_s']:.2f} s, {mib(answer['peak_bytes'])} MiB over idle")
                for arm in arms:
                    arm.close()
    return {spec.name: found[spec.name] for spec in specs}


def same_gradients(arms: Sequence[Measured]) -> bool:
    """Whether every arm had the same loss and the same gradients, to the last bit, in every round it shares."""
    first = arms[0]
    return all(
        arm.gradients[number] == first.gradients[number] and arm.losses[number] == first.losses[number]
        for arm in arms[1:]
        for number in arm.gradients.keys() & first.gradients.keys()
    )


def _arm_table(model: Model, arms: Mapping[str, Measured], device: str) -> Grid:
    base = arms["plain"]
    rows = []
    for arm in arms.values():
        paired = bool(arm.wall_s)  # an arm outside the turns has no partners to be compared with
        rows.append(
            (
                arm.name,
                arm.allocator,
                mib(arm.peak_bytes),
                f"{arm.peak_bytes / base.peak_bytes:.2f}",
                f"{median(arm.wall_s):.3f}" if paired else "-",
                f"{median_ratio(arm.wall_s, base.wall_s):.3f}" if paired else "-",
                f"{median(arm.cpu_s):.3f}" if paired else "-",
                f"{median_ratio(arm.cpu_s, base.cpu_s):.3f}" if paired else "-",
                f"{median(arm.waited_share):.2%}" if paired and arm.moved else "-",
                mib(arm.moved["written_bytes"]) if arm.moved else "-",
            )
        )
    columns = (
        "arm",
        "allocator",
        "peak MiB",
        "/ plain",
        "step s",
        "/ plain",
        "CPU s",
        "/ plain",
        "waited",
        "written MiB",
    )
    what = "allocated on the device" if device == "cuda" else "resident"
    note = (
        f"Peak: {what}, over idle, worst of all steps. Times: medians; ratios: medians over {len(base.wall_s)} rounds. "
        f"Losses and gradients of all arms bit-equal: {'yes' if same_gradients(list(arms.values())) else 'NO'}."
    )
    return Grid(f"{model.describe()}, {device}", columns, rows, note)


def _bar_table(model: Model, bars: Sequence[Bar]) -> Grid:
    rows = [bar.row() for bar in bars]
    return Grid(f"Bars, {model.name}", ("what", "bar", "measured", "met"), rows, "Behind ±: about 95 % confidence.")
