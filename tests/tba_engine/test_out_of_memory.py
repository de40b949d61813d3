"""Out of memory: what was read ahead goes first; then PyTorch's own error, which finders of batch sizes know."""

from __future__ import annotations

import errno
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from io_backends import BufferPool
from io_backends.testing import Fault, Operation
from support.engine import ALL_INT8, activation, assert_plain, chain, chain_gradient, engine, save, stored_chain
from support.exactness import assert_bit_equal
from tba import Offloader, TransferError
from tba._memory.shortage import in_torchs_words, lacks_memory

N = 1 << 14
HOST = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"
)
LACKS: dict[str, Callable[[], Exception]] = {
    "mmap": lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    "python": MemoryError,
    "torch on a CPU": lambda: RuntimeError(HOST),
    "torch on a device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    "CUDA": lambda: RuntimeError("CUDA error: out of memory"),
}


def is_known(error: BaseException) -> bool:
    """What accelerate and Lightning ask."""
    return (
        isinstance(error, RuntimeError)
        and len(error.args) == 1
        and any(text in error.args[0] for text in (" out of memory.", "DefaultCPUAllocator: can't allocate memory"))
    )


class Scarce:
    """Has a function raise in those of its next calls that `failing` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, error: Callable[[], Exception]) -> None:
        self.failing: Iterator[bool] = iter(())
        self.failed = 0
        real = pkgutil.resolve_name(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(self.failing, False):
                self.failed += 1
                raise error()
            return real(*args, **kwargs)

        monkeypatch.setattr(name, call)


LEGS = {
    "memory to read into": ("io_backends.BufferPool.lease", {}),
    "the way to the device": ("tba._device.streams.into", {}),
    "what a codec unpacks": ("tba._record.encoded.Encoded.unpack", {"compress": ALL_INT8}),
    "the tensor itself": ("tba._engine.unpacking.look_for_code", {}),
}


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("place", [0, 3])
def test_a_lack_that_passes_costs_what_was_read_ahead_and_no_more(
    leg: str, lack: str, place: int, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = LEGS[leg]
    scarce = Scarce(monkeypatch, name, LACKS[lack])
    with engine(scratch, prefetch_bytes=4 * N * 4, **settings) as offload:
        leaf, x = activation(N)
        wanted = None
        for fails in (False, True):
            leaf.grad = None
            with offload:
                y = chain(x)
            offload.flush()
            scarce.failing = iter([*[False] * place, fails])
            y.sum().backward(inputs=[leaf])
            if fails:
                assert scarce.failed == 1
                assert_bit_equal(leaf.grad, wanted)
            wanted = leaf.grad
        del y
        assert offload.stats().live_records == 0
        if not settings:
            assert_bit_equal(wanted, chain_gradient(leaf))


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("lack", LACKS)
def test_a_lack_that_stays_raises_pytorchs_error_and_a_smaller_batch_works(
    leg: str, lack: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = LEGS[leg]
    scarce = Scarce(monkeypatch, name, LACKS[lack])
    with engine(scratch, prefetch_bytes=4 * N * 4, **settings) as offload:
        leaf, y = stored_chain(offload, N)
        scarce.failing = iter([True] * 100)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        error = caught.value
        assert is_known(error)
        assert isinstance(error, torch.OutOfMemoryError) == (lack in ("torch on a device", "CUDA"))
        assert not isinstance(error, TransferError)
        (note,) = error.__notes__
        assert re.search(r"float32\[16384\] #\d was to be brought back", note)
        scarce.failing = iter(())
        del y, error, caught
        assert offload.stats().live_records == 0  # nothing holds the graph: not the error, nor a cycle with it
        leaf, y = stored_chain(offload, N // 2)
        if settings:
            y.sum().backward()
        else:
            assert_plain(leaf, y)
        assert offload.stats().live_records == 0


def test_a_graph_whose_backward_ran_out_of_memory_may_be_asked_again(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(monkeypatch, "io_backends.BufferPool.lease", LACKS["mmap"])
    with engine(scratch, prefetch_bytes=4 * N * 4) as offload:
        leaf, y = stored_chain(offload, N)
        for place in range(6):
            scarce.failing = iter([*[False] * place, *[True] * 20])
            with pytest.raises(RuntimeError) as caught:
                torch.autograd.grad(y.sum(), leaf, retain_graph=True)
            assert is_known(caught.value)
        scarce.failing = iter(())
        assert_plain(leaf, y)


def test_what_was_read_ahead_is_let_go_of_and_read_again(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = Scarce(monkeypatch, "tba._engine.unpacking.look_for_code", MemoryError)
    with engine(scratch, prefetch_bytes=8 * N * 4) as offload:
        leaf, y = stored_chain(offload, N)
        torch.autograd.grad(y.sum(), leaf, retain_graph=True)  # all of it is in memory, and may be asked for again
        before = offload.stats()
        scarce.failing = iter([True])
        y.sum().backward()
        assert offload.stats().read_bytes > before.read_bytes
        assert_bit_equal(leaf.grad, chain_gradient(leaf))


@pytest.mark.parametrize("failing", [1, 100], ids=["the first", "all"])
def test_a_read_that_fails_for_lack_of_memory_is_made_again(failing: int, scratch: Path) -> None:
    def plan(operation: Operation, number: int) -> Fault | None:
        lacks = operation == "read" and number < failing
        return Fault(error=OSError(errno.ENOMEM, "no memory")) if lacks else None

    with engine(scratch, plan, prefetch_bytes=0) as offload:
        leaf, y = stored_chain(offload, N)
        if failing == 1:
            assert_plain(leaf, y)
        else:
            with pytest.raises(RuntimeError) as caught:
                y.sum().backward()
            assert is_known(caught.value)


def test_other_failures_of_a_read_stay_what_they_are(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.EIO, "broken"), RuntimeError("something else")):
        scarce = Scarce(monkeypatch, "io_backends.BufferPool.lease", lambda error=error: error)  # type: ignore[misc]
        with engine(scratch, prefetch_bytes=0) as offload:
            _, y = stored_chain(offload, N)
            scarce.failing = iter([True])
            with pytest.raises(TransferError, match="could not be read back"):
                y.sum().backward()
            assert scarce.failed == 1
        monkeypatch.undo()


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("part", ["begin", "finish"])
@pytest.mark.parametrize("tier", ["nvme", "keep"])
def test_a_tensor_that_no_memory_is_left_to_pack_stays_as_it_is(
    lack: str, part: str, tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(*_: Any, **__: Any) -> None:
        raise LACKS[lack]()

    where = "compact._codecs.quantized.Quantized.begin" if part == "begin" else "compact._codecs.codec.Pending.finish"
    monkeypatch.setattr(where, scarce)
    with engine(scratch, tier=tier, compress=ALL_INT8) as offload:
        leaf, y = stored_chain(offload, N)
        assert_plain(leaf, y)
        assert offload.stats().encoded_bytes == 0


def test_another_error_of_a_codec_is_raised(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("compact._codecs.quantized.Quantized.begin", wrong)
    with (
        engine(scratch, tier="keep", compress=ALL_INT8) as offload,
        pytest.raises(RuntimeError, match="something else"),
        offload,
    ):
        chain(activation(N)[1])


def _derived(offload: Offloader) -> tuple[Tensor, list[Tensor]]:
    """A graph that saves a tensor which others give again."""
    leaf, x = activation(64, 64)
    with offload:
        y = torch.nn.functional.gelu(torch.nn.functional.silu(x * 1.0) * 2.0)
        loss = save(y).sum()
    return loss, [leaf]


@pytest.mark.parametrize("times", [1, 100])
def test_a_tensor_that_is_made_again_asks_twice_and_then_says_so(
    times: int, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(scratch, tier="keep", compress="exact") as offload:
        loss, leaves = _derived(offload)
        (wanted,) = torch.autograd.grad(loss, leaves)
        loss, leaves = _derived(offload)
        assert offload.stats().derived_bytes > 0
        scarce = Scarce(monkeypatch, "tba._engine.unpacking.again", LACKS["torch on a CPU"])
        scarce.failing = iter([True] * times)
        if times == 1:
            assert_bit_equal(torch.autograd.grad(loss, leaves)[0], wanted)
        else:
            with pytest.raises(RuntimeError) as caught:
                torch.autograd.grad(loss, leaves)
            assert is_known(caught.value)
            assert scarce.failed == 2


def test_a_comparison_without_memory_says_nothing_about_the_recipe(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def derived_bytes() -> int:
        before = offload.stats().derived_bytes
        loss, leaves = _derived(offload)
        torch.autograd.grad(loss, leaves)
        return offload.stats().derived_bytes - before

    with engine(scratch, tier="keep", compress="exact", verify="full") as offload:
        usual = derived_bytes()
        for lack in LACKS.values():
            with monkeypatch.context() as patched:
                scarce = Scarce(patched, "tba._derive.recipe.Recipe.settled", lack)
                scarce.failing = iter([True] * 100)
                assert derived_bytes() == 0
                assert scarce.failed > 0
            assert derived_bytes() == usual > 0


def test_a_pool_takes_less_where_the_system_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = BufferPool._map

    def scarce(self: BufferPool, nbytes: int) -> Any:
        asked.append(nbytes)
        if nbytes > 1 << 20:
            raise OSError(errno.ENOMEM, "no memory")
        return real(self, nbytes)

    monkeypatch.setattr(BufferPool, "_map", scarce)
    pool = BufferPool(4096)
    lease = pool.lease(100_000)
    assert asked == [64 << 20, 102_400]
    with pytest.raises(OSError, match="no memory"):
        pool.lease(2 << 20)
    del lease
    pool.lease(100_000)
    assert len(asked) == 4  # the one that was given back serves
    pool.close()


def test_causes_are_looked_through_and_said_once() -> None:
    outer = TransferError("float32[2] #1 could not be read back")
    outer.__cause__ = OSError(errno.ENOMEM, "no memory")
    assert lacks_memory(outer)
    made = in_torchs_words(outer, 12, "about it")
    assert str(made).startswith("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes.")
    assert made.__cause__ is outer.__cause__
    own = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 bytes.")
    outer.__cause__ = own
    assert in_torchs_words(outer, 12, "about it") is in_torchs_words(outer, 12, "about it") is own
    assert own.__notes__ == ["about it"]
    assert not lacks_memory(TransferError("broken"))
    assert not lacks_memory(OSError(errno.EIO, "broken"))
