"""Where no descriptor is left, garbage is collected, and what that lets go of is waited for, before a store fails."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from io_backends import Buffer, PosixStore, StoreBroken, Syscalls
from io_backends._file import scratch as scratch_files
from support.exactness import assert_bit_equal
from tba import Offloader, OffloadWarning, attach

REAL = Syscalls()


@pytest.fixture(autouse=True)
def _nobody_collects_but_we(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    gc.disable()
    monkeypatch.setattr(scratch_files, "_useless_s", float("-inf"))
    monkeypatch.setattr(scratch_files.time, "sleep", lambda seconds: _sleep(max(seconds, 0.05)))
    yield
    gc.enable()


_sleep = scratch_files.time.sleep


class Few:
    """Lets so many scratch files be open at a time."""

    def __init__(self, most: int, code: int = errno.EMFILE) -> None:
        self.most, self.code = most, code
        self.open: set[int] = set()
        self.refused = 0
        self.syscalls = dataclasses.replace(REAL, open=self._open, close=self._close)

    def _open(self, path: str, flags: int, mode: int) -> int:
        if len(self.open) >= self.most:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        fd = REAL.open(path, flags, mode)
        self.open.add(fd)
        return fd

    def _close(self, fd: int) -> None:
        self.open.discard(fd)
        REAL.close(fd)


def write(store: PosixStore) -> None:
    memory = torch.zeros(1 << 10)
    ticket = store.write(Buffer(memory.data_ptr(), memory.nbytes, memory))
    ticket.wait()


class Holder:
    """Drops a store in a reference cycle, as a model or trainer does."""

    def __init__(self, store: PosixStore) -> None:
        self.store, self.itself = store, self

    def __del__(self) -> None:
        self.store.abandon()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_store_takes_the_descriptor_of_one_that_was_dropped(code: int, scratch: Path) -> None:
    few = Few(2, code)
    for _ in range(8):
        store = PosixStore(scratch, threads=1, syscalls=few.syscalls)
        write(store)
        Holder(store)
    del store
    assert few.refused > 0
    assert len(few.open) <= 2


def test_where_nothing_was_dropped_the_error_is_told_and_no_more_is_collected(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collections: list[int] = []
    monkeypatch.setattr(scratch_files.gc, "collect", lambda: collections.append(1))
    few = Few(0)
    for _ in range(3):
        store = PosixStore(scratch, threads=1, syscalls=few.syscalls)
        with pytest.raises(StoreBroken, match="Too many open files"):
            write(store)
        store.close()
    assert len(collections) == len(scratch_files._WAITS_S)


def test_another_error_collects_nothing(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_files.gc, "collect", lambda: pytest.fail("collected"))
    store = PosixStore(scratch, threads=1, syscalls=Few(0, errno.EACCES).syscalls)
    with pytest.raises(StoreBroken, match="Permission denied"):
        write(store)
    store.close()


def test_a_finaliser_may_use_the_store_that_collects(scratch: Path) -> None:
    few = Few(1)
    first, second = (PosixStore(scratch, threads=1, syscalls=few.syscalls) for _ in range(2))
    write(first)
    told: list[str] = []

    class Asks:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            first.close()
            write(second)
            told.append("written")

    Asks()
    write(second)
    assert told == ["written"]
    second.close()
    assert few.open == set()


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open a few more files only."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + more, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(more):
            os.close(taken.pop())
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    made.itself = [made]  # type: ignore[assignment]
    return made


def test_models_dropped_in_cycles_leave_descriptors_to_those_that_come(scratch: Path) -> None:
    x = torch.randn(64, 32)
    plain = model()
    plain(x).sum().backward()
    written = 0
    with few_descriptors(12):
        for _ in range(30):
            made = model()
            offload: Offloader = attach(made, "nvme", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=scratch)
            loss = made(x).sum()
            offload.flush()
            loss.backward()
            assert offload.stats().errors == 0
            written += offload.stats().written_bytes > 0
            for ours, theirs in zip(made.parameters(), plain.parameters(), strict=True):
                assert_bit_equal(ours.grad, theirs.grad)
            made.offload = offload  # type: ignore[assignment]
            del made, offload, loss, ours, theirs
    assert written == 30


def test_a_tensor_stays_where_there_is_really_none(scratch: Path) -> None:
    x = torch.randn(64, 32)
    made = model()
    offload = attach(made, "nvme", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=scratch)
    with few_descriptors(0):
        with pytest.warns(OffloadWarning, match="Too many open files.*tensors stay in memory"):
            loss = made(x).sum()
        loss.backward()
    assert offload.stats().kept_by_reason["write failed"] > 0
    offload.close()
