"""Tests of the io benchmark: end to end at a tiny size, and that wrong bytes do not pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import io
from benchmarks._io.arms import Rig, StoreArm
from benchmarks._io.fio import Fio, Mode, arguments, parse
from benchmarks._io.memory import Memory, verify, wipe
from benchmarks._io.rounds import FIO, MODES, STORE, TWO_PATHS, Series, check, measure, take
from benchmarks._report.results import CannotMeasure
from io_backends import PosixStore, Syscalls

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 64 << 10


@contextmanager
def make_rig(count: int = 4) -> Iterator[Rig]:
    rig = Rig(Memory(count, BLOCK), Memory(count, BLOCK), Memory(2, BLOCK))
    for memory in rig:
        memory.fill(1)
    yield rig
    for memory in rig:
        memory.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with make_rig() as rig:
        yield rig


@pytest.fixture
def arm(scratch: Path, rig: Rig) -> Iterator[StoreArm]:
    arm = StoreArm(PosixStore(scratch, threads=2), 2, rig)
    yield arm
    arm.close()
    assert list(scratch.iterdir()) == []


# -- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.exhaustive
def test_io_measures_every_arm_and_leaves_nothing(scratch: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "io", "--quick", "--json", "--path", str(scratch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["sizes"]) == [str(1 << 20), str(4 << 20)]
    arms = {STORE, TWO_PATHS} | ({FIO} if shutil.which("fio") else set())
    for series in found["sizes"].values():
        assert arms == set(series)
        for name in arms:
            for values in (series[name]["bytes_per_s"], series[name]["cpu_s_per_gib"]):
                assert {mode: len(numbers) for mode, numbers in values.items()} == {"write": 2, "read": 2, "both": 2}
            assert all(min(numbers) > 0 for numbers in series[name]["bytes_per_s"].values())
        assert min(series[STORE]["submit_cpu_s"]) > 0
    assert len(found["bars"]) == (2 * 3 if FIO in arms else 0) + 3 * (2 + 1) + 2 * 2 + 2
    assert list(scratch.iterdir()) == []


def test_without_fio_it_says_so(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(scratch))
    done = io.run_io(scratch, sizes=[BLOCK], nbytes=4 * BLOCK, rounds=2, fio_run_ms=50)
    assert set(done.data["sizes"][str(BLOCK)]) == {STORE, TWO_PATHS}
    assert "fio: not installed" in done.tables[0].note
    assert not any("store / fio" in bar["what"] for bar in done.data["bars"])


def test_a_folder_in_ram_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "file_system", lambda directory: "tmpfs")
    with pytest.raises(CannotMeasure, match="is on tmpfs, in RAM; name a folder on a disk with --path"):
        io.run_io(tmp_path, sizes=(BLOCK,), nbytes=BLOCK)


def test_a_file_system_without_direct_io_is_refused(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Syscalls()

    def no_direct(path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "no direct I/O")
        return real.open(path, flags, mode)

    monkeypatch.setattr(
        "benchmarks._io.rounds.PosixStore",
        lambda directory, threads: PosixStore(directory, threads=threads, syscalls=Syscalls(open=no_direct)),
    )
    with pytest.raises(CannotMeasure, match="there is no direct I/O in"):
        measure({}, scratch, BLOCK, BLOCK, threads=1, rounds=1, fio_run_ms=50, tell=lambda text: None)


# -- arms ------------------------------------------------------------------------------------------------------------


def test_an_arm_brings_back_what_it_wrote(arm: StoreArm, rig: Rig) -> None:
    number = rig.sources.number(1)
    arm.write()
    wipe(arm.found)
    arm.warm_read()
    verify(arm.found, rig.sources.words, "arm")
    rig.sources.number(number)
    assert arm.both() > 0
    wipe(arm.found)
    arm.warm_read()
    verify(arm.found, rig.sources.words, "arm")


def test_reads_that_count_go_into_a_few_buffers_in_turn(scratch: Path) -> None:
    with make_rig(7) as rig:
        rig.sources.number(1)
        arm = StoreArm(PosixStore(scratch, threads=1), 1, rig)
        arm.write()
        wipe(rig.targets.words)
        arm.read()
        assert not any(words[0] for words in rig.targets.words)
        assert np.array_equal(rig.few.words[0], rig.sources.words[-1])  # one worker, one buffer: the last one read
        arm.close()


def test_both_has_reads_and_writes_under_way_at_once(scratch: Path) -> None:
    """Submitted together, all reads would go ahead of the writes."""
    under_way, seen, lock, real = {"read": 0, "write": 0}, set[tuple[int, int]](), threading.Lock(), Syscalls()

    def watched(kind: str, call: Any) -> Any:
        def transfer(*arguments: Any) -> Any:
            with lock:
                under_way[kind] += 1
                seen.add((under_way["read"], under_way["write"]))
            time.sleep(0.02)  # long enough for the other worker to begin
            try:
                return call(*arguments)
            finally:
                with lock:
                    under_way[kind] -= 1

        return transfer

    syscalls = Syscalls(pwritev=watched("write", real.pwritev), preadv=watched("read", real.preadv))
    with make_rig(8) as rig:
        arm = StoreArm(PosixStore(scratch, threads=2, syscalls=syscalls), 2, rig)
        arm.write()
        seen.clear()
        arm.both()
        arm.close()
    assert (1, 1) in seen
    # A write waits behind the one under way, so behind the last read both workers write: that is not counted any more.
    assert all(reads <= 1 for reads, _ in seen)


@pytest.mark.parametrize("spoil", ["stale", "one bit"])
@pytest.mark.parametrize("mode", MODES)
def test_wrong_bytes_end_the_benchmark(
    arm: StoreArm, rig: Rig, mode: Mode, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(mode: Mode) -> None:
        take(arm, mode, rig, Series(), "spoiled")
        check(arm, mode, rig, "spoiled")

    rig.sources.number(1)
    turn("write")
    real = arm.warm_read

    def spoiled() -> None:
        if spoil == "one bit":
            real()
            arm.found[2][700] ^= np.uint64(1)

    monkeypatch.setattr(arm, "warm_read", spoiled)
    with pytest.raises(CannotMeasure, match=r"spoiled: buffer [02] of 4 differs from byte"):
        turn(mode)


def test_right_ahead_of_each_turn_that_counts_is_one_that_does_not(
    arm: StoreArm, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    def note(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (done.append(name), call())[1]

    for name in ("warm_read", *MODES):
        monkeypatch.setattr(arm, name, note(name, getattr(arm, name)))
    found = Series()
    for mode in MODES:
        done.clear()
        take(arm, mode, rig, found, "arm")
        assert (done[0], done[-1]) == ("write" if mode == "write" else "warm_read", mode)
        check(arm, mode, rig, "arm")
    assert all(len(values) == 1 and values[0] > 0 for values in found.bytes_per_s.values())
    assert list(found.bytes_per_s) == list(MODES)


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
    with pytest.raises(CannotMeasure, match=says):
        parse(text)


@pytest.mark.parametrize(("block_mib", "run_ms"), [(4, 800), (16, 800), (64, 3200)])
def test_fio_has_our_depth_and_runs_longer_with_larger_blocks(block_mib: int, run_ms: int) -> None:
    """It counts those under way when the ramp ends in full."""
    files, size = [Path("/a/one"), Path("/a/two")], 1 << 30
    line = set(arguments("write", files, size, block_mib << 20, 4, 800))
    assert {"--numjobs=4", f"--size={size // 4}", f"--offset_increment={size // 4}", "--rw=write"} <= line
    assert {"--filename=one", "--direct=1", f"--runtime={run_ms}ms"} <= line
    line = set(arguments("both", files, size, block_mib << 20, 4, 800))
    assert {"--numjobs=2", "--rw=read", "--filename=one", "--rw=write", "--filename=two"} <= line
    assert f"--runtime={run_ms}ms" in line


def test_the_real_fio(scratch: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    fio = Fio(scratch, 8 << 20, 2, run_ms=50)
    assert fio.version.startswith("fio-")
    fio.lay_out()
    for mode in MODES:
        run = fio.run(mode, 1 << 20)
        assert run.nbytes > 0
        assert run.bytes_per_s > 0
    with pytest.raises(CannotMeasure, match="fio ended with status"):
        fio.run("write", 7)  # no block of direct I/O
    fio.clear()
    assert list(scratch.iterdir()) == []
