"""Layout: how an extent lines up with a buffer. Pure arithmetic.

In an extent a buffer's bytes keep their offset within an aligned block of memory (`skew`), so direct I/O moves whole
blocks without a copy. The head and the tail, each less than a block, go through two blocks of the worker's own, in the
same system call:

    memory                 |..hhhh|mmmmmm|mmmmmm|ttt...|     h head, m middle, t tail
    extent          0      |--hhhh|mmmmmm|mmmmmm|ttt---|     length, in whole blocks
                            bounce 0               bounce 1
"""

from __future__ import annotations

Piece = tuple[int, int]  # address, nbytes
Edge = tuple[int, int, int]  # address in the bounce blocks, address in the buffer, nbytes
Vector = tuple[list[Piece], list[Edge]]  # what the system moves, and what to copy by hand


def vector(address: int, skew: int, nbytes: int, block: int, bounce: int) -> Vector:
    """Lay out a transfer between memory and an extent with the same `skew`.

    `bounce` is the address of two blocks, used if the buffer begins or ends inside a block.
    """
    if not skew and not nbytes % block:
        return [(address, nbytes)], []
    pieces: list[Piece] = []
    edges: list[Edge] = []
    body = block if skew else 0  # the middle's range within the extent
    body_end = max(body, (skew + nbytes) // block * block)
    if skew:
        pieces.append((bounce, block))
        edges.append((bounce + skew, address, min(block - skew, nbytes)))
    if body < body_end:
        pieces.append((address + body - skew, body_end - body))
    if skew + nbytes > body_end:
        pieces.append((bounce + block, block))
        edges.append((bounce + block, address + body_end - skew, skew + nbytes - body_end))
    return pieces, edges


def payload(begin: int, end: int, skew: int, nbytes: int) -> tuple[int, int]:
    """The range of the buffer's bytes within [begin, end) of the extent; may be empty."""
    first = min(max(0, begin - skew), nbytes)
    return first, max(first, min(end - skew, nbytes))


def first(pieces: list[Piece], most_bytes: int) -> list[Piece]:
    """The first `most_bytes` of a vector, a multiple of any block."""
    batch: list[Piece] = []
    for address, length in pieces:
        if length >= most_bytes:
            return [*batch, (address, most_bytes)] if most_bytes else batch
        batch.append((address, length))
        most_bytes -= length
    return batch


def rest(pieces: list[Piece], moved: int) -> list[Piece]:
    """What remains of a vector after its first `moved` bytes."""
    for index, (address, length) in enumerate(pieces):
        if moved < length:
            return [(address + moved, length - moved), *pieces[index + 1 :]]
        moved -= length
    return []
