"""The peers benchmark: tba beside what its user would use instead: one model, one seed, one allocator.

Each peer trains in a process of its own, in turns with the others. Beneath stands what each makes of ten things that
training code does to saved tensors, found by doing them, each in a process that may hang or die.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from ._peers.cases import CASES
from ._peers.registry import OURS, PEERS
from ._peers.trial import Outcome, run_case
from ._pictures.curves import Panel, Point, draw_curves
from ._processes.arms import Spec
from ._processes.child import ChildError
from ._processes.device import CPU, Device
from ._processes.measure import count_saved_bytes, measure
from ._report.bar import Bar, bar_table
from ._report.curve import per_second
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.ratios import doubt, median_ratio, ratios
from ._report.results import MIB, Grid, Result, mib
from ._report.steps import Measured, memory_share
from ._workload.families import BY_SIZE
from ._workload.tools import scratch_directory

PLAIN, RULE, SHARE = "plain", "SSDTrain's rule", 0.4
AUTO = f"tba auto {SHARE:.2f}"
_WARM_UP, _WARM_UP_APART = 6, 4  # until a plan stands; fewer where a step moves gigabytes
_CASE_TIMEOUT_S = 120.0  # what hangs hangs for ever; importing takes seconds
# What PyPI has besides, and why it is no arm.
ELSEWHERE = {
    "trainstream": "needs CUDA: wrap() refuses a CPU build of PyTorch; it pages weights, optimizer and activations",
    "ckptplan": "needs CUDA: it plans recomputing by bytes that it counts on a CUDA device alone",
}


def run_peers(
    names: Sequence[str],
    *,
    family: str,
    cases: Sequence[str],
    rounds: int,
    starts: int,
    threads: int,
    out: Path,
    layers: int | None = None,
    batch: int = 0,
    settings: Mapping[str, Any] | None = None,
    device: Device = CPU,
) -> Result:
    """Train under each of the peers `names`, then run the cases under each; `batch` 0 is the family's own."""
    from tba import OffloadConfig

    directory = scratch_directory(OffloadConfig().storage_paths)
    missing = {name: why for name in names if (why := PEERS[name].missing())}
    here = [name for name in names if name not in missing]
    options = {"family": family, "layers": layers, "batch": batch}
    with ExitStack() as stack:
        folders = {
            name: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            for name in (PLAIN, *here, RULE, AUTO)
        }
        # What a peer compiles (DeepSpeed an operator) is compiled here, by the step that tries it. In PyTorch's own
        # cache who is killed meanwhile leaves a lock, for which all later processes wait: a hang that is no peer's.
        compiled = {"TORCH_EXTENSIONS_DIR": stack.enter_context(tempfile.TemporaryDirectory(dir=directory))}
        specs = make_arms(here, options, folders, compiled, threads, dict(settings or {}), device)
        specs, failed = _those_that_run(specs)
        warm_up = _WARM_UP_APART if device.apart else _WARM_UP
        turns = {"rounds": rounds, "warm_up": warm_up, "starts": starts, "apart": device.apart}
        arms = measure(specs, title=f"peers {family}", **turns)
        left = {name: _bytes_below(folder) for name, folder in folders.items() if name in arms}
        able = [name for name in here if name not in failed]
        found = _run_cases(able, cases, directory, {**device.environment, **compiled}, device)
    bars = make_bars(arms, found)
    model = BY_SIZE[device.size][family]
    title = f"{model.of(layers)}, batch {batch or model.examples}"
    tables = [
        _table(title, arms, left, device),
        _against_table(arms),
        Grid("Not measured here", ("peer", "why"), list((missing | ELSEWHERE | failed).items())),
        _case_table(found, cases, missing | failed),
        bar_table(bars),
    ]
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "peers.png"
    places = [Point(name, _kind(name), arm.peak_bytes / MIB, per_second(arm)) for name, arm in arms.items()]
    draw_curves({title: Panel(places, "peak over idle, MiB", f"{model.unit} per second")}, picture)
    data = {
        "family": family,
        "arms": {name: vars(arm) for name, arm in arms.items()},
        "bytes_left_on_disk": left,
        "missing": missing | ELSEWHERE,
        "failed": failed,
        "cases": {name: {case: found[name][case]._asdict() for case in cases} for name in found},
        "bit_equal": {name: equal_to(arm, arms[PLAIN]) for name, arm in arms.items()},
        "bars": [bar.data() for bar in bars],
    }
    allocators = {name: arm.allocator for name, arm in arms.items()}
    environment = environment_block(allocators, threads=threads, device=device.name)
    environment["processes"] = f"{starts} of each arm, one after another"
    theme, files = device.theme("peers"), [picture]
    return Result(theme=theme, tables=tables, data=data, files=files, picture=picture, environment=environment)


def make_arms(
    names: Sequence[str],
    options: Mapping[str, Any],
    folders: Mapping[str, Path],
    environment: Mapping[str, str],
    threads: int,
    settings: Mapping[str, Any],
    device: Device,
) -> list[Spec]:
    """List the arms: plain, each peer, and tba by the paper's rule and by a budget; all get these variables."""

    def arm(name: str, **more: Any) -> Spec:
        folder = str(folders[name])
        given = {**options, "scratch": folder, **more}
        return device.spec(name, given, threads=threads, environment={"TMPDIR": folder, **environment})

    def planned(name: str, **more: Any) -> Spec:
        paths = {"storage_paths": [str(folders[name])]}
        return arm(name, tier="auto", settings={**settings, **paths, **more})

    budget = int(SHARE * count_saved_bytes({**options, "settings": settings}, threads, device))
    peers = [arm(name, peer=name) for name in names]
    return [arm(PLAIN), *peers, planned(RULE, policy="tba"), planned(AUTO, memory_budget=budget)]


def _those_that_run(specs: Sequence[Spec]) -> tuple[list[Spec], dict[str, str]]:
    """Try one step of each arm that is made from another package; tell what became of those that fail."""
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
    for name in (*OURS, RULE, AUTO):
        if name in arms:
            unequal = float(not equal_to(arms[name], arms[PLAIN]))
            bars.append(Bar(what=f"{name}: runs with other gradients", measured=unequal, limit=0, unit=""))
    return bars


def _against_table(arms: Mapping[str, Measured]) -> Grid:
    """Compare tba, moving all and by a budget, with each of the others."""
    rows = []
    for name, other in arms.items():
        if name in (*OURS, AUTO):
            continue
        cells = []
        for ours in (OURS[0], AUTO):
            against = ratios(arms[ours].wall_s, other.wall_s)
            cells += [f"{memory_share(arms[ours], other):.2f}", f"{median(against):.3f} ± {doubt(against):.3f}"]
        rows.append((name, *cells))
    heads = (f"{ours}: {what}" for ours in (OURS[0], AUTO) for what in ("peak", "step"))
    return Grid("tba / each", ("against", *heads), rows, "Below 1: tba is better. Behind ±: about 95 % confidence.")


def _kind(name: str) -> str:
    return {PLAIN: "plain", AUTO: "ours"}.get(name, "ours" if name in OURS else "peer")


def _table(title: str, arms: Mapping[str, Measured], left: Mapping[str, int], device: Device) -> Grid:
    plain, rows = arms[PLAIN], []
    for name, arm in arms.items():
        rows.append(
            (
                name,
                mib(arm.peak_bytes),
                f"{memory_share(arm, plain):.2f}",
                f"{median(arm.wall_s):.3f}",
                f"{median_ratio(arm.wall_s, plain.wall_s):.3f}",
                f"{median(arm.cpu_s):.3f}",
                f"{median_ratio(arm.cpu_s, plain.cpu_s):.3f}",
                *([mib(arm.host_bytes)] if device.apart else []),
                f"{left[name]:,}",
                "yes" if equal_to(arm, plain) else "NO",
            )
        )
    heads = ("arm", "peak MiB", "/ plain", "step s", "/ plain", "CPU s", "/ plain")
    host = ("host MiB",) if device.apart else ()
    note = (
        f"Peak: {device.memory}, over idle, worst of all steps. Left on disk: once the process has ended. "
        f"tba auto may hold {SHARE:.0%} of what plain saves. Times: medians over {len(plain.wall_s)} rounds. "
    )
    note += (
        "Host: the most that was ever resident of the process."
        if device.apart
        else "save_on_cpu has nowhere to move a CPU's tensors to."
    )
    return Grid(title, (*heads, *host, "bytes left on disk", "bit-equal"), rows, note)


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
        "Right: plain PyTorch's gradients, bit for bit. For the edit plain has an error, and the gradients without the "
        f"edit are right too. -: keeps nothing in files. {words}."
    )
    return Grid("What becomes of it", ("under", *cases), rows, note)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def known_cases() -> list[str]:
    """List the cases by name."""
    return list(CASES)
