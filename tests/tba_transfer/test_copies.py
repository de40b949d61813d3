"""Copies: what a device copies out, from the hook that queues it until the store has it; and a device that is late."""

from __future__ import annotations

import errno
import random
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from io_backends import HostStore, PosixStore, Store, TwoLevelStore
from io_backends.testing import Fault, FaultyStore, Operation
from support.card import BACK_S, OUT_S, Card
from support.engine import Gate, activation, chain, chain_gradient, engine, save, stored_chain
from support.exactness import assert_bit_equal
from support.stores import WAIT_S, once
from tba import OffloadConfig, Offloader, OffloadWarning
from tba._record.record import Record
from tba._transfer.mover import Mover

N = 4096  # elements of a saved tensor
NBYTES = 4 * N
LENGTH = 8


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def mover_of(offload: Offloader) -> Mover:
    return offload._saver.mover


def records(offload: Offloader) -> list[Record]:
    found = [reference() for reference in offload._saver.read_ahead.records.values()]
    return [record for record in found if record is not None]


def land(offload: Offloader) -> None:
    """What a hook does when it comes by."""
    with offload._saver.lock:
        mover_of(offload).land()


def backward(leaf: Tensor, y: Tensor) -> None:
    y.sum().backward()
    assert_bit_equal(leaf.grad, chain_gradient(leaf, LENGTH))


def test_memory_goes_when_the_copy_is_over_and_not_when_the_write_is(card: Card, scratch: Path) -> None:
    gate = Gate("write")
    with engine(scratch, gate, prefetch_bytes=0, staging_bytes="1GiB") as offload:
        leaf, x = activation(N)
        with offload:
            y = chain(x, LENGTH)
        land(offload)
        staging = mover_of(offload).staging
        assert (staging.bytes, staging.host_bytes, staging.count) == (0, LENGTH * NBYTES, LENGTH)
        assert all(record.alias is None or not record.alias.untyped_storage().nbytes() for record in records(offload))
        gate.open()
        offload.flush()
        assert (staging.bytes, staging.host_bytes, staging.count) == (0, 0, 0)
        assert all(record.staged is None for record in records(offload))
        backward(leaf, y)
        assert offload.stats().errors == 0


def test_what_is_still_being_written_comes_back_from_host_memory(card: Card, scratch: Path) -> None:
    """The write under way ends; those that have not begun are called off, as nobody needs them."""
    gate = Gate("write")
    with engine(scratch, gate, prefetch_bytes=0, staging_bytes="1GiB") as offload:
        leaf, x = activation(N)
        with offload:
            y = chain(x, LENGTH)
        land(offload)
        backward(leaf, y)
        gate.open()
        offload.flush()
        del y
        assert offload.stats().written_bytes <= 4096 + NBYTES
        assert offload.stats().read_bytes == LENGTH * NBYTES
        store = mover_of(offload).store
        assert store is not None
        # `flush` returns with the write's callback; its ticket ends, and the range is free, just after that.
        once(lambda: not store.used_bytes, lambda: None).join()
        assert store.used_bytes == 0


def test_a_device_that_stands_still_is_no_store_that_has_stalled(card: Card, scratch: Path) -> None:
    """Another rank is late, say: nothing times out, and there is no warning (it would be an error here)."""

    def after_a_thousand() -> bool:
        return card.asked > 1000

    settings = {"min_tensor_bytes": 0, "prefetch_bytes": 0, "staging_bytes": 2 * NBYTES, "io_timeout": 0.001}
    offload = Offloader(None, OffloadConfig(tier="nvme", **settings), store=HostStore())
    leaf, x = activation(N)
    card.is_over = after_a_thousand
    with offload:
        y = chain(x, LENGTH)  # the third has to wait for room
    card.asked = 0
    offload.flush()
    backward(leaf, y)
    stats = offload.stats()
    assert (stats.errors, stats.offloaded_bytes) == (0, LENGTH * NBYTES)
    offload.close()


def test_a_read_passes_writes_that_wait_for_the_device(card: Card, scratch: Path) -> None:
    with engine(scratch, prefetch_bytes=0, staging_bytes="1GiB", threads=1) as offload:
        leaf, x = activation(N)
        with offload:
            y = chain(x, LENGTH)
        offload.flush()
        card.blocks()
        _, other = activation(N, seed=1)
        with offload:
            waits = chain(other, LENGTH)
        assert mover_of(offload).copies.count
        backward(leaf, y)
        assert mover_of(offload).copies.count
        card.goes_on()
        del waits


@pytest.mark.parametrize("kind", ["posix", "host"])
def test_copies_that_end_whenever_they_like_are_exact(card: Card, kind: str, scratch: Path) -> None:
    chance = random.Random(0)
    card.is_over = lambda: chance.random() < 0.3
    with engine(scratch, store_kind=kind, prefetch_bytes=2 * NBYTES, staging_bytes=2 * NBYTES) as offload:
        for step in range(4):
            leaf, x = activation(N, seed=step)
            with offload:
                y = chain(x, LENGTH)
            if step % 2:
                offload.flush()
            backward(leaf, y)
            del y
        stats = offload.stats()
        assert stats.read_bytes > 0
        assert (stats.errors, stats.live_records) == (0, 0)


@pytest.mark.parametrize("kept", [True, False], ids=["asked for", "dropped"])
def test_a_copy_that_nobody_wants_any_more_is_not_written(card: Card, kept: bool, scratch: Path) -> None:
    with engine(scratch, prefetch_bytes=0, staging_bytes="1GiB") as offload:
        leaf, x = activation(N)
        card.blocks()
        with offload:
            y = chain(x, LENGTH)
        if kept:
            backward(leaf, y)
        del y
        card.goes_on()
        offload.flush()
        stats = offload.stats()
        assert (stats.written_bytes, stats.live_records, stats.errors) == (0, 0, 0)
        assert mover_of(offload).staging.count == 0


def test_a_write_that_fails_leaves_the_bytes_in_host_memory(card: Card, scratch: Path) -> None:
    def fail(operation: Operation, number: int) -> Fault | None:
        return Fault(error=OSError(errno.EIO, "injected")) if operation == "write" and number % 3 == 1 else None

    with engine(scratch, fail, prefetch_bytes=0, staging_bytes="1GiB") as offload:
        with pytest.warns(OffloadWarning, match="stays in memory"):
            leaf, y = stored_chain(offload, N, length=LENGTH)
        backward(leaf, y)
        stats = offload.stats()
        assert stats.errors == len(range(1, LENGTH, 3))
        assert stats.kept_bytes == stats.errors * NBYTES


def test_what_is_in_host_memory_is_given_after_close_too(card: Card, scratch: Path) -> None:
    def fail(operation: Operation, number: int) -> Fault | None:
        return Fault(error=OSError(errno.EIO, "injected")) if operation == "write" else None

    with engine(scratch, fail, prefetch_bytes=0, staging_bytes="1GiB") as offload:
        with pytest.warns(OffloadWarning, match="stays in memory"):
            leaf, y = stored_chain(offload, N, length=LENGTH)
        offload.close()
        backward(leaf, y)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("injected"), MemoryError("injected")], ids=["torch", "python"]
)
def test_where_no_host_memory_is_left_a_tensor_stays_where_it_is(
    error: Exception, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(*_: object) -> None:
        raise error

    monkeypatch.setattr("tba._device.streams.out", out)
    with engine(scratch, prefetch_bytes=0) as offload:
        with pytest.warns(OffloadWarning, match="could not be queued .*injected.*stay in memory"):
            leaf, y = stored_chain(offload, N, length=LENGTH)
        backward(leaf, y)
        stats = offload.stats()
        assert stats.offloaded_bytes == stats.written_bytes == 0
        assert stats.kept_by_reason == {"write failed": stats.saved_bytes}


class Full(PosixStore):
    """Takes no write."""

    def submit_write(self, *_: object) -> object:  # type: ignore[override]
        raise OSError(errno.EMFILE, "injected")


def test_a_store_that_takes_no_write_leaves_the_tensor_where_it_was(card: Card, scratch: Path) -> None:
    offload = Offloader(None, OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0), store=Full(scratch))
    with pytest.warns(OffloadWarning, match="could not be queued"):
        leaf, y = stored_chain(offload, N, length=LENGTH)
    backward(leaf, y)
    assert offload.stats().kept_bytes == offload.stats().errors * NBYTES == LENGTH * NBYTES
    offload.close()


def test_an_edit_while_the_copy_is_under_way_raises_pytorchs_own_error(card: Card, scratch: Path) -> None:
    with engine(scratch, prefetch_bytes=0) as offload:
        _, x = activation(N)
        card.blocks()
        with offload:
            y = save(x)
        x.add_(1)
        card.goes_on()
        offload.flush()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("close", ["close", "collect"])
def test_an_engine_ends_while_its_device_stands_still(card: Card, close: str, scratch: Path) -> None:
    with engine(scratch, prefetch_bytes=0, staging_bytes="1GiB") as offload:
        leaf, x = activation(N)
        card.blocks()
        with offload:
            y = chain(x, LENGTH)
        if close == "close":
            offload.close()
            backward(leaf, y)  # what had not been copied is still there
            assert offload.stats().kept_by_reason["closed"] == LENGTH * NBYTES


def stores(scratch: Path) -> Iterator[tuple[Store, int]]:
    """Stores of host memory, and how many of the writes have to go on to a file."""
    yield HostStore(), 0
    yield TwoLevelStore(HostStore(), PosixStore(scratch), 1 << 30), 0
    yield TwoLevelStore(HostStore(), PosixStore(scratch), 3 * NBYTES), LENGTH - 3


@pytest.mark.parametrize("kind", range(3), ids=["host", "two levels", "two levels, spilling"])
def test_what_stays_in_host_memory_takes_no_worker(card: Card, kind: int, scratch: Path) -> None:
    store, spilled = list(stores(scratch))[kind]
    offload = Offloader(None, OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0), store=store)
    before = set(threading.enumerate())
    for _ in range(2):
        leaf, x = activation(N)
        with offload:
            y = chain(x, LENGTH)
        land(offload)
        if not spilled:
            assert mover_of(offload).staging.count == 0
        offload.flush()
        backward(leaf, y)
    begun = {thread.name.rstrip("-0123456789") for thread in set(threading.enumerate()) - before}
    assert begun <= ({"tba-copies", "tba-two-level", "tba-io"} if spilled else {"tba-copies"})
    assert offload.stats().errors == 0
    offload.close()


def test_what_a_device_says_of_its_copies_is_what_the_link_carries(card: Card) -> None:
    """The host's clock sees launches, and a store of host memory moves nothing."""
    offload = Offloader(None, OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0), store=HostStore())
    elements = 1 << 20
    leaf, x = activation(elements)
    with offload:
        y = chain(x, LENGTH)
    offload.flush()
    y.sum().backward()
    land(offload)
    cost = mover_of(offload).cost
    assert cost.out.bytes_per_s == 4 * elements / OUT_S
    assert cost.back.bytes_per_s == 4 * elements / BACK_S
    offload.close()
    del leaf


def test_with_no_hook_to_come_a_thread_lands_what_is_over(card: Card, scratch: Path) -> None:
    written = threading.Event()

    class Tells(PosixStore):
        def submit_write(self, *args: object) -> object:  # type: ignore[override]
            written.set()
            return super().submit_write(*args)  # type: ignore[arg-type]

    offload = Offloader(None, OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0), store=Tells(scratch))
    _, x = activation(N)
    card.blocks()
    with offload:
        y = save(x * 1)
    assert not written.is_set()
    card.goes_on()
    assert written.wait(WAIT_S)
    offload.close()
    del y


def test_bytes_on_the_way_to_a_slow_disk_stay_within_the_host_s_budget(card: Card, scratch: Path) -> None:
    gate = Gate("write")
    seen: list[int] = []

    def opening(operation: Operation, number: int) -> Fault | None:
        staging = mover_of(offload).staging
        seen.append(staging.host_bytes + staging.bytes)
        if len(seen) == 3:
            gate.open()  # forward waits for room by then, or soon will
        return gate(operation, number)

    config = OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0, cpu_budget=4 * NBYTES)
    offload = Offloader(None, config, store=FaultyStore(PosixStore(scratch), opening))
    leaf, x = activation(N)
    with offload:
        y = chain(x, LENGTH)
    offload.flush()
    assert max(seen) <= 3 * NBYTES  # a quarter is for reads
    backward(leaf, y)
    assert offload.stats().errors == 0
    offload.close()


def test_leaving_the_context_in_a_capture_asks_nothing_of_the_device(
    card: Card, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of an event breaks the capture of a CUDA graph."""

    def asked() -> bool:
        raise AssertionError("an event was queried in a capture")

    model = torch.nn.Linear(64, 64)
    x = torch.randn(64, 64)
    with warnings.catch_warnings(), engine(scratch, model=model) as offload:
        warnings.simplefilter("ignore", OffloadWarning)
        for _ in range(2):
            with offload:
                loss = model(x).square().mean()
            loss.backward()
        offload.flush()
        pool = mover_of(offload).memory.of(torch.device("cpu"))
        pool.retain(object(), asked)
        with monkeypatch.context() as capture:
            capture.setattr("tba._device.streams.capturing_here", lambda: True)
            with offload:  # the last step is over, and would end here; what a capture saves stays anyhow
                pass
            offload.stats()
        pool._retained.clear()
