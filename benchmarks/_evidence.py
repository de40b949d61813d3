"""The commands that set tba beside what else there is, and beside itself at other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from ._report.options import OUT, Device, Out, Quick, Threads, check_names, command
from ._report.results import Result


def add_evidence(app: typer.Typer) -> None:
    """Make them commands of `app`."""
    for function in (rok, paper, peers, knee, scale):
        command(app)(function)


def rok(
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: all).")] = None,
    batch: Annotated[list[float] | None, typer.Option(help="Multiples of the own batch (default: 0.5, 1, 2).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds of each arm (default: 6; on cuda 5).")] = None,
    starts: Annotated[int, typer.Option(min=1, help="Sets of processes.")] = 1,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Recompute, offload, keep: throughput against peak memory, at three batch sizes (up to 15 minutes a family)."""
    from ._processes.device import DEVICES
    from ._workload.families import FAMILIES
    from ._workload.sizes import TINY_SETTINGS
    from .rok import CARD, SCALES, Sizes, run_rok

    here = DEVICES[device]
    names = family or (["gpt"] if device == "cuda" else list(FAMILIES))
    check_names(names, FAMILIES, "family")
    sizes = replace(CARD, scales=batch or CARD.scales) if device == "cuda" else Sizes(scales=batch or SCALES)
    if quick:
        here = replace(here, size="small")
        sizes = replace(sizes, scales=batch or (0.25,), shares=(0.4,), layers=2, presets=("safe8",))
        sizes = replace(sizes, settings=TINY_SETTINGS, warm_up=4)
        names, rounds, starts = family or ["gpt"], 1, 1
    turns = {"rounds": rounds or (5 if here.apart else 6), "starts": starts, "threads": threads, "device": here}
    return run_rok(names, sizes=sizes, out=out, **turns)


def paper(
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5 (default: all).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each arm.")] = 6,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """The figure of the paper TBA/SSDTrain: activation peak of GPT, BERT and T5 at 8 layers (five minutes)."""
    from ._workload.sizes import TINY_SETTINGS
    from .paper import FAMILIES, run_paper

    names = family or (["gpt"] if quick else list(FAMILIES))
    check_names(names, FAMILIES, "family")
    if quick:
        return run_paper(names, rounds=1, threads=threads, out=out, layers=2, batch=2, settings=TINY_SETTINGS)
    return run_paper(names, rounds=rounds, threads=threads, out=out)


def peers(
    family: Annotated[Literal["llama", "gpt", "bert", "conv"], typer.Option(help="What is trained.")] = "llama",
    peer: Annotated[list[str] | None, typer.Option(help="Measure these alone, beside tba (default: all).")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Timed rounds of each arm (default: 12; on cuda 5).")
    ] = None,
    starts: Annotated[int | None, typer.Option(min=1, help="Sets of processes (default: 2; on cuda 1).")] = None,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """tba beside what else there is: memory, time, bytes left; what becomes of ten things code does (10 minutes)."""
    from ._peers.registry import CHECKPOINT, NVME, PEERS
    from ._processes.device import DEVICES
    from ._workload.sizes import TINY_SETTINGS
    from .peers import known_cases, run_peers

    here, cases = DEVICES[device], known_cases()
    check_names(peer or (), PEERS, "peer")
    chosen = [name for name in PEERS if name in (peer or PEERS) or name == NVME]
    if not quick:
        rounds, starts, batch = (rounds or 5, starts or 1, 4) if here.apart else (rounds or 12, starts or 2, 0)
        given = {"rounds": rounds, "starts": starts, "threads": threads, "out": out, "device": here, "batch": batch}
        return run_peers(chosen, family=family, cases=cases, **given)
    few, here = [CHECKPOINT, "tutorial's files", NVME], replace(here, size="small")
    tiny = {"layers": 2, "batch": 2, "settings": TINY_SETTINGS, "device": here}
    names, cases = (chosen, cases) if peer else (few, cases[:1] + cases[-3:])
    return run_peers(names, family="gpt", cases=cases, rounds=1, starts=1, threads=threads, out=out, **tiny)


def knee(
    family: Annotated[Literal["gpt", "bert", "t5", "llama", "conv"], typer.Option(help="What is trained.")] = "gpt",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each arm.")] = 5,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Step time and waiting on links from 50 MB/s to free; where the link binds, predicted and measured (8 minutes)."""
    from ._workload.sizes import TINY_SETTINGS
    from .knee import NEAR, RATES, run_knee

    if not quick:
        return run_knee(family, rates=RATES, near=NEAR, rounds=rounds, threads=threads, out=out)
    tiny = {"layers": 2, "batch": 2, "settings": TINY_SETTINGS}
    return run_knee(family, rates=(50e6,), near=(0.5,), rounds=1, threads=threads, out=out, **tiny)


def scale(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each arm.")] = 4,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """How cost grows: layers, width, sequence, batch, threads, saved tensors; 30 GB in 4 GiB (20 minutes, 30 GB)."""
    from .scale import Sizes, run_scale, tiny

    return run_scale(tiny() if quick else Sizes(), rounds=1 if quick else rounds, threads=threads, out=out)
