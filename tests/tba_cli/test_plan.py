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

def sized(batch=512):
    return Feed(), torch.randn(batch, 256)

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

class Placed(Feed):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(200, 256))
    def forward(self, x):
        return super().forward(x + self.places[: x.shape[1]])

def wrong_at_any(batch=2, sequence=64):
    return Wrong(), torch.randn(batch, sequence, 256)

def placed(batch=2, sequence=64):
    return Placed(), torch.randn(batch, sequence, 256)
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
    assert found["saved_bytes"]["kept"] == 2 * 512 * 1024 * 4
    result = run(f"{ours}:make", "--device", "rtx4090", "--disk", "gen3x1", "--memory-budget", f"{6 * mib}B")
    assert result.exit_code == 0, result.output
    screen = result.stdout
    took, verdict, _, *table = screen.splitlines()
    assert took == (
        f"{ours}:make: Feed, 526 thousand parameters, float32; batch 512 x 256; adamw; rtx4090 with 22.4 GiB, gen3x1"
    )
    assert verdict.startswith("FITS without offloading: peak ")
    assert [row.split("  ")[0] for row in table[1:5]] == ["plain", "nvme", "host", "auto"]
    memory = ("weights", "gradients", "optimizer", "saved tensors", "peak")
    assert all(word in screen for word in (*memory, "endurance", "TB a day"))
    assert len(screen.splitlines()) < 36
    assert max(map(len, screen.splitlines())) <= 140


def test_unknown_names_are_refused_with_the_list() -> None:
    assert "known are a100" in refusal("llama", "--device", "h101")
    for disk in ("floppy", "gen9x1", "gen5x0"):
        assert "known are gen3xN" in refusal("llama", "--device", "h100", "--disk", disk)
    assert "choose of float32, bfloat16" in refusal("llama", "--device", "h100", "--autocast", "int8")
    assert "known are adamw" in refusal("llama", *SMALL, "--device", "h100", "--optimizer", "lion")
    assert "no model type of transformers" in refusal("lama", "--device", "h100")
    assert "has no such field; it has " in refusal("llama", "--set", "layers=3", "--device", "h100")
    assert "field=value" in refusal("llama", "--set", "layers", "--device", "h100")
    assert "is not a number and a unit" in refusal("llama", "--device", "h100", "--memory-budget", "many")


def test_options_of_a_config_are_refused_for_a_callable(ours: str) -> None:
    assert "--set was given" in refusal(f"{ours}:make", "--set", "a=1", "--device", "h100")
    assert "write `def make(batch=...)`" in refusal(f"{ours}:make", "--batch", 3, "--device", "h100")
    assert figures(f"{ours}:sized", "--batch", 3, "--device", "h100")["batch"] == [3, 256]


@pytest.mark.exhaustive
def test_a_model_that_is_too_large_is_refused_with_the_numbers() -> None:
    arguments = ("llama", "--dtype", "bf16", "--set", "num_hidden_layers=24", "--device", "rtx3090")
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (2, "")
    took, said, *_ = result.stdout.splitlines()
    assert "LlamaForCausalLM" in took
    assert said.startswith("DOES NOT FIT: rtx3090 has 22.4 GiB, but before any saved tensor this training needs ")
    assert "--fsdp or --tp with more ranks" in said
    found = json.loads(run(*arguments, "--json").stdout)
    assert (found["fits"], {way["fits"] for way in found["steps"].values()}) == (False, {False})
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


@pytest.mark.exhaustive
def test_it_can_be_forecast_for_the_machine_at_hand() -> None:
    found = figures("llama", *SMALL, "--device", "here", "--optimizer", "sgd")
    assert found["device"] == "here"
    assert found["steps"]["plain"]["step_s"] > 0


def test_each_policy_is_shown_with_its_peak_and_what_it_moves(ours: str) -> None:
    found = figures(f"{ours}:make", "--device", "rtx4090")
    steps, wide = found["steps"], 512 * 1024 * 4
    assert {name: way["moved_bytes"] for name, way in steps.items()} == {
        "plain": 0,
        "nvme": 2 * wide,
        "host": 2 * wide,
        "auto": 0,
    }
    assert steps["plain"]["peak_bytes"] == steps["auto"]["peak_bytes"] >= steps["host"]["peak_bytes"]
    assert steps["plain"]["step_s"] < steps["host"]["step_s"] <= steps["nvme"]["step_s"]
    # The input of 512 KiB is below what moves, and the output too.
    assert found["saved_bytes"] == {
        "all": 2 * wide + wide // 2,
        "small": wide // 2,
        "kept": 2 * wide,
        "moved": 0,
        "recomputed": 0,
    }


@pytest.mark.parametrize(("budget", "policy"), [((), "plain"), (("--memory-budget", "6MiB"), "auto")])
def test_the_largest_batch_is_one_below_the_first_that_does_not_fit(ours: str, budget: Any, policy: str) -> None:
    card = ("--device", "40MB,30TFLOPS,10GB/s", "--disk", "none")
    found = figures(f"{ours}:sized", "--find-batch", *card, *budget)
    most = found["largest"][policy]
    assert found["batch"] == [found["largest"]["auto"], 256]
    at = {batch: run(f"{ours}:sized", "--batch", batch, *card, *budget, "--json") for batch in (most, most + 1)}
    assert [json.loads(each.stdout)["steps"][policy]["fits"] for each in at.values()] == [True, False]
    assert "give one, and the other" in refusal(f"{ours}:sized", "--find-batch", "--find-sequence", *card)
    assert "leave --batch out" in refusal(f"{ours}:sized", "--find-batch", "--batch", 3, *card)


def test_the_longest_sequence_ends_at_the_positions_of_the_config() -> None:
    result = run("llama", *SMALL, "--set", "max_position_embeddings=200", "--find-sequence", "--device", "h100")
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[2]
    assert line.startswith("largest sequence that fits: plain 192, nvme 192, host 192, auto 192 (")
    assert "is more than the 200 positions" in line


def test_the_longest_sequence_ends_where_the_model_raises(ours: str) -> None:
    result = run(f"{ours}:placed", "--find-sequence", "--device", "h100")
    assert result.exit_code == 0, result.output
    assert "Traceback" not in result.output
    line = result.stdout.splitlines()[2]
    assert line.startswith(
        "largest sequence that fits: plain 192, nvme 192, host 192, auto 192 (at sequence 256 the model"
    )
    wrong = run(f"{ours}:wrong_at_any", "--find-sequence", "--device", "h100")
    assert wrong.exit_code == 1
    assert "raised an error of its own" in wrong.stderr


def test_a_card_and_a_disk_are_made_of_figures(ours: str) -> None:
    card = "8GiB,100TFLOPS,40TFLOPS,500GB/s,16GB/s"
    result = run(f"{ours}:make", "--device", card, "--disk", "5GB/s,6GB/s,600TB")
    assert f"your figures, {card}." in result.stdout
    assert "8.0 GiB, your disk" in result.stdout
    whole = run(f"{ours}:make", "--device", "24GB,165.2TFLOPS,32GB/s", "--disk", "none", "--json")
    same = figures(f"{ours}:make", "--device", "rtx4090", "--disk", "none")
    assert json.loads(whole.stdout)["steps"] == same["steps"]  # what is not given is as in the nearest card
    for wrong in ("8GiB,16GB/s", "8GiB,fast,16GB/s", "0GiB,1TFLOPS,1GB/s", "8GiB,8GiB,1TFLOPS,1GB/s"):
        assert "write them as 48GiB,165TFLOPS,25GB/s" in refusal(f"{ours}:make", "--device", wrong)
    assert "write them as 5GB/s,6GB/s" in refusal(f"{ours}:make", "--device", "h100", "--disk", "5GB/s,1TFLOPS")


def test_a_name_of_the_hub_says_how_to_fetch_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "somebody/their-model"
    assert f"hf download {name} config.json" in refusal(name, "--device", "h100")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=99, bos_token_id=1)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert figures(name, "--device", "h100")["model"] == "GPT2LMHeadModel"


def test_a_group_is_planned_rank_by_rank() -> None:
    asked = ("llama", *SMALL, "--batch", 4, "--sequence", 256, "--device", "h100")
    found = figures(*asked, "--world", 8, "--fsdp", 2, "--tp", 2, "--ranks-per-node", 8)
    alone = figures(*asked)
    assert (found["world"], found["replicas"], found["shards"], found["tensor"]) == (8, 2, 2, 2)
    assert [each["ranks"] for each in found["ranks"]] == [list(range(8))]
    cut = 4 * 256 * 256 + 3 * 256 * 512  # the weights of a layer's matrices
    parameters = 4 * cut // 2 + (4 * 2 + 1) * 256 + 2 * 500 * 256 // 2  # norms are whole
    assert found["memory_bytes"]["weights"] == pytest.approx(4 * parameters / 2, abs=1024)
    assert alone["saved_bytes"]["all"] > found["saved_bytes"]["all"] > alone["saved_bytes"]["all"] / 2
    assert found["parameters"] == alone["parameters"]
    result = run(*asked, "--world", 8, "--fsdp", 2, "--tp", 2)
    assert "8 ranks: 2 replicas x 2 FSDP x 2 tensor" in result.stdout
    assert "ranks 0 to 7" in result.stdout
    assert figures(*asked, "--shards", 2) == figures(*asked, "--fsdp", 2)


def test_groups_that_make_no_sense_are_refused(ours: str) -> None:
    assert "--world 7 is no multiple of --fsdp 2 times --tp 1" in refusal(
        "llama", "--device", "h100", "--world", 7, "--fsdp", 2
    )
    assert "num_attention_heads=4, which 3 ranks cannot share" in refusal(
        "llama", *SMALL, "--device", "h100", "--tp", 3
    )
    assert "GPT2LMHeadModel has no plan of tensor parallelism" in refusal("gpt2", "--device", "h100", "--tp", 2)
    assert "Feed has no plan of tensor parallelism" in refusal(f"{ours}:make", "--device", "h100", "--tp", 2)
