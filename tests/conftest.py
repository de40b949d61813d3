"""Shared fixtures: where scratch files go, a clean environment, and a check that no test leaves anything behind."""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from io_backends import interrupts
from io_backends._file.rate import RateLimit
from support import gpu, samples
from support.clock import Counted
from support.engine import STORES
from tba import Offloader, offload_context
from tba._engine import backward
from tba._plan import clock

# Elementwise kernels are not bit-stable across thread counts, and two workers of xdist share the machine.
torch.set_num_threads(1)

# Without such a device `torch.manual_seed` queues a call for each kind of one, with the text of the whole stack: under
# pytest three milliseconds, thousands of times.
for _devices in (torch.cuda, torch.mtia, torch.xpu):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]

_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_GRACE_S = 60.0  # a thread that was told to end may need a moment on a busy machine


_frozen_modules = 0


def pytest_runtest_setup() -> None:
    """Freeze what has been imported, again whenever much was (transformers, numba): no collection looks through it.

    Many tests ask for collections, some for hundreds; over a heap full of torch and transformers each takes 0.7 s.
    """
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[samples.CASES] = samples.mark(items)
    if others := samples.others_share(items):
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))


@pytest.fixture(autouse=True)
def _a_clock_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made from what a test does, and not from how fast it does it; those of a device from both."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(clock, "current", Counted())


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on a rate is what plans reckon with, and holds nothing up; in `make test-all` it does."""
    if not samples.ALL:
        monkeypatch.setattr(RateLimit, "pace", lambda limit, nbytes: None)


@functools.cache
def _file_system(resolved: Path) -> str:
    """The type of the file system a path is on: that of the longest mount point above it."""
    mounts = [
        (len(Path(part.mountpoint).parts), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(part.mountpoint)
    ]
    return max(mounts, default=(0, ""))[1]


@pytest.fixture
def scratch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on a real disk: below the temp directory, or in the checkout where that one is in RAM."""
    if _file_system(tmp_path.resolve().parent) not in _RAM_FILE_SYSTEMS:
        yield tmp_path
        return
    if _file_system(request.config.rootpath.resolve()) in _RAM_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} and {request.config.rootpath} are in RAM; set --basetemp to a directory on a disk")
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=request.config.rootpath) as directory:
        yield Path(directory)


@pytest.fixture
def auto(scratch: Path, quick_limits: None) -> Iterator[Callable[..., Offloader]]:
    """Makes contexts of tier auto, which are closed at the end."""
    made = []

    def make(model: nn.Module | None, **settings: Any) -> Offloader:
        given: dict[str, Any] = {"min_tensor_bytes": 4096, "storage_paths": scratch} | settings
        offload = offload_context(model, "auto", **given)
        made.append(offload)
        return offload

    yield make
    for offload in made:
        offload.close()


@pytest.fixture(scope="module", params=gpu.DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and the device of the GPU tests where there is one (`support.gpu`)."""
    device: torch.device = request.param
    if device.type == "cpu":
        yield device
        return
    gpu.open_device()
    with gpu.deterministic():
        yield device


@pytest.fixture(params=STORES)
def store_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store in turn, for tests of the engine to which it makes a difference."""
    kind: str = request.param
    return kind


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TBA_")]:
        monkeypatch.delenv(name)


def _held() -> Counter[str]:
    """Count our threads, by identity, and open descriptors of deleted files, by number and target."""
    held = Counter(f"thread {t.name} ({t.ident})" for t in threading.enumerate() if t.name.startswith("tba-"))
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        for entry in os.listdir(descriptors):
            try:
                target = os.readlink(descriptors / entry)
            except OSError:  # the descriptor of the listing itself
                continue
            # Libraries keep anonymous memory (memfd) and locks in descriptors of deleted files too.
            if target.endswith(" (deleted)") and not target.startswith(("/memfd:", "/dev/shm/")):
                held[f"descriptor {entry} of {target}"] += 1
    return held


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """After each test: no thread named tba-* and no deleted (scratch) file held open that was not there before."""
    before = _held()
    yield
    assert backward.look() is None
    assert not interrupts._armed, "signals are held back after this test"
    if not _held() - before:
        return
    deadline_s = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline_s:
        gc.collect()  # an engine that is part of a cycle ends with the cycle
        if not _held() - before:
            return
        time.sleep(0.05)
    pytest.fail("left behind by this test: " + ", ".join(sorted(_held() - before)))
