"""Device memory: recognised by its owner, handed over without a copy, registered within a budget while it is held."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from io_backends._device_memory import Registry, on_device, view
from support.stores import WAIT_S, buffer_of, empty_at, pattern_at

KIB = 1024


class Driver:
    """Registers what it is asked to, unless it `refuses`, and says what it was asked."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False

    def register(self, array: Any) -> None:
        if self.refuses:
            raise RuntimeError("no space in the window")
        interface = array.__cuda_array_interface__
        assert interface["data"][0] not in self.registered
        self.registered[interface["data"][0]] = interface["shape"][0]

    def deregister(self, array: Any) -> None:
        del self.registered[array.__cuda_array_interface__["data"][0]]

    def registry(self, budget_bytes: int) -> Registry:
        return Registry(self.register, self.deregister, budget_bytes)


def test_a_view_of_host_memory_is_that_memory() -> None:
    array = pattern_at(5, 1000)
    seen = view(array.ctypes.data + 10, 900, cuda=False)
    assert isinstance(seen, np.ndarray)
    assert (seen.ctypes.data, seen.nbytes, seen.dtype) == (array.ctypes.data + 10, 900, np.uint8)
    seen[:] = 7
    assert bytes(array[9:12]) == bytes([pattern_at(5, 1000)[9], 7, 7])


def test_a_view_of_device_memory_names_it() -> None:
    seen = view(123456, 900, cuda=True)
    assert seen.__cuda_array_interface__["data"] == (123456, False)
    assert (seen.__cuda_array_interface__["shape"], seen.__cuda_array_interface__["typestr"]) == ((900,), "|u1")
    assert not hasattr(seen, "__array_interface__")


def test_which_owners_are_on_a_device() -> None:
    class Shy:
        """As a tensor on a device that requires grad."""

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("detach it first")

    assert on_device(Shy())
    assert on_device(view(4096, 1, cuda=True))
    tensors = [torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)]
    for host in (None, object(), np.zeros(3), memoryview(bytearray(3)), *tensors):
        assert not on_device(host)


def test_what_is_registered_is_held_until_it_makes_way() -> None:
    driver = Driver()
    registry = driver.registry(10 * KIB)
    first, second = empty_at(0, 6 * KIB), empty_at(0, 6 * KIB)
    watched, address = weakref.ref(first), second.ctypes.data
    assert registry.add(buffer_of(first))
    del first
    assert watched() is not None  # the driver would move bytes to pages that are somebody else's by then
    assert registry.add(buffer_of(second))
    assert watched() is None
    assert driver.registered == {address: 6 * KIB}
    assert registry.registered_bytes == 6 * KIB
    registry.clear()
    registry.clear()
    assert driver.registered == {}


def test_what_is_in_use_does_not_make_way() -> None:
    driver = Driver()
    registry = driver.registry(10 * KIB)
    first, second = empty_at(0, 6 * KIB), empty_at(0, 6 * KIB)
    registry.add(buffer_of(first))
    with registry.using(first.ctypes.data + 100):
        assert not registry.add(buffer_of(second))
        assert list(driver.registered) == [first.ctypes.data]
    with registry.using(second.ctypes.data):  # not registered: nothing to keep
        pass
    assert registry.add(buffer_of(second))
    assert list(driver.registered) == [second.ctypes.data]


def test_the_one_not_used_for_the_longest_makes_way() -> None:
    driver = Driver()
    registry = driver.registry(3 * KIB)
    arrays = [empty_at(0, KIB) for _ in range(4)]
    for array in arrays[:3]:
        assert registry.add(buffer_of(array))
    with registry.using(arrays[0].ctypes.data):
        pass
    assert registry.add(buffer_of(arrays[3]))
    assert sorted(driver.registered) == sorted(arrays[number].ctypes.data for number in (0, 2, 3))


def test_what_cannot_be_registered_changes_nothing() -> None:
    driver = Driver()
    registry = driver.registry(2 * KIB)
    array = empty_at(0, KIB)
    driver.refuses = True
    assert not registry.add(buffer_of(array))
    driver.refuses = False
    assert registry.add(buffer_of(array))
    assert registry.add(buffer_of(array))  # once is enough
    assert not registry.add(buffer_of(array[:10]))  # another size at the same place: one of the two is no allocation
    assert not registry.add(buffer_of(empty_at(0, 3 * KIB)))
    assert driver.registered == {array.ctypes.data: KIB}


def test_many_threads_never_lose_what_they_use() -> None:
    driver = Driver()
    registry = driver.registry(4 * KIB)
    arrays = [empty_at(0, KIB) for _ in range(8)]
    used, lost = [0], list[int]()

    def work(number: int) -> None:
        for turn in range(200):
            address = arrays[number].ctypes.data  # nobody else uses this one
            registry.add(buffer_of(arrays[number]))
            with registry.using(address):
                allocation = registry._allocations.get(address)
                if allocation is None or not allocation.users:
                    continue  # it made way before it was used
                used[0] += 1
                registry.add(buffer_of(arrays[4 + (number + turn) % 4]))  # others make way, this one not
                if address not in driver.registered:
                    lost.append(address)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert lost == []
    assert used[0] > 0
    assert sum(driver.registered.values()) == registry.registered_bytes <= 4 * KIB
    assert all(not allocation.users for allocation in registry._allocations.values())


@pytest.mark.parametrize("budget_bytes", [0, KIB - 1])
def test_a_budget_too_small_for_anything(budget_bytes: int) -> None:
    driver = Driver()
    assert not driver.registry(budget_bytes).add(buffer_of(empty_at(0, KIB)))
    assert driver.registered == {}
