"""KvikioStore over the real kvikio: `test_kvikio.py` runs this in a process whose CUDA driver is the double."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import kvikio
import kvikio.defaults
import numpy as np
import pytest

from io_backends import Location, ShortTransfer, Store, StoreBroken, StoreClosed, Syscalls
from io_backends._stores.kvikio import THRESHOLD_BYTES, KvikioStore
from io_backends.testing import FaultyStore, check_store
from support.kvikio_double.fake import OnDevice, device_buffer
from support.stores import WAIT_S, Bytes, buffer_of, empty_at, in_child, pattern_at, read_back, write

SIZES = [0, 1, 511, 4096, THRESHOLD_BYTES - 1, THRESHOLD_BYTES, THRESHOLD_BYTES + 1, (9 << 20) + 3]

double = ctypes.CDLL("libcuda.so.1")
double.double_declare_device.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
double.double_copied_bytes.restype = ctypes.c_size_t
double.double_default_waits.restype = ctypes.c_size_t


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KvikioStore]:
    store = KvikioStore(tmp_path)
    yield store
    store.close()


@pytest.fixture
def device() -> Iterator[Bytes]:
    """Memory that kvikio believes to be on a device."""
    memory = pattern_at(0, 24 << 20)
    assert double.double_declare_device(memory.ctypes.data, memory.nbytes) == 0
    yield memory
    double.double_forget_devices()


@pytest.mark.parametrize("threshold", [THRESHOLD_BYTES, 0, 1 << 40])
@pytest.mark.parametrize("faulty", [False, True])
def test_the_contract_of_a_store_is_kept(tmp_path: Path, threshold: int, faulty: bool) -> None:
    def make() -> Store:
        store = KvikioStore(tmp_path, threshold_bytes=threshold)
        return FaultyStore(store, lambda *_: None) if faulty else store

    check_store(make)


def test_the_mode_is_what_kvikio_says(store: KvikioStore) -> None:
    assert store.mode == "compat"
    assert kvikio.defaults.is_compat_mode_preferred()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 512, 77])
def test_a_round_trip_in_device_memory(store: KvikioStore, device: Bytes, nbytes: int, offset: int) -> None:
    source, target = device[offset : offset + nbytes], device[(12 << 20) : (12 << 20) + nbytes]
    kept = source.copy()
    copied, waits = double.double_copied_bytes(), double.double_default_waits()
    ticket = store.write(OnDevice(source))
    assert ticket.wait(WAIT_S)
    assert ticket.location.skew == 0
    assert double.double_copied_bytes() - copied == nbytes  # kvikio took it for a device's, whatever the size
    source[:] = 0
    assert store.read(ticket.location, OnDevice(target)).wait(WAIT_S)
    assert double.double_copied_bytes() - copied == 2 * nbytes
    assert double.double_default_waits() - waits <= 2  # one for each transfer
    assert np.array_equal(target, kept)


def test_bytes_cross_between_device_and_host(store: KvikioStore, device: Bytes) -> None:
    for nbytes in (1000, (2 << 20) + 5):
        source = device[64 : 64 + nbytes]
        ticket = store.write(device_buffer(source))
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), source)
        array, target = pattern_at(99, nbytes, 1), device[(12 << 20) + 512 : (12 << 20) + 512 + nbytes]
        assert store.read(write(store, array).location, device_buffer(target)).wait(WAIT_S)
        assert np.array_equal(target, array)


def test_the_file_has_no_name_and_goes_with_the_store(store: KvikioStore, tmp_path: Path) -> None:
    def mine() -> list[str]:
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if os.path.islink(link) and str(tmp_path) in os.readlink(link)]

    write(store, pattern_at(0, 5000))
    assert os.listdir(tmp_path) == []
    assert mine()
    assert all(link.endswith(" (deleted)") for link in mine())
    assert store.allocated_bytes() >= 5000
    store.close()
    assert mine() == []
    assert store.allocated_bytes() == 0


def test_space_is_reused_and_trimmed(store: KvikioStore) -> None:
    for count in (15, *[1] * 25):  # a big step and small ones
        tickets = [write(store, array) for array in [pattern_at(0, 10 << 20)] * count]
        assert store.used_bytes == count * (10 << 20)
        for ticket in tickets:
            store.discard(ticket)
        store.trim()
    write(store, pattern_at(0, 10))  # behind the trim in the queue
    assert store.allocated_bytes() < 50 << 20  # of 150


@pytest.mark.parametrize("nbytes", [5000, 9 << 20])
def test_an_error_of_kvikio_or_the_system_reaches_the_waiter(tmp_path: Path, nbytes: int) -> None:
    """The real one: the file may not grow beyond a limit."""
    store = KvikioStore(tmp_path, syscalls=Syscalls(fallocate=lambda *_: None))
    first = write(store, pattern_at(0, 3000, 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StoreBroken, match=f"transfer of {nbytes} bytes.*File too large"):
            write(store, pattern_at(0, nbytes))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert np.array_equal(read_back(store, first), pattern_at(0, 3000, 1))
    array = pattern_at(0, nbytes)
    assert np.array_equal(read_back(store, write(store, array)), array)
    store.close()


def test_bytes_that_are_not_there(store: KvikioStore) -> None:
    write(store, pattern_at(0, 10))
    beyond = Location(1 << 40, 4096, 4000, 0)
    with pytest.raises(ShortTransfer, match="0 of 4000 bytes"):
        store.read(beyond, buffer_of(empty_at(0, 4000))).wait(WAIT_S)
    beyond = Location(1 << 40, 2 << 20, 2 << 20, 0)
    with pytest.raises(StoreBroken, match="EOF"):
        store.read(beyond, buffer_of(empty_at(0, 2 << 20))).wait(WAIT_S)


def test_settings_are_made_unless_the_environment_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KvikioStore(tmp_path, threads=3, threshold_bytes=12345).close()
    assert kvikio.defaults.get("gds_threshold") == 12345
    assert kvikio.defaults.get("num_threads") >= 3
    assert kvikio.defaults.get("auto_direct_io_read")
    monkeypatch.setenv("KVIKIO_GDS_THRESHOLD", "12345")
    KvikioStore(tmp_path).close()
    assert kvikio.defaults.get("gds_threshold") == 12345


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_nothing_of_it(store: KvikioStore) -> None:
    array = pattern_at(0, 3 << 20)
    ticket = write(store, array)
    descriptors = [store.open().fd, store.open().handle.fileno()]

    def child() -> str:
        for fd in descriptors:
            try:
                os.fstat(fd)
            except OSError:
                continue
            return "a descriptor is open"
        try:
            store.write(buffer_of(array))
        except StoreClosed:
            return "closed"
        return "open"

    assert in_child(child) == "closed"
    assert np.array_equal(read_back(store, ticket), array)
