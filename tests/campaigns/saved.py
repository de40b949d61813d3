"""Saved: counts what a plain step saves, by an account of our own."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn


class Saved:
    """A context around a forward: counts the storages that autograd saves, each once.

    Args:
        model: its parameters and buffers do not count.
        least_bytes: nor do smaller storages.

    Attributes:
        nbytes: of all that count.
    """

    def __init__(self, model: nn.Module, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        # Addresses tell here: what is saved lives on until backward.
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.nbytes = 0

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen and storage.nbytes() >= self._least_bytes:
                self._seen.add(storage.data_ptr())
                self.nbytes += storage.nbytes()
        return tensor.detach()
