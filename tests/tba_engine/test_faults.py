"""Faults: never a wrong byte. Whatever fails, the tensor stays in memory or an error names it; nothing hangs."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from campaigns.faults.small_disk import NotAllowed, small_disk
from io_backends import PosixStore, StripedStore, Syscalls
from io_backends.testing import Fault, Operation
from support.engine import Gate, activation, assert_plain, chain, chain_gradient, engine, stored_chain
from support.exactness import assert_adds_up, assert_bit_equal
from support.striped import Disk
from tba import OffloadConfig, Offloader, OffloadError, OffloadWarning, StalledError, TransferError, offload_context

N = 1 << 15


def _fails(operation: Operation, code: int, which: Callable[[int], bool]) -> Callable[[Operation, int], Fault | None]:
    def plan(asked: Operation, number: int) -> Fault | None:
        if asked == operation and which(number):
            return Fault(error=OSError(code, os.strerror(code)))
        return None

    return plan


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("which", [lambda n: True, lambda n: n == 3, lambda n: n % 2 == 0], ids=["all", "one", "half"])
def test_a_failed_write_keeps_the_tensor(
    code: int, which: Callable[[int], bool], scratch: Path, store_kind: str
) -> None:
    with engine(scratch, _fails("write", code, which), store_kind=store_kind) as offload:
        leaf, x = activation(N)
        with offload:
            y = chain(x)
        with pytest.warns(OffloadWarning, match="stays in memory"):
            offload.flush()
        stats = offload.stats()
        assert_plain(leaf, y)
        assert stats.errors == sum(map(which, range(8)))
        assert stats.kept_by_reason["write failed"] == stats.errors * N * 4
        assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_of_two_disks_one_that_is_dead_costs_memory_and_no_tensor(code: int, scratch: Path) -> None:
    """Each write that lands on it keeps its tensor, with the one warning of a single disk; the other goes on."""
    dead, well = Disk(scratch), Disk(scratch)
    dead.code = code
    store = StripedStore([dead.store, well.store])
    with warnings.catch_warnings(record=True) as told, engine(scratch, store=store) as offload:
        warnings.simplefilter("always")
        for step in range(1, 4):
            leaf, x = activation(N)
            with offload:
                y = chain(x)
            offload.flush()
            stats = offload.stats()
            assert stats.errors >= step  # it has been tried again
            assert stats.kept_by_reason["write failed"] == stats.errors * N * 4
            assert stats.offloaded_bytes == (8 * step - stats.errors) * N * 4 > 0
            assert_plain(leaf, y)
            for lane in store._lanes:
                lane.catch_up()
                lane.rests_until_s = 0.0
    assert len(told) == 1
    said = rf"offloading: the write of .* failed \(.*{os.strerror(code)}\); it stays in memory"
    assert re.fullmatch(said, str(told[0].message))


def test_a_failed_write_is_counted_once_however_often_it_is_tried(scratch: Path, store_kind: str) -> None:
    """Beyond the cap what backward keeps is written after all: that fails again, of a tensor that is kept already."""
    with engine(
        scratch, _fails("write", errno.EIO, lambda n: True), store_kind=store_kind, prefetch_bytes=0
    ) as offload:
        leaf, x = activation(N)
        with pytest.warns(OffloadWarning, match="stays in memory"):  # noqa: PT031  # either may land the first
            with offload:
                y = chain(x)
            offload.flush()
        y.sum().backward(retain_graph=True)
        offload.flush()
        stats = offload.stats()
        assert stats.errors > 8  # some were tried again
        assert stats.offloaded_bytes == 0
        assert stats.kept_by_reason == {"write failed": 8 * N * 4}
        assert_bit_equal(leaf.grad, chain_gradient(leaf))


def test_a_failed_read_names_the_tensor_and_a_later_one_may_succeed(scratch: Path, store_kind: str) -> None:
    with engine(
        scratch, _fails("read", errno.EIO, lambda n: n == 0), store_kind=store_kind, prefetch_bytes=0
    ) as offload:
        leaf, y = stored_chain(offload, N)
        with pytest.raises(TransferError, match=r"float32\[32768\] #7 .131072 bytes. could not be read back.*"):
            y.sum().backward(retain_graph=True)
        assert leaf.grad is None
        assert_plain(leaf, y)
        assert offload.stats().errors == 1


def test_a_failed_read_ahead_is_raised_only_where_its_tensor_is_used(scratch: Path, store_kind: str) -> None:
    with engine(
        scratch, _fails("read", errno.EIO, lambda n: n == 5), store_kind=store_kind, prefetch_bytes=1 << 30
    ) as offload:
        leaf, y = stored_chain(offload, N)
        with pytest.raises(TransferError, match=r"#2 "):  # reads are in the order 7, 6, 5, 4, 3, 2
            y.sum().backward()
        assert leaf.grad is None


@pytest.mark.parametrize("at_most", [4096, 8192 + 4096])
def test_transfers_that_the_system_cuts_short_are_finished(at_most: int, scratch: Path) -> None:
    real = Syscalls()

    def cut(pieces):  # type: ignore[no-untyped-def]
        address, length = pieces[0]
        return [(address, min(length, at_most))]

    syscalls = Syscalls(
        pwritev=lambda fd, pieces, offset: real.pwritev(fd, cut(pieces), offset),
        preadv=lambda fd, pieces, offset: real.preadv(fd, cut(pieces), offset),
    )
    with engine(scratch, store=PosixStore(scratch, syscalls=syscalls)) as offload:
        leaf, y = stored_chain(offload, N)
        assert_plain(leaf, y)
        assert_adds_up(offload.stats())


@pytest.mark.parametrize("moved", [0, 100])
def test_a_short_transfer_without_an_error_is_an_error(moved: int, scratch: Path) -> None:
    real, short = Syscalls(), [False]

    def preadv(fd, pieces, offset):  # type: ignore[no-untyped-def]
        return moved if short[0] else real.preadv(fd, pieces, offset)

    with engine(scratch, store=PosixStore(scratch, syscalls=Syscalls(preadv=preadv))) as offload:
        leaf, y = stored_chain(offload, N)
        short[0] = True
        with pytest.raises(OffloadError, match="bytes moved"):
            y.sum().backward()
        assert leaf.grad is None


def test_a_stalled_device_is_an_error_and_not_a_hang(scratch: Path, store_kind: str) -> None:
    gate = Gate("write")
    with engine(
        scratch, gate, store_kind=store_kind, io_timeout=0.2, prefetch_bytes=0, staging_bytes=2 * N * 4
    ) as offload:
        leaf, x = activation(N)
        with pytest.warns(OffloadWarning, match=r"no transfer has ended for 0\.2 s"), offload:
            y = chain(x)  # back-pressure never ends: the rest stays in memory
        with pytest.raises(StalledError, match="stalled"):
            offload.flush()
        assert_plain(leaf, y)
        gate.open()
    gate = Gate("read")
    with engine(scratch, gate, store_kind=store_kind, io_timeout=0.2, prefetch_bytes=0) as offload:
        leaf, x = activation(N)
        with offload:
            y = chain(x)
        for _ in range(300):  # on a busy machine a write may take longer than that, too
            with suppress(StalledError):
                offload.flush()
                break
        with pytest.raises(StalledError, match=r"#7 .*0\.2 s"):
            y.sum().backward()
        gate.open()


def test_a_directory_that_vanishes_before_the_first_write_keeps_the_tensors(scratch: Path) -> None:
    directory = scratch / "gone"
    directory.mkdir()
    offload = Offloader(config=OffloadConfig(tier="nvme", min_tensor_bytes=0, storage_paths=directory))
    directory.rmdir()
    leaf, x = activation(N)
    with offload:
        y = chain(x)
    with pytest.warns(OffloadWarning, match="stay"):
        offload.flush()
    assert_plain(leaf, y)
    offload.close()


def test_a_disk_that_really_runs_full_keeps_the_tensors(scratch: Path) -> None:
    with ExitStack() as stack:
        try:
            point = stack.enter_context(small_disk(scratch, 32 << 20))
        except NotAllowed as why:
            pytest.skip(str(why))
        # The default budget would stop at 80% of what is free.
        config = OffloadConfig(tier="nvme", min_tensor_bytes=0, storage_paths=point, nvme_budget="1GiB")
        offload = stack.enter_context(closing(Offloader(config=config)))
        leaf, x = activation(1 << 20)
        with offload:
            y = chain(x, 12)  # 48 MiB
        with pytest.warns(OffloadWarning, match="No space left"):
            offload.flush()
        stats = offload.stats()
        assert_plain(leaf, y, 12)
        assert stats.errors > 0
        assert stats.written_bytes > 8 << 20


def test_interpreter_exit_with_transfers_in_flight(scratch: Path) -> None:
    code = """
import sys, torch
from tba import offload_context
offload = offload_context(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=sys.argv[1])
x = torch.randn(1 << 20, requires_grad=True)
with offload:
    y = (x * 1).exp().exp().exp()
"""
    done = subprocess.run([sys.executable, "-c", code, str(scratch)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert list(scratch.iterdir()) == []


def test_a_directory_replaced_by_a_link_into_ram_is_noticed(scratch: Path, tmp_path: Path) -> None:
    ram = Path("/dev/shm")
    if not ram.is_dir() or ram.stat().st_dev == scratch.stat().st_dev:
        pytest.skip("this system has no second file system in RAM")
    place = scratch / "place"
    place.mkdir()
    leaf, x = activation(N)
    with (
        tempfile.TemporaryDirectory(dir=ram) as elsewhere,
        closing(offload_context(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=place)) as offload,
    ):
        place.rmdir()
        place.symlink_to(elsewhere)
        said = "place' was on device .* when it was chosen and is on device .* now"
        with pytest.warns(OffloadWarning, match=said):  # noqa: PT031  # whichever comes later than the worker warns
            with offload:
                y = chain(x)
            offload.flush()
        y.sum().backward()
        assert leaf.grad is not None
        assert offload.stats().written_bytes == 0
        assert offload.stats().errors > 0
