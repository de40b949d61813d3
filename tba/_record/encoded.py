"""Encoded: how a codec packed a record's bytes, and how to unpack them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from compact import Codec, Packed


class Encoded(NamedTuple):
    """How a codec packed a record's bytes: everything except the bytes.

    Attributes:
        codec: packed them.
        packed: the packed form, without its buffers.
        sizes: bytes of each buffer; the buffers are stored one after another.
        begin, end: range of the original in its storage, in bytes.
    """

    codec: Codec
    packed: Packed
    sizes: tuple[int, ...]
    begin: int
    end: int

    def payload(self, storage: torch.UntypedStorage) -> Tensor:
        """The packed bytes, uint8 [nbytes], at the beginning of `storage`."""
        payload = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return payload.set_(storage, 0, (sum(self.sizes),), (1,))

    def unpack(self, payload: Tensor) -> torch.UntypedStorage:
        """The bytes from `begin` on, equal to the original's or as near as the codec states."""
        buffers = tuple(payload.split(self.sizes))
        return self.codec.decode(replace(self.packed, buffers=buffers)).untyped_storage()
