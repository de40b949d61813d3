"""Offloader: the context a user enters, and what he may ask of it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

from torch import nn

from io_backends import Store

from . import _hooks, _open
from ._config import OffloadConfig
from ._errors import ClosedError, ConfigError, StalledError
from ._quiet import quiet
from ._saver import Saver
from ._stats import OffloadStats, TraceEvent
from ._storage_path import Directory, storage_directories


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.entries: list[bool] = []  # per entry of the context on this thread: whether its hooks could be pushed
        self.forwards = 0  # of them, those a model's forward has entered


class Offloader:
    """Moves what autograd saves out of memory and back. Made by `offload_context` and `attach`.

    A context manager that may be entered again and nested: inside, tensors saved for backward go to the tier. Leaving
    it only stops the hooks; graphs made inside stay valid until `close`. Making one is cheap: no file and no thread
    before something is first stored.

    Args:
        model: recognises its parameters and buffers as weights; held weakly. May be None.
        config: the settings.
        store: where bytes go, instead of what the settings say (it is closed with the Offloader).

    Raises:
        ConfigError: tier nvme on a system that is not Linux.
        StorageError: the storage path cannot be used.
    """

    def __init__(
        self, model: nn.Module | None = None, config: OffloadConfig | None = None, *, store: Store | None = None
    ) -> None:
        self.config = config if config is not None else OffloadConfig()
        _open.check(self.config)
        self._store = store
        self._directories: tuple[Directory, ...] = ()
        if store is None and self.config.tier in ("nvme", "auto"):
            if not sys.platform.startswith("linux"):
                raise ConfigError(
                    f"tier={self.config.tier!r} needs Linux (O_DIRECT, fallocate), this is {sys.platform}; "
                    "use tier='cpu' or 'keep'"
                )
            self._directories = storage_directories(self.config)  # a wrong path is an error now, not in the first step
        weak_model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else _no_model
        open_it = partial(_open_store, self.config, self._directories, store)
        self._saver = Saver(self.config, weak_model, open_it)
        self._saved_by = self._saver.compressor.mode(model) if self._saver.compressor is not None else None
        self._per_thread = _PerThread()
        self._untie: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._saver.mover.closed

    @property
    def entered(self) -> bool:
        """Whether this thread is inside the context."""
        return bool(self._per_thread.entries)

    def __enter__(self) -> Self:
        if self.closed:
            raise ClosedError("this Offloader was closed; offload_context(...) or attach(...) makes a new one")
        if not self.entered:
            self._saver.mark_weights()
        self._per_thread.entries.append(_hooks.push(self._saver.pack, self._saver.unpack))
        if self._saved_by is not None:
            self._saved_by.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        steps = self._saver.steps
        if kind is None and not (steps.told or self.entered or self._saver.dead):
            steps.tell_if_idle(self.stats(), forward_seen=steps.open)

    def leave(self) -> None:
        """`__exit__` without its first-step check: a forward that `attach` follows may well be an evaluation."""
        if self._saved_by is not None:
            self._saved_by.__exit__(None, None, None)
        if self._per_thread.entries.pop():
            _hooks.pop()
        saver = self._saver
        if not saver.dead:
            with saver.locked(), quiet():
                saver.finished.pass_on(None)
                if not self.entered and saver.steps.over:
                    saver.end_step()

    def stats(self) -> OffloadStats:
        """A snapshot of what was moved since the start."""
        saver = self._saver
        with saver.locked(), quiet():
            if saver.steps.over and not self.entered:
                saver.settle()
                if not saver.counters.live_records:
                    saver.end_step()
            return saver.stats()

    def flush(self) -> None:
        """Wait until all that this thread's graphs saved, and whatever else is queued, is written and its memory given
        back. Tier "auto" writes only what memory has no room for.

        Raises:
            StalledError: no transfer ended for `io_timeout` seconds.
        """
        saver = self._saver
        with saver.locked(), quiet():
            saver.finished.pass_on(None)
            saver.held.send_all()
            if not saver.mover.staging.wait_until_idle():
                raise StalledError(
                    f"flush: no write has ended for {self.config.io_timeout:g} s; "
                    f"{', '.join(map(str, self._directories)) or 'the store'} has stalled (TBA_IO_TIMEOUT sets how "
                    "long to wait)"
                )
            saver.settle()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Lift the hooks for a region on this thread, e.g. for `torch.func.grad`, which refuses any."""
        with _hooks.lifted(self._saver.pack):
            yield

    @contextmanager
    def trace(self) -> Iterator[list[TraceEvent]]:
        """Collect an event for each write, read, wait and forwarded tensor of the region, in the order they ended."""
        mover, events = self._saver.mover, list[TraceEvent]()
        before, mover.trace = mover.trace, events
        try:
            yield events
        finally:
            mover.trace = before

    def tie_to(self, model: nn.Module) -> None:
        """Enter and leave with the model's own forward (`attach`). A second call changes nothing."""
        if self._untie is None:
            weak = weakref.ref(self)  # neither keeps the other alive
            self._untie = _hooks.tie(model, partial(_enter, weak), partial(_leave, weak))

    def close(self) -> None:
        """End threads, give back files and buffers. Idempotent.

        What is still in memory stays usable by its graphs; an unpack of what was stored raises ClosedError.
        """
        with self._saver.locked():
            if self.closed:
                return
            self._saver.settle()
            self._saver.mover.closed = True
            untie, self._untie = self._untie, None
        if untie is not None:
            untie()
            while self._per_thread.forwards:  # closed by the model's own forward, which ends without us now
                self._per_thread.forwards -= 1
                self.leave()
        store = self._saver.mover.store or self._store
        if store is not None:
            store.close()
        with self._saver.locked():
            self._saver.settle()
        self._saver.mover.close()


def _open_store(
    config: OffloadConfig, directories: tuple[Directory, ...], given: Store | None, on_device: bool
) -> Store:
    return given if given is not None else _open.open_store(config, directories, on_device=on_device)


def _enter(weak: weakref.ref[Offloader]) -> None:
    offloader = weak()
    if offloader is not None and not offloader.closed:
        offloader.__enter__()
        offloader._per_thread.forwards += 1


def _leave(weak: weakref.ref[Offloader]) -> None:
    offloader = weak()
    if offloader is not None and offloader._per_thread.forwards:  # else a hook ahead of ours has raised
        offloader._per_thread.forwards -= 1
        offloader.leave()


def _no_model() -> None:
    """What an Offloader without a model finds where it looks for one."""
