"""What one thread is at, a block's forward or a trial, is its own: what another saves and asks for counts as it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.planned import ROWS, WIDTH, Training, assert_equal, saved_bytes, train
from tba import Offloader
from tba._blocks.trial import Trial
from tba._blocks.watch import Watch
from tba._plan.facts import OUTSIDE

WAIT_S = 60.0
LENGTH = 3  # storages that the other thread's graph saves


def graph() -> Tensor:
    """A loss beside the model, whose graph saves so many storages: one for each operator."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    for _ in range(LENGTH):
        x = x.exp()
    return x.sum()


def on_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def surveyed(auto: Callable[..., Offloader], share: float = 0.4) -> tuple[Training, Offloader, Any]:
    """A training whose blocks are known, so that its next step is watched; its engine; its execution."""
    training = Training()
    offload = auto(training.model, memory_budget=int(share * saved_bytes()))
    train(offload, training, steps=1)
    planner = offload._saver.planner
    assert planner is not None
    return training, offload, planner.execution


def test_what_a_thread_asks_for_while_another_tries_a_block_counts(
    auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, offload, execution = surveyed(auto)
    run_again, watched = Trial._run_again, list[Watch]()
    beside: list[Tensor] = []

    def while_it_runs(trial: Trial, first: Any) -> tuple[str, float | None]:
        if beside:
            loss = beside.pop()
            before = set(execution._seen().asked)
            on_another_thread(loss.backward)
            watched.append(execution._seen())
            asked.extend(set(execution._seen().asked) - before)
        return run_again(trial, first)

    asked: list[int] = []
    monkeypatch.setattr(Trial, "_run_again", while_it_runs)
    with offload:
        beside.append(graph())
        training.step(number=1)
    assert [watched[0].saved[number][0].block for number in asked] == [OUTSIDE] * LENGTH
    assert_equal(training.state(), train(None, Training(), steps=2))


def test_a_trial_that_ends_on_one_thread_leaves_anothers_apart(auto: Callable[..., Offloader]) -> None:
    """What a trial keeps to compare is none of the step's own."""
    training, offload, execution = surveyed(auto)

    def another_trial() -> None:
        with execution.apart():
            pass

    with offload:
        with execution.apart():
            on_another_thread(another_trial)
            packed = offload._saver.pack(torch.ones(ROWS, WIDTH) * 1.0)
        assert execution.put_aside == {packed[0].number}
        assert not execution._seen().saved
        del packed
        training.step(number=1)


def test_what_a_thread_saves_while_another_is_in_a_block_is_none_of_the_blocks(
    auto: Callable[..., Offloader],
) -> None:
    training, offload, execution = surveyed(auto)
    losses: list[Tensor] = []
    places: list[int] = []

    def saves() -> None:
        with offload:
            losses.append(graph())

    def other(*_: object) -> None:
        before = set(execution._seen().saved)
        on_another_thread(saves)
        places.extend(execution._seen().saved[number][0].block for number in execution._seen().saved.keys() - before)

    with offload:
        hook = training.model.layers[1].up.register_forward_hook(other)
        training.step(number=1)
        hook.remove()
    assert places == [OUTSIDE] * LENGTH
    losses[0].backward()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_in_a_block_ends_its_forward_whoever_held_the_lock(auto: Callable[..., Offloader]) -> None:
    training, offload, _ = surveyed(auto)
    taken, forked = threading.Event(), threading.Event()

    def holds_the_lock() -> None:
        with offload._saver.lock:
            taken.set()
            forked.wait(WAIT_S)

    pids = []

    def fork(*_: object) -> None:
        holder = threading.Thread(target=holds_the_lock)
        holder.start()
        assert taken.wait(WAIT_S)
        pids.append(os.fork())
        forked.set()
        if pids[0]:
            holder.join(WAIT_S)

    with offload:
        hook = training.model.layers[1].up.register_forward_hook(fork)
        training.model(torch.ones(ROWS, WIDTH))
        if not pids[0]:
            os._exit(7)
        hook.remove()
        training.step(number=1)
    assert ended(pids[0]) == 7


def ended(pid: int) -> int | None:
    """The exit status of a child; None if it hangs, and is killed."""
    for _ in range(int(WAIT_S / 0.05)):
        if (found := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(found[1])
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
