"""Encoded: a record's bytes as a codec has packed them, and how they are unpacked again."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from compact import Codec, Packed


class Encoded(NamedTuple):
    """How a record's bytes are packed: by which codec, and all of `Packed` but the bytes.

    `sizes` are those of its buffers, which lie one behind another; `begin` and `end` are the range of the original.
    """

    codec: Codec
    packed: Packed
    sizes: tuple[int, ...]
    begin: int
    end: int


def payload_of(encoded: Encoded, storage: torch.UntypedStorage) -> Tensor:
    """The packed bytes, uint8 [nbytes], at the beginning of a storage."""
    payload = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return payload.set_(storage, 0, (sum(encoded.sizes),), (1,))


def unpacked(encoded: Encoded, payload: Tensor) -> torch.UntypedStorage:
    """The original bytes from `encoded.begin` on, exact or nearly."""
    buffers = tuple(payload.split(encoded.sizes))
    return encoded.codec.decode(replace(encoded.packed, buffers=buffers)).untyped_storage()
