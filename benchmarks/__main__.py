"""The command line: `python -m benchmarks COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Annotated, Literal

import typer

from ._processes.child import ChildError
from ._report.options import (
    MACHINE,
    OUT,
    AsJson,
    Device,
    Folder,
    Machine,
    Out,
    Quick,
    Save,
    Threads,
    check_names,
    command,
    parse_rate,
)
from ._report.results import MIB, CannotMeasure, Result, show

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@command(app)
def step(
    model: Annotated[
        list[str] | None, typer.Option(help="24x256, 8x512 (default: both); on cuda 16x1024, 24x2048.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed pairs of each arm.")] = 16,
    starts: Annotated[int | None, typer.Option(min=1, help="Sets of processes (default: 8; on cuda 1).")] = None,
    threads: Threads = 2,
    device: Device = "cpu",
    explain: Annotated[bool, typer.Option(help="Also arms that show where the cost goes.")] = False,
    quick: Quick = False,
) -> Result:
    """Memory, time and exactness of a training step: plain, offloaded, checkpointed."""
    from ._workload.sizes import CPU_MODELS, CUDA_MODELS, TINY
    from .step import STARTS, run_step

    known = CUDA_MODELS if device == "cuda" else CPU_MODELS
    names = model or (["16x1024"] if device == "cuda" else list(known))
    check_names(names, known, "model", where=f" for {device}")
    if explain and device == "cuda":
        raise typer.BadParameter("--explain takes the cost on a CPU apart; leave --device away")
    if quick:
        return run_step([TINY], device=device, rounds=2, threads=threads, explain=explain)
    models, starts = [known[name] for name in names], starts or (1 if device == "cuda" else STARTS)
    return run_step(models, device=device, rounds=rounds, starts=starts, threads=threads, explain=explain)


@command(app)
def forecast(
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: all).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which all is forecast and run.")] = 2,
    threads: Threads = 1,
    quick: Quick = False,
) -> Result:
    """What `tba plan` forecasts beside what was measured: here, and of published steps on GPUs."""
    from ._workload.families import FAMILIES
    from .forecast import run_forecast

    names = family or (["conv"] if quick else list(FAMILIES))
    check_names(names, FAMILIES, "family")
    return run_forecast(names, rounds=1 if quick else rounds, threads=threads, published=not quick)


@command(app)
def curve(
    arms: Annotated[
        str | None, typer.Option(help="Set of arms: rok, card, auto, paper, links (default: rok; on cuda card).")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: the set's).")] = None,
    batch: Annotated[list[float] | None, typer.Option(help="Multiples of the set's batch (default: its own).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds of each arm (default: the set's).")] = None,
    starts: Annotated[int | None, typer.Option(min=1, help="Sets of processes (default: the set's).")] = None,
    rate: Annotated[str | None, typer.Option(help="Limit each link to so much a second, such as 100MB.")] = None,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Throughput against peak memory under a set of arms: recomputed, moved, by budget (up to 15 minutes a family)."""
    from ._processes.device import DEVICES
    from ._workload.families import FAMILIES
    from .curve import SETS, run_curve

    arms, here = arms or ("card" if device == "cuda" else "rok"), DEVICES[device]
    check_names([arms], SETS, "set of arms")
    chosen = SETS[arms]
    check_names(family or (), FAMILIES, "family")
    parts = [arms, *(family or ())]
    if quick:
        chosen, here = chosen.tiny(), replace(here, size="small")
    if rate is not None:
        limit = parse_rate(rate)
        chosen = chosen.limited(limit)
        parts.append(f"{limit / 1e6:.0f}MBps")
    given = {"families": family, "scales": batch, "rounds": rounds, "starts": starts}
    chosen = replace(chosen, **{name: value for name, value in given.items() if value})
    return run_curve("-".join(parts), chosen, threads=threads, out=out, device=here)


@command(app)
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


@command(app)
def hooks(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each kind.")] = 40,
    device: Device = "cpu",
    quick: Quick = False,
) -> Result:
    """Cost per saved tensor on the calling thread, above an empty pair of hooks."""
    from ._processes.device import DEVICES
    from .hooks import run_hooks

    sizes = {"tensors": 16, "records": 64} if quick else {"tensors": 128, "records": 1000}
    return run_hooks(rounds=3 if quick else rounds, device=DEVICES[device], **sizes)


@command(app)
def overlap(
    model: Annotated[Literal["24x256", "8x512"], typer.Option(help="Size of the GPT.")] = "24x256",
    rate: Annotated[list[str] | None, typer.Option(help="Limit the link to so much a second, such as 200MB.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps traced; the report shows the last.")] = 3,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """The share of a step's I/O that compute hides; with --rate (several times) on a slower link."""
    from ._workload.sizes import CPU_MODELS, TINY
    from .overlap import run_overlap

    rates = [parse_rate(text) for text in rate or []]
    size, rounds = (TINY, 1) if quick else (CPU_MODELS[model], rounds)
    return run_overlap(size, rates=rates, rounds=rounds, threads=threads, out=out)


@command(app)
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="Take about so long, all arms together.")] = 150,
    steps: Annotated[int, typer.Option(min=1, help="At most so many steps.")] = 60,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Train a GPT on Python's standard library, plain and offloaded: memory, time, bytes and loss of both."""
    from ._workload.sizes import CPU_MODELS, TINY
    from .demo import run_demo

    size, steps = (TINY, min(steps, 3)) if quick else (CPU_MODELS["24x256"], steps)
    return run_demo(size, seconds=seconds, steps=steps, threads=threads, out=out)


@command(app)
def io(
    rounds: Annotated[int, typer.Option(min=2, help="Timed turns of each arm.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="I/O workers of each path, and jobs of fio.")] = 2,
    path: Folder = None,
    quick: Quick = False,
) -> Result:
    """Stores against fio: bandwidth, CPU seconds, cost of submitting (writes some 600 GB)."""
    from .io import run_io

    if quick:
        return run_io(path, sizes=(MIB, 4 * MIB), nbytes=16 * MIB, rounds=2, threads=threads, fio_run_ms=50)
    return run_io(path, rounds=rounds, threads=threads)


@command(app)
def codec(
    rounds: Annotated[int, typer.Option(min=1, help="Timed turns of each codec and layer.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Of the layer and the block; codecs get one.")] = 2,
    quick: Quick = False,
) -> Result:
    """Speed, size and error of every codec; compact_linear; stored bytes of a Llama block under each preset."""
    from .codec import run_codec

    return run_codec(rounds=2 if quick else rounds, threads=threads, quick=quick)


@command(app)
def bert(
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each arm.")] = 2,
    threads: Threads = 2,
    rank: Annotated[int, typer.Option(min=1, help="Of CompAct's projections.")] = 8,
    quick: Quick = False,
) -> Result:
    """Peak memory of fine-tuning BERT-base: plain, CompAct, CompAct on NVMe."""
    from .bert import run_bert

    return run_bert(rounds=1 if quick else rounds, threads=threads, rank=rank, quick=quick)


@app.command(name="all")
def everything(
    quick: Quick = False,
    save: Save = False,
    machine: Machine = MACHINE,
    only: Annotated[list[str] | None, typer.Option(help="Run these commands alone (default: all).")] = None,
    json: AsJson = False,
) -> None:
    """Every benchmark; with --quick, in a few minutes, to see that all of them work."""
    from .all import run_all

    known = [name for entry in app.registered_commands if (name := entry.name) not in (None, "all")]
    names = only or known
    check_names(names, known, "benchmark")
    result = run_all(names, quick=quick, options=["--save", "--machine", machine] if save else [])
    show(result, as_json=json)
    if any(each["code"] for each in result.data["commands"].values()):
        sys.exit(1)


def _terminated(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)  # so that what a benchmark has started or mounted ends with it
    try:
        app()
    except (CannotMeasure, ChildError) as error:
        sys.exit(f"benchmarks: {error}")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        sys.exit("benchmarks: pictures need matplotlib, which is not here; pip install 'tba-offload[plot]'")


if __name__ == "__main__":
    main()
