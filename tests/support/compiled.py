"""Compiled code: a compiler of a test's own, and what stands for compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config as inductor_config


@contextmanager
def own_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile into a cache of one's own, with no pool of compiling processes that outlives the tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    torch.compiler.reset()
    with inductor_config.patch(compile_threads=1):
        yield
    torch.compiler.reset()


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a Function that has an `_aot_id` as AOTAutograd applies those that it makes."""
    return make_boxed_func(function.apply)(list(args))
