"""Card: tensors of this CPU pass for those of a device with one stream, whose copies end when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tba._device import streams

UNWRITTEN = 0xEE
OUT_S, BACK_S = 0.05, 0.02  # how long each copy takes, says the device
STAMP_MS = 1e6  # from one stamp to the next


class Stream:
    """The only one there is."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Departure:
    """A copy out: its bytes are there once it is over, and not before."""

    def __init__(self, card: Card, source: Tensor, host: Tensor) -> None:
        self._card = card
        self._source: Tensor | None = source
        self._host = host

    def seconds(self) -> float:
        """As `streams.Departure.seconds`."""
        return OUT_S

    def over(self) -> bool:
        """As `streams.Departure.over`."""
        self._card.asked += 1
        if not self._card.is_over():
            return False
        if self._source is not None:
            self._host.copy_(self._source)
        self._source = None
        return True


class Flag:
    """The event that a flag of a codec has come to the host: it comes as late as copies do."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def query(self) -> bool:
        """As of an event."""
        return self._card.is_over()

    def synchronize(self) -> None:
        """As of an event."""


class Stamp:
    """A moment of the device."""

    def elapsed_time(self, later: Stamp) -> float:
        """As of an event."""
        return STAMP_MS


class Arrival:
    """A copy back, which is over at once."""

    def __init__(self, timed: bool) -> None:
        self.timed = timed

    def wait(self, tensor: Tensor) -> None:
        """As `streams.Arrival.wait`."""

    def seconds(self) -> float:
        """As `streams.Arrival.seconds`."""
        return BACK_S


class Card:
    """The device.

    Attributes:
        is_over: whether the copy that was queued first is over, whenever the engine asks.
        asked: how often it has.
        host: the addresses of the host memory that copies went to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over: Callable[[], bool] = lambda: True
        self.asked = 0
        stream = Stream()
        monkeypatch.setattr(streams, "producer_stream", lambda tensor: stream)
        monkeypatch.setattr(streams, "also_used", lambda tensor, stream: None)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: stream)
        monkeypatch.setattr(streams, "out", self._out)
        monkeypatch.setattr(streams, "fetch", lambda flag: (flag.clone(), Flag(self)))
        monkeypatch.setattr(streams, "stamp", lambda stream: Stamp())
        monkeypatch.setattr(streams, "target", lambda nbytes, device: None)
        monkeypatch.setattr(streams, "into", lambda host, *_, timed, **__: (host.clone(), Arrival(timed)))

    def blocks(self) -> None:
        """End no copy from now on."""
        self.is_over = lambda: False

    def goes_on(self) -> None:
        """End all copies."""
        self.is_over = lambda: True

    def _out(
        self, source: Tensor, begin: int, nbytes: int, producer: Any, memory: Any, *, timed: bool
    ) -> tuple[Any, Departure]:
        view, buffer = memory.lease(nbytes)
        host = streams.host_bytes(view).fill_(UNWRITTEN)
        departure = Departure(self, streams.raw_bytes(source, begin, nbytes), host)
        return buffer._replace(owner=host, given=True), departure
