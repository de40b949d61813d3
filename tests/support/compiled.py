"""Stands for compiled code: calls a Function that has an `_aot_id` as AOTAutograd calls those that it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a Function as the node of a compiled graph."""
    return make_boxed_func(function.apply)(list(args))
