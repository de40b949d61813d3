"""KvikioStore: over the real kvikio where it is installed, its driver a test double; and its own logic anywhere."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from io_backends import ShortTransfer, StoreBroken, StoreFull
from io_backends._stores.kvikio import TASK_BYTES, THRESHOLD_BYTES, KvikioStore
from support.kvikio_double import build
from support.kvikio_double.fake import Kvikio, device_buffer
from support.stores import WAIT_S, buffer_of, in_child, pattern_at, read_back, write

TESTS = Path(__file__).parents[1]
MIB = 1 << 20

# -- the real one ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double, where it can be built and kvikio imported."""
    if build.compiler() is None:
        pytest.skip("no C compiler (cc) to build the test double of libcuda.so.1 with")
    library = build.build(tmp_path_factory.mktemp("libcuda"))
    tried = build.python(library, ["-c", "import kvikio"])
    if tried.returncode:
        pytest.skip(f"kvikio cannot be imported: {tried.stderr.strip().splitlines()[-1]}")
    return library


def test_the_double_has_every_function_that_kvikio_looks_up(tmp_path: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C compiler (cc)")
    defined = build.build(tmp_path).read_bytes()
    names = re.findall(rb"\x00(cu[A-Z][A-Za-z]+(?:_v[0-9])?)(?=\x00)", defined)
    assert len(set(names)) == 35


@pytest.mark.exhaustive
def test_the_real_kvikio_over_the_double(library: Path, scratch: Path) -> None:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={scratch / 'base'}"]
    done = build.python(library, [*arguments, str(TESTS / "support" / "kvikio_double" / "checks.py")], cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[0-9]+ passed in", done.stdout.splitlines()[-1]), done.stdout


def test_without_a_driver_the_first_transfer_says_so(library: Path, scratch: Path) -> None:
    try_it = (
        "import sys; from io_backends import Buffer, KvikioStore, StoreBroken\n"
        "import numpy as np; array = np.zeros(100, np.uint8); store = KvikioStore(sys.argv[1])\n"
        "try: store.write(Buffer(array.ctypes.data, 100, array)).wait(60)\n"
        "except StoreBroken as error: print(error)\n"
        "store.close()\n"
    )
    done = build.python(None, ["-c", try_it, str(scratch)], cwd=TESTS.parent)
    if not done.stdout and done.returncode == 0:
        pytest.skip("there is a driver here")
    assert "it needs /proc, and libcuda.so.1 of the NVIDIA driver" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


# -- its own logic, over a fake ----------------------------------------------------------------------------------------


@contextmanager
def store_over(fake: Kvikio, scratch: Path, **options: int) -> Iterator[KvikioStore]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake.install(monkeypatch)
        store = KvikioStore(scratch, **options)
        yield store
        store.close()


def test_without_kvikio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ImportError, match=r"needs kvikio.*pip install 'tba-offload\[gds\]'"):
        KvikioStore(scratch)


@pytest.mark.parametrize(
    ("gds", "accepts", "mode", "opened"),
    [
        (True, True, "gds", ["open OFF"]),
        (True, False, "compat", ["open AUTO"]),  # asked with OFF first, which fails
        (False, True, "compat", ["open AUTO"]),
    ],
)
def test_the_mode_is_asked_for_the_very_file(
    scratch: Path, gds: bool, accepts: bool, mode: str, opened: list[str]
) -> None:
    fake = Kvikio(gds=gds, accepts=accepts)
    with store_over(fake, scratch) as store:
        assert store.mode == mode
        assert store.threshold_bytes == (THRESHOLD_BYTES if mode == "gds" else sys.maxsize)
        assert [event for event in fake.events if event.startswith("open")] == opened
        assert fake.settings["compat_mode"].name == "AUTO"  # for everybody else as it was
        array = pattern_at(64, 9 * MIB)
        assert np.array_equal(read_back(store, write(store, array)), array)


def test_small_host_transfers_never_reach_kvikio(scratch: Path) -> None:
    fake = Kvikio()
    with store_over(fake, scratch, threshold_bytes=1000) as store:
        assert store.mode == "gds"
        before = fake.pieces
        for nbytes in (1, 999):
            array = pattern_at(5, nbytes)
            assert np.array_equal(read_back(store, write(store, array)), array)
        assert fake.pieces == before
        read_back(store, write(store, pattern_at(5, 1000)))
        assert fake.pieces == before + 2
        write_device = store.write(device_buffer(pattern_at(0, 10)))  # kvikio's own threshold is the same
        assert write_device.wait(WAIT_S)
        assert fake.pieces == before + 3
        assert fake.settings["gds_threshold"] == 1000


def test_pieces_are_cut_at_pages_of_the_file(scratch: Path) -> None:
    fake = Kvikio()
    with store_over(fake, scratch) as store:
        assert store.mode == "gds"
        before = fake.pieces
        array = pattern_at(100, 2 * TASK_BYTES)
        ticket = write(store, array)
        assert fake.pieces == before + 3  # 100 bytes short of two whole ones
        assert np.array_equal(read_back(store, ticket), array)


def test_device_memory_is_one_piece_and_waits_for_its_stream_once(scratch: Path) -> None:
    fake = Kvikio()
    with store_over(fake, scratch) as store:
        assert store.mode == "gds"
        before = fake.pieces
        source, target = pattern_at(0, 3 * TASK_BYTES + 5), pattern_at(0, 3 * TASK_BYTES + 5, 1)
        ticket = store.write(device_buffer(source))
        assert ticket.wait(WAIT_S)
        assert store.read(ticket.location, device_buffer(target)).wait(WAIT_S)
        assert fake.pieces == before + 2
        assert fake.task_bytes[-2:] == [source.nbytes, source.nbytes]
        assert np.array_equal(source, target)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (100, ShortTransfer, "100 of .* bytes moved"),
        (RuntimeError("POSIX error on pwrite: No space left on device"), StoreFull, "no space left"),
        (OSError(28, "nothing left"), StoreFull, "no space left"),
        (RuntimeError("cuFile error: internal"), StoreBroken, "cuFile error: internal"),
    ],
)
def test_a_piece_that_fails_fails_the_transfer_after_all_have_ended(
    scratch: Path, bad: int, fault: int | Exception, error: type[Exception], text: str
) -> None:
    fake = Kvikio()
    with store_over(fake, scratch) as store:
        assert store.mode == "gds"
        first = fake.pieces
        fake.fault = lambda number: fault if number == first + bad else None
        array = pattern_at(0, 3 * TASK_BYTES)
        ticket = store.write(buffer_of(array))
        with pytest.raises(error, match=text):
            ticket.wait(WAIT_S)
        assert fake.events[-3:] == [f"piece {first + number}" for number in range(3)]
        store.discard(ticket)
        assert store.used_bytes == 0
        assert np.array_equal(read_back(store, write(store, array)), array)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_call_the_driver(scratch: Path) -> None:
    fake = Kvikio()
    with store_over(fake, scratch) as store:
        write(store, pattern_at(0, 10))
        events = list(fake.events)
        assert in_child(lambda: str(fake.events == events)) == "True"


def test_no_descriptor_is_left_when_the_file_cannot_be_used(scratch: Path) -> None:
    fake = Kvikio()
    fake.fault = lambda number: RuntimeError("libcuda.so.1: cannot open shared object file")
    with store_over(fake, scratch) as store:
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(StoreBroken, match=r"libcuda\.so\.1: cannot open"):
                store.write(buffer_of(pattern_at(0, 10))).wait(WAIT_S)
        assert set(os.listdir("/proc/self/fd")) == before
