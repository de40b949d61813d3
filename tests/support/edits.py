"""Edits that PyTorch does not see, by name, and a program in whose step they may be made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tba import EditedError, Offloader

from .engine import activation
from .exactness import equal

TOKENS, WIDTH, PROVEN = 32, 64, 3  # steps, after which no forward runs an operator again


def flip(tensor: Tensor) -> None:
    tensor.data.view(-1)[3::7].neg_()


def permute(tensor: Tensor) -> None:
    tensor.data.copy_(tensor.data.flip(0))


def by_numpy(tensor: Tensor) -> None:
    array = tensor.detach().numpy()
    array += 0.5


def by_another_data(tensor: Tensor) -> None:
    tensor.data = tensor.data + 0.5


def with_the_version_kept(tensor: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
        tensor.mul_(1.5)


def of_one_bit(tensor: Tensor) -> None:
    tensor.data.view(torch.int32).view(-1)[5] ^= 1


EDITS: dict[str, Callable[[Tensor], None]] = {
    "signs": flip,
    "a permutation": permute,
    "numpy": by_numpy,
    "another data": by_another_data,
    "version kept": with_the_version_kept,
    "one bit": of_one_bit,
}


class Program:
    """A step whose tensors may be edited by name, as soon as they are there or between forward and backward."""

    def __init__(self, device: torch.device | None = None) -> None:
        torch.manual_seed(0)
        self._device = device
        self.norm, self.head = nn.LayerNorm(WIDTH).to(device), nn.Linear(WIDTH, WIDTH).to(device)
        self.buffer = torch.linspace(0.5, 2, WIDTH).to(device)

    def step(self, context: Any, edit: Callable[[Tensor], None] | None, what: str, when: str) -> list[Tensor]:
        leaf, x = activation(TOKENS, WIDTH, device=self._device)
        named: dict[str, Tensor] = {"weight": self.norm.weight, "buffer": self.buffer, "leaf": leaf}
        before = {name: tensor.detach().clone() for name, tensor in named.items()}

        def there(name: str, tensor: Tensor) -> Tensor:
            named[name] = tensor
            if edit is not None and when == "at once" and what == name:
                edit(tensor)
            return tensor

        with context:
            there("source", x)
            product = there("derived", functional.gelu(x) * self.buffer)
            normed = there("normed", self.norm(self.head(product)))
            loss = (functional.linear(normed, self.head.weight).square() * there("detached", x.detach())).sum()
        if edit is not None and when == "afterwards":
            edit(named[what])
        try:
            return list(torch.autograd.grad(loss, [leaf, *self.norm.parameters(), *self.head.parameters()]))
        finally:
            for name, tensor in before.items():
                named[name].data.copy_(tensor)


# What is edited, when, and whether that raises. A weight, a buffer and a leaf are copied; a detached tensor is the
# source's memory. After it was saved, a tensor's new memory is none of the saved one's, whether anything is derived.
CASES = [
    *((edit, "source", "at once", False) for edit in EDITS),
    *((edit, what, "at once", True) for edit in EDITS for what in ("derived", "normed")),
    *((edit, what, "afterwards", False) for edit in EDITS for what in ("weight", "leaf")),
    *((edit, "buffer", "afterwards", False) for edit in EDITS if edit != "another data"),
    *((edit, "source", "afterwards", True) for edit in EDITS if edit != "another data"),
    *((edit, "detached", when, True) for edit in EDITS if edit != "another data" for when in ("at once", "afterwards")),
]


def assert_right_or_refused(
    offload: Offloader, edit: str, what: str, when: str, *, raises: bool, device: torch.device | None = None
) -> None:
    """A step with an edit, behind some without: gradients are plain ones, or, if it `raises`, it is refused."""
    plain, ours = Program(device), Program(device)
    unedited = plain.step(nullcontext(), None, what, when)
    wanted = plain.step(nullcontext(), EDITS[edit], what, when)
    for _ in range(PROVEN):
        assert equal(ours.step(offload, None, what, when), unedited)
        if device is not None:
            offload.flush()  # its comparisons have ended
    with pytest.raises(EditedError, match=r"float32 \[32, 64\] #.* derive=False") if raises else nullcontext():
        assert equal(ours.step(offload, EDITS[edit], what, when), wanted)
    assert equal(ours.step(offload, None, what, when), unedited)  # the next step is none the worse
