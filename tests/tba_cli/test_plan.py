"""`tba plan`: what MODEL may be, what is printed, and the exit status."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.cli import answer, refused, users_module

transformers = pytest.importorskip("transformers")

OURS = """
import torch
from torch import nn

class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x))).pow(2).sum()

def make():
    return Feed(), torch.randn(512, 256)

class Looking(Feed):
    def forward(self, x):
        return super().forward(x) * x.max().item()

def looking():
    return Looking(), torch.randn(512, 256)

class Wrong(Feed):
    def forward(self, x):
        return super().forward(x).view(7)

def wrong():
    return Wrong(), torch.randn(512, 256)
"""
SMALL = (
    *("--set", "hidden_size=256", "--set", "num_hidden_layers=4", "--set", "num_attention_heads=4"),
    *("--set", "intermediate_size=512", "--set", "vocab_size=500", "--set", "num_key_value_heads=4"),
)
run, refusal = partial(answer, "plan"), partial(refused, "plan")


def figures(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return users_module("planned_by_test", OURS, tmp_path, monkeypatch)


def test_a_model_type_with_fields_is_planned() -> None:
    found = figures("llama", *SMALL, "--batch", 4, "--sequence", 256, "--device", "h100", "--disk", "gen5x2")
    per_layer = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
    assert found["memory_bytes"]["weights"] == pytest.approx(4 * (4 * per_layer + 2 * 500 * 256 + 256), abs=1024)
    assert found["blocks"] == 4
    assert found["tokens"] == 4 * 256
    assert found["disk"] == "gen5x2"
    assert found["ssd_years"] is None


def test_more_sequences_save_proportionally_more() -> None:
    one, three = (
        figures("llama", *SMALL, "--batch", batch, "--sequence", 512, "--device", "a100") for batch in (8, 24)
    )
    assert three["saved_bytes"]["all"] == pytest.approx(3 * one["saved_bytes"]["all"], rel=0.01)
    # Transformers may compute angles of positions once for all sequences: 32,768 of 97,635,041,280.
    assert three["flops"] == pytest.approx(3 * one["flops"], rel=1e-6)
    assert three["memory_bytes"]["weights"] == one["memory_bytes"]["weights"]


def test_a_config_may_be_changed(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=99, bos_token_id=1)
    config.save_pretrained(tmp_path)
    as_filed = figures(tmp_path, "--device", "h200")
    deeper = figures(tmp_path / "config.json", "--set", "n_layer=5", "--device", "h200")
    assert (as_filed["blocks"], deeper["blocks"]) == (0, 0)  # too small to be worth planning
    layer = 4 * (12 * 64 * 64 + 13 * 64)
    assert deeper["memory_bytes"]["weights"] - as_filed["memory_bytes"]["weights"] == pytest.approx(3 * layer, rel=0.01)


def test_an_encoder_and_decoder_is_planned_by_its_architecture() -> None:
    small = [part for name in ("num_layers=2", "num_decoder_layers=2") for part in ("--set", name)]
    head = 'architectures=["T5ForConditionalGeneration"]'
    found = figures("t5", *small, "--set", head, "--device", "h100", "--batch", 8, "--sequence", 256)
    assert found["blocks"] == 4
    assert "has no causal language model" in refusal("t5", *small, "--device", "h100")


def test_a_callable_is_planned_under_a_budget_and_shows_a_screen(ours: str) -> None:
    found = figures(f"{ours}:make", "--device", "rtx4090", "--disk", "gen3x1")
    mib = 1 << 20
    assert found["saved_bytes"]["all"] == 2 * 512 * 1024 * 4
    result = run(f"{ours}:make", "--device", "rtx4090", "--disk", "gen3x1", "--memory-budget", f"{6 * mib}B")
    assert result.exit_code == 0, result.output
    screen = result.stdout
    memory = ("weights", "gradients", "optimizer", "saved tensors", "peak")
    assert all(word in screen for word in (*memory, "step, planned", "endurance", "TB a day"))
    assert len(screen.splitlines()) < 32
    assert max(map(len, screen.splitlines())) <= 140


def test_unknown_names_are_refused_with_the_list() -> None:
    assert "known are a100" in refusal("llama", "--device", "h101")
    for disk in ("floppy", "gen9x1", "gen5x0"):
        assert "known are gen3xN" in refusal("llama", "--device", "h100", "--disk", disk)
    assert "choose of bfloat16" in refusal("llama", "--device", "h100", "--autocast", "int8")
    assert "known are adamw" in refusal("llama", *SMALL, "--device", "h100", "--optimizer", "lion")
    assert "no model type of transformers" in refusal("lama", "--device", "h100")
    assert "has no such field; it has " in refusal("llama", "--set", "layers=3", "--device", "h100")
    assert "field=value" in refusal("llama", "--set", "layers", "--device", "h100")
    assert "is not a number and a unit" in refusal("llama", "--device", "h100", "--memory-budget", "many")


def test_options_of_a_config_are_refused_for_a_callable(ours: str) -> None:
    assert "--set was given" in refusal(f"{ours}:make", "--set", "a=1", "--device", "h100")
    assert "--batch was given" in refusal(f"{ours}:make", "--batch", 3, "--device", "h100")


def test_a_model_that_is_too_large_is_refused_with_the_numbers() -> None:
    said = refusal("llama", "--dtype", "bfloat16", "--set", "num_hidden_layers=24", "--device", "rtx3090")
    assert "rtx3090 has 22.4 GiB" in said
    assert "--shards" in said
    more = refusal("llama", *SMALL, "--device", "rtx3090", "--memory-budget", "64GiB")
    assert "is more than the 22." in more


def test_a_model_that_needs_values_is_told_what_to_do(ours: str) -> None:
    said = refusal(f"{ours}:looking", "--device", "h100")
    assert "cannot be run without values" in said
    assert "offload_context(model, memory_budget=...)" in said


def test_an_error_of_the_model_is_shown_as_its_own(ours: str) -> None:
    result = run(f"{ours}:wrong", "--device", "h100")
    assert result.exit_code == 1
    assert f"{ours}:wrong raised an error of its own" in result.stderr
    assert "view(7)" in result.stderr


def test_it_can_be_forecast_for_the_machine_at_hand() -> None:
    found = figures("llama", *SMALL, "--device", "here", "--optimizer", "sgd")
    assert found["device"] == "here"
    assert found["steps"]["all kept"]["step_s"] > 0
