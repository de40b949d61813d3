"""Snippets of the pages and of docstrings run as they are shown; those of frameworks run in `make matrix`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tba
from support.snippets import Snippet, all_snippets

HERE = [snippet for snippet in all_snippets() if not snippet.of_framework]


class Model(nn.Module):
    """Called with a batch by keyword, as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.model.layers:
            x = layer(x)
        return SimpleNamespace(loss=x.square().mean())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, for what wraps a model."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("rank") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def given(names: set[str], folder: Path) -> dict[str, Any]:
    """What the reader of a page has: a model, a loader, an optimizer, a trainer of their own."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [{"x": torch.randn(2048, 256)} for _ in range(5)]

    def train(steps: int = 2) -> None:
        for batch in loader[:steps]:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    x = torch.randn(8, 256, requires_grad=True)
    has: dict[str, Any] = {"torch": torch, "nn": nn, "tba": tba, "os": os, "subprocess": subprocess}
    has |= {"offload_context": tba.offload_context, "attach": tba.attach, "checkpoint": checkpoint}
    has |= {"model": model, "loader": loader, "optimizer": optimizer, "train": train, "block": model.model.layers[0]}
    has |= {"x": x, "trainer": SimpleNamespace(train=train), "modules": list(model.model.layers)}
    has |= {"array": np.arange(1 << 10), "other": np.zeros(1 << 10, dtype=np.int64), "directory": str(folder)}
    has["schedule"] = SimpleNamespace(step=lambda tokens: model(x=tokens).loss.backward())
    has["tokens"] = torch.randn(8, 256)
    if "DistributedDataParallel" in names:
        has["DistributedDataParallel"] = nn.parallel.DistributedDataParallel
    if "fully_shard" in names:
        from torch.distributed.fsdp import fully_shard

        has["fully_shard"] = fully_shard
    if "offload" in names:  # from a snippet before
        has["offload"] = offload = tba.offload_context(model, tier="keep")
        with offload:
            train()
    return has


def shape(line: str) -> str:
    """A verdict without its figures."""
    return re.sub(r"[-+]?[\d.,]+( [KMGT]?i?B)?", "#", line)


def labels(text: str) -> set[str]:
    """What the rows of a table are called."""
    return {re.split(r" {2,}", line.strip())[0] for line in text.splitlines()[2:]}


def assert_shown(printed: str, shown: str) -> None:
    """The verdict is as it is shown, figures aside; which rows there are depends on how fast the disk is."""
    assert shape(printed.splitlines()[0]) == shape(shown.splitlines()[0])
    known = {line.metadata["label"].strip() for line in fields(tba.OffloadStats) if line.metadata}
    assert labels(shown) - known <= labels(printed)


def case(snippet: Snippet) -> Any:
    """The page of the quick start trains for ten seconds."""
    marks = [pytest.mark.exhaustive] if snippet.where.startswith("quick_start.md") else []
    return pytest.param(snippet, id=snippet.where, marks=marks)


@pytest.mark.parametrize("snippet", [case(snippet) for snippet in HERE])
def test_a_snippet_runs_and_prints_what_is_shown(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')")
    if snippet.names & {"DistributedDataParallel", "fully_shard"}:
        request.getfixturevalue("one_rank")
    code = snippet.code.replace('"/scratch"', repr(str(tmp_path)))
    if snippet.output:
        code = code.replace('"8GiB"', '"4MiB"')  # the model here is smaller than the reader's
    scope = given(snippet.names, tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, snippet.where, "exec"), scope)
    if snippet.output:
        assert_shown(printed.getvalue(), snippet.output)
    offload = scope.get("offload")
    if isinstance(offload, tba.Offloader):
        offload.close()


def test_the_pages_and_the_packages_show_snippets() -> None:
    where = [snippet.where for snippet in all_snippets()]
    assert {"README.md-0", "quick_start.md-0", "tba/__init__.py", "io_backends/__init__.py"} <= set(where)
