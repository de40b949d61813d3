"""The command `faults`: runs the cases of some seeds and counts their outcomes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks._report.environment import environment_block
from benchmarks._report.progress import progress
from benchmarks._report.results import Grid, Result
from benchmarks._workload.tools import scratch_directory

from .campaign import BAD, VERDICTS, Campaign, tally
from .cases import KINDS
from .trial import Outcome


def run_faults(seeds: Sequence[int], path: Path | None = None) -> Result:
    """Run the cases of `seeds` below `path` (None: below `out/`). Cases that fail are shown as they come."""
    outcomes: list[Outcome] = []
    directory = scratch_directory((path,) if path is not None else None)
    with progress("faults", len(seeds)) as bar, Campaign(directory) as campaign:
        if campaign.no_disk:
            bar.say(f"no disk runs full: {campaign.no_disk}")
        for seed in seeds:
            outcome = campaign.run(seed)
            outcomes.append(outcome)
            if outcome.verdict in BAD:
                bar.say(_describe(outcome))
            bar.advance(f"{sum(one.verdict in BAD for one in outcomes)} bad")
        no_disk = campaign.no_disk
    tables = [_table(outcomes, no_disk)]
    if len(seeds) == 1:
        tables.append(_one(outcomes[0]))
    data = {
        "seeds": [seeds[0], seeds[-1]],
        "counts": {kind: dict(counts) for kind, counts in tally(outcomes).items()},
        "bad": bad_count(outcomes),
        "failing": [asdict(outcome) for outcome in outcomes if outcome.verdict in BAD],
        "no_disk": no_disk,
    }
    environment = environment_block({}, threads=1)
    return Result(theme="faults", tables=tables, data=data, environment=environment, package="tests.campaigns")


def bad_count(outcomes: Sequence[Outcome]) -> int:
    """Count the outcomes that are wrong, hung or leaked."""
    return sum(outcome.verdict in BAD for outcome in outcomes)


def _describe(outcome: Outcome) -> str:
    return (
        f"seed {outcome.seed}: {outcome.verdict} ({outcome.kind}); again alone: "
        f"python -m tests.campaigns faults --only {outcome.seed}\n{outcome.detail}\n{json.dumps(outcome.case)}"
    )


def _table(outcomes: Sequence[Outcome], no_disk: str) -> Grid:
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
    title = f"Fault campaign, seeds {outcomes[0].seed} to {outcomes[-1].seed}"
    return Grid(title, ("fault", "seam", "to be survived", *columns), [*rows, ("all", "", "", *total)], note)


def _one(outcome: Outcome) -> Grid:
    rows = [(name, str(value)) for name, value in (outcome.case | {"detail": outcome.detail}).items()]
    return Grid(f"Seed {outcome.seed}: {outcome.verdict}", ("what", "value"), rows)
