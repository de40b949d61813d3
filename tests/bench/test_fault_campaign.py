"""The fault campaign: random faults at random points of training steps end exactly or in an error that names them.

`python -m tests.campaigns faults --count 10000` is the long one. Here too: that the campaign sees what it looks for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks._processes.child import ChildError
from benchmarks._report.results import Result
from campaigns.__main__ import app
from campaigns.faults import command, trial
from campaigns.faults.cases import ALWAYS, KINDS, MODELS, Case, draw
from campaigns.faults.command import BAD, run_cases, tally
from campaigns.faults.sabotage import Sabotage
from campaigns.faults.small_disk import NotAllowed, small_disk
from campaigns.faults.trial import Outcome, run_trial
from campaigns.runner import Runner
from io_backends import PosixStore
from io_backends._file import checksum
from io_backends.testing import FaultyStore

ROOT = Path(__file__).resolve().parents[2]
EACH = 8  # cases of each kind


def case_of(kind: str, **changes: Any) -> Case:
    """A case of this kind on the smallest model, where everything takes the file; with changes."""
    case = replace(
        draw(0, kind),
        call="read",
        where=0.2,
        count=1,
        amount=0.5,
        model="small",
        store="posix",
        threads=1,
        checksum=False,
        direct=True,
        window=0.0,
        staging=1.0,
        steps=1,
        forwards=1,
        flush=True,
        inside=False,
        retained=False,
        dropped=False,
    )
    return replace(case, **changes)


def assert_exact(outcome: Outcome) -> None:
    assert outcome.verdict == "exact", outcome.detail


# -- the campaign ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_case_ends_exactly_or_names_tensor_and_cause(scratch: Path) -> None:
    outcomes, _ = run_cases([(seed, kind) for kind in KINDS for seed in range(EACH)], scratch)
    bad = [f"seed {o.seed}, {o.kind}: {o.verdict}: {o.detail}" for o in outcomes if o.verdict in BAD]
    assert not bad, "\n".join(bad)
    counts = tally(outcomes)
    for kind, count in counts.items():
        assert count["cases"] == EACH
        if not count["skipped"]:
            assert count["struck"], f"no fault of kind {kind!r} ever struck a call: {count}"
        if KINDS[kind].survived:
            assert count["exact"] == EACH, f"{kind}: {count}"
    total = sum(counts.values(), Counter[str]())
    assert total["raised"] > 0
    assert total["exact"] > 0
    assert total["struck"] > len(outcomes) / 2
    assert list(scratch.iterdir()) == []


@pytest.mark.exhaustive
def test_the_command_counts_what_it_runs(scratch: Path) -> None:
    found = command.run_faults([43], scratch).data
    assert (found["seeds"], found["bad"], found["failing"]) == ([43, 43], 0, [])
    assert {kind for kind, count in found["counts"].items() if count} == {draw(43).kind}


@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [(["--count", "5", "--seed", "7"], range(7, 12)), (["--quick"], range(8)), (["--only", "3"], [3])],
)
@pytest.mark.parametrize("bad", [0, 2])
def test_the_command_runs_the_seeds_asked_for_and_fails_where_one_is_bad(
    arguments: list[str], seeds: Sequence[int], bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(seeds: Sequence[int], path: Path | None, device: str) -> Result:
        assert device == "cpu"
        asked.append(seeds)
        return Result(theme="faults", tables=[], data={"bad": bad})

    monkeypatch.setattr(command, "run_faults", run)
    assert CliRunner().invoke(app, ["faults", *arguments]).exit_code == (1 if bad else 0)
    assert asked == [seeds]


def test_draws_repeat_and_reach_everything() -> None:
    cases = [draw(seed) for seed in range(2000)]
    assert cases == [draw(seed) for seed in range(2000)]
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.model for case in cases} == set(MODELS)
    assert {case.store for case in cases} == {"posix", "striped", "two-level"}
    assert {(case.kind, case.call) for case in cases} == {(k, call) for k, kind in KINDS.items() for call in kind.calls}
    assert all(case.checksum for case in cases if case.kind == "flipped")
    assert all(draw(seed, "torn").kind == "torn" for seed in range(20))


# -- what is done to a step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "verdict", "says"),
    [
        (case_of("late"), "exact", ""),
        (case_of("failing"), "raised", "could not be read back: a transfer failed: .*Error"),
        (case_of("failing", call="write"), "exact", ""),
        (case_of("error"), "raised", "transfer of .* bytes in"),
        (case_of("error", count=ALWAYS), "raised", "transfer of .* bytes in"),
        (case_of("cut short", count=ALWAYS), "exact", ""),
        (case_of("torn", amount=0.4), "raised", r"\d+ of \d+ bytes moved"),
        (case_of("torn", amount=0.6), "raised", "0 of .* bytes moved"),
        (case_of("interrupted", count=5), "exact", ""),
        (case_of("flipped", checksum=True, count=ALWAYS), "raised", "checksum"),
        (case_of("flipped", checksum=True, call="write", where=0.0, on_disk=True, count=ALWAYS), "raised", "checksum"),
        (case_of("lost", count=ALWAYS), "raised", "checksum"),
        (case_of("lost", call="write", where=0.0, count=ALWAYS), "raised", "checksum"),
        (case_of("misplaced", call="write", where=0.0, count=ALWAYS), "raised", "checksum"),
        (case_of("misplaced"), "raised", "checksum"),
        (case_of("dying worker"), "raised", "could not be read back: .*"),
        (case_of("directory gone", call="before"), "exact", ""),
        (case_of("directory gone", call="after"), "exact", ""),
    ],
    ids=lambda value: f"{value.kind}-{value.call}-{value.amount}-{value.count}" if isinstance(value, Case) else "",
)
def test_a_fault_strikes_and_ends_as_it_must(case: Case, verdict: str, says: str, scratch: Path) -> None:
    outcome = run_trial(case, scratch)
    assert outcome.verdict == verdict, outcome.detail
    assert outcome.struck > 0 if case.count == ALWAYS else outcome.struck == case.count
    assert bool(outcome.raised) is (verdict == "raised")
    assert re.search(says, outcome.detail), outcome.detail


def test_faults_strike_the_calls_they_were_drawn_for_until_they_are_stopped() -> None:
    sabotage = Sabotage(case_of("failing", where=0.5, count=2), transfers=8)
    struck = [sabotage.plan("read", number) is not None for number in range(7)]
    assert struck == [False, False, False, False, True, True, False]
    assert sabotage.plan("write", 4) is None
    assert sabotage.struck == 2
    sabotage = Sabotage(case_of("failing", where=0.0, count=ALWAYS), transfers=8)
    assert sabotage.plan("read", 0) is not None
    sabotage.stop()
    assert sabotage.plan("read", 1) is None


# -- what the campaign must notice -----------------------------------------------------------------------------------


def test_it_notices_a_wrong_gradient(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "sampled", lambda address, nbytes: 0)  # so that the flipped bits arrive
    outcome = run_trial(case_of("flipped", count=ALWAYS), scratch)
    assert outcome.verdict == "wrong"
    assert "loss and gradients" in outcome.detail


def test_it_notices_an_error_that_had_not_to_be(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "error", replace(KINDS["error"], survived=True))
    outcome = run_trial(case_of("error"), scratch)
    assert outcome.verdict == "wrong"
    assert "has to be survived" in outcome.detail


@pytest.mark.exhaustive
def test_it_notices_an_error_that_is_none_of_tbas(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("not one of tba's")

    monkeypatch.setattr(FaultyStore, "read", fail)
    monkeypatch.setattr(trial, "size_of", lambda *_: (1 << 20, 10))
    outcome = run_trial(case_of("late"), scratch)
    assert outcome.verdict == "wrong"
    assert "not one of tba's" in outcome.detail


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("float32[2, 16, 32] #7 (4096 bytes) could not be read back: no space", True),
        ("int64[] #7 (8 bytes) was not read back within 0.25 s; the device has stalled", True),
        ("flush: no write has ended for 0.25 s; the store has stalled (TBA_IO_TIMEOUT sets how long)", True),
        ("float32[2, 16, 32] #7 (4096 bytes) could not be read back", False),
        ("a transfer failed", False),
    ],
)
def test_an_error_has_to_name_tensor_and_cause(text: str, named: bool) -> None:
    assert bool(trial._NAMES_TENSOR.search(text) or trial._NAMES_STORE.search(text)) is named


def test_it_notices_extents_that_are_never_given_back(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_GRACE_S", 0.1)
    monkeypatch.setattr(PosixStore, "discard", lambda self, ticket: None)
    outcome = run_trial(case_of("late"), scratch)
    assert outcome.verdict == "leaked"
    assert "bytes in the store are left" in outcome.detail


def test_it_notices_threads_and_descriptors_that_stay(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Callable[[], None]] = []
    close = PosixStore.close
    monkeypatch.setattr(trial, "_GRACE_S", 0.1)
    monkeypatch.setattr(trial, "size_of", lambda *_: (1 << 20, 10))
    monkeypatch.setattr(PosixStore, "close", lambda self: left.append(lambda: close(self)))
    outcome = run_trial(case_of("late"), scratch)
    for end in left:
        end()
    assert outcome.verdict == "leaked"
    assert "thread tba-io" in outcome.detail
    assert "descriptor" in outcome.detail


def test_it_notices_a_case_that_hangs_or_dies(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_disk(directory: Path, nbytes: int) -> Any:
        raise NotAllowed("not in this test")

    def gone(runner: Runner, question: Any) -> Any:
        hung = question[0] == 1
        raise ChildError("the process stands in trial.py" if hung else "the process ended", hung=hung, words="")

    monkeypatch.setattr(command, "small_disk", no_disk)
    monkeypatch.setattr(Runner, "ask", gone)
    (hung, died), why_not = run_cases([(1, "late"), (2, "late")], scratch)
    assert why_not == "not in this test"
    assert (hung.verdict, hung.kind, hung.seed, hung.case) == ("hung", "late", 1, draw(1, "late").describe())
    assert "trial.py" in hung.detail
    assert (died.verdict, died.kind, died.seed) == ("wrong", "late", 2)
    assert "the process ended" in died.detail
    assert list(scratch.iterdir()) == []


def test_the_next_case_after_one_that_hangs_or_dies_has_another_process() -> None:
    arguments = iter([[], ["second"], ["third"]])
    with closing(Runner("tests.support.child", lambda: next(arguments), timeout_s=60.0)) as runner:
        _, first = runner.ask("one")
        assert runner.ask("two") == ["two", first]
        runner.timeout_s = 0.5
        with pytest.raises(ChildError, match=r"gave no answer within 0\.5 s") as caught:
            runner.ask("hang")
        runner.timeout_s = 60.0
        assert caught.value.hung
        _, second = runner.ask("three")
        with pytest.raises(ChildError, match=r"the process ended \(exit status 3\)") as caught:
            runner.ask("die")
        assert not caught.value.hung
        _, third = runner.ask("four")
    assert len({first, second, third}) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second, third))


def test_a_small_disk_is_small_and_gone_afterwards(scratch: Path) -> None:
    try:
        with small_disk(scratch, 16 << 20) as point:
            free = os.statvfs(point)
            assert 4 << 20 < free.f_bavail * free.f_frsize < 16 << 20
            assert list(point.iterdir()) == []
    except NotAllowed as reason:
        pytest.skip(str(reason))
    assert list(scratch.iterdir()) == []


def test_the_tally_counts_by_kind() -> None:
    outcomes = [
        Outcome(seed=0, kind="late", struck=2),
        Outcome(seed=1, kind="late"),
        Outcome(seed=2, kind="torn", verdict="raised", struck=1, raised=1),
    ]
    counts = tally(outcomes)
    assert list(counts) == list(KINDS)
    assert counts["late"] == {"cases": 2, "exact": 2, "struck": 1}
    assert counts["torn"] == {"cases": 1, "raised": 1, "struck": 1}
    assert not counts["open"]


@pytest.mark.exhaustive
def test_a_campaign_that_is_told_to_end_leaves_no_mount(scratch: Path) -> None:
    command = [sys.executable, "-m", "tests.campaigns", "faults", "--count", "1000", "--path", str(scratch)]
    try:
        with small_disk(scratch, 8 << 20):
            pass
    except NotAllowed as reason:
        pytest.skip(str(reason))
    mounts = Path("/proc/mounts")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while str(scratch) not in mounts.read_text():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    finally:
        process.terminate()
        try:
            words = process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            words = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM, words
    assert str(scratch) not in mounts.read_text()
    assert list(scratch.iterdir()) == []


_TOLD = """
import pathlib, signal, sys
from tests.campaigns.faults.command import run_cases
from tests.campaigns.runner import end_when_told

class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

end_when_told()
Lost()
run_cases([(seed, None) for seed in range(1000)], pathlib.Path(sys.argv[1]))
"""


def test_a_campaign_ends_though_a_finalizer_swallowed_what_told_it_to(scratch: Path) -> None:
    command = [sys.executable, "-c", _TOLD, str(scratch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "Exception ignored in" in done.stderr
    assert list(scratch.iterdir()) == []
