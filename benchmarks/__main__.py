"""The command line: `python -m benchmarks COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Literal

import typer

from ._evidence import add_evidence
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
def auto(
    family: Annotated[
        list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: all, some 25 minutes).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each arm.")] = 12,
    starts: Annotated[int, typer.Option(min=1, help="Sets of processes.")] = 2,
    rate: Annotated[str | None, typer.Option(help="Limit the link to so much a second, such as 100MB.")] = None,
    regions: Annotated[
        str, typer.Option(help="Modules to recompute instead of blocks, in arms of their own, such as LlamaMLP.")
    ] = "",
    threads: Threads = 2,
    quick: Quick = False,
) -> Result:
    """Tier auto at seven budgets beside every fixed policy: time, peak, and what each plan predicted."""
    from ._workload.families import FAMILIES
    from .auto import run_auto
    from .overlap import parse_rate

    names = family or list(FAMILIES)
    check_names(names, FAMILIES, "family")
    try:
        limit = None if rate is None else parse_rate(rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    asked = {"threads": threads, "rate_bytes_per_s": limit, "regions": regions}
    if quick:
        return run_auto(family or ["conv"], rounds=1, starts=1, shares=(0.4, 0.85), **asked)
    return run_auto(names, rounds=rounds, starts=starts, **asked)


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
def ablation(
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: all).")] = None,
    threads: Threads = 2,
    quick: Quick = False,
) -> Result:
    """Plans by the library, a linear program and fixed rules: simulated, above the lower bound (two minutes)."""
    from ._workload.families import FAMILIES
    from .ablation import run_ablation

    names = family or (["conv"] if quick else list(FAMILIES))
    check_names(names, FAMILIES, "family")
    return run_ablation(names, scratch=OUT / "scratch", threads=threads, with_large=not quick)


add_evidence(app)


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
    rounds: Annotated[int, typer.Option(min=1, help="Steps traced; the one of median length is drawn.")] = 3,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """One step as a timeline of compute and I/O; with --rate (several times) on a slower link."""
    from ._workload.sizes import CPU_MODELS, TINY
    from .overlap import parse_rate, run_overlap

    try:
        rates = [parse_rate(text) for text in rate or []]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    size, rounds = (TINY, 1) if quick else (CPU_MODELS[model], rounds)
    return run_overlap(size, rates=rates, rounds=rounds, threads=threads, out=out)


@command(app)
def replay(
    family: Annotated[list[str] | None, typer.Option(help="gpt, conv (default: both).")] = None,
    rate: Annotated[list[str] | None, typer.Option(help="Limit of the link (default: 100MB and 400MB).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps traced.")] = 9,
    threads: Threads = 2,
    quick: Quick = False,
) -> Result:
    """Transfers of planned steps on a throttled link beside those that their plans foresee (five minutes)."""
    from .overlap import parse_rate
    from .replay import BUDGETS, run_replay

    names = family or (["conv"] if quick else list(BUDGETS))
    check_names(names, BUDGETS, "family")
    try:
        rates = [parse_rate(text) for text in rate or (["400MB"] if quick else ["100MB", "400MB"])]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return run_replay(names, rates=rates, rounds=2 if quick else rounds, threads=threads)


@command(app)
def sim(
    rate: Annotated[
        list[str] | None, typer.Option(help="Limit of the check's link (default: 200MB and 400MB).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps that check the simulator.")] = 5,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Simulation: what can leave at 2% of a step on cards, links and drives that are not here (five minutes)."""
    from .overlap import parse_rate
    from .replay import BUDGETS
    from .sim import run_sim

    try:
        rates = [parse_rate(text) for text in rate or (["400MB"] if quick else ["200MB", "400MB"])]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    families = ["conv"] if quick else list(BUDGETS)
    return run_sim(rates=rates, families=families, rounds=2 if quick else rounds, threads=threads, out=out, quick=quick)


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
def fidelity(
    task: Annotated[list[str] | None, typer.Option(help="text, digits (default: both).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of text (default: 2000); of digits 0.3 as many.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Seeds; only from two on they show a doubt.")] = 3,
    rate: Annotated[list[float] | None, typer.Option(help="Learning rates tried (default: three a task).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time, one thread each.")] = 2,
    resume: Annotated[bool, typer.Option(help="Go on with the runs that are finished.")] = False,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """Validation loss under presets, CompAct, and arms like PRAC and GACT, against peak and step time (three hours)."""
    from .fidelity import PLAN, TINY_PLAN, run_fidelity

    plan, seeds = (TINY_PLAN, min(seeds, 2)) if quick else (PLAN, seeds)
    check_names(task or (), plan.studies, "task")
    plan = plan.changed(steps=steps, rates=rate, tasks=task or list(plan.studies))
    return run_fidelity(plan, seeds=seeds, jobs=jobs, resume=resume, out=out)


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


@app.command()
def report(out: Out = OUT, json: AsJson = False) -> None:
    """One page of all that is filed: report.html, and report.md for the docs. Measures nothing."""
    from .report import run_report

    show(run_report(out), as_json=json)


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

    known = [name for entry in app.registered_commands if (name := entry.name) not in (None, "report", "all")]
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
        needs = {"matplotlib": ("pictures need", "plot"), "scipy": ("the linear program needs", "dev")}
        if error.name not in needs:
            raise
        what, extra = needs[error.name]
        sys.exit(f"benchmarks: {what} {error.name}, which is not here; pip install 'tba-offload[{extra}]'")


if __name__ == "__main__":
    main()
