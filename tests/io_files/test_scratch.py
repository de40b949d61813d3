"""Scratch file: no name, mode 0600, direct I/O where the file system has it, and nothing left where it has not."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from io_backends import StoreBroken, Syscalls
from io_backends._file.scratch import ScratchFile, open_scratch
from support.stores import Pieces

REAL = Syscalls()
TMPFILE = os.O_TMPFILE


class Opens:
    """`open` that refuses what `refuses` says with an errno, as file systems do, and remembers all it was asked."""

    def __init__(self, refuses: Callable[[int], int]) -> None:
        self._refuses = refuses
        self.asked: list[tuple[str, int, int]] = []
        self.open: set[int] = set()

    def __call__(self, path: str, flags: int, mode: int) -> int:
        self.asked.append((path, flags, mode))
        code = self._refuses(flags)
        if code:
            if flags & os.O_CREAT and code == errno.EINVAL:  # Linux makes the file before it refuses O_DIRECT
                os.close(os.open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(code, os.strerror(code))
        fd = os.open(path, flags, mode)
        self.open.add(fd)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)
        self.open.remove(fd)

    def syscalls(self) -> Syscalls:
        return Syscalls(open=self, close=self.close)


def is_tmpfile(flags: int) -> bool:
    return flags & TMPFILE == TMPFILE


def no_direct(flags: int) -> int:
    return errno.EINVAL if flags & os.O_DIRECT else 0


def no_tmpfile(code: int) -> Callable[[int], int]:
    return lambda flags: code if is_tmpfile(flags) else 0


def neither(flags: int) -> int:
    return errno.EOPNOTSUPP if is_tmpfile(flags) else no_direct(flags)


def assert_nameless(file: ScratchFile, directory: Path) -> None:
    status = os.fstat(file.fd)
    assert os.listdir(directory) == []
    assert status.st_nlink == 0
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(file.fd)


@pytest.mark.parametrize(
    ("refuses", "direct"),
    [
        (lambda flags: 0, True),
        (no_tmpfile(errno.EOPNOTSUPP), True),
        (no_tmpfile(errno.EISDIR), True),
        (no_tmpfile(errno.ENOENT), True),
        (no_direct, False),
        (neither, False),
    ],
    ids=["all", "no O_TMPFILE", "unknown O_TMPFILE", "older kernel", "no O_DIRECT", "neither"],
)
def test_a_file_without_a_name_on_any_file_system(refuses: Callable[[int], int], direct: bool, scratch: Path) -> None:
    opens = Opens(refuses)
    mask = os.umask(0)  # the mode must not depend on the user's mask
    try:
        file = open_scratch(str(scratch), opens.syscalls())
    finally:
        os.umask(mask)
    assert file.direct is direct
    assert (file.alignment in (512, 4096)) is direct
    assert_nameless(file, scratch)
    assert opens.open == {file.fd}
    if not direct:
        assert os.pwrite(file.fd, b"any", 1) == 3
    os.close(file.fd)


def test_the_file_is_created_exclusively_where_it_needs_a_name(scratch: Path) -> None:
    opens = Opens(no_tmpfile(errno.EOPNOTSUPP))
    names = set()
    for _ in range(2):
        os.close(open_scratch(str(scratch), opens.syscalls()).fd)
        path, flags, mode = opens.asked[-1]
        assert flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
        assert (Path(path).parent, mode) == (scratch, 0o600)
        names.add(path)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("strict_about", "least", "alignment"),
    [
        *itertools.product(["address", "length", "offset", "all"], [512], [512]),
        *itertools.product(["address", "length", "offset", "all"], [1024, 4096], [4096]),
        *itertools.product(["length", "offset", "all"], [8192], [1]),  # an address may be such a multiple by chance
    ],
)
def test_the_alignment_is_found_by_trying(strict_about: str, least: int, alignment: int, scratch: Path) -> None:
    """A device whose blocks are larger refuses addresses, offsets or lengths that are not multiples of its own."""

    def strict(real: Callable[[int, Pieces, int], int]) -> Callable[[int, Pieces, int], int]:
        def call(fd: int, pieces: Pieces, offset: int) -> int:
            values = {
                "address": [address for address, _ in pieces],
                "length": [length for _, length in pieces],
                "offset": [offset],
            }
            checked = values.get(strict_about) or [value for kind in values.values() for value in kind]
            if any(value % least for value in checked):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, pieces, offset)

        return call

    opens = Opens(lambda flags: 0)
    syscalls = dataclasses.replace(opens.syscalls(), pwritev=strict(REAL.pwritev), preadv=strict(REAL.preadv))
    file = open_scratch(str(scratch), syscalls)
    assert file.alignment == alignment
    assert opens.open == {file.fd}
    os.close(file.fd)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_trial_that_comes_short_is_no_direct_io(call: str, scratch: Path) -> None:
    file = open_scratch(str(scratch), dataclasses.replace(REAL, **{call: lambda fd, pieces, offset: 100}))
    assert file == (file.fd, 1)
    os.close(file.fd)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENOSPC])
def test_a_directory_that_refuses_is_named(code: int, scratch: Path) -> None:
    opens = Opens(lambda flags: code)
    with pytest.raises(StoreBroken, match=f"cannot make a scratch file in '{scratch}'.*{os.strerror(code)}") as caught:
        open_scratch(str(scratch), opens.syscalls())
    assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(scratch) == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), StoreBroken),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), StoreBroken),
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt),
    ],
)
def test_a_trial_that_fails_leaves_no_descriptor(
    error: BaseException, raised: type[BaseException], scratch: Path
) -> None:
    def fail(fd: int, pieces: Pieces, offset: int) -> int:
        raise error

    opens = Opens(lambda flags: 0)
    with pytest.raises(raised, match=str(error.args[-1])):
        open_scratch(str(scratch), dataclasses.replace(opens.syscalls(), pwritev=fail))
    assert len(opens.asked) == 1
    assert opens.open == set()


def test_a_name_that_cannot_be_removed_leaves_no_descriptor(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    opens = Opens(no_tmpfile(errno.EOPNOTSUPP))
    with pytest.raises(StoreBroken, match=os.strerror(errno.EROFS)):
        open_scratch(str(scratch), opens.syscalls())
    assert opens.open == set()


def test_a_directory_moved_to_another_file_system_is_refused_by_both_numbers(scratch: Path) -> None:
    closed: list[int] = []

    def close(fd: int) -> None:
        closed.append(fd)
        REAL.close(fd)

    device = scratch.stat().st_dev
    REAL.close(open_scratch(str(scratch), REAL, device).fd)
    other = os.makedev(os.major(device) + 1, 7)
    with pytest.raises(StoreBroken) as raised:
        open_scratch(str(scratch), Syscalls(close=close), other)
    for part in (
        str(scratch),
        f"{os.major(device) + 1}:7 when",
        f"{os.major(device)}:{os.minor(device)} now",
        "put it",
    ):
        assert part in str(raised.value)
    assert len(closed) == 1


def test_a_file_may_have_another_number_than_its_directory(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where file systems are laid over one another."""
    device = scratch.stat().st_dev
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_dev=device + 1))
        fd = open_scratch(str(scratch), REAL, device).fd
    REAL.close(fd)
