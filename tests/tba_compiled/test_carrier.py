"""The carrier of a compiled backend: exact over any store; nothing is left when tokens die, or it fails or closes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from io_backends import StoreError
from io_backends.testing import Fault, FaultyStore, Operation
from support.engine import STORES
from support.exactness import assert_bit_equal
from tba import ClosedError, OffloadConfig, OffloadError, OffloadWarning, TransferError
from tba._compiled.carrier import SHARED, Carrier, moved_by

SIZE = 4096
Plan = Callable[[Operation, int], Fault | None]


@contextmanager
def carrier(
    scratch: Path, plan: Plan | None = None, *, store_kind: str = "posix", **settings: object
) -> Iterator[Carrier]:
    store = STORES[store_kind](scratch, 1)
    made = Carrier(OffloadConfig(tier="nvme", **settings), store if plan is None else FaultyStore(store, plan))
    try:
        yield made
    finally:
        made.close()


def send(moving: Carrier, tensor: Tensor) -> Tensor:
    """Move a tensor, whose memory is somebody else's afterwards, as the compiler's are."""
    token = moving.done(moved_by(moving.out(tensor)), tensor)
    tensor.untyped_storage().fill_(0x55)
    return token


def live(moving: Carrier) -> tuple[int, int, int]:
    gc.collect()
    stats = moving.stats()
    return stats.live_records, stats.resident_bytes, stats.errors


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.randn(SIZE),
    "transposed": lambda: torch.randn(64, 64).t(),
    "part": lambda: torch.randn(4, SIZE)[2],
    "strided": lambda: torch.randn(SIZE, 4)[:, 1],
    "expanded": lambda: torch.randn(1, 64).expand(64, 64),
    "bf16": lambda: torch.randn(SIZE).bfloat16(),
    "bool": lambda: torch.randn(SIZE) > 0,
    "scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_comes_back_with_its_layout_and_bits(layout: str, scratch: Path) -> None:
    tensor = LAYOUTS[layout]()
    expected = tensor.clone()
    with carrier(scratch) as moving:
        token = send(moving, tensor)
        moving.ahead(moved_by(token))
        back = moving.back(moved_by(token))
        assert back.stride() == tensor.stride()
        assert torch.equal(back, expected)
        del token
        assert live(moving) == (0, 0, 0)


def test_each_kind_of_store_gives_it_back(store_kind: str, scratch: Path) -> None:
    with carrier(scratch, store_kind=store_kind) as moving:
        tensors = [torch.randn(SIZE) for _ in range(8)]
        expected = [each.clone() for each in tensors]
        tokens = [send(moving, each) for each in tensors]
        for token, each in zip(reversed(tokens), reversed(expected), strict=True):
            assert_bit_equal(moving.back(moved_by(token)), each)


def test_a_token_may_be_asked_again_and_each_answer_has_its_own_memory(scratch: Path) -> None:
    with carrier(scratch) as moving:
        tensor = torch.randn(SIZE)
        expected, token = tensor.clone(), send(moving, tensor)
        moving.back(moved_by(token)).zero_()
        assert_bit_equal(moving.back(moved_by(token)), expected)


def test_a_token_outlives_aliases_and_its_end_frees_memory_and_file(scratch: Path) -> None:
    with carrier(scratch) as moving:
        token = send(moving, torch.randn(1 << 18))
        other = token.detach().view(1)
        del token
        assert live(moving)[0] == 1
        assert moving.stats().file_bytes >= 1 << 20
        del other
        assert live(moving) == (0, 0, 0)
        assert moving.stats().micro_batches == 1


def test_a_failed_write_keeps_a_copy(scratch: Path) -> None:
    failing = lambda operation, number: Fault(error=StoreError("no")) if operation == "write" else None  # noqa: E731
    with carrier(scratch, failing) as moving:
        tensor = torch.randn(SIZE)
        expected = tensor.clone()
        with pytest.warns(OffloadWarning, match="it stays in memory"):
            token = send(moving, tensor)
        assert_bit_equal(moving.back(moved_by(token)), expected)
        stats = moving.stats()
        assert stats.kept_by_reason == {"write failed": 4 * SIZE}
        assert (stats.resident_bytes, stats.read_bytes, stats.errors) == (4 * SIZE, 0, 1)
        del token
        assert live(moving) == (0, 0, 1)


def test_a_failed_read_is_an_error_that_names_the_tensor(scratch: Path) -> None:
    faults = [Fault(error=StoreError("gone"))]
    with carrier(scratch, lambda operation, _: faults.pop() if operation == "read" and faults else None) as moving:
        tensor = torch.randn(SIZE)
        expected, token = tensor.clone(), send(moving, tensor)
        moving.ahead(moved_by(token))
        with pytest.raises(TransferError, match=r"float32\[4096\].*gone"):
            moving.back(moved_by(token))
        assert_bit_equal(moving.back(moved_by(token)), expected)  # a later one may succeed


def test_a_stalled_write_keeps_a_copy(scratch: Path) -> None:
    gate = threading.Event()
    held = lambda operation, number: Fault(gate=gate) if operation == "write" else None  # noqa: E731
    with carrier(scratch, held, io_timeout=0.2) as moving:
        tensors = [torch.randn(SIZE) for _ in range(3)]
        expected = [each.clone() for each in tensors]
        tokens = [send(moving, each) for each in tensors]
        gate.set()
        for token, each in zip(tokens, expected, strict=True):
            assert_bit_equal(moving.back(moved_by(token)), each)


def test_memory_that_others_may_edit_is_copied_and_stays(scratch: Path) -> None:
    with carrier(scratch) as moving:
        tensor = torch.randn(SIZE)
        expected = tensor.clone()
        token = moving.out(tensor, moves=False)
        tensor.zero_()
        assert_bit_equal(moving.back(moved_by(moving.done(moved_by(token), tensor))), expected)
        assert moving.stats().kept_by_reason == {SHARED: 4 * SIZE}
        assert not moving.stats().written_bytes


def test_after_close_nothing_moves_and_stored_bytes_are_gone(scratch: Path) -> None:
    with carrier(scratch) as moving:
        stored = send(moving, torch.randn(SIZE))
        moving.close()
        with pytest.raises(ClosedError):
            moving.back(moved_by(stored))
        tensor = torch.randn(SIZE)
        expected = tensor.clone()
        assert_bit_equal(moving.back(moved_by(send(moving, tensor))), expected)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_a_wait_and_loses_no_tensor(scratch: Path) -> None:
    gate = threading.Event()
    held = lambda operation, number: Fault(gate=gate) if operation == "write" and not number else None  # noqa: E731
    with carrier(scratch, held) as moving:

        def interrupt() -> None:
            while not moving.mover.staging.waiters:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        tensor = torch.randn(SIZE)
        token = moving.out(tensor)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            moving.done(moved_by(token), tensor)
        thread.join()
        gate.set()
        del token
        other = torch.randn(SIZE)
        expected = other.clone()
        assert_bit_equal(moving.back(moved_by(send(moving, other))), expected)
        while live(moving)[0]:  # a worker may be ending its write
            time.sleep(0.001)


def test_a_forked_child_keeps_what_it_makes_and_has_not_what_was_stored(scratch: Path) -> None:
    with carrier(scratch) as moving:
        stored = send(moving, torch.randn(SIZE))
        child = os.fork()
        if not child:
            tensor = torch.ones(SIZE)
            good = torch.equal(moving.back(moved_by(send(moving, tensor))), torch.ones(SIZE))
            try:
                moving.back(moved_by(stored))
            except ClosedError:
                os._exit(0 if good else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        moving.back(moved_by(stored))


def test_a_token_of_nobody_is_an_error(scratch: Path) -> None:
    with carrier(scratch) as moving, pytest.raises(OffloadError, match="token"):
        moving.back(moved_by(torch.tensor([12345])))


@pytest.mark.parametrize("staging", [3, 40])
def test_what_is_on_its_way_out_stays_within_both_windows(staging: int, scratch: Path) -> None:
    with carrier(scratch, staging_bytes=staging * 4 * SIZE) as moving:
        tokens = [moving.out(torch.randn(SIZE), window_bytes=5 * 4 * SIZE) for _ in range(40)]
        assert len(tokens) == 40
        assert moving.stats().staging_peak_bytes <= min(staging, 5) * 4 * SIZE
