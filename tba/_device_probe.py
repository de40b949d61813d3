"""Device probe: what a CUDA device, its PCIe link, pinned memory and kvikio can do, found by asking and by trying.

Link facts come from sysfs (`Documentation/ABI/testing/sysfs-bus-pci`): `current_link_width` counts lanes,
`current_link_speed` is in GT/s per lane. A link that idles may have lowered its speed, so it is read after the copies.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from io_backends import KvikioStore, pci_address

_COPY_BYTES = 64 << 20
_COPIES = 8
# Bits that arrive of bits sent: 8b/10b up to 5 GT/s, 128b/130b up to 32, 242 of 256 bytes of a flit from 64 on.
_ENCODING = ((5.0, 0.8), (32.0, 128 / 130), (float("inf"), 242 / 256))


class Link(NamedTuple):
    """A PCIe link as it is and as it could be: lanes, and gigatransfers per second and lane."""

    width: int
    max_width: int
    speed_gt_s: float
    max_speed_gt_s: float

    @property
    def bytes_per_s(self) -> float:
        """What the link carries each way, before the headers of packets."""
        share = next(share for least, share in _ENCODING if self.speed_gt_s <= least)
        return self.width * self.speed_gt_s * 1e9 * share / 8


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One CUDA device. Rates are those of copies with pinned memory, in bytes per second; None where not measured."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    bus_id: str
    link: Link | None = None
    to_device_bytes_per_s: float | None = None
    to_host_bytes_per_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class KvikioFacts:
    """Whether kvikio imports, and how it moves bytes to a storage path: "gds" (from GPU to disk), "compat" (through
    the host), None where there was no path to ask about. `error` is why it cannot be used."""

    version: str | None = None
    mode: str | None = None
    error: str | None = None


def probe_devices() -> tuple[DeviceFacts, ...]:
    """Every CUDA device that PyTorch sees; empty where there is none. What fails is told in the facts."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_probe_device(index) for index in range(torch.cuda.device_count()))


def probe_kvikio(
    directory: str | None,
    *,
    load: Callable[[str], object] = importlib.import_module,
    make: Callable[[str], KvikioStore] = KvikioStore,
) -> KvikioFacts:
    """Import kvikio and ask it how it would move bytes to a scratch file in `directory`, of which nothing is left."""
    version = None
    try:
        version = str(getattr(load("kvikio"), "__version__", "unknown"))
        if directory is None:
            return KvikioFacts(version=version)
        with closing(make(directory)) as store:
            return KvikioFacts(version=version, mode=store.mode)
    except ModuleNotFoundError as error:
        missing = "kvikio is not installed" if error.name == "kvikio" else str(error)
        return KvikioFacts(version=version, error=missing)
    except Exception as error:  # it loads shared libraries, and each loader has errors of its own
        return KvikioFacts(version=version, error=f"{type(error).__name__}: {error}".splitlines()[0])


def locked_memory_limit_bytes() -> int | None:
    """`RLIMIT_MEMLOCK`, the bytes a process may lock in memory; None for no limit, or where there is no such thing."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_link(bus_id: str, root: Path = Path("/sys/bus/pci/devices")) -> Link | None:
    """The link of a PCI device such as "0000:3b:00.0"; None where the system does not show it, as in most containers
    and virtual machines."""
    values = []
    for name in ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed"):
        try:
            number = re.match(r"\d+(\.\d+)?", (root / bus_id / name).read_text())
        except OSError:
            return None
        if number is None or not float(number[0]):  # "Unknown", or 0 lanes
            return None
        values.append(float(number[0]))
    width, max_width, speed, max_speed = values
    return Link(int(width), int(max_width), speed, max_speed)


def _probe_device(index: int) -> DeviceFacts:
    properties: Any = torch.cuda.get_device_properties(index)
    bus_id = pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    to_device = to_host = None
    error = None
    free_bytes = 0
    try:
        free_bytes, _ = torch.cuda.mem_get_info(index)
        to_device, to_host = _copy_rates(torch.device("cuda", index))
    except RuntimeError as problem:  # pinning refused, no memory left on the device, wrong bytes
        error = str(problem).splitlines()[0]
    return DeviceFacts(
        index=index,
        name=properties.name,
        total_bytes=properties.total_memory,
        free_bytes=free_bytes,
        bus_id=bus_id,
        link=read_link(bus_id),
        to_device_bytes_per_s=to_device,
        to_host_bytes_per_s=to_host,
        error=error,
    )


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second to the device and back. Raises RuntimeError where memory or bytes are wrong."""
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
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        took_s = float(start.elapsed_time(end)) / 1e3
        return _COPY_BYTES * _COPIES / took_s
