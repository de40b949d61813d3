"""The contract of `Store` as a suite for any store. Public as `io_backends.testing.check_store`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from .._store import Store
from .promises import PROMISES

_GRACE_S = 10.0  # for threads to end on a busy machine


def check_store(make: Callable[[], Store], *, keeps_memory: bool = False) -> None:
    """Test that a store keeps the promises of `Store`.

    Args:
        make: returns a fresh store each time; the suite closes it.
        keeps_memory: the store keeps a write's memory until it is discarded, instead of copying it.

    Raises:
        AssertionError: names the broken promise and how it is broken.
    """
    make().close()  # what a first use opens permanently is not a leak
    before = _open_now()
    for promise in PROMISES:
        store = make()
        try:
            promise(store, keeps_memory)
        except AssertionError as error:
            raise AssertionError(f"{promise.__doc__} -- {error}") from error
        finally:
            store.close()
    deadline_s = time.monotonic() + _GRACE_S
    while (left := _open_now() - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left, f"Nothing is left behind after close. -- still there: {', '.join(sorted(left))}"


def _open_now() -> set[str]:
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found.add(f"descriptor {entry} of {os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found
