"""The command `faults`: runs the cases of some seeds, each under a watchdog, and counts their outcomes.

Every case asked for gets an outcome: one that does not end within `CASE_TIMEOUT_S` is "hung", one that takes its
process with it is "wrong", both with the process's last words. The next case begins in a new process.

Assumption: a case needs seconds at most, as its store's own timeout is some seconds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.results import Grid, Result
from benchmarks._workload.tools import scratch_directory

from ..device import theme_of
from ..runner import ask_all, result
from .cases import KINDS, draw
from .small_disk import NotAllowed, small_disk
from .trial import Outcome

CASE_TIMEOUT_S = 90.0
_DISK_BYTES = 16 << 20  # about one step of the model that fills it
VERDICTS = ("exact", "raised", "wrong", "hung", "leaked", "skipped")  # in the order of a table
BAD = ("wrong", "hung", "leaked")

Question = tuple[int, str | None]  # a seed, and the kind of fault if it is not to be drawn


def run_cases(
    questions: Sequence[Question],
    path: Path | None = None,
    *,
    device: str = "cpu",
    timeout_s: float = CASE_TIMEOUT_S,
) -> tuple[list[Outcome], str]:
    """Run cases on a device, with files below `path` (None: below `out/`).

    Return their outcomes, and why no disk runs full, "" if one does.

    However it ends, no process, mount or file of it is left.
    """
    with ExitStack() as stack:
        parent = scratch_directory((path,) if path is not None else None)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="tba-faults-", dir=parent))
        disks, no_disk = list[Path](), ""
        try:
            disks.append(stack.enter_context(small_disk(Path(place), _DISK_BYTES)))
        except NotAllowed as reason:
            no_disk = str(reason)

        def arguments(directory: str) -> list[str]:
            own = tempfile.mkdtemp(dir=directory)  # a killed process may leave files there
            return [device, own, *map(str, disks)]

        def outcome(question: Question, answer: Any) -> Outcome:
            if not isinstance(answer, ChildError):
                return Outcome(**answer)
            for left in (left for disk in disks for left in disk.iterdir()):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            case, verdict = draw(*question), "hung" if answer.hung else "wrong"
            return Outcome(seed=case.seed, kind=case.kind, verdict=verdict, detail=str(answer), case=case.describe())

        found = ask_all("faults", questions, outcome, _describe, arguments=arguments, timeout_s=timeout_s, path=parent)
        return found, no_disk


def run_faults(seeds: Sequence[int], path: Path | None = None, device: str = "cpu") -> Result:
    """Run the cases of `seeds` on a device. Those that fail are shown as they come."""
    outcomes, no_disk = run_cases([(seed, None) for seed in seeds], path, device=device)
    tables = [_table(outcomes, device, no_disk)]
    if len(seeds) == 1:
        tables.append(_one(outcomes[0]))
    failing = [asdict(outcome) for outcome in outcomes if outcome.verdict in BAD]
    data = {
        "device": device,
        "seeds": [seeds[0], seeds[-1]],
        "counts": {kind: dict(counts) for kind, counts in tally(outcomes).items()},
        "bad": len(failing),
        "failing": failing,
        "no_disk": no_disk,
    }
    return result(theme_of("faults", device), tables, data)


def tally(outcomes: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """Count by kind, in the order of `KINDS`: each verdict, "cases" in all, and "struck" by their fault."""
    counts = {kind: Counter[str]() for kind in KINDS}
    for outcome in outcomes:
        counts[outcome.kind].update(["cases", outcome.verdict, *(["struck"] if outcome.struck else [])])
    return counts


def _describe(outcome: Outcome) -> str:
    if outcome.verdict not in BAD:
        return ""
    return (
        f"seed {outcome.seed}: {outcome.verdict} ({outcome.kind}); again alone: "
        f"python -m tests.campaigns faults --only {outcome.seed}\n{outcome.detail}\n{json.dumps(outcome.case)}"
    )


def _table(outcomes: Sequence[Outcome], device: str, no_disk: str) -> Grid:
    counts = tally(outcomes)
    columns = ("cases", "struck", *VERDICTS)
    rows = [
        (kind, KINDS[kind].seam, "yes" if KINDS[kind].survived else "", *(str(counts[kind][name]) for name in columns))
        for kind in KINDS
    ]
    total = [str(sum(counts[kind][name] for kind in KINDS)) for name in columns]
    note = (
        "Struck: cases whose fault struck a call. Exact: every step completed, loss and gradients bit-equal to plain "
        "PyTorch. Raised: some step raised OffloadError naming tensor and cause, the completed ones were exact. "
        "Wrong, hung and leaked have to be 0; a fault that has to be survived may not raise either."
    )
    if no_disk:
        note += f" Disk full: skipped, {no_disk}."
    title = f"Fault campaign, {device}, seeds {outcomes[0].seed} to {outcomes[-1].seed}"
    return Grid(title, ("fault", "seam", "to be survived", *columns), [*rows, ("all", "", "", *total)], note)


def _one(outcome: Outcome) -> Grid:
    rows = [(name, str(value)) for name, value in (outcome.case | {"detail": outcome.detail}).items()]
    return Grid(f"Seed {outcome.seed}: {outcome.verdict}", ("what", "value"), rows)
