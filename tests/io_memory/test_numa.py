"""NUMA: the node is chosen from what the kernel says, and pages come from it where the kernel does that."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import pytest

from io_backends._memory import numa
from io_backends._memory.arena import HostArena
from io_backends._memory.pool import address_of


def tree(root: Path, devices: dict[str, str]) -> Path:
    for address, node in devices.items():
        (root / "bus/pci/devices" / address).mkdir(parents=True)
        (root / "bus/pci/devices" / address / "numa_node").write_text(node)
    return root


def test_a_machine_of_two_sockets(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, {"0000:17:00.0": "0\n", "0000:ca:00.0": "1\n", "0001:3b:00.0": "-1\n"})
    assert numa.device_node(numa.pci_address(0, 0x17, 0), sysfs) == 0
    assert numa.device_node(numa.pci_address(0, 0xCA, 0), sysfs) == 1
    assert numa.device_node("0000:CA:00.0", sysfs) == 1  # as some tools print it
    assert numa.device_node(numa.pci_address(1, 0x3B, 0), sysfs) is None  # the firmware does not say
    assert numa.device_node("0000:ff:00.0", sysfs) is None  # no such device


def test_a_system_without_numa(tmp_path: Path) -> None:
    assert numa.device_node("0000:17:00.0", tmp_path) is None
    assert numa.device_node("0000:17:00.0", tree(tmp_path, {"0000:17:00.0": "\n"})) is None


_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def preferred_node(address: int) -> int | None:
    """The node that the page at `address` is to come from, or None where it has no preference of its own."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None
    policy = ctypes.c_int()
    mask = (ctypes.c_ulong * (numa._MOST_NODES // numa._WORD_BITS))()
    call = (number, ctypes.byref(policy), mask, numa._MASK_BITS, ctypes.c_void_p(address))
    if numa._libc.syscall(*call, ctypes.c_ulong(2)) != 0 or policy.value != numa._MPOL_PREFERRED:
        return None
    return next((n for n in range(numa._MOST_NODES) if mask[n // numa._WORD_BITS] >> n % numa._WORD_BITS & 1), None)


def test_pages_come_from_the_node_asked_for() -> None:
    memory = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    view = memoryview(memory)
    if not numa.bind(address_of(view), view.nbytes, 0):
        pytest.skip("mbind(2) is not allowed here, or the kernel has no NUMA")
    assert preferred_node(address_of(view)) == 0
    assert preferred_node(address_of(view) + 15 * mmap.PAGESIZE) == 0
    other = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    assert preferred_node(address_of(other)) is None


def test_what_cannot_be_bound_is_told_and_left_as_it_was() -> None:
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    assert not numa.bind(address_of(memory), memory.nbytes, 1023)  # no machine here has so many
    assert not numa.bind(address_of(memory), memory.nbytes, 1 << 20)
    assert not numa.bind(address_of(memory) + 1, memory.nbytes, 0)
    assert preferred_node(address_of(memory)) is None


def test_an_arena_takes_its_pages_there_and_works_all_the_same_where_it_cannot() -> None:
    probe = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    can = numa.bind(address_of(probe), probe.nbytes, 0)
    for asked, found in ((0, 0 if can else None), (1023, None), (None, None)):
        view, buffer = HostArena(1 << 20, register=lambda *_: None, unregister=lambda _: None, node=asked).lease(1000)
        view[:] = b"\x05" * 1000
        assert preferred_node(buffer.address) == found
