"""Cases of the fault campaign: a fault, its place in a training step, and the engine's settings, drawn from a seed.

A case is a pure function of its seed, so that a failing one can be run again alone. What it promises is the same for
every kind: each step completes with gradients bit-equal to plain PyTorch, or raises `OffloadError` naming tensor and
cause. The kinds that a store has to survive promise more: no error at all.
"""

from __future__ import annotations

import errno
import random
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._workload.gpt import GPTConfig

ALWAYS = 1 << 30  # a fault that goes on to the end
_WRITE_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENODEV, errno.EFAULT)
_READ_CODES = (errno.EIO, errno.ENODEV, errno.ESTALE, errno.EFAULT)
_OPEN_CODES = (errno.EMFILE, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO)
_LAYOUT_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EOPNOTSUPP, errno.ENOSYS)
_PROTOCOL_CODES = (errno.EIO, errno.ENOSPC, errno.ETIMEDOUT)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to fail.

    Attributes:
        seam: where it strikes: "protocol" (`FaultyStore`), "system call" (the table beneath `PosixStore`), or
            "file system" (for real).
        weight: how often it is drawn, beside the others.
        survived: whether a step under it must complete: nothing is lost, only late or in pieces.
        calls: which calls of its seam it strikes; one is drawn.
    """

    seam: str
    weight: int
    calls: tuple[str, ...] = ("write", "read")
    survived: bool = False


KINDS = {
    "late": Kind(seam="protocol", weight=4, survived=True),
    "failing": Kind(seam="protocol", weight=6),
    "store full": Kind(seam="protocol", weight=4, calls=("write",)),
    "stalled": Kind(seam="protocol", weight=2),
    "error": Kind(seam="system call", weight=10),
    "cut short": Kind(seam="system call", weight=6, survived=True),
    "torn": Kind(seam="system call", weight=6),  # stops inside a block, or moves nothing, without an error
    "interrupted": Kind(seam="system call", weight=4, calls=("write", "read", "fallocate"), survived=True),
    "flipped": Kind(seam="system call", weight=10),
    "lost": Kind(seam="system call", weight=6),  # nothing moves, and the system says that all did
    "misplaced": Kind(seam="system call", weight=6),  # to or from the page beside
    "slow device": Kind(seam="system call", weight=3, survived=True),
    "hanging device": Kind(seam="system call", weight=2),
    "dying worker": Kind(seam="system call", weight=6),
    "fallocate": Kind(seam="system call", weight=4, calls=("fallocate",)),
    "open": Kind(seam="system call", weight=4, calls=("open",)),
    "directory gone": Kind(seam="file system", weight=3, calls=("before", "after")),
    "disk full": Kind(seam="file system", weight=4, calls=("write",)),
}
# Kinds whose fault ends by itself after a while rather than after a number of calls.
BRIEF = ("stalled", "hanging device")
# Each with a batch. "odd" has sizes that fill no block and dropout; "wide" has tensors of 16 MiB.
MODELS = {
    "small": (GPTConfig(layers=2, width=32, heads=2, sequence=16), 2),
    "odd": (GPTConfig(layers=2, width=30, heads=3, sequence=17, vocab=53, dropout=0.1), 3),
    "middle": (GPTConfig(layers=3, width=64, heads=2, sequence=64), 8),
    "wide": (GPTConfig(layers=1, width=128, heads=2, sequence=64), 128),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a few training steps with one fault in it.

    Attributes:
        call: which call of the seam is struck.
        where: at which share of the calls expected the fault begins, in [0, 1).
        count: how many such calls in a row are struck.
        code: the error, an errno.
        amount: how much, in [0, 1): of a delay, of a transfer that is cut, of a disk that is full from the start.
        on_disk: a flip that strikes the file, and not the memory read into.
        window, staging: `prefetch_bytes` and `staging_bytes` as a share of what a step saves.
        io_timeout_s: short where the fault is that nothing moves.
        flush: between forward and backward, so that all has been written before anything is read.
        inside: backward runs within the context too.
        retained: backward runs twice over each graph.
        dropped: before the first step a forward whose graph dies without a backward.
    """

    seed: int
    kind: str
    call: str
    where: float
    count: int
    code: int
    amount: float
    on_disk: bool
    model: str
    store: str
    threads: int
    checksum: bool
    direct: bool
    window: float
    staging: float
    io_timeout_s: float
    steps: int
    forwards: int
    flush: bool
    inside: bool
    retained: bool
    dropped: bool

    def describe(self) -> dict[str, Any]:
        """All fields, for a report; the error by its name."""
        return {**asdict(self), "code": errno.errorcode[self.code]}


def draw(seed: int, kind: str | None = None) -> Case:
    """Draw the case of a seed, any whole number; with `kind`, a case of this kind."""
    r = random.Random(seed)
    drawn = r.choices(list(KINDS), [known.weight for known in KINDS.values()])[0]
    kind = kind or drawn
    call = r.choice(KINDS[kind].calls)
    big = kind == "disk full"  # what fills a disk of some megabytes
    model = r.choices(list(MODELS), (0, 0, 12, 1) if big else (20, 12, 2, 1))[0]
    return Case(
        seed=seed,
        kind=kind,
        call=call,
        where=r.random(),
        count=_count(r, kind),
        code=r.choice(_codes(kind, call)),
        amount=r.random(),
        on_disk=call == "write",
        model=model,
        store=r.choices(("posix", "striped", "two-level"), (8, 0, 0) if big else (8, 2, 1))[0],
        threads=r.choice((1, 2, 2, 4)),
        checksum=kind == "flipped" or r.random() < 0.5,
        direct=r.random() < 0.8,
        window=r.choice((0.0, 0.05, 0.3)),
        staging=r.choice((0.02, 0.1, 1.0)),
        io_timeout_s=0.25 if kind in BRIEF else 20.0,
        steps=1 if model == "wide" else r.choice((1, 2, 3)),
        forwards=1 if model == "wide" else r.choice((1, 1, 1, 2)),
        flush=r.random() < 0.5,
        inside=r.random() < 0.5,
        retained=r.random() < 0.15,
        dropped=r.random() < 0.15,
    )


def _count(r: random.Random, kind: str) -> int:
    few = r.choice((1, 1, 2, 5, 20))
    if kind in ("late", "slow device", "interrupted"):
        return few  # each costs time, and a call that is interrupted for ever is made for ever
    return ALWAYS if r.random() < 0.2 else few


def _codes(kind: str, call: str) -> tuple[int, ...]:
    if kind == "failing":
        return _PROTOCOL_CODES
    return {"read": _READ_CODES, "open": _OPEN_CODES, "fallocate": _LAYOUT_CODES}.get(call, _WRITE_CODES)
