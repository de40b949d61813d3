"""Processes of the benchmarks: children that are asked, arms that take turns, and what happens when one fails."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks._processes.arms import Spec, ask, in_turns, plain_environment, running
from benchmarks._processes.child import Child, ChildError
from benchmarks._processes.disk_bytes import disk_bytes
from benchmarks._processes.worker import Worker

TIMEOUT_S = 60.0
UNKNOWN = Spec(name="wrong", role="train:nonesuch", options={}, threads=1)


@pytest.fixture
def child() -> Iterator[Child]:
    with closing(Child("the child", "tests.support.child", environment=os.environ)) as child:
        yield child


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_child_answers_and_tells_notes_whatever_it_prints(child: Child) -> None:
    notes: list[str] = []
    for question in ("one", {"two": [2]}):
        assert child.ask(question, timeout_s=TIMEOUT_S, tell=notes.append) == [question, child.pid]
    assert notes == ["asked one", "asked {'two': [2]}"]
    child.close()
    assert not is_there(child.pid)


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("die", r"the child ended \(exit status 3\)"),
        ("fail", r"exit status 1\)(?s:.*)ValueError: the child's own words"),
    ],
)
def test_child_that_ends_is_an_error_with_its_last_words(child: Child, question: str, says: str) -> None:
    with pytest.raises(ChildError, match=says) as caught:
        child.ask(question, timeout_s=TIMEOUT_S)
    assert not caught.value.hung


def test_killed_child_is_an_error_before_and_after_it_is_asked(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ChildError, match=r"ended \(exit status -9\)"):
            child.ask("one", timeout_s=TIMEOUT_S)


def test_child_that_hangs_says_where(child: Child) -> None:
    child.ask("one", timeout_s=TIMEOUT_S)
    with pytest.raises(ChildError, match=r"gave no answer within 0\.2 s \(still running\)(?s:.*)child\.py") as caught:
        child.ask("hang", timeout_s=0.2)
    assert caught.value.hung
    assert is_there(child.pid)


# -- arms ------------------------------------------------------------------------------------------------------------


def test_arm_that_fails_is_an_error_that_names_it() -> None:
    with pytest.raises(ChildError, match=r"the arm 'wrong' ended \(exit status 1\)(?s:.*)no attribute 'nonesuch'"):
        ask(UNKNOWN)
    with pytest.raises(ChildError, match="'wrong' ended"), running([UNKNOWN]):
        pass


def test_worker_runs_a_role_that_answers_once() -> None:
    options = {"tokens": 4, "width": 8, "out": 8, "rank": 2, "rounds": 1, "threads": 1}
    notes: list[str] = []
    found = Worker().answer({"role": "codec_speed:measure_linear", "options": options}, notes.append)
    assert notes == ["round 0 of 1", "round 1 of 1"]
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == {"nn.Linear": 1, "compact_linear": 1}


def test_turns_reverse_every_other_round() -> None:
    class FakeArm:
        def __init__(self, name: str) -> None:
            self.name = name

        def turn(self, index: int) -> dict[str, int]:
            return {"index": index}

    order = [(arm.name, number) for arm, number, _ in in_turns([FakeArm("a"), FakeArm("b")], range(3))]
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_as_python_comes_means_without_allocator_settings() -> None:
    given = {"PATH": "/bin", "LD_PRELOAD": "x.so", "MALLOC_CONF": "a:b", "MALLOC_ARENA_MAX": "1", "MIMALLOC_X": "1"}
    assert plain_environment(given) == {"PATH": "/bin"}


def test_disk_bytes_are_those_of_direct_io_in_any_thread(scratch: Path) -> None:
    nbytes = 8 << 20
    file = os.open(scratch / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    with mmap.mmap(-1, nbytes) as page_aligned, ThreadPoolExecutor(1) as other:
        page_aligned.write(b"x" * nbytes)
        before = disk_bytes()
        assert other.submit(os.pwrite, file, page_aligned, 0).result() == nbytes
        written = disk_bytes()
        assert os.preadv(file, [page_aligned], 0) == nbytes
        read = disk_bytes()
    os.close(file)
    # A file system may write or read a few blocks of its own.
    assert nbytes <= written[0] - before[0] < nbytes + (1 << 20)
    assert nbytes <= read[1] - written[1] < nbytes + (1 << 20)
    assert written[1] - before[1] < 1 << 20
    assert read[0] - written[0] < 1 << 20
