"""Subjects: each family as `tba plan` takes a model, by the name of a function that returns it and a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .families import FAMILIES


def _subject(name: str) -> tuple[nn.Module, Any]:
    return FAMILIES[name].make(False), FAMILIES[name].batch(0)


gpt, bert, t5, llama, conv = (partial(_subject, name) for name in ("gpt", "bert", "t5", "llama", "conv"))
