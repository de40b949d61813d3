"""Device probe: the devices that PyTorch sees, and how kvikio would transfer, found by trying."""

from __future__ import annotations

import importlib
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from io_backends import KvikioStore

from ..._device.kinds import available, has_streams


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device and its memory; `error` is why it cannot be used."""

    kind: str = "cuda"
    index: int
    name: str
    total_bytes: int
    free_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class KvikioFacts:
    """Version of kvikio, and how it moves bytes to a storage path: "gds" (from GPU to disk), "compat" (through the
    host), None without a path to try. `error` is why it cannot be used."""

    version: str | None = None
    mode: str | None = None
    error: str | None = None


def probe_devices() -> tuple[DeviceFacts, ...]:
    """Look at every device that PyTorch sees. Failures are reported in the facts, not raised."""
    found = available()
    if found is None or not has_streams(found[0]):
        return ()
    return tuple(_probe_device(*found, index) for index in range(found[1].device_count()))


def probe_kvikio(directory: str | None) -> KvikioFacts:
    """Import kvikio and see how it would move bytes to a scratch file in `directory`; the file is deleted."""
    version = None
    try:
        version = str(getattr(importlib.import_module("kvikio"), "__version__", "unknown"))
        if directory is None:
            return KvikioFacts(version=version)
        with closing(KvikioStore(directory)) as store:
            return KvikioFacts(version=version, mode=store.mode)
    except ModuleNotFoundError as error:
        missing = "not installed" if error.name == "kvikio" else f"{error.name} is not installed"
        return KvikioFacts(version=version, error=missing)
    except Exception as error:  # it loads shared libraries, and every loader has its own errors
        text = str(error)
        if "libcuda.so" in text:
            return KvikioFacts(version=version, error="the NVIDIA driver (libcuda.so.1) is not installed")
        return KvikioFacts(version=version, error=f"it cannot be used: {(text.splitlines() or ['?'])[0]}")


def _probe_device(kind: str, module: Any, index: int) -> DeviceFacts:
    properties = module.get_device_properties(index)
    facts = DeviceFacts(kind=kind, index=index, name=properties.name, total_bytes=properties.total_memory)
    try:
        return replace(facts, free_bytes=module.mem_get_info(index)[0])
    except RuntimeError as problem:  # the device has no memory left, or another process holds it exclusively
        return replace(facts, error=str(problem).splitlines()[0])
