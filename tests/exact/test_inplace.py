"""In-place edits never give a wrong gradient. Writers are held back to make every order happen."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from io_backends import PosixStore
from io_backends.testing import FaultyStore
from support.engine import Gate, activation, engine, save
from support.exactness import assert_bit_equal
from support.gpu import take_what_is_free
from tba import OffloadConfig, Offloader

MODIFIED = "modified by an inplace operation"


def _plain_message() -> str:
    _, x = activation(8)
    result = save(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError) as caught:
        result.sum().backward()
    return str(caught.value)


def test_an_edit_before_the_write_begins_raises_pytorchs_own_error(scratch: Path) -> None:
    with engine(scratch) as offload:
        _, x = activation(8)
        with offload:
            result = save(x)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED) as caught:
            result.sum().backward()
    assert str(caught.value).partition("[")[0] == _plain_message().partition("[")[0]
    assert "is at version 1; expected version 0 instead. Hint" in str(caught.value)


def test_an_edit_while_the_write_is_held_back_poisons_the_record(scratch: Path, store_kind: str) -> None:
    gate = Gate("write")
    with engine(scratch, gate, store_kind=store_kind, prefetch_bytes=0) as offload:
        _, x = activation(4096)
        with offload:
            result = save(x)
            _ = x + 1  # the operator after the one that saved: now the write is submitted
            _ = save(x * 1)
        with torch.no_grad():
            x.add_(1)
        gate.open()
        offload.flush()  # nothing is raised here
        with pytest.raises(RuntimeError, match=MODIFIED):
            result.sum().backward()
        with pytest.raises(RuntimeError, match=MODIFIED):  # and it stays so
            result.sum().backward()


def test_a_poisoned_record_that_nobody_unpacks_raises_nothing(scratch: Path, store_kind: str) -> None:
    gate = Gate("write")
    with engine(scratch, gate, store_kind=store_kind, prefetch_bytes=0) as offload:
        leaf, x = activation(4096)
        with offload:
            unused = save(x)
            used = save(leaf * 1)
        with torch.no_grad():
            x.add_(1)
        gate.open()
        offload.flush()
        used.sum().backward()
        assert_bit_equal(leaf.grad, 2 * leaf.detach())
        del unused


def test_an_edit_after_the_copy_has_finished_is_legal_and_the_copy_is_used(
    device: torch.device, scratch: Path, store_kind: str
) -> None:
    with engine(scratch, store_kind=store_kind) as offload:
        leaf, x = activation(4096, device=device)
        with offload:
            result = save(x)
        offload.flush()
        with torch.no_grad():
            x.zero_()
        result.sum().backward()
        assert_bit_equal(leaf.grad, 2 * leaf.detach())


class _Tells(FaultyStore):
    """Sets an event once a write has ended and the engine knows."""

    def __init__(self, store: PosixStore) -> None:
        super().__init__(store, lambda operation, number: None)
        self.landed = threading.Event()

    def write(self, buffer, *, on_done=None, before=None):  # type: ignore[no-untyped-def]
        def done(ticket):  # type: ignore[no-untyped-def]
            on_done(ticket)
            self.landed.set()

        return super().write(buffer, on_done=done, before=before)


def test_an_edit_whose_kernel_ends_after_the_write_is_noticed_at_the_next_hook(scratch: Path) -> None:
    # An in-place kernel bumps the version only when it has ended: a write that ends while it runs sees the old number.
    # The edit is made in two halves here: bytes first, unseen; then the bump.
    store = _Tells(PosixStore(scratch, threads=1))
    offload = Offloader(config=OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0), store=store)
    _, x = activation(4096)
    small = torch.ones(1, requires_grad=True) * 1
    with offload:
        result = save(x)
        x.data.mul_(0.5)  # the kernel is running ...
        other = save(small)  # (the write is submitted here)
        assert store.landed.wait(60)  # ... and the write ends ...
        with torch.no_grad():
            x.add_(0)  # ... before it has bumped the version
        again = save(small)
    with pytest.raises(RuntimeError, match=MODIFIED):
        result.sum().backward()
    del other, again
    offload.close()


def test_a_storage_resized_under_the_writer_becomes_an_alias(
    device: torch.device, scratch: Path, store_kind: str
) -> None:
    gate = Gate("write")
    with engine(scratch, gate, store_kind=store_kind, prefetch_bytes=0) as offload:
        leaf, x = activation(64, 64, device=device)
        nbytes = x.untyped_storage().nbytes()
        content = x.detach().clone()
        with offload:
            result = save(x)
            _ = save(leaf * 1)
        x.untyped_storage().resize_(0)
        take_what_is_free(device)
        gate.open()
        offload.flush()
        x.untyped_storage().resize_(nbytes)  # as FSDP does, with the content back in time
        x.data.copy_(content)
        result.sum().backward()
        assert_bit_equal(leaf.grad, 2 * content)
        assert offload.stats().errors == 0


def test_a_weight_changed_between_forward_and_backward_is_watched_too(scratch: Path) -> None:
    linear = torch.nn.Linear(8, 8)
    with engine(scratch, model=linear) as offload:
        _, x = activation(8, 8)
        with offload:
            result = linear(x)
        with torch.no_grad():
            linear.weight.add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED):
            result.sum().backward()


@pytest.mark.parametrize("then_flush", [True, False])
def test_memory_that_an_operator_fills_after_pack_is_saved_filled(
    then_flush: bool, scratch: Path, store_kind: str
) -> None:
    # rrelu saves its noise before its kernel draws it, and no version changes.
    leaf, x = activation(256, 256)
    plain = leaf.detach().clone().requires_grad_()
    torch.manual_seed(5)
    torch.nn.functional.rrelu(plain + 0, training=True).sum().backward()
    with engine(scratch, store_kind=store_kind, prefetch_bytes=0) as offload:
        with offload:
            torch.manual_seed(5)
            y = torch.nn.functional.rrelu(x, training=True)
            _ = save(x * 1)
        if then_flush:
            offload.flush()
        y.sum().backward()
    assert_bit_equal(leaf.grad, plain.grad)
