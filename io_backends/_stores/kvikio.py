"""KvikioStore: GPUDirect Storage through kvikio, between device memory and a scratch file with no copy in host memory.

Without GPUDirect Storage (GDS), kvikio moves device memory through host memory. It always moves host memory with POSIX
calls. kvikio says for the opened file which path is in use; `mode` returns it.

Guarantees beyond those of `Store`:

1. A buffer's owner tells whether it is device memory: a CUDA tensor, or anything with `__cuda_array_interface__`, such
   as a CuPy array. The submitter waits, in `before`, for the kernels and copies that use it (with CuPy
   `before=cupy.cuda.get_current_stream().synchronize`); kvikio waits only for the default stream.
2. A transfer ends when all its pieces have, even if one failed: nothing touches the memory afterwards. Device memory is
   one piece: for each piece kvikio waits for the default stream, where PyTorch computes.
3. Nothing is left on disk when the process ends (`_file.scratch`). kvikio opens files by name, so it gets the name
   /proc/self/fd/N of a file that has no other.

Host path. A transfer below the threshold bypasses kvikio's threads: host memory goes by one plain write or read through
the page cache, device memory (by kvikio) through its pinned bounce buffer. Without GDS, copy device memory of any size
to host memory first (`threshold_bytes` says so): kvikio's bounce buffers hold up the default stream both ways.

kvikio's settings are process-wide. Those that the environment does not set (KVIKIO_*) are set here: as many threads as
this store has workers, the threshold, and direct I/O for host memory, because scratch data is read only once and gains
nothing from the page cache.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, NamedTuple

from .._buffer import Buffer, Location, on_device
from .._errors import ShortTransfer, StoreBroken, StoreError, StoreFull
from .._file.syscalls import Pieces, Syscalls, memory_at
from .._ticket import Ticket
from .file_store import FileStore

# Measured with kvikio 26.10 on 2 cores: a request through its threads takes 0.24 ms more than a system call. A write of
# 1 MiB takes 0.49 ms that way and 0.18 ms into the page cache; 2 MiB take 0.9 ms, and 5.8 ms as the cache throttles.
THRESHOLD_BYTES = 1 << 20
TASK_BYTES = 4 << 20  # kvikio's default for the pieces that its threads move
_PAGE_BYTES = mmap.PAGESIZE  # the unit of kvikio's direct I/O

Mode = Literal["gds", "compat"]


class _DeviceMemory:
    """`nbytes` at `address` on a CUDA device, in the form kvikio takes. Owns nothing."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class _File(NamedTuple):
    handle: Any  # kvikio.CuFile
    fd: int  # of the handle's own, without direct I/O
    mode: Mode


class KvikioStore(FileStore[_File]):
    """A `Store` on a file system, through kvikio.

    Args:
        directory: an existing, writable directory; for GDS on a file system that supports it (ext4, xfs, Lustre ...).
        threads: workers, and at least as many threads of kvikio.
        threshold_bytes: smaller transfers take the host path.
        capacity_bytes: most that may be stored at once; a write beyond it fails with `StoreFull`. None: what the disk
            has.
        timeout_s: a wait fails with `StoreStalled` if no byte has moved for this long; None for never.
        syscalls: replaced in tests.
        device: `st_dev` of the file system that the directory was on when it was checked; no other is used.

    Raises:
        ImportError: kvikio is not installed, or a library that it needs is missing.
    """

    alignment = _PAGE_BYTES
    takes_device_memory = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        threads: int = 2,
        threshold_bytes: int = THRESHOLD_BYTES,
        capacity_bytes: int | None = None,
        timeout_s: float | None = 60.0,
        syscalls: Syscalls | None = None,
        device: int | None = None,
    ) -> None:
        self._host_path_bytes = threshold_bytes
        self._device_bytes: int | None = None
        self._kvikio, self._defaults, self._driver = _import_kvikio()
        _configure(self._defaults, threads, threshold_bytes)
        super().__init__(
            directory,
            "tba-kvikio",
            threads=threads,
            capacity_bytes=capacity_bytes,
            timeout_s=timeout_s,
            syscalls=syscalls,
            device=device,
        )

    @property
    def mode(self) -> Mode:
        """`gds`: device memory goes straight to the disk; `compat`: through host memory. Makes the file."""
        return self.open().mode

    @property
    def threshold_bytes(self) -> int:
        """As given with GDS; without it beyond any size. Makes the file; a failure to do so is the next transfer's."""
        if self._device_bytes is None:  # asked once, for every tensor asks
            self._device_bytes = sys.maxsize
            with suppress(StoreError):
                if self.mode == "gds":
                    self._device_bytes = self._host_path_bytes
        return self._device_bytes

    # -- on the workers ------------------------------------------------------------------------------------------

    def _write(self, ticket: Ticket) -> None:
        file, buffer = self.open(), ticket.buffer
        assert buffer is not None
        # Host memory keeps its offset within a page, so direct I/O needs no copy. A device's driver needs whole pages.
        location = self._place(ticket, file.fd, 1 if on_device(buffer.owner) else _PAGE_BYTES)
        if location.length:
            self._transfer(file, buffer, location, self._syscalls.pwritev, file.handle.pwrite)
        ticket.moved_bytes = ticket.nbytes

    def _read(self, ticket: Ticket) -> None:
        file, buffer = self.open(), ticket.buffer
        assert buffer is not None
        if ticket.nbytes:
            self._transfer(file, buffer, ticket.location, self._syscalls.preadv, file.handle.pread)
        ticket.moved_bytes = ticket.nbytes

    def _transfer(
        self,
        file: _File,
        buffer: Buffer,
        location: Location,
        plain: Callable[[int, Pieces, int], int],
        submit: Callable[[Any, int, int, int], Any],
    ) -> None:
        cuda = on_device(buffer.owner)
        try:
            if not cuda and buffer.nbytes < self._host_path_bytes:
                self._move(plain, file.fd, 1, [(buffer.address, buffer.nbytes)], location, location.skew)
            else:
                self._by_kvikio(submit, buffer, location, cuda)
        except StoreError:
            raise
        except Exception as error:  # kvikio raises RuntimeErrors that quote the system
            raise self._as_store_error(error, f"transfer of {buffer.nbytes} bytes") from error

    def _by_kvikio(
        self, submit: Callable[[Any, int, int, int], Any], buffer: Buffer, location: Location, cuda: bool
    ) -> None:
        # Cut here instead of by kvikio, to wait for every piece and to notice a short one.
        offset = location.offset + location.skew
        cuts = () if cuda else range(TASK_BYTES - offset % _PAGE_BYTES, buffer.nbytes, TASK_BYTES)
        bounds = [0, *cuts, buffer.nbytes]
        pieces: list[tuple[int, Any]] = []
        failure: BaseException | None = None
        try:
            for begin, end in itertools.pairwise(bounds):
                nbytes = end - begin
                memory = (_DeviceMemory if cuda else memory_at)(buffer.address + begin, nbytes)
                pieces.append((nbytes, submit(memory, nbytes, offset + begin, nbytes)))  # not cut any further
        except Exception as error:
            failure = error
        for nbytes, future in pieces:
            try:
                moved = future.get()
                self._workers.moved_s = time.perf_counter()
                if moved != nbytes:
                    raise ShortTransfer(f"{moved} of {nbytes} bytes moved in {str(self.directory)!r}")
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # -- the file ------------------------------------------------------------------------------------------------

    def _make(self) -> _File:
        scratch = self._open_scratch()
        try:
            handle, mode = self._open_by_name(f"/proc/self/fd/{scratch.fd}")
            try:
                self._try(handle)
            except BaseException:
                handle.close()
                raise
            return _File(handle, handle.fileno(), mode)
        except Exception as error:
            raise self._as_store_error(
                error, "opening a scratch file with kvikio (it needs /proc, and libcuda.so.1 of the NVIDIA driver)"
            ) from error
        finally:
            self._syscalls.close(scratch.fd)

    def _open_by_name(self, path: str) -> tuple[Any, Mode]:
        if not self._defaults.is_compat_mode_preferred() and self._driver.get("is_gds_available"):
            with suppress(Exception), self._defaults.set("compat_mode", self._kvikio.CompatMode.OFF):
                return self._kvikio.CuFile(path, "r+"), "gds"  # fails instead of falling back silently
        return self._kvikio.CuFile(path, "r+"), "compat"

    def _try(self, handle: Any) -> None:
        memory = mmap.mmap(-1, _PAGE_BYTES)
        for moved in (handle.pwrite(memory, _PAGE_BYTES, 0).get(), handle.pread(memory, _PAGE_BYTES, 0).get()):
            if moved != _PAGE_BYTES:
                raise ShortTransfer(f"{moved} of {_PAGE_BYTES} bytes moved in {str(self.directory)!r}")

    def _as_store_error(self, error: Exception, what: str) -> StoreError:
        text = str(error)
        for code in (errno.ENOSPC, errno.EDQUOT):
            if getattr(error, "errno", None) == code or os.strerror(code) in text:
                return StoreFull(f"no space left in {str(self.directory)!r}: {text}")
        return StoreBroken(f"{what} in {str(self.directory)!r}: {text}")

    # -- ending --------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        # A forked child must not call the driver, which in compat mode does not know the descriptors.
        if self._files and self._files[-1].mode == "gds":
            self._files.clear()
        super()._forget()

    def _release(self, file: _File) -> None:
        file.handle.close()


def _import_kvikio() -> tuple[Any, Any, Any]:
    """Return kvikio, its settings and its driver's properties. Raises ImportError naming the extra."""
    try:
        return import_module("kvikio"), import_module("kvikio.defaults"), import_module("kvikio.cufile_driver")
    except Exception as error:  # a missing library raises others
        raise ImportError(
            f"the kvikio store needs kvikio, which cannot be imported ({error}): pip install 'tba-offload[gds]'"
        ) from error


def _configure(defaults: Any, threads: int, threshold_bytes: int) -> None:
    wanted = {
        "KVIKIO_NTHREADS": ("num_threads", max(threads, defaults.get("num_threads"))),
        "KVIKIO_GDS_THRESHOLD": ("gds_threshold", threshold_bytes),
        "KVIKIO_AUTO_DIRECT_IO_READ": ("auto_direct_io_read", True),
        "KVIKIO_AUTO_DIRECT_IO_WRITE": ("auto_direct_io_write", True),
    }
    for variable, (name, value) in wanted.items():
        if variable not in os.environ and defaults.get(name) != value:
            defaults.set(name, value)
