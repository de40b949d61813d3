"""Interrupts: put off in protected code, called when it is left, and an engine that is whole after each of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from io_backends import interrupts
from io_backends.testing import Fault, Operation
from support.engine import Gate, chain, engine
from support.exactness import assert_bit_equal
from support.repeated import ENGINE, SCARCE, repeated
from support.signals import interrupted_at, places
from tba import Offloader


@pytest.fixture(autouse=True)
def _handlers_are_as_before() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert not interrupts.pending


def _plans(place: Any) -> bool:
    """Whether it is passed only when a plan is made, which depends on how long steps have taken."""
    return Path(place.code.co_filename).parent.name in ("_auto", "_plan")


SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": SCARCE,
    "auto": {"tier": "auto", "memory_budget": 1 << 14},
    "resting": {"tier": "auto"},
    "safe8": SCARCE | {"compress": "safe8"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_interrupt_at_places_where_one_can_come_leaves_the_engine_whole(name: str, scratch: Path) -> None:
    _interrupt_at_each(SETTINGS[name], 19, scratch)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "every"), [("nvme", 1), ("auto", 7), ("resting", 1), ("safe8", 7)])
def test_an_interrupt_wherever_one_can_come_leaves_the_engine_whole(name: str, every: int, scratch: Path) -> None:
    _interrupt_at_each(SETTINGS[name], every, scratch)


def _interrupt_at_each(settings: dict[str, Any], every: int, scratch: Path) -> None:
    with repeated(scratch, **settings) as bench:
        found = places(bench.step, ENGINE)
        assert len(found) > 200
        missed = []
        for number, place in enumerate(found[::every]):
            if not interrupted_at(place, bench.step) and not _plans(place):
                missed.append(place)  # not passed this time, as it depends on when a worker has ended
            try:
                assert len(bench.model._forward_hooks) == len(bench.model._forward_pre_hooks) == 0
                bench.check()
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            except BaseException as error:
                error.add_note(f"after an interrupt at {place}, the {number}th of {len(found[::every])}")
                raise
        assert len(missed) <= 1 + len(found[::every]) // 10, list(map(str, missed[:20]))


def _interrupt_soon(seconds: float = 0.2) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


@contextmanager
def _held_back(operation: Operation, scratch: Path) -> Iterator[tuple[Offloader, Gate, Tensor, Callable[[], None]]]:
    """An engine whose store stands still, a gate that lets it go on, a loss, and the check of its gradient."""
    gate = Gate(operation)
    leaf = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(leaf.sin().square().sum(), leaf)
    with engine(scratch, gate) as offload:
        with offload:
            losses = [leaf.sin().square().sum()]
        yield offload, gate, losses[0], lambda: assert_bit_equal(torch.autograd.grad(losses.pop(), leaf), expected)


def test_a_wait_for_the_disk_can_be_interrupted_and_backward_run_again(scratch: Path) -> None:
    with _held_back("read", scratch) as (offload, gate, loss, check):
        offload.flush()
        _interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        gate.open()
        check()


def test_flush_can_be_interrupted_while_the_disk_stands_still(scratch: Path) -> None:
    with _held_back("write", scratch) as (offload, gate, _, check):
        _interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            offload.flush()
        gate.open()
        offload.flush()
        check()


# -- by itself -----------------------------------------------------------------------------------------------------


class _Seen(Exception):
    """Raised by a program's handler."""


def _code(source: str, file: str, **names: Any) -> Any:
    """The function `f` of some source, as if it stood in a file."""
    space: dict[str, Any] = {"interrupts": interrupts, "signal": signal, "time": time, **names}
    exec(compile(source, file, "exec"), space)
    return space["f"]


@pytest.fixture
def protected(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes functions that are protected."""
    monkeypatch.setattr(interrupts, "_protected", (*interrupts._protected, "protected.py"))
    return lambda source, **names: _code(source, "protected.py", **names)


@contextmanager
def _armed(number: int = signal.SIGINT, handler: Any = signal.default_int_handler) -> Iterator[None]:
    before = signal.signal(number, handler)
    interrupts.arm()
    try:
        yield
    finally:
        interrupts.disarm()
        left = signal.signal(number, before)
    assert left is handler


def _strike(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_a_handler_is_put_off_in_protected_code_until_that_is_left(protected: Any) -> None:
    f = protected("def f(strike, log):\n    strike()\n    log.append('after')\n    _ = [*interrupts.again]")
    log: list[str] = []
    with _armed():
        with pytest.raises(KeyboardInterrupt):
            len((f(_strike, log), log))  # after a call the interpreter looks for signals
        assert log == ["after"]
        assert not interrupts.pending


def test_a_handler_is_called_at_once_in_other_code() -> None:
    with _armed(), pytest.raises(KeyboardInterrupt):
        _strike()


def test_what_protected_code_calls_on_the_programs_behalf_is_interrupted(protected: Any) -> None:
    f = interrupts.lets_through(protected("def f(strike):\n    strike()"))
    with _armed(), pytest.raises(KeyboardInterrupt):
        f(_strike)


def test_code_that_takes_errors_for_its_own_is_not_interrupted_within_others(protected: Any) -> None:
    inner = interrupts.lets_through(protected("def f(strike):\n    strike()"))
    noted: list[int] = []
    f = protected("def f(inner, strike):\n    inner(strike)\n    return len(interrupts.pending)", inner=inner)
    with _armed(), pytest.raises(KeyboardInterrupt):
        _wait_after(lambda: noted.append(f(inner, _strike)))
    assert noted == [1]


def _wait_after(call: Callable[[], object]) -> None:
    call()
    _wait(lambda: False)


def _wait(over: Callable[[], bool]) -> None:
    for _ in range(2000):
        if over():
            return
        time.sleep(0.005)
    pytest.fail("nothing has come")


def test_every_signal_is_delivered_once_however_busy_the_threads_are(protected: Any) -> None:
    """Threads change places all the time, where the old front lost one in fifty."""
    f = protected("def f(strike):\n    strike()")
    seen: list[int] = []
    interval, stop = sys.getswitchinterval(), threading.Event()

    def busy() -> None:
        while not stop.is_set():
            pass

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    sys.setswitchinterval(1e-6)
    try:
        for count in range(1, 101):
            with _armed(signal.SIGUSR1, lambda number, _: seen.append(number)):
                f(lambda: _strike(signal.SIGUSR1))
            _wait(lambda count=count: len(seen) >= count)  # type: ignore[misc]
            assert len(seen) == count
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    time.sleep(0.02)
    assert seen == [signal.SIGUSR1] * 100


@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM", "SIGUSR1", "SIGCHLD", "SIGHUP", "SIGRTMIN"])
def test_a_programs_own_handler_is_put_off_and_comes_back(name: str, protected: Any) -> None:
    number = int(getattr(signal, name))
    noted: list[int] = []

    def theirs(number: int, frame: object) -> None:
        raise _Seen

    f = protected("def f(strike):\n    strike()\n    return len(interrupts.pending)")
    with _armed(number, theirs):
        interrupts.arm()
        with pytest.raises(_Seen):
            _wait_after(lambda: noted.append(f(lambda: _strike(number))))
        assert noted == [1]
        interrupts.disarm()
        assert signal.getsignal(number) is not theirs  # until as many have ended as have begun


def test_two_signals_are_both_delivered(protected: Any) -> None:
    seen: list[int] = []
    f = protected("def f(strike):\n    strike(15)\n    strike(14)\n    return list(interrupts.pending)")

    def note(number: int, _: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGALRM, note)
    with _armed(signal.SIGTERM, note):
        assert sorted(f(_strike)) == [14, 15]
        _wait(lambda: len(seen) == 2)
    signal.signal(signal.SIGALRM, before)
    assert sorted(seen) == [signal.SIGALRM, signal.SIGTERM]


def test_a_handler_that_calls_the_one_before_it_ends(protected: Any) -> None:
    seen: list[int] = []
    f = protected("def f(strike):\n    strike(15)")
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(1))
    try:
        interrupts.arm()
        ours: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (seen.append(2), ours(number, frame)))
        interrupts.arm()
        f(_strike)
        _wait(lambda: len(seen) == 2)
        for _ in range(2):
            interrupts.disarm()
        assert seen == [2, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def _throw_while_another_error_is_handled() -> None:
    try:
        raise RuntimeError("the wait's own")
    except RuntimeError:
        interrupts.throw()


def test_what_a_handler_raises_in_a_wait_is_kept_for_who_leaves() -> None:
    with _armed():
        interrupts.pending.append(int(signal.SIGINT))
        interrupts.look()
        assert interrupts.waiting()
        assert not interrupts.pending
        with pytest.raises(KeyboardInterrupt) as caught:
            _throw_while_another_error_is_handled()
        assert caught.value.__context__ is None
        assert not interrupts.waiting()


def test_a_handler_that_does_not_raise_ends_no_wait(scratch: Path) -> None:
    """Room is waited for on: the tensors go to the file, however often a timer strikes."""
    struck: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: struck.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with engine(scratch, lambda *_: Fault(delay_s=0.03), staging_bytes=4096, prefetch_bytes=0) as offload:
            with offload:
                loss = chain(torch.randn(1024, requires_grad=True) * 1, 12).sum()
            offload.flush()
            assert offload.stats().kept_by_reason == {}
            loss.backward()
        assert struck
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_set_meanwhile_is_left_alone() -> None:
    interrupts.arm()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.disarm()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)
    interrupts.arm()
    interrupts.disarm()


def test_other_threads_change_nothing() -> None:
    def elsewhere() -> None:
        interrupts.arm()
        seen.append(signal.getsignal(signal.SIGINT))
        interrupts.disarm()

    seen: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(4))
def test_what_a_handler_raises_while_the_package_is_imported_reaches_the_program(number: int) -> None:
    """Imports run code in callbacks of weak references, where errors are printed and lost."""
    code = f"""
import os, signal, sys, threading, time, torch
raised, caught, ready = 0, 0, threading.Event()

def handler(*_):
    global raised
    raised += 1
    raise RuntimeError("from a handler")

def shoot():
    for _ in range(25):
        if not ready.wait(30):
            return  # what the handler raised last was lost
        ready.clear()
        before = raised
        time.sleep(0.001 * {1 + 5 * number})
        os.kill(os.getpid(), signal.SIGUSR1)
        while raised == before:
            time.sleep(0.0005)

shooter = threading.Thread(target=shoot)
shooter.start()
signal.signal(signal.SIGUSR1, handler)
while shooter.is_alive():
    try:
        ready.set()
        import tba
        while shooter.is_alive():
            time.sleep(0.001)
    except RuntimeError as error:
        caught += str(error) == "from a handler"
print(raised, caught)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["25", "25"], done.stderr
