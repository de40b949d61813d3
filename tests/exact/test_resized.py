"""A storage that is emptied, resized or replaced after it was saved is an alias, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.engine import ALL_INT8, activation, engine, save
from support.exactness import assert_bit_equal

ROWS, WIDTH = 64, 64
SETTINGS: dict[str, dict[str, Any]] = {
    "through the file": {"prefetch_bytes": 0},
    "held back": {},
    "exact": {"compress": "exact", "prefetch_bytes": 0},
    "exact, held back": {"compress": "exact"},
    "exact, in place": {"compress": "exact", "tier": "keep"},
    "exact, by room": {"compress": "exact", "tier": "auto"},
}


def emptied(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


def shrunk(x: Tensor) -> None:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)


def grown(x: Tensor) -> None:
    x.untyped_storage().resize_(3 * x.untyped_storage().nbytes())


def emptied_and_made_again(x: Tensor) -> None:
    """As FSDP gathers anew: emptied, and filled elsewhere at once."""
    storage, content = x.untyped_storage(), x.detach().clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    kept = torch.empty(nbytes, dtype=torch.uint8)  # takes the place it had
    storage.resize_(nbytes)
    x.data.copy_(content)
    del kept


def shared(x: Tensor) -> None:
    """As a DataLoader or a queue does: the same bytes, elsewhere."""
    x.share_memory_()


def given_another(x: Tensor) -> None:
    with torch.no_grad():
        x.set_(x.detach().clone().untyped_storage(), 0, x.shape, x.stride())  # type: ignore[call-overload]


def left(x: Tensor) -> None:
    """Nothing is done to it."""


WAYS = (emptied, shrunk, grown, emptied_and_made_again, shared, given_another, left)
MOMENTS = ("after an operator", "flushed ahead", "flushed inside", "flushed", "saved again")
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[8:40],
    "columns": lambda x: x[:, :32],
    "flat": lambda x: x.view(-1)[64:2048],
}


def refill(x: Tensor, content: Tensor, address: int) -> None:
    """Put the bytes back, as the backward of a reversible block does, but not to the `address` that they had.

    While they are written to the file nobody could tell there that they were gone for a moment (docs/limits.md).
    """
    storage, nbytes = x.untyped_storage(), content.nbytes
    if storage.nbytes() < nbytes:
        storage.resize_(nbytes)
        taken = []
        while storage.data_ptr() == address:
            storage.resize_(0)
            taken.append(torch.empty(nbytes, dtype=torch.uint8))
            storage.resize_(nbytes)
    x.data.copy_(content)


def trained(
    context: Any, flush: Callable[[], None], ways: list[Callable[[Tensor], None]], views: list[str], moments: set[str]
) -> Any:
    """The gradient of a graph that saves views of tensors whose storages are touched after it, in several orders."""
    leaf, _ = activation(ROWS, WIDTH)
    loss, kept = torch.zeros(()), []
    with context:
        for number, way in enumerate(ways):
            x = leaf * (number + 1.0)
            content, address = x.detach().clone(), x.data_ptr()
            for view in views:
                loss = loss + save(VIEWS[view](x)).sum()
            if "after an operator" in moments:
                loss = loss + save(leaf * 3.0).sum()
            if "flushed ahead" in moments:
                flush()
            way(x)
            if "saved again" in moments:
                loss = loss + Later.apply(x)
            kept.append((x, content, address))
        if "flushed inside" in moments:
            flush()
    if "flushed" in moments:
        flush()
    for x, content, address in kept:
        refill(x, content, address)
    try:
        loss.backward()
    except RuntimeError as error:  # `set_` is an edit, and counted as one
        return str(error).partition("[")[0]
    return leaf.grad


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, str):
        assert found == wanted
    else:
        assert_bit_equal(found, wanted)


class Later(torch.autograd.Function):
    """Saves its input without a look at it: that may be empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * gradients[0]


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SETTINGS[request.param]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("moment", ["flushed", "after an operator", "saved again", ""])
def test_a_storage_that_changes_after_it_was_saved_is_an_alias(
    way: Callable[[Tensor], None], moment: str, setting: dict[str, Any], scratch: Path
) -> None:
    moments = {moment} if moment != "saved again" or way is not emptied else {moment, "flushed"}
    views = ["whole"]
    wanted = trained(nullcontext(), lambda: None, [way, left], views, moments)
    with engine(scratch, **setting) as offload:
        for _ in range(2):
            assert_same(trained(offload, offload.flush, [way, left], views, moments), wanted)
        assert offload.stats().errors == 0


@given(
    ways=st.lists(st.sampled_from([way for way in WAYS if way is not given_another]), min_size=1, max_size=4),
    views=st.lists(st.sampled_from([*VIEWS]), min_size=1, max_size=3),
    moments=st.sets(st.sampled_from(MOMENTS)),
    named=st.sampled_from([*SETTINGS]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_storages_that_change_at_any_moment_leave_plain_gradients(
    scratch: Path, ways: list[Callable[[Tensor], None]], views: list[str], moments: set[str], named: str
) -> None:
    ways = [*ways, left]
    wanted = trained(nullcontext(), lambda: None, ways, views, moments)
    with engine(scratch, **SETTINGS[named]) as offload:
        assert_bit_equal(trained(offload, offload.flush, ways, views, moments), wanted)
        assert offload.stats().errors == 0


@pytest.mark.parametrize("way", [emptied, grown, emptied_and_made_again], ids=lambda way: way.__name__)
def test_a_lossy_codec_leaves_a_storage_alone_that_was_emptied(way: Callable[[Tensor], None], scratch: Path) -> None:
    wanted = trained(nullcontext(), lambda: None, [way], ["whole"], set())
    for tier in ("nvme", "keep"):
        with engine(scratch, tier=tier, compress=ALL_INT8) as offload:
            assert_bit_equal(trained(offload, offload.flush, [way], ["whole"], set()), wanted)
            assert offload.stats().packed_bytes == 0
