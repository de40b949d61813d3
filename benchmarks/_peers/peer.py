"""Peer: one way to save memory, as a wrapper of functions, and how it is applied to a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .._workload.families import blocks

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to save memory.

    Attributes:
        make: returns the wrapper for a model (None: a function that is no model) and a folder for files.
        scope: what the wrapper wraps in a model: its whole forward, or each block.
        every: wrap every n-th block.
        package: the package that it needs besides PyTorch.
        install: the command that installs it.
        cuda: why it needs a CUDA device; "" if it does not.
        files: whether it stores bytes in files.
    """

    make: Callable[[nn.Module | None, Path], Wrapper]
    scope: Literal["model", "block"] = "model"
    every: int = 1
    package: str = ""
    install: str = ""
    cuda: str = ""
    files: bool = False

    def missing(self) -> str:
        """Say why it cannot run here; "" if it can."""
        if self.package and find_spec(self.package) is None:
            return f"not installed: {self.install}"
        if self.cuda and not torch.cuda.is_available():
            return f"needs CUDA: {self.cuda}"
        return ""

    def put_under(self, model: nn.Module, scratch: Path) -> None:
        """Wrap the model's forward, or its blocks'."""
        wrap = self.make(model, scratch)
        wrapped = [model] if self.scope == "model" else blocks(model)[:: self.every]
        for module in wrapped:
            module.forward = wrap(module.forward)


def within(make: Callable[[], AbstractContextManager[Any]]) -> Wrapper:
    """Make the wrapper that calls a function within a context; `make` returns one for each call."""

    def wrap(function: Function) -> Function:
        def call(*arguments: Any, **named: Any) -> Any:
            with make():
                return function(*arguments, **named)

        return call

    return wrap
