"""Disk bytes: what this process, with all its threads, has had its disks write and read so far (proc(5), `io`).

Direct I/O counts as it is submitted. Writes into the page cache count at once; reads from it do not. Linux only.
"""

from __future__ import annotations

from pathlib import Path


def disk_bytes() -> tuple[int, int]:
    """Return bytes written and bytes read."""
    lines = (line.partition(": ") for line in Path("/proc/self/io").read_text().splitlines())
    counted = {name: int(value) for name, _, value in lines}
    return counted["write_bytes"], counted["read_bytes"]
