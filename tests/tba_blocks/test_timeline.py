"""Timeline: what a plan is made from is the device's time, while the host launches ahead of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tba._blocks import timeline as _timeline
from tba._blocks.timeline import Stopwatch, Timeline
from tba._blocks.watch import Watch
from tba._plan.facts import Link, Place

GPU = torch.device("cuda", 0)


class Device:
    """A device: a test says when it gets to what is recorded next, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.done = True
        self.waits = 0
        device = self

        class Event:
            def __init__(self, *_: Any, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, _: Any) -> None:
                self.at_s = device.now_s

            def query(self) -> bool:
                return device.done

            def synchronize(self) -> None:
                device.waits += 1

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at_s - self.at_s)

        class Torch:
            Event: Any
            device = torch.device

        Torch.Event = Event
        monkeypatch.setattr(_timeline, "torch", Torch)
        monkeypatch.setattr(_timeline.streams, "current", lambda device: None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_model_on_a_host_has_none() -> None:
    assert Timeline.of(nn.Linear(2, 2)) is Timeline.of(None) is Timeline.of(nn.ReLU()) is None
    watch = Stopwatch(torch.zeros(1))
    assert watch.seconds == 0


def test_moments_are_those_of_the_device_less_what_was_aside_and_waited(device: Device) -> None:
    line = Timeline(GPU)
    device.now_s = 1.0
    line.mark(0.1)
    begun = line.step_aside()
    device.now_s = 3.0
    line.step_back(begun)
    device.now_s = 4.0
    line.mark(0.2)
    begun = line.step_aside()
    assert line.step_aside() is None  # within it
    line.step_back(None)
    device.now_s = 8.0
    line.step_back(begun)
    device.now_s = 9.0
    line.mark(0.3)
    device.now_s = 9.5
    line.mark(5.0)  # the host was slower
    assert line.times() == {0.1: 1.0, 0.2: 2.0, 0.3: 3.0, 5.0: 5.0}
    assert line.aside_s == 6.0
    line.touch()
    assert line.step() == (9.5, 6.0)


def test_a_step_of_which_the_device_is_not_at_the_end_has_no_time_yet(device: Device) -> None:
    line = Timeline(GPU)
    assert line.step() is None
    device.now_s = 2.0
    line.touch()
    device.now_s = 3.0
    line.touch()
    device.done = False
    assert line.step() is None
    device.done = True
    assert line.step() == (3.0, 0.0)
    assert device.waits == 0


def test_facts_have_the_times_of_the_device(device: Device) -> None:
    watch = Watch(0.0, timeline=Timeline(GPU))
    assert watch.timeline is not None
    module = nn.Linear(2, 2)
    for at_s, device_s in ((0.001, 1.0), (0.002, 2.0)):
        device.now_s = device_s
        watch.timeline.mark(at_s)
        watch.saved[len(watch.saved)] = Place(0, len(watch.saved)), 100, at_s
        watch.prompt.add(len(watch.saved) - 1)
    watch.visit(module, 0.001, ())
    for number, at_s, device_s in ((1, 0.003, 3.0), (0, 0.004, 7.0)):
        device.now_s = device_s
        watch.timeline.mark(at_s)
        watch.asked[number] = at_s
    watch.take_times_of_device()
    facts = watch.facts(Link(1.0, 1.0), 0)
    assert (facts.forward_s, facts.backward_s) == (3.0, 4.0)
    assert [each.saved_s for each in facts.saved] == [1.0, 2.0]
    assert facts.blocks[0].begin_s == 1.0


def test_a_second_run_takes_as_long_as_the_device_says(device: Device) -> None:
    class OnDevice:
        device = GPU
        is_cpu = False

    on_device: Any = OnDevice()
    watch = Stopwatch(on_device)
    for device.now_s in (0.5, 2.0):
        watch.lap()
    assert watch.seconds == 2.0
