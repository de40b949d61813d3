"""Measured: how fast a device's bytes reached a disk through kvikio and through pinned memory, as `tba doctor` found.

`io_backend="auto"` takes kvikio only where that was faster, there and back. The measurements are in a file of the
user's cache directory, by machine, mount and device. One that was made with another kvikio or driver does not count,
nor does a file that cannot be read.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .._device.kinds import active
from .scratch_paths import default_directories, look_at, make_private

_VERSION = 1
_NAME = "measured.json"
_MODULES = Path("/sys/module")  # each kernel module tells its version there


class Speed(NamedTuple):
    """Bytes per second, out of a device and back."""

    write: float
    read: float

    @property
    def round_trip_s(self) -> float:
        """Seconds for a byte."""
        return 1 / self.write + 1 / self.read

    def __str__(self) -> str:
        return f"{self.write / 1e9:.2f} GB/s to write and {self.read / 1e9:.2f} GB/s to read"


class Setup(NamedTuple):
    """What a measurement holds for."""

    place: str  # machine and mount
    device: str
    kvikio: str
    driver: str


class Choice(NamedTuple):
    """The backend that "auto" takes, and why."""

    backend: Literal["posix", "kvikio"]
    why: str


def choose(found: Mapping[str, Any], setup: Setup | None) -> Choice:
    """Choose by what is in the file; `setup` is None without a device in use, or without kvikio."""
    if setup is None:
        return Choice("posix", "no CUDA device is in use here, or kvikio cannot be imported")
    entry = found.get(_key(setup))
    try:
        assert entry is not None
        versions, (pinned, direct) = entry["versions"], (Speed(*map(float, entry[way])) for way in ("pinned", "kvikio"))
        faster = direct.round_trip_s < pinned.round_trip_s
    except (AssertionError, LookupError, TypeError, ValueError, ZeroDivisionError):
        return Choice("posix", "`tba doctor` has not measured kvikio there")
    if versions != [setup.kvikio, setup.driver]:
        return Choice("posix", f"`tba doctor` measured kvikio there with other versions ({versions}); run it again")
    return Choice("kvikio" if faster else "posix", f"measured: kvikio {direct}, pinned memory {pinned}")


def setup_of(directory: str | os.PathLike[str]) -> Setup | None:
    """Look at what is here. Imports kvikio."""
    found = active()
    if found is None or found[0] != "cuda":
        return None
    try:
        kvikio = str(import_module("kvikio").__version__)
    except Exception:  # it loads shared libraries, and every loader has its own errors
        return None
    mount = look_at(directory).mount
    name = found[1].get_device_properties(found[1].current_device()).name
    driver = " ".join(filter(None, (_version(module) for module in ("nvidia", "nvidia_fs"))))
    return Setup(f"{platform.node()}: {mount.kind} on {mount.source} at {mount.point}", name, kvikio, driver)


def measured_file() -> Path:
    """Where the measurements are."""
    places = default_directories(os.environ, os.path.expanduser("~"), tempfile.gettempdir(), os.getuid())
    return places[0] / _NAME


def read(file: Path) -> dict[str, Any]:
    """Read the measurements by setup; none from a file that is not there, of another version or not to be read."""
    with suppress(OSError, ValueError):
        data = json.loads(file.read_text())
        if isinstance(data, dict) and data.get("version") == _VERSION and isinstance(data.get("measured"), dict):
            return dict(data["measured"])
    return {}


def record(file: Path, setup: Setup, pinned: Speed, kvikio: Speed) -> str | None:
    """Add a measurement to the file, at once or not at all; returns why, if it cannot be."""
    entry = {"versions": [setup.kvikio, setup.driver], "pinned": pinned, "kvikio": kvikio}
    text = json.dumps({"version": _VERSION, "measured": read(file) | {_key(setup): entry}}, indent=1)
    if (why_not := make_private(file.parent)) is not None:
        return f"{file.parent} {why_not}"
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        return f"{file}: {error.strerror}"
    return None


def backend_for(directory: str | os.PathLike[str]) -> Literal["posix", "kvikio"]:
    """Choose for a directory, and log it where kvikio is taken."""
    found = read(measured_file())
    choice = choose(found, setup_of(directory)) if found else Choice("posix", "")
    if choice.backend == "kvikio":
        logging.getLogger("tba").info("io_backend 'auto' takes kvikio for %s: %s", directory, choice.why)
    return choice.backend


def _key(setup: Setup) -> str:
    return f"{setup.place}, {setup.device}"


def _version(module: str) -> str:
    with suppress(OSError):
        return f"{module} {(_MODULES / module / 'version').read_text().strip()}"
    return ""
