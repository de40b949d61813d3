"""NUMA: which memory node is next to a device, and how to place memory there.

Pinned memory on the far node costs most of a device's copy bandwidth if its link is faster than the one between the
sockets. `device_node` reads sysfs (Documentation/ABI/testing/sysfs-bus-pci). `bind` calls mbind(2), which refuses a
node without memory. If nothing is known, nothing is done.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

# mbind(2) has no function in libc; its number, from the kernel's tables.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1  # not MPOL_BIND: a full node must slow a copy down, not end the process
_MOST_NODES = 1024  # the kernel's maximum (CONFIG_NODES_SHIFT = 10)
_MASK_BITS = ctypes.c_ulong(_MOST_NODES + 1)  # the kernel subtracts one (get_nodes in mm/mempolicy.c)
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


def pci_address(domain: int, bus: int, device: int) -> str:
    """A device's name in sysfs, from CUDA's `pci_domain_id`, `pci_bus_id` and `pci_device_id`."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def device_node(address: str, sysfs: Path = Path("/sys")) -> int | None:
    """The memory node next to the PCI device `address` (`0000:17:00.0`), or None if unknown."""
    try:
        node = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say


def bind(address: int, nbytes: int, node: int) -> bool:
    """Take untouched pages of `[address, address + nbytes)` from `node` while it has any; False if that is refused.

    `address` is a multiple of the page size.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MOST_NODES:
        return False
    mask = (ctypes.c_ulong * (_MOST_NODES // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    call = (number, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_PREFERRED, mask)
    return bool(_libc.syscall(*call, _MASK_BITS, 0) == 0)
