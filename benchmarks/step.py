"""The step benchmark: memory and time of a training step, plain, offloaded and checkpointed.

Every arm trains the same GPT from the same seed on the same batches, in its own process. Ratios are medians over
rounds; memory is the worst step of all, over what was resident just before the first one.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ._processes.arms import Spec, available
from ._processes.device import DEVICES
from ._processes.measure import measure
from ._report.bar import bar_table
from ._report.environment import environment_block
from ._report.options import Device, Quick, Threads, check_names
from ._report.results import Grid, Result
from ._report.steps import AS_IS, Measured, arm_table, equal_text, same_gradients, step_bars
from ._workload.sizes import CPU_MODELS, CUDA_MODELS, TINY, Model

# Two processes of one arm may differ for as long as they live: plain steps of 2.68 and 3.05 s have been seen. Many
# sets of processes with few rounds each say more than many rounds in one set.
_STARTS = 8
# The arm under another allocator shows its memory only.
_MEMORY_ROUNDS = 4


def step(
    model: Annotated[
        list[str] | None,
        typer.Option(help="24x256, 8x512 (default: both; simulated: one); on cuda 16x1024 (default), 24x2048."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed pairs of each arm.")] = 16,
    starts: Annotated[int | None, typer.Option(min=1, help="Sets of processes (default: 8; on a device 1).")] = None,
    threads: Threads = 2,
    device: Device = "cpu",
    quick: Quick = False,
) -> Result:
    """Memory, time and exactness of a training step: plain, offloaded, checkpointed."""
    on_cpu, known = device == "cpu", CUDA_MODELS if device == "cuda" else CPU_MODELS
    names = model or (list(known) if on_cpu else list(known)[:1])
    check_names(names, known, "model", where=f" for {device}")
    models, starts = [known[name] for name in names], starts or (_STARTS if on_cpu else 1)
    if quick:
        models, rounds, starts = [TINY], 2, 1
    starts = min(starts, rounds)
    tables: list[Grid] = []
    data: dict[str, Any] = {}
    every: dict[str, Measured] = {}
    for size in models:
        specs, memory_only = make_arms(size, device, threads)
        arms = measure(specs, rounds=rounds, title=f"step {size.name}", starts=starts)
        if memory_only:
            arms |= measure(memory_only, rounds=0, title=f"memory {size.name}", warm_up=min(rounds, _MEMORY_ROUNDS))
        bars = step_bars(size.name, arms)
        note = f"Peak: {DEVICES[device].memory}, over idle, worst of all steps. {equal_text(list(arms.values()))}"
        tables += [
            arm_table(f"{size.describe()}, {device}", arms, note),
            bar_table(bars, f"Bars, {size.name}", "Behind ±: about 95 % confidence."),
        ]
        data[size.name] = {
            "model": size.options(),
            "arms": {name: vars(arm) for name, arm in arms.items()},
            "bars": [bar.data() for bar in bars],
            "gradients_bit_equal": same_gradients(list(arms.values())),
        }
        every |= arms
    environment = environment_block(every, threads=threads, card=DEVICES[device].card, starts=starts)
    return Result(theme=DEVICES[device].theme("step"), tables=tables, data={"models": data}, environment=environment)


def make_arms(model: Model, device: str, threads: int) -> tuple[list[Spec], list[Spec]]:
    """List the arms in turns, and those of which only the memory counts."""
    here = DEVICES[device]

    def arm(name: str, allocator: str = here.allocator, **more: Any) -> Spec:
        return here.gpt(name, model, allocator=allocator, threads=threads, **more)

    moving = [arm(f"offload {tier}", tier=tier) for tier in here.tiers]
    turns = [arm("plain"), *moving, arm("checkpoint", checkpoint=True)]
    if device != "cpu":
        return turns, []
    memory_only = [arm("offload nvme, mimalloc", "mimalloc", tier="nvme")] if available("mimalloc") else []
    return [arm(AS_IS, "as-is"), *turns], memory_only
