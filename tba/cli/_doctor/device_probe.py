"""Device probe: speed of copies between a CUDA device and pinned memory, and the mode of kvikio, found by trying."""

from __future__ import annotations

import importlib
import time
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from io_backends import KvikioStore

_COPY_BYTES = 64 << 20
_COPIES = 8


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One CUDA device. Rates are those of copies with pinned memory, in bytes per second; None where not measured."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int = 0
    to_device_bytes_per_s: float | None = None
    to_host_bytes_per_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class KvikioFacts:
    """Version of kvikio, and how it moves bytes to a storage path: "gds" (from GPU to disk), "compat" (through the
    host), None where there was no path to ask about. `error` is why it cannot be used."""

    version: str | None = None
    mode: str | None = None
    error: str | None = None


def probe_devices() -> tuple[DeviceFacts, ...]:
    """Try every CUDA device that PyTorch sees. Failures are reported in the facts, not raised."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_probe_device(index) for index in range(torch.cuda.device_count()))


def probe_kvikio(directory: str | None) -> KvikioFacts:
    """Import kvikio and ask how it would move bytes to a scratch file in `directory`; the file does not stay."""
    version = None
    try:
        version = str(getattr(importlib.import_module("kvikio"), "__version__", "unknown"))
        if directory is None:
            return KvikioFacts(version=version)
        with closing(KvikioStore(directory)) as store:
            return KvikioFacts(version=version, mode=store.mode)
    except ModuleNotFoundError as error:
        missing = "kvikio is not installed" if error.name == "kvikio" else str(error)
        return KvikioFacts(version=version, error=missing)
    except Exception as error:  # it loads shared libraries, and each loader has errors of its own
        return KvikioFacts(version=version, error=f"{type(error).__name__}: {error}".splitlines()[0])


def _probe_device(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    facts = DeviceFacts(index=index, name=properties.name, total_bytes=properties.total_memory)
    try:
        facts = replace(facts, free_bytes=torch.cuda.mem_get_info(index)[0])
        to_device, to_host = _copy_rates(torch.device("cuda", index))
        return replace(facts, to_device_bytes_per_s=to_device, to_host_bytes_per_s=to_host)
    except RuntimeError as problem:  # pinning refused, no memory left on the device, wrong bytes
        return replace(facts, error=str(problem).splitlines()[0])


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Measure bytes per second to the device and back. Raises RuntimeError for lack of memory and for wrong bytes."""
    source = torch.empty(_COPY_BYTES // 8, dtype=torch.int64, pin_memory=True)
    source.random_(generator=torch.Generator().manual_seed(0))
    returned = torch.zeros_like(source, pin_memory=True)
    there = torch.zeros_like(source, device=device)
    there.copy_(source, non_blocking=True)  # the first copy sets things up
    returned.copy_(there, non_blocking=True)
    rates = _rate(there, source, device), _rate(returned, there, device)
    if not torch.equal(source, returned):
        raise RuntimeError(f"{_COPY_BYTES} bytes did not come back from {device} as they were sent")
    return rates


def _rate(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begun_s = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return _COPY_BYTES * _COPIES / (time.perf_counter() - begun_s)
