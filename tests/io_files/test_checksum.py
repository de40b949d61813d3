"""Checksums: a changed bit anywhere, or by sample a changed page, is found on reading and named; else all is alike."""

from __future__ import annotations

import builtins
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from io_backends import Corrupted, PosixStore, Syscalls
from io_backends._file import checksum
from support.stores import Pieces, pattern_at, read_back, write

MIB = 1 << 20
PAGE = 4096
REAL = Syscalls()


class Flipping:
    """Reads after which the bits of `masks` are inverted: {offset in the file: mask}."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def __call__(self, fd: int, pieces: Pieces, offset: int) -> int:
        moved = REAL.preadv(fd, pieces, offset)
        begin = offset
        for address, length in pieces:
            for where, mask in self.masks.items():
                if begin <= where < begin + length:
                    ctypes.c_ubyte.from_address(address + where - begin).value ^= mask
            begin += length
        return moved


@pytest.fixture
def flipping() -> Flipping:
    return Flipping()


@pytest.fixture
def store(scratch: Path, flipping: Flipping) -> Iterator[PosixStore]:
    store = PosixStore(scratch, checksum=True, threads=3, syscalls=Syscalls(preadv=flipping))
    yield store
    store.close()


def test_the_digest_is_xxh3_over_the_memory_itself() -> None:
    array = pattern_at(3, 100_000)
    for begin, end in ((0, 100_000), (1, 2), (77, 4000)):
        found = checksum.every_byte()(array.ctypes.data + begin, end - begin)
        assert found == xxhash.xxh3_64_intdigest(array[begin:end].tobytes())


@pytest.mark.parametrize("nbytes", [1, 5000, 4 * MIB + 3, 17 * MIB + 11])
@pytest.mark.parametrize("padded", [True, False])
def test_a_flipped_bit_is_found_and_named(store: PosixStore, flipping: Flipping, nbytes: int, padded: bool) -> None:
    array = pattern_at(100, nbytes)
    ticket = write(store, array)
    location = ticket.location
    for place in {0, nbytes // 2, nbytes - 1}:
        flipping.masks = {location.offset + location.skew + place: 1 << place % 8}
        with pytest.raises(Corrupted) as caught:
            read_back(store, ticket, padded=padded)
        text = str(caught.value)
        assert f"{nbytes} bytes, read at offset {location.offset}" in text
        assert f"written with {location.checksum:016x}" in text
        assert str(store.directory) in text
    flipping.masks = {}
    assert np.array_equal(read_back(store, ticket, padded=padded), array)


def test_a_bit_of_the_padding_is_nobody_s(store: PosixStore, flipping: Flipping) -> None:
    array = pattern_at(100, 5000)
    ticket = write(store, array)
    flipping.masks = {ticket.location.offset + byte: 0xFF for byte in (0, 99 % store.alignment, 100 + 5000)}
    if store.alignment > 100:
        assert np.array_equal(read_back(store, ticket), array)


@pytest.mark.parametrize("nbytes", [1, 31, 32, 5000, 4 * MIB + 3])
@pytest.mark.parametrize("skew", [0, 100, 4095])
def test_by_sample_any_page_is_found_that_holds_other_bytes(
    scratch: Path, flipping: Flipping, skew: int, nbytes: int
) -> None:
    """The first, the last and some between, each with all its bytes inverted, as when its write was lost."""
    store = PosixStore(scratch, syscalls=Syscalls(preadv=flipping))
    array = pattern_at(skew, nbytes)
    ticket = write(store, array)
    location = ticket.location
    first = location.offset // PAGE
    last = (location.offset + location.skew + nbytes - 1) // PAGE
    for page in {first, last, *range(first, last + 1, 97)}:
        flipping.masks = dict.fromkeys(range(page * PAGE, (page + 1) * PAGE), 0xFF)
        with pytest.raises(Corrupted, match=f"written with {location.checksum:016x}"):
            read_back(store, ticket)
    flipping.masks = {}
    assert np.array_equal(read_back(store, ticket), array)
    store.close()


def test_by_sample_little_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(checksum.zlib, "crc32", lambda data, start=0: hashed.append(len(data)) or start)
    array = pattern_at(3, 4 * MIB)
    checksum.sampled(array.ctypes.data, array.nbytes)
    assert sum(hashed) < array.nbytes / 100


def test_a_missing_package_is_named(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def absent(name: str, *arguments: Any) -> Any:
        if name == "xxhash":
            raise ImportError("no module")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match="checksum=True needs the package xxhash: pip install xxhash"):
        PosixStore(scratch, checksum=True)
    PosixStore(scratch).close()
