"""Tests of the io benchmark: end to end at a tiny size, that wrong bytes do not pass, and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import io
from benchmarks._io.arms import Arm, BareArm, StoreArm
from benchmarks._io.fio import Fio, FioError, arguments, parse
from benchmarks._io.memory import Memory, WrongBytes, verify
from benchmarks._io.peers import make_peers
from benchmarks._io.rounds import BARE, FIO, MODES, MORE_WORKERS, STORE, TWO_PATHS, Series, _ArmTurns, _Rig, measure
from benchmarks._report.results import CannotMeasure
from benchmarks.io import make_bars, run_io
from io_backends import PosixStore, Syscalls

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 64 << 10


@contextmanager
def memories(count: int = 4, size: int = BLOCK) -> Iterator[tuple[Memory, Memory]]:
    sources, targets = Memory(count, size), Memory(count, size)
    sources.fill(1)
    targets.fill(1)
    yield sources, targets
    sources.close()
    targets.close()


@pytest.fixture(params=["store", "bare"])
def arm(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Arm]:
    arm: Arm = StoreArm(PosixStore(scratch, threads=2), 2) if request.param == "store" else BareArm(scratch, 2)
    yield arm
    arm.close()


# -- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_io_measures_every_arm_and_leaves_nothing(scratch: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "io", "--quick", "--json", "--path", str(scratch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["sizes"]) == [str(1 << 20), str(4 << 20)]
    arms = {STORE, BARE, TWO_PATHS, MORE_WORKERS} | ({FIO} - set(found["missing"]))
    for series in found["sizes"].values():
        assert arms <= set(series)
        for name in arms:
            for values in (series[name]["bytes_per_s"], series[name]["cpu_s_per_gib"]):
                assert {mode: len(numbers) for mode, numbers in values.items()} == {"write": 2, "read": 2, "both": 2}
            assert all(min(numbers) > 0 for numbers in series[name]["bytes_per_s"].values())
        assert min(series[STORE]["submit_cpu_s"]) > 0
    assert set(found["missing"]) | set(found["sizes"][str(1 << 20)]) >= {FIO, "deepspeed", "kvikio"}
    assert all(reason for reason in found["missing"].values())
    assert len(found["bars"]) == 2 * 3 + 2 * (2 + 1) * 3 + 2 * 2 + 2
    assert list(scratch.iterdir()) == []


def test_without_fio_it_says_so_and_compares_with_the_bare_calls(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(scratch))
    told: list[str] = []
    found, missing = measure(scratch, BLOCK, 4 * BLOCK, threads=2, rounds=2, tell=told.append)
    assert "apt-get install fio" in missing[FIO]
    assert FIO not in found
    assert len(told) == 3
    bars = make_bars({BLOCK: found})
    assert [bar.what for bar in bars][:3] == [f"{mode}, 0 MiB: store / bare" for mode in ("write", "read", "both")]
    assert all(bar.met is None for bar in bars[:3])


def test_a_folder_in_ram_is_refused(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "file_system", lambda directory: "tmpfs")
    with pytest.raises(CannotMeasure, match="is on tmpfs, in RAM; name a folder on a disk with --path"):
        run_io(scratch)


def test_without_direct_io_nothing_is_measured(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(directory: Path, threads: int) -> PosixStore:
        def buffered(path: str, flags: int, mode: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "no direct I/O")
            return os.open(path, flags, mode)

        return PosixStore(directory, threads=threads, syscalls=Syscalls(open=buffered))

    monkeypatch.setattr("benchmarks._io_rounds.PosixStore", make)
    with pytest.raises(CannotMeasure, match="there is no direct I/O in"):
        measure(scratch, BLOCK, 4 * BLOCK, threads=1, rounds=1, tell=print)


# -- the arms --------------------------------------------------------------------------------------------------------


def test_an_arm_brings_back_what_it_wrote(arm: Arm) -> None:
    with memories() as (sources, targets):
        first = sources.number(1)
        arm.write(sources)
        targets.wipe()
        arm.read(targets)
        verify(targets, sources.words, "arm")
        old = [words.copy() for words in sources.words]
        sources.number(first)
        arm.both(sources, targets)
        verify(targets, old, "arm")  # what had been written before
        arm.read(targets)
        verify(targets, sources.words, "arm")


def test_reads_into_few_buffers_leave_the_last_to_be_verified(arm: Arm) -> None:
    with memories(16) as (sources, targets):
        sources.number(1)
        arm.write(sources)
        targets.wipe()
        few = targets.in_turn(3)
        assert few.nbytes == sources.nbytes
        arm.read(few)
        verify(few, sources.words, "arm")
        for index, words in enumerate(targets.words[:6]):
            numbers = {int(source[0]) for source in (sources.words[13:] if index >= 3 else sources.words[index:13:3])}
            assert int(words[0]) in numbers
        assert not any(words[0] for words in targets.words[6:])  # nothing went elsewhere
        few.words[14][700] ^= np.uint64(1)
        with pytest.raises(WrongBytes, match=r"arm: buffer 14 of 16 differs from byte 5600 on"):
            verify(few, sources.words, "arm")
        arm.both(sources, few)
        verify(few, sources.words, "arm")
        targets.wipe()
        arm.read(targets.in_turn(3, 6))
        assert [bool(words[0]) for words in targets.words] == [6 <= index < 12 for index in range(16)]


def test_both_has_reads_and_writes_under_way_at_once(scratch: Path) -> None:
    """Submitted together, all reads would go ahead of the writes."""
    under_way, seen, lock, real = {"read": 0, "write": 0}, set[tuple[int, int]](), threading.Lock(), Syscalls()

    def watched(kind: str, call: Any) -> Any:
        def transfer(*arguments: Any) -> Any:
            with lock:
                under_way[kind] += 1
                seen.add((under_way["read"], under_way["write"]))
            time.sleep(0.002)  # long enough for the other worker to begin
            try:
                return call(*arguments)
            finally:
                with lock:
                    under_way[kind] -= 1

        return transfer

    syscalls = Syscalls(pwritev=watched("write", real.pwritev), preadv=watched("read", real.preadv))
    with memories(8) as (sources, targets):
        arm = StoreArm(PosixStore(scratch, threads=2, syscalls=syscalls), 2)
        arm.write(sources)
        seen.clear()
        arm.both(sources, targets)
        arm.close()
    assert (1, 1) in seen
    # A write waits behind the one under way, so behind the last read both workers write: that is not counted any more.
    assert all(reads <= 1 for reads, _ in seen)


def test_an_arm_gives_the_space_of_earlier_rounds_back(scratch: Path) -> None:
    with memories() as (sources, targets):
        store = PosixStore(scratch, threads=2)
        arm = StoreArm(store, 2)
        for _ in range(3):
            arm.write(sources)
            arm.both(sources, targets)
        assert store.used_bytes == sources.nbytes
        arm.close()


@pytest.mark.parametrize("spoil", ["stale", "one bit", "one bit of a read that counts"])
def test_wrong_bytes_end_the_benchmark(arm: Arm, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with memories() as (sources, targets):
        read = arm.read

        def spoiled(memory: Memory) -> None:
            if spoil != "stale":
                read(memory)
            if spoil == "one bit" or (spoil != "stale" and memory.read_over):
                memory.words[2][700] ^= np.uint64(1)

        rig = _Rig(sources, targets)
        turns = _ArmTurns(rig, "spoiled", arm, 2)

        def take_all() -> None:
            for mode in MODES:
                rig.begin(mode)
                turns.take(mode, Series())
                turns.check(mode)

        take_all()
        monkeypatch.setattr(arm, "read", spoiled)
        with pytest.raises(WrongBytes, match=r"spoiled: buffer [02] of 4 differs from byte"):
            take_all()


@pytest.mark.parametrize(("count", "at_once"), [(4, 0), (4, 2), (8, 2)])
def test_right_ahead_of_a_read_that_counts_is_one_that_does_not(
    arm: Arm, count: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memories(count) as (sources, targets):
        rig = _Rig(sources, targets)
        turns = _ArmTurns(rig, "arm", arm, at_once)
        rig.begin("write")
        turns.take("write", Series())
        read, seen = arm.read, list[Memory]()
        monkeypatch.setattr(arm, "read", lambda memory: (seen.append(memory), read(memory)))
        turns.take("read", Series())
        assert len(seen) == 2
        rig.begin("both")
        turns.take("both", Series())
        assert len(seen) == 3


def test_a_transfer_that_fails_ends_the_arm(scratch: Path) -> None:
    with memories() as (_, targets):
        arm = BareArm(scratch, 2)
        with pytest.raises(OSError, match="0 of 65536 bytes moved"):
            arm.read(targets)  # nothing has been written
        arm.close()


def test_peers_that_are_not_there_say_why(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", None)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with memories() as (sources, _):
        arms, missing = make_peers(scratch, sources, 1)
    assert arms == {}
    assert set(missing) == {"deepspeed", "kvikio"}
    assert all("Error: " in reason for reason in missing.values())


# -- fio -------------------------------------------------------------------------------------------------------------


def job(read: int = 0, write: int = 0, runtime: int = 400, error: int = 0) -> dict[str, Any]:
    sides = {side: {"io_bytes": n, "runtime": runtime if n else 0} for side, n in (("read", read), ("write", write))}
    return {"error": error, "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": runtime, **sides}


def test_fio_answers_are_summed_over_jobs() -> None:
    text = "note: something\n" + json.dumps({"jobs": [job(read=400), job(write=800)]}, indent=1)
    run = parse(text)
    assert (run.nbytes, run.bytes_per_s) == (1200, 3000.0)
    assert run.cpu_s == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fio: out of memory", "cannot be read"),
        ('{\n"jobs": [{}]}', "cannot be read"),
        (json.dumps({"jobs": [job(read=1, error=5)]}), r"errors \[5\]"),
        (json.dumps({"jobs": [job()]}), "moved nothing"),
    ],
)
def test_fio_answers_that_make_no_sense(text: str, says: str) -> None:
    with pytest.raises(FioError, match=says):
        parse(text)


def test_fio_is_asked_for_the_same_depth_in_every_mode() -> None:
    files = [Path("/a/one"), Path("/a/two")]
    line = arguments("write", files, 8 << 20, 1 << 20, 4)
    assert {"--numjobs=4", "--size=2097152", "--offset_increment=2097152", "--rw=write", "--filename=one"} <= set(line)
    line = arguments("both", files, 8 << 20, 1 << 20, 4)
    assert {"--numjobs=2", "--rw=read", "--filename=one", "--rw=write", "--filename=two", "--direct=1"} <= set(line)


@pytest.mark.parametrize(("block_mib", "run_ms"), [(4, 800), (16, 800), (64, 3200)])
def test_fio_runs_the_longer_the_larger_its_blocks(block_mib: int, run_ms: int) -> None:
    """It counts those under way when the ramp ends in full."""
    for mode in ("write", "read", "both"):
        line = arguments(mode, [Path("/a/one"), Path("/a/two")], 1 << 30, block_mib << 20, 2)
        assert f"--runtime={run_ms}ms" in line


def test_the_real_fio(scratch: Path) -> None:
    try:
        fio = Fio(scratch, 8 << 20, 2)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert fio.version.startswith("fio-")
    fio.lay_out()
    for mode in ("write", "read", "both"):
        run = fio.run(mode, 1 << 20)
        assert run.nbytes > 0
        assert run.bytes_per_s > 0
    with pytest.raises(FioError, match="fio ended with status"):
        fio.run("write", 7)  # no block of direct I/O
    fio.clear()
    assert list(scratch.iterdir()) == []
