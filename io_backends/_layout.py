"""Layout: how an extent and a buffer lie against each other, and where a transfer is cut. Pure arithmetic.

An extent holds a buffer's bytes at the same place within an aligned block as memory does (`skew`), so direct I/O can
move every whole block straight between the two. What is left, the head and the tail (each less than a block), goes
through two blocks of the worker's own, in the same system call:

    memory                 |..hhhh|mmmmmm|mmmmmm|ttt...|     h head, m middle, t tail
    extent          0      |--hhhh|mmmmmm|mmmmmm|ttt---|     length, in whole blocks
                            bounce 0               bounce 1
"""

from __future__ import annotations

from ._extents import align_up

# The unit of cutting and of checksums.
CHUNK_BYTES = 4 << 20
# Each part costs a system call and a wake-up, and the device gets less to overlap at a time. Measured on a virtual
# disk of 5 GB/s with two workers: 8 MiB in two parts took twice as long as in one, 16 MiB and more as long.
PART_BYTES = 2 * CHUNK_BYTES

Piece = tuple[int, int]  # address, nbytes
Part = tuple[int, int]  # begin and end within an extent
Edge = tuple[int, int, int]  # address in the bounce blocks, address in the buffer, nbytes


# What one part of a transfer hands to the system, and what is to be copied besides.
Vector = tuple[list[Piece], list[Edge]]


def chunks(length: int, block: int) -> int:
    """In how many chunks an extent of `length` bytes falls; the last takes up to two blocks more than the others.

    Without that, a tensor of 4 MiB at an odd address would be cut for the sake of its tail.
    """
    return max(1, -(-(length - 2 * block) // CHUNK_BYTES))


def chunks_of(part: Part, length: int, block: int) -> range:
    """The indices of the chunks that a part made by `parts` consists of."""
    begin, end = part
    return range(begin // CHUNK_BYTES, chunks(length, block) if end == length else end // CHUNK_BYTES)


def parts(length: int, block: int, most: int) -> list[Part]:
    """Cut an extent into at most `most` ranges of whole chunks, nearly equal and of about `PART_BYTES` or more."""
    count = chunks(length, block)
    most = max(1, min(most, (length + 2 * block) // PART_BYTES))
    bounds = [index * count // most * CHUNK_BYTES for index in range(most)]
    return list(zip(bounds, [*bounds[1:], length], strict=True))


def chunk_payload(index: int, skew: int, nbytes: int, block: int) -> tuple[int, int]:
    """The bytes of the buffer, as a range within it, that chunk `index` of its extent holds."""
    begin = index * CHUNK_BYTES
    last = index == chunks(align_up(skew + nbytes, block), block) - 1
    return payload(begin, skew + nbytes if last else begin + CHUNK_BYTES, skew, nbytes)


def payload(begin: int, end: int, skew: int, nbytes: int) -> tuple[int, int]:
    """The bytes of the buffer, as a range within it, that lie in [begin, end) of the extent; maybe empty."""
    first = min(max(0, begin - skew), nbytes)
    return first, max(first, min(end - skew, nbytes))


def vector(address: int, skew: int, nbytes: int, block: int, part: Part, bounce: int) -> Vector:
    """What to move for one part of a transfer between memory and an extent with the same `skew`.

    `bounce` is the address of two blocks, used only where the buffer ends inside of one.
    """
    begin, end = part
    pieces: list[Piece] = []
    edges: list[Edge] = []
    body = block if skew else 0  # the middle's range within the extent
    body_end = max(body, (skew + nbytes) // block * block)
    if begin < body:
        pieces.append((bounce, block))
        edges.append((bounce + skew, address, min(block - skew, nbytes)))
    first, last = max(begin, body), min(end, body_end)
    if first < last:
        pieces.append((address + first - skew, last - first))
    if end > body_end:
        pieces.append((bounce + block, block))
        edges.append((bounce + block, address + body_end - skew, skew + nbytes - body_end))
    return pieces, edges


def first(pieces: list[Piece], most_bytes: int) -> list[Piece]:
    """The beginning of a vector, up to `most_bytes`, a multiple of any block."""
    batch: list[Piece] = []
    for address, length in pieces:
        if length >= most_bytes:
            return [*batch, (address, most_bytes)] if most_bytes else batch
        batch.append((address, length))
        most_bytes -= length
    return batch


def rest(pieces: list[Piece], moved: int) -> list[Piece]:
    """What is left of a vector after its first `moved` bytes."""
    for index, (address, length) in enumerate(pieces):
        if moved < length:
            return [(address + moved, length - moved), *pieces[index + 1 :]]
        moved -= length
    return []
