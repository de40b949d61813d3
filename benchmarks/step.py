"""The step benchmark: memory and time of a training step, plain, offloaded and checkpointed.

Every arm trains the same GPT from the same seed on the same batches, in its own process. Ratios are medians over
rounds; memory is the worst step of all, over what was resident just before the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._processes.arms import Spec, available
from ._processes.measure import WARM_UP_ROUNDS, measure
from ._report.bar import bar_table
from ._report.environment import environment_block
from ._report.results import Grid, Result
from ._report.shares import EXACT, HOOKS, HUGE, INSTANT, KEEP, NVME, SAFE8, SMALL, explain_tables, shares
from ._report.steps import Measured, arm_table, cpu_bars, cuda_bars, same_gradients
from ._workload.sizes import Model

# Two processes of one arm may differ for as long as they live: plain steps of 2.68 and 3.05 s have been seen. So many
# sets of processes with few rounds in each say more than many rounds in one set.
STARTS = 8
# The arm under another allocator shows its memory only.
MEMORY_ROUNDS = 4
# After so many steps the engine has left the derivations that do not pay, and learned the order that follows.
_SETTLING_ROUNDS = 5
# Of bare I/O: calls of this size, memory that is used in turn.
_BLOCK_BYTES, _IO_MEMORY_BYTES = 4 << 20, 64 << 20


def run_step(
    models: Sequence[Model],
    *,
    device: str = "cpu",
    rounds: int = 16,
    starts: int = 1,
    threads: int = 2,
    explain: bool = False,
) -> Result:
    """Measure every model; at least `rounds` pairs each, spread over `starts` sets of processes.

    `explain` adds arms that have a part of offloading only, and the table of what each part costs; it is for a CPU.
    """
    starts = min(starts, rounds)
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    allocators: dict[str, str] = {}
    for model in models:
        if device == "cuda":
            specs, memory_only = cuda_arms(model), ()
        else:
            specs, memory_only = cpu_arms(model, threads)
            specs += explain_arms(model, threads) if explain else []
        warm_up = _SETTLING_ROUNDS if explain else WARM_UP_ROUNDS
        arms = measure(specs, rounds=rounds, title=f"step {model.name}", warm_up=warm_up, starts=starts)
        if memory_only:
            arms |= measure(memory_only, rounds=0, title=f"memory {model.name}", warm_up=min(rounds, MEMORY_ROUNDS))
        bars = cuda_bars(arms) if device == "cuda" else cpu_bars(model.name, arms)
        tables += [
            arm_table(f"{model.describe()}, {device}", arms, _note(arms, device)),
            bar_table(bars, f"Bars, {model.name}", "Behind ±: about 95 % confidence."),
            *(explain_tables(model.name, arms) if explain else []),
        ]
        data[model.name] = {
            "model": model.options(),
            "arms": {name: vars(arm) for name, arm in arms.items()},
            "bars": [bar.data() for bar in bars],
            "gradients_bit_equal": same_gradients(list(arms.values())),
            "shares": {clock: shares(arms, clock) for clock in ("wall_s", "cpu_s")} if explain else {},
        }
        allocators |= {name: arm.allocator for name, arm in arms.items()}
    environment = environment_block(allocators, threads=threads, device=device)
    environment["processes"] = f"{starts} of each arm, one after another"
    theme = "step-explain" if explain else "step" if device == "cpu" else f"step-{device}"
    return Result(theme=theme, tables=tables, data={"models": data}, environment=environment)


def cpu_arms(model: Model, threads: int) -> tuple[list[Spec], list[Spec]]:
    """List the arms in turns, and those of which only the memory counts."""

    def arm(name: str, allocator: str, **more: Any) -> Spec:
        return _spec(name, "train:TrainArm", model, allocator, threads, **more)

    turns = [
        arm("plain, as Python comes", "as-is"),
        arm("plain", "auto"),
        arm("offload nvme", "auto", tier="nvme"),
        arm("checkpoint", "auto", checkpoint=True),
    ]
    return turns, [arm("offload nvme, mimalloc", "mimalloc", tier="nvme")] if available("mimalloc") else []


def explain_arms(model: Model, threads: int) -> list[Spec]:
    """List the arms that have a part of offloading only. The bytes of bare I/O are those that a first step moves."""

    def arm(name: str, **more: Any) -> Spec:
        return _spec(name, "explain:ExplainArm", model, "auto", threads, **more)

    def settings(preset: str) -> dict[str, Any]:
        return {**model.settings, "compress": preset}

    probe = measure([arm(NVME, tier="nvme")], rounds=0, title=f"bytes {model.name}")[NVME].moved
    written_bytes = int(probe["written_bytes"])
    moved = {"write": written_bytes, "read": min(written_bytes, int(probe["read_bytes"]))}
    io = {**moved, "block": _BLOCK_BYTES, "memory_bytes": _IO_MEMORY_BYTES}
    return [
        arm(HOOKS, empty_hooks=True),
        arm(KEEP, tier="keep"),
        arm(INSTANT, tier="nvme", instant=True),
        arm(SMALL, bare_io={**io, "huge": False}),
        arm(HUGE, bare_io={**io, "huge": True}),
        arm(EXACT, tier="nvme", settings=settings("exact")),
        arm(SAFE8, tier="nvme", settings=settings("safe8")),
    ]


def _spec(name: str, role: str, model: Model, allocator: str, threads: int, **more: Any) -> Spec:
    return Spec(name=name, role=role, options={**model.options(), **more}, allocator=allocator, threads=threads)


def cuda_arms(model: Model) -> list[Spec]:
    """List the arms on a GPU, where torch has an allocator of its own; that of the process stays as it is."""

    def arm(name: str, **more: Any) -> Spec:
        options = {**model.options(), "device": "cuda", "dtype": "bfloat16", **more}
        # cuBLAS is deterministic with a fixed workspace only; gradients are compared bit for bit.
        return Spec(
            name=name, role="train:TrainArm", options=options, environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        )

    return [
        arm("plain"),
        arm("offload nvme", tier="nvme"),
        arm("offload cpu", tier="cpu"),
        arm("checkpoint", checkpoint=True),
    ]


def _note(arms: Mapping[str, Measured], device: str) -> str:
    memory = "allocated on the device" if device == "cuda" else "resident"
    equal = "yes" if same_gradients(list(arms.values())) else "NO"
    return f"Peak: {memory}, over idle, worst of all steps. Losses and gradients of all arms bit-equal: {equal}."
