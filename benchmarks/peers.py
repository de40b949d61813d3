"""The peers benchmark: tba beside what its user would use instead: one model, one seed, one allocator.

Each peer trains in its own process, in turns with the others. Then ten things that training code does to saved tensors
are done under each peer, each in a process that may hang or die.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import typer

from ._peers.cases import CASES
from ._peers.registry import CHECKPOINT, NVME, OURS, PEERS
from ._peers.trial import Outcome, run_case
from ._pictures.curves import Panel, Point, draw_curves
from ._pictures.pictures import check_pictures
from ._processes.arms import Spec
from ._processes.child import ChildError
from ._processes.device import DEVICES, Device
from ._processes.measure import count_saved_bytes, measure
from ._report.bar import Bar, bar_table
from ._report.curve import per_second
from ._report.environment import environment_block
from ._report.options import OUT, Out, Quick, Threads, check_names
from ._report.options import Device as DeviceName
from ._report.progress import progress
from ._report.ratios import doubt, ratios
from ._report.results import MIB, Column, Grid, Result, mib
from ._report.steps import Measured, arm_table, memory_share
from ._workload.families import BY_SIZE
from ._workload.sizes import TINY_SETTINGS
from ._workload.tools import scratch_directory

PLAIN, RULE, SHARE = "plain", "SSDTrain's rule", 0.4
AUTO = f"tba auto {SHARE:.2f}"
_WARM_UP, _WARM_UP_APART = 6, 4  # until a plan is made; fewer if a step moves gigabytes
_CASE_TIMEOUT_S = 120.0  # a case that hangs hangs for ever; importing takes seconds
# What else PyPI has, and why it is no arm.
ELSEWHERE = {
    "trainstream": "needs CUDA: wrap() refuses a CPU build of PyTorch; it pages weights, optimizer and activations",
    "ckptplan": "needs CUDA: it plans recomputing by bytes that it counts on a CUDA device alone",
}


def peers(
    family: Annotated[
        Literal["llama", "gpt", "bert", "conv"], typer.Option(help="The model that is trained.")
    ] = "llama",
    peer: Annotated[list[str] | None, typer.Option(help="Measure only these, and tba (default: all).")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Examples of a batch (default: the family's own; on a device 4).")
    ] = None,
    judge: Annotated[
        bool, typer.Option("--cases/--no-cases", help="Also try how each handles patterns in real code.")
    ] = True,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Timed rounds of each arm (default: 12; on a device 5).")
    ] = None,
    starts: Annotated[int | None, typer.Option(min=1, help="Sets of processes (default: 2; on a device 1).")] = None,
    threads: Threads = 2,
    device: DeviceName = "cpu",
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """tba against other tools: memory, time, bytes left on disk, and how each handles ten patterns (10 minutes)."""
    check_pictures()
    here, cases = DEVICES[device], list(CASES) if judge else []
    check_names(peer or (), PEERS, "peer")
    names = [name for name in PEERS if name in (peer or PEERS) or name == NVME]
    options: dict[str, Any] = {"family": family, "batch": 4 if here.apart else 0, "layers": None, "settings": {}}
    rounds, starts = (rounds or 5, starts or 1) if here.apart else (rounds or 12, starts or 2)
    if quick:
        rounds, starts, here = 1, 1, replace(here, size="small")
        options = {"family": "gpt", "batch": 2, "layers": 2, "settings": TINY_SETTINGS}
        if not peer:
            names, cases = [CHECKPOINT, "tutorial's files", NVME], cases[:1] + cases[-3:]
    options["batch"] = batch or options["batch"]
    missing = {name: why for name in names if (why := PEERS[name].missing())}
    names = [name for name in names if name not in missing]
    arms, left, failed, found = _measure(names, options, cases, rounds, starts, threads, here)
    bars, model = make_bars(arms, found), BY_SIZE[here.size][options["family"]]
    title = f"{model.of(options['layers'])}, batch {options['batch'] or model.examples}"
    tables = [
        _table(title, arms, left, here),
        _against_table(arms),
        Grid("Not measured here", ("peer", "why"), list((missing | ELSEWHERE | failed).items())),
        *([_case_table(found, cases, missing | failed)] if cases else []),
        bar_table(bars),
    ]
    data = {
        "family": options["family"],
        "arms": {name: vars(arm) for name, arm in arms.items()},
        "bytes_left_on_disk": left,
        "missing": missing | ELSEWHERE,
        "failed": failed,
        "cases": {name: {case: found[name][case]._asdict() for case in cases} for name in found},
        "bit_equal": {name: equal_to(arm, arms[PLAIN]) for name, arm in arms.items()},
        "bars": [bar.data() for bar in bars],
    }
    picture = _draw(title, model.unit, arms, out)
    environment = environment_block(arms, threads=threads, card=here.card, starts=starts)
    theme, files = here.theme(f"peers-batch{batch}" if batch else "peers"), [picture]
    return Result(theme=theme, tables=tables, data=data, files=files, picture=picture, environment=environment)


def _measure(
    names: Sequence[str],
    options: Mapping[str, Any],
    cases: Sequence[str],
    rounds: int,
    starts: int,
    threads: int,
    device: Device,
) -> tuple[dict[str, Measured], dict[str, int], dict[str, str], dict[str, dict[str, Outcome]]]:
    """Train under each peer, then run the cases under each that trains.

    Returns:
        The arms, the bytes that each left on disk, why arms failed, and the outcomes of the cases.
    """
    from tba import OffloadConfig

    directory = scratch_directory(OffloadConfig().storage_paths)
    with ExitStack() as stack:
        every = (PLAIN, *names, *_tiers(device), RULE, AUTO)
        folders = {name: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory))) for name in every}
        # What a peer compiles (DeepSpeed an operator) goes here, when its step is tried. In PyTorch's own cache, a
        # process killed while it compiles leaves a lock that all later ones wait for: a hang that is no peer's.
        compiled = {"TORCH_EXTENSIONS_DIR": stack.enter_context(tempfile.TemporaryDirectory(dir=directory))}
        specs, failed = _those_that_run(make_arms(names, options, folders, compiled, threads, device))
        warm_up = _WARM_UP_APART if device.apart else _WARM_UP
        turns = {"rounds": rounds, "warm_up": warm_up, "starts": starts, "apart": device.apart}
        arms = measure(specs, title=f"peers {options['family']}", **turns)
        left = {name: _bytes_below(folder) for name, folder in folders.items() if name in arms}
        able = [name for name in names if name not in failed]
        return arms, left, failed, _run_cases(able, cases, directory, {**device.environment, **compiled}, device)


def make_arms(
    names: Sequence[str],
    options: Mapping[str, Any],
    folders: Mapping[str, Path],
    environment: Mapping[str, str],
    threads: int,
    device: Device,
) -> list[Spec]:
    """List the arms: plain, each peer, tba by tier, by the paper's rule and by a budget; all get these variables."""
    settings = options["settings"]
    trained = {name: value for name, value in options.items() if name != "settings"}

    def arm(name: str, **more: Any) -> Spec:
        folder = str(folders[name])
        given = {**trained, "scratch": folder, **more}
        return device.spec(name, given, threads=threads, environment={"TMPDIR": folder, **environment})

    def ours(name: str, tier: str, **more: Any) -> Spec:
        paths = {"storage_paths": [str(folders[name])]}
        return arm(name, tier=tier, settings={**settings, **paths, **more})

    budget = int(SHARE * count_saved_bytes(options, threads, device))
    peers = [arm(name, peer=name) for name in names]
    tiers = [ours(name, tier) for name, tier in _tiers(device).items()]
    planned = [ours(RULE, "auto", policy="tba"), ours(AUTO, "auto", memory_budget=budget)]
    return [arm(PLAIN), *peers, *tiers, *planned]


def _tiers(device: Device) -> dict[str, str]:
    """Name the tiers of a device that are not among the peers."""
    return {f"tba {tier}": tier for tier in device.tiers if f"tba {tier}" not in PEERS}


def _is_ours(name: str) -> bool:
    return name.startswith("tba ")


def _those_that_run(specs: Sequence[Spec]) -> tuple[list[Spec], dict[str, str]]:
    """Try one step of each arm that another package makes; return those that run, and why the others fail."""
    run, failed = [], {}
    for spec in specs:
        if spec.name in PEERS and PEERS[spec.name].package:
            try:
                measure([spec], rounds=0, title=f"a step of {spec.name}", warm_up=1)
            except ChildError as error:
                last = error.words.strip().splitlines()[-1]
                failed[spec.name] = f"does not run: {'it hangs' if error.hung else last[:160]}"
                continue
        run.append(spec)
    return run, failed


def _run_cases(
    names: Sequence[str], cases: Sequence[str], directory: Path, environment: Mapping[str, str], device: Device
) -> dict[str, dict[str, Outcome]]:
    limits = {"timeout_s": _CASE_TIMEOUT_S, "directory": directory, "environment": environment, "device": device.name}
    found: dict[str, dict[str, Outcome]] = {}
    with progress("cases", len(names) * len(cases)) as bar:
        for name in names:
            for case in cases:
                outcome = run_case(name, case, **limits)
                found.setdefault(name, {})[case] = outcome
                bar.advance(f"{name}, {case}: {outcome.kind}")
    return found


def equal_to(arm: Measured, plain: Measured) -> bool:
    """Whether losses and gradients are plain's, bit for bit, in every round."""
    return arm.gradients == plain.gradients and arm.losses == plain.losses


def make_bars(arms: Mapping[str, Measured], found: Mapping[str, Mapping[str, Outcome]]) -> list[Bar]:
    """Require of tba that each case is right or an error, and equal gradients."""
    bars = []
    for name in OURS:
        if name in found:
            bad = sum(outcome.kind not in ("right", "error", "-") for outcome in found[name].values())
            bars.append(Bar(what=f"{name}: cases neither right nor an error", measured=bad, limit=0, unit=""))
    for name in arms:
        if _is_ours(name) or name == RULE:
            unequal = float(not equal_to(arms[name], arms[PLAIN]))
            bars.append(Bar(what=f"{name}: runs with other gradients", measured=unequal, limit=0, unit=""))
    return bars


def _draw(title: str, unit: str, arms: Mapping[str, Measured], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    places = [Point(name, _kind(name), arm.peak_bytes / MIB, per_second(arm)) for name, arm in arms.items()]
    draw_curves({title: Panel(places, "peak over idle, MiB", f"{unit} per second")}, out / "peers.png")
    return out / "peers.png"


def _against_table(arms: Mapping[str, Measured]) -> Grid:
    """Compare tba, moving everything and by a budget, with each of the others."""

    def peak(ours: str, other: Measured) -> str:
        return f"{memory_share(arms[ours], other):.2f}"

    def step(ours: str, other: Measured) -> str:
        against = ratios(arms[ours].wall_s, other.wall_s)
        return f"{median(against):.3f} ± {doubt(against):.3f}"

    columns: list[Column] = [("against", lambda other: str(other.name))]
    for ours in (OURS[0], AUTO):
        columns += [(f"{ours}: peak", partial(peak, ours)), (f"{ours}: step", partial(step, ours))]
    others = [arm for name, arm in arms.items() if not _is_ours(name)]
    return Grid.of("tba / each", others, columns, "Below 1: tba is better. Behind ±: about 95 % confidence.")


def _kind(name: str) -> str:
    return "plain" if name == PLAIN else "ours" if _is_ours(name) else "peer"


def _table(title: str, arms: Mapping[str, Measured], left: Mapping[str, int], device: Device) -> Grid:
    host: list[Column] = [("host MiB", lambda arm: mib(arm.host_bytes))] if device.apart else []
    note = (
        f"Peak: {device.memory}, over idle, worst of all steps. Left on disk: after the process has ended. "
        f"tba auto may hold {SHARE:.0%} of what plain saves. "
    )
    note += (
        "Host: the most memory that was ever resident in the process."
        if device.apart
        else "save_on_cpu cannot move tensors of a CPU anywhere."
    )
    return arm_table(
        title,
        arms,
        note,
        *host,
        ("bytes left on disk", lambda arm: f"{left[arm.name]:,}"),
        ("bit-equal", lambda arm: "yes" if equal_to(arm, arms[PLAIN]) else "NO"),
    )


def _case_table(found: Mapping[str, Mapping[str, Outcome]], cases: Sequence[str], missing: Mapping[str, str]) -> Grid:
    rows = [(name, *(outcomes[case].kind for case in cases)) for name, outcomes in found.items()]
    rows += [(name, *[why.partition(":")[0]] * len(cases)) for name, why in missing.items()]
    words = "; ".join(
        f"{name}, {case}: {outcome.words}"
        for name, outcomes in found.items()
        for case, outcome in outcomes.items()
        if outcome.kind not in ("right", "error", "-")
    )
    note = (
        "Right: plain PyTorch's gradients, bit for bit. For the edit, plain raises an error, and the gradients without "
        f"the edit are right too. -: keeps nothing in files. {words}."
    )
    return Grid("Outcomes of the cases", ("under", *cases), rows, note)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
