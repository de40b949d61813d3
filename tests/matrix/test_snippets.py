"""Snippets of the pages and of docstrings that name a framework: each runs with it as it is shown."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import tba
from matrix.arms import batches, zero
from matrix.models import llama
from support.snippets import Snippet, all_snippets

HERE = [snippet for snippet in all_snippets() if snippet.of_framework]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """A process group of one rank; what frameworks write into the environment is gone afterwards."""
    before = dict(os.environ)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


# What the reader has, for each name that a snippet reads; `...` in a call stands for arguments of theirs.


def of_trainer(folder: Path) -> dict[str, Any]:
    from matrix.trainings import trainer

    def make(_: Any, callbacks: list[Any]) -> Any:
        return trainer(folder, *callbacks)

    return {"Trainer": make, "SFTTrainer": make}


def of_lightning(folder: Path) -> dict[str, Any]:
    import lightning

    class Library:
        @staticmethod
        def Trainer(_: Any, callbacks: list[Any]) -> Any:  # as the library has it
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            return lightning.Trainer(
                accelerator="cpu", max_steps=2, default_root_dir=folder, callbacks=callbacks, **quiet
            )

    return {"lightning": Library}


def of_accelerator(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    model = llama()
    loader = DataLoader(torch.cat(list(batches(90, (3, 70)))), batch_size=3)
    return {
        "accelerator": Accelerator(cpu=True),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": loader,
        "step": 1,
    }


def of_deepspeed(_: Path) -> dict[str, Any]:
    from tba.integrations.deepspeed import initialize as real

    # The page leaves out what a training on a CPU has to say beside it.
    def initialize(model: Any, config: dict[str, Any]) -> Any:
        optimizer = torch.optim.AdamW(model.parameters())
        found = zero(config["zero_optimization"]["stage"]) | {"tba": config["tba"]}
        return real(model=model, optimizer=optimizer, config=found, dist_init_required=False)

    return {"model": llama(), "initialize": initialize}


def of_megatron(_: Path) -> dict[str, Any]:
    from matrix.devices import cuda_is_the_cpu
    from matrix.rows import megatron

    megatron.initialize()
    model = megatron.gpt()
    tokens = next(iter(batches(megatron.VOCABULARY, (6, 70), count=1)))

    def run(forward_step_func: Any, **_: Any) -> Any:
        with cuda_is_the_cpu():
            return megatron.step(model, tokens, forward_step_func)

    return {
        "forward_step": megatron.forward_step,
        "get_forward_backward_func": lambda: run,
        "forward_backward_func": run,
        "others": {},
    }


def of_torchtitan(_: Path) -> dict[str, Any]:
    from matrix.rows.torchtitan import configuration

    return {"config": configuration("", imports=[])}


def of_ray(_: Path) -> dict[str, Any]:
    return {"tba": tba}  # the function that Ray's workers run: examples/ray_train.py runs it


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "Trainer": of_trainer,
    "SFTTrainer": of_trainer,
    "lightning": of_lightning,
    "accelerator": of_accelerator,
    "initialize": of_deepspeed,
    "forward_step": of_megatron,
    "ray": of_ray,
    "config": of_torchtitan,
}


@pytest.mark.parametrize("snippet", HERE, ids=[snippet.where for snippet in HERE])
def test_a_snippet_runs_with_its_framework(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")  # as launchers do
    name = next(name for name in GIVEN if name in snippet.names)
    scope = {"functools": functools} | GIVEN[name](tmp_path)
    own = {each: scope.pop(each) for each in ("initialize",) if each in scope}
    code = compile(snippet.code, snippet.where, "exec")
    if own:  # it imports the name itself
        monkeypatch.setattr("tba.integrations.deepspeed.initialize", own["initialize"])
    with capfd.disabled():  # DeepSpeed duplicates standard output, which pytest would have made a file
        exec(code, scope)
    if "engine" in scope:
        scope["offload"] = scope["engine"].offload
    if "offload" in scope:
        scope["offload"].close()
