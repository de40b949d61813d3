"""Frames: every warning points at the user's own line, and a traceback may begin there."""

from __future__ import annotations

import gc
import linecache
import logging
import os
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from io_backends.testing import Fault
from support.engine import activation, chain, engine
from tba import OffloadWarning, attach, audit, offload_context
from tba._torch import user_frames
from tba._transfer import scratch_paths


class Line:
    """The line of this file that a warning points at, or none."""

    text = ""


@contextmanager
def pointed_at() -> Iterator[Line]:
    """Fills in the line of the one warning given inside."""
    line = Line()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield line
    (warning,) = caught
    assert warning.category is OffloadWarning
    assert warning.filename == __file__
    line.text = linecache.getline(warning.filename, warning.lineno).strip()


def test_leaving_points_at_the_with(scratch: Path) -> None:
    offload = offload_context(tier="nvme", storage_paths=scratch)
    with pointed_at() as line, offload:
        torch.ones(1)
    assert line.text.startswith("with pointed_at() as line, ")
    offload.close()


def test_a_setting_points_at_the_call(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.realpath(scratch)
    mount = SimpleNamespace(mountpoint=real, fstype="nfs4", device="server:/x")
    monkeypatch.setattr(scratch_paths, "_mounts", lambda: [mount])
    with pointed_at() as line:
        offload = offload_context(tier="nvme", storage_paths=scratch)
    assert line.text.startswith("offload = offload_context(")
    offload.close()
    with pointed_at() as line:
        offload = attach(nn.Linear(1, 1), tier="nvme", storage_paths=scratch)
    assert line.text.startswith("offload = attach(")
    offload.close()


def test_an_attached_model_points_at_the_forward(scratch: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    offload = attach(model, tier="nvme", storage_paths=scratch)
    with pointed_at() as line, torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(torch.ones(1))
    assert line.text == "model(torch.ones(1))"
    offload.close()


def test_a_failed_write_points_at_the_flush(scratch: Path) -> None:
    def plan(operation: str, number: int) -> Fault | None:
        return Fault(error=OSError(5, "injected")) if operation == "write" else None

    with engine(scratch, plan, prefetch_bytes=1 << 30) as offload:
        with offload:
            x = activation(1 << 16)[1]
            y = chain(x, 4)
            with pointed_at() as line:
                offload.flush()
        assert line.text == "offload.flush()"
        del y


def test_an_audit_points_at_its_call() -> None:
    with pointed_at() as line:
        audit(nn.LayerNorm(8), torch.randn(4, 8), loss=lambda out: out.pow(3).sum(), presets=["compact"])
    assert line.text.startswith("audit(nn.LayerNorm(8)")


def test_no_module_warns_but_by_the_one_way() -> None:
    package = Path(user_frames.__file__).parents[1]
    ways = [path.name for path in package.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert ways == ["user_frames.py"]


def test_a_warning_holds_no_frame_that_led_to_it() -> None:
    class Local:
        pass

    def caller() -> weakref.ref[Local]:
        local = Local()
        with pytest.warns(OffloadWarning, match="once"):
            user_frames.warn("once")
        return weakref.ref(local)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_a_worker_points_at_what_the_main_thread_does() -> None:
    worker = threading.Thread(target=user_frames.warn, args=("from a worker",))
    with pointed_at() as line:
        worker.start()
        worker.join()
    assert line.text in ("worker.start()", "worker.join()")


COLLECTS = """
import faulthandler, gc, threading, time, warnings
import io_backends
from tba._torch import user_frames

warnings.simplefilter("ignore")
faulthandler.dump_traceback_later(100, exit=True)

class Cycle:
    pass

WORK = '''
def work():  # among a worker's frames none is the user's
    for number in range(1000):
        gc.disable()
        gc.collect(0)
        one = Cycle()
        one.me, one.local = one, threading.local()
        one.local.x = 1
        del one
        gc.set_threshold(gc.get_count()[0] + number % 10)  # a collection comes within some objects
        time.sleep(0.00003)
        gc.enable()
        user_frames.warn("from a worker")
'''
exec(compile(WORK, io_backends.__file__, "exec"))
gc.collect()
gc.freeze()
worker = threading.Thread(target=work)
worker.start()

def wait():
    time.sleep(0.00001)

while worker.is_alive():
    wait()
print("ended")
"""


def test_a_worker_that_warns_while_garbage_is_collected_stops_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, check=False)
    assert done.stdout == "ended\n", done.stderr


def test_where_no_frame_is_the_users_it_is_said_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_frames, "between", lambda file: True)
    with pytest.warns(OffloadWarning, match="said all the same"):
        user_frames.warn("said all the same")


def test_a_notice_is_said_once_for_each_key_though_it_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    notices = user_frames.Notices()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in ("first", "second"):
            with pytest.raises(OffloadWarning, match=f"the {key}"):
                notices.say(key, f"the {key}")
            notices.say(key, f"the {key} again")
        for _ in range(2):
            notices.say("third", "the third", level=logging.WARNING)
    assert caplog.messages == ["the third"]


def test_a_traceback_begins_at_the_users_frame() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(7)

    error: Exception | None = None
    try:
        nn.Sequential(Broken())(torch.ones(3))
    except RuntimeError as caught:
        error = caught
    assert error is not None
    assert error.__traceback__ is not None
    beneath = user_frames.users_part(error.__traceback__.tb_next)  # torch's own frames lead to the forward
    assert [frame.name for frame in traceback.extract_tb(beneath)] == ["forward"]
    assert user_frames.users_part(None) is None
