"""Mutations: each wait, event and word to the allocator of the engine is needed: without it bytes are wrong.

What the engine does in their place is trained on streams of its own, with random delays, until something goes wrong.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support import accelerator
from support.exactness import equal
from support.gpu import DEVICE, Delays, card, crossing_net, gpu_only, late_net, leaf_of, offloader, scribble
from tba import OffloadError
from tba._device import streams

pytestmark = gpu_only

LAYERS = 6
ELEMENTS = 1 << 12
NBYTES = 4 * ELEMENTS
SEEDS = 12


def net(x: Tensor, sleep: Callable[[], None]) -> Tensor:
    return late_net(x, LAYERS, sleep)


def crossing(x: Tensor, sleep: Callable[[], None]) -> Tensor:
    return crossing_net(x, LAYERS, card.Stream(), sleep)


PROGRAMS = (net, crossing)


def plain(program: Callable[[Tensor, Callable[[], None]], Tensor]) -> Tensor:
    leaf = leaf_of(elements=ELEMENTS)
    program(leaf * 1, lambda: None).sum().backward()
    card.synchronize()
    assert leaf.grad is not None
    return leaf.grad


def goes_wrong(
    program: Callable[[Tensor, Callable[[], None]], Tensor], seed: int, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether some steps of a program give other gradients than plain PyTorch, or raise."""
    expected = plain(program)
    with monkeypatch.context() as patched:
        delays = Delays(seed, patched)
        accelerator.configure(delay_s=2e-4, seed=seed)
        side = card.Stream()
        try:
            for tier, window in (("cpu", 0), ("cpu", 2 * NBYTES), ("nvme", 2 * NBYTES)):
                settings: dict[str, Any] = {"prefetch_bytes": window, "staging_bytes": 2 * NBYTES}
                with offloader(tier, scratch, **settings) as offload:
                    for kind in ("plain", "dropped", "twice", "elsewhere"):
                        leaf = leaf_of(elements=ELEMENTS)
                        side.wait_stream(card.current_stream())
                        with card.stream(side), offload:
                            y = program(leaf * 1, delays.sleep)
                        if kind == "dropped":  # while copies are under way
                            del y
                            with card.stream(side):
                                scribble(leaf)
                            continue
                        for again in range(2 if kind == "twice" else 1):
                            leaf.grad = None
                            with card.stream(side if kind != "elsewhere" else card.Stream()):
                                card.current_stream().wait_stream(side)
                                y.sum().backward(retain_graph=kind == "twice" and not again)
                            card.synchronize()
                            if not equal([leaf.grad], [expected]):
                                return True
        except OffloadError:  # bytes that changed while they were written do not have their checksum
            return True
        finally:
            card.synchronize()
            accelerator.configure()
    return False


def mutate(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(streams, name)))
    assert source.count(old) == 1, f"{name} has {old!r} no more: what takes its place?"
    scope = vars(streams)
    before = scope[name]
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), f"<{name}>", "exec"), scope)
    made = scope[name]
    scope[name] = before
    monkeypatch.setattr(streams, name, made)


# Not among them: that a source and its host memory outlive a copy out. The engine holds both until the copy is over, as
# it has to write it; what `streams` promises by itself is tested in test_copies.py. Nor `also_used` and
# `goes_early`, for which no program has been found that goes wrong without them.
MUTATIONS = {
    "a copy out waits for the kernel": ("out", "side.wait_event(launched)", "pass"),
    "a copy is over when the device says so": ("Departure", "if not self._event.query():", "if False:"),
    "a copy back waits for the last reader": ("into", "side.wait_event(allocated)", "pass"),
    "host memory outlives the copy from it": ("into", "memory.retain(host, copied.query, side)", "pass"),
    "a consumer waits for the copy": ("Arrival", "current.wait_event(self._copied)", "pass"),
    "the allocator hears of another consumer": ("Arrival", "as_bytes(tensor).record_stream(current)", "pass"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_it_is_nothing_goes_wrong(
    program: Callable[[Tensor, Callable[[], None]], Tensor], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEVICE.type == "sim"
    for seed in range(4):
        assert not goes_wrong(program, seed, scratch, monkeypatch), seed


@pytest.mark.parametrize("what", MUTATIONS)
def test_without_it_something_goes_wrong(what: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *MUTATIONS[what])
    found = (goes_wrong(program, seed, scratch, monkeypatch) for seed in range(SEEDS) for program in PROGRAMS)
    assert any(found), f"nobody would notice: {what}"
