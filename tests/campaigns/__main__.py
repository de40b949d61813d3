"""The command line: `python -m tests.campaigns faults|programs|families|state|signals`, from the checkout."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks._report.options import MACHINE, AsJson, Folder, Machine, Quick, Save, finish
from benchmarks._report.results import Result

from .device import Device, check_device
from .runner import end_when_told

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Seed = Annotated[int, typer.Option(help="The seed of the first; each has the next.")]


@app.command()
def faults(
    count: Annotated[int, typer.Option(min=1, help="How many cases.")] = 1000,
    seed: Seed = 0,
    only: Annotated[int | None, typer.Option(help="Run the case of this seed alone, and tell all about it.")] = None,
    device: Device = "cpu",
    path: Folder = None,
    json: AsJson = False,
    quick: Quick = False,
    save: Save = False,
    machine: Machine = MACHINE,
) -> None:
    """Random faults at random points of training steps: exact or an error that names it; exit status 1 otherwise."""
    from .faults.command import run_faults

    check_device(device)
    seeds = [only] if only is not None else range(seed, seed + (8 if quick else count))
    result = run_faults(seeds, path, device)
    _finish(result, json, save, machine)


@app.command()
def programs(
    count: Annotated[int, typer.Option(min=1, help="How many programs, in whole batches of 50.")] = 2000,
    seed: Annotated[int, typer.Option(help="The seed of the first batch; each has the next.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time, one thread each.")] = 2,
    device: Device = "cpu",
    path: Folder = None,
    json: AsJson = False,
    quick: Quick = False,
    save: Save = False,
    machine: Machine = MACHINE,
) -> None:
    """Random programs against plain PyTorch, under interrupts and failing stores; exit status 1 if one is not exact."""
    from .programs.command import run_programs

    check_device(device)
    result = run_programs(seed, 1 if quick else count, jobs=jobs, path=path, device=device)
    _finish(result, json, save, machine)


@app.command()
def families(
    only: Annotated[str, typer.Option(help="Run the families whose name (such as causal/gptj) matches this.")] = "",
    seed: Annotated[int, typer.Option(help="The seed of weights and batches.")] = 0,
    native: Annotated[bool, typer.Option("--native", help="This processor's own kernels, not those of all.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time, one thread each.")] = 2,
    path: Folder = None,
    json: AsJson = False,
    quick: Quick = False,
    save: Save = False,
    machine: Machine = MACHINE,
) -> None:
    """Every small architecture of transformers by plan against plain PyTorch; exit status 1 if one is not equal."""
    from .families.command import run_families

    result = run_families("^causal/(gpt|llama)" if quick else only, seed, native=native, jobs=jobs, path=path)
    _finish(result, json, save, machine)


@app.command()
def state(
    seeds: Annotated[str, typer.Option(help="The first seed and the one after the last, as FIRST:END.")] = "0:5000",
    kind: Annotated[str | None, typer.Option(help="A kind of state: all models have one of it, and no other.")] = None,
    show: Annotated[int | None, typer.Option(help="Print the source code of this seed's model, and run it.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time, one thread each.")] = 2,
    path: Folder = None,
    json: AsJson = False,
    quick: Quick = False,
    save: Save = False,
    machine: Machine = MACHINE,
) -> None:
    """Random models whose blocks keep hidden state, under budgets; exit status 1 if one is not as plain PyTorch."""
    from .state.command import run_state
    from .state.program import describe, draw, kinds

    if kind is not None and kind not in kinds():
        raise typer.BadParameter(f"no such kind; one of: {', '.join(kinds())}")
    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise typer.BadParameter("seeds are FIRST:END, such as 0:5000")
    chosen = range(int(first), int(end))
    if show is not None:
        typer.echo(describe(draw(show, kind)))
        chosen = range(show, show + 1)
    result = run_state(chosen[:100] if quick else chosen, kind, jobs=jobs, path=path)
    _finish(result, json, save, machine)


@app.command()
def signals(
    count: Annotated[int, typer.Option(min=1, help="How many signals.")] = 3000,
    seed: Seed = 0,
    path: Folder = None,
    json: AsJson = False,
    quick: Quick = False,
    save: Save = False,
    machine: Machine = MACHINE,
) -> None:
    """Signals at random moments of training, of handlers that raise, exit, save and train; exit status 1 if one is lost
    or a step is not exact."""
    from .signals.command import run_signals

    _finish(run_signals(seed, 60 if quick else count, path=path), json, save, machine)


def _finish(result: Result, as_json: bool, save: bool, machine: str) -> None:
    finish(result, as_json, save, machine)
    if result.data["bad"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    end_when_told()
    app()
