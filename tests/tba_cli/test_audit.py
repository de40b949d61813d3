"""`tba audit`: what MODEL may be, what is printed, and the exit status."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tba
from compact import Saved
from support import models
from support.cli import answer, refused, users_module
from tba.cli import _blame, app
from tba.cli._subject import from_callable, from_config, subject

transformers = pytest.importorskip("transformers")

OURS = """
import torch
from torch import nn

number = 3

class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x))).pow(2).sum()

def make():
    torch.manual_seed(0)
    return Feed(), torch.randn(32, 16)

def norm():
    return nn.LayerNorm(8), torch.randn(4, 8)

def failing():
    return helper()

def helper():
    raise FileNotFoundError(2, "no data", "here")

class Mismatched(nn.Module):
    def forward(self, x):
        return x.view(7)

def mismatched():
    return nn.Sequential(nn.Linear(3, 3), Mismatched()), torch.randn(3)

def alone():
    return Feed()

def swapped():
    return torch.randn(4, 16), Feed()

class Nested:
    made = staticmethod(make)
"""
WIDTH, POSITIONS = 32, 48
run, refusal = partial(answer, "audit"), partial(refused, "audit")


def llama(**changes: Any) -> Any:
    """The configuration of a small Llama, with changes."""
    config = models.llama(num_key_value_heads=4, positions=POSITIONS).config
    config.update(changes)
    return config


def saved(config: Any, path: Path) -> Path:
    config.save_pretrained(path)
    return path


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "broken_by_test.py").write_text("import a_module_that_nobody_has")
    return users_module("audited_by_test", OURS, tmp_path, monkeypatch)


# -- a callable ------------------------------------------------------------------------------------------------------


def test_a_callable_of_the_working_directory_is_audited(ours: str) -> None:
    result = run(f"{ours}:make", "--preset", "exact", "--preset", "safe8", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    nbytes = 32 * 16 * 4
    assert found["before_bytes"] == {
        "linear_input": nbytes + 2 * nbytes,
        "activation_input": 2 * nbytes,
        "unknown": nbytes,
    }
    assert list(found["presets"]) == ["exact", "safe8"]
    assert found["presets"]["exact"]["cosine"] == 1
    assert found["presets"]["exact"]["relative_error"] == 0
    assert 0 < found["presets"]["safe8"]["relative_error"] < 0.02
    assert found["unrecognised_bytes"] == {"PowBackward0": nbytes}


def test_the_table_is_printed_without_json(ours: str) -> None:
    result = run(f"{ours}:Nested.made")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[2:] == ["plain", "exact", "safe8", "balanced", "max", "compact"]
    assert any(line.startswith("PowBackward0") for line in lines)


def test_a_warning_is_said_beside_the_answer(ours: str) -> None:
    result = run(f"{ours}:norm", "--preset", "compact", "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("tba audit: preset 'compact' has nothing to compress here")
    assert json.loads(result.stdout)["presets"]["compact"]["relative_error"] == 0
    assert run(f"{ours}:make", "--preset", "compact", "--json").stderr == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody:make", "there is no module 'nobody' in .* call this command where it is"),
        ("{ours}.sub:make", "there is no module '{ours}.sub'"),
        ("{ours}:other", "has no attribute 'other'; give `module:callable`"),
        ("{ours}:number", "number is a int, but it must be callable"),
        ("{ours}:alone", r"alone\(\) returned Feed, but this needs \(model, batch\)"),
        ("{ours}:swapped", r"swapped\(\) returned Tensor, Feed, but"),
        *(
            (name, "is no file or directory here, and no `module:callable`")
            for name in (":make", ".module:make", "module:")
        ),
        *(
            (name, f"fetch its config first: hf download {name} config.json$")
            for name in ("meta-llama/Llama-3.2-1B", "distilgpt2")
        ),
        ("my_module.py:make", "names a file, but a module is imported by its name: give `my_module:make`"),
        ("src/models/gpt.py:make", "give `src.models.gpt:make`"),
        ("my_module.py", "give `my_module:callable`"),
        ("../src/gpt.py:make", r"give `gpt:make` in the directory \.\./src"),
        ("/src/gpt.py:make", "give `gpt:make` in the directory /src"),
    ],
)
def test_what_is_no_callable_is_refused_with_what_to_give(ours: str, name: str, message: str) -> None:
    said = refusal(name.replace("{ours}", ours))
    assert name.replace("{ours}", ours) in said
    assert re.search(message.replace("{ours}", ours), said)


def test_a_failing_import_of_the_module_itself_is_shown_as_it_is(ours: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        from_callable("broken_by_test:make")


@pytest.mark.parametrize(
    ("name", "frames", "last"),
    [
        ("failing", ["failing", "helper"], "FileNotFoundError: [Errno 2] no data: 'here'"),
        ("mismatched", ["forward"], "RuntimeError: shape '[7]' is invalid for input of size 3"),
    ],
)
def test_an_error_of_the_models_own_code_is_shown_from_its_first_frame_on(
    ours: str, name: str, frames: list[str], last: str
) -> None:
    result = run(f"{ours}:{name}")
    assert (result.exit_code, result.stdout) == (1, "")
    first, *lines = result.stderr.splitlines()
    assert first == f"tba audit: {ours}:{name} raised an error of its own:"
    assert [line.split(", in ")[1] for line in lines if line.startswith("  File")] == frames
    assert lines[-1] == last


def test_an_error_of_ours_is_shown_whole(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blame, "users_part", lambda trace: None)
    assert isinstance(run(f"{ours}:mismatched").exception, RuntimeError)


@pytest.mark.exhaustive
def test_a_model_type_is_audited_if_memory_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0}
    fields = [part for name, value in (sizes | heads).items() for part in ("--set", f"{name}={value}")]
    result = run("llama", *fields, "--sequence", 8, "--preset", "exact", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["presets"]["exact"]["cosine"] == 1
    said = refusal("llama", "--set", "num_hidden_layers=2000")
    assert "a step of it cannot run here; make it smaller, as by --set num_hidden_layers=2, or use tba plan" in said


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tba {tba.__version__}\n")


def test_options_of_a_config_are_refused_for_a_callable(ours: str) -> None:
    said = refusal(f"{ours}:make", "--sequence", 8)
    assert (
        f"--sequence was given with '{ours}:make', which makes its own model and batch: write `def make(sequence=...)`"
        in said
    )


# -- a config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_file", [False, True])
def test_a_config_gives_a_model_with_random_weights(by_file: bool, tmp_path: Path) -> None:
    path = saved(llama(architectures=["LlamaForCausalLM"]), tmp_path)
    model, batch = subject(str(path / "config.json" if by_file else path), batch=3, sequence=16)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert batch["input_ids"].shape == (3, 16)
    assert batch["labels"] is batch["input_ids"]
    again, _ = subject(str(path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_defaults_come_from_the_config(tmp_path: Path) -> None:
    config = models.transformer("GPT2LMHeadModel", width=WIDTH, layers=1, heads=2, positions=POSITIONS).config
    config.update({"dtype": "bfloat16", "architectures": None})  # none: its causal language model
    path = saved(config, tmp_path)
    state = torch.get_rng_state()
    model, batch = from_config(path, 2, None, None)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert batch["input_ids"].shape == (2, POSITIONS)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_config_is_audited_in_the_asked_dtype(tmp_path: Path) -> None:
    path = saved(llama(architectures=["LlamaForCausalLM"]), tmp_path / "model")
    arguments = (path, "--batch", 1, "--sequence", 16, "--preset", "balanced", "--json")
    found = {dtype: json.loads(run(*arguments, "--dtype", dtype).stdout) for dtype in ("float32", "bfloat16")}
    sizes = [found[dtype]["before_bytes"][Saved.LINEAR_INPUT.value] for dtype in ("float32", "bfloat16")]
    assert sizes[0] == 2 * sizes[1]
    shape = (WIDTH + WIDTH + 2 * WIDTH) * 2 + WIDTH  # of each layer q, k and v's, gate and up's, down's; the head's
    assert sizes[0] == 16 * shape * 4
    again = json.loads(run(*arguments, "--dtype", "float32").stdout)
    assert again == found["float32"]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (llama(), ["--sequence", POSITIONS + 1], f"--sequence {POSITIONS + 1} is more than the {POSITIONS} positions"),
        (llama(), ["--dtype", "float8"], "--dtype 'float8' is not known: choose of float32, bfloat16, float16"),
        (llama(), ["--preset", "safe16"], "no preset 'safe16': choose one of exact"),
        (llama(architectures=["LlamaForSequenceClassification"]), [], "which has no loss over tokens"),
        (
            llama(architectures=["OurOwnForCausalLM"]),
            [],
            "OurOwnForCausalLM, which is not a class of this transformers",
        ),
        (transformers.ViTConfig(), [], "type 'vit' has no causal language model"),
    ],
)
def test_a_config_that_cannot_be_audited_is_refused(
    config: Any, options: list[object], message: str, tmp_path: Path
) -> None:
    assert message in refusal(saved(config, tmp_path), *options)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    assert f"there is no config.json in {tmp_path}" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    assert "cannot read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot read" in refusal(tmp_path)


# -- a picture -------------------------------------------------------------------------------------------------------


def test_a_picture_is_drawn_beside_the_answer(ours: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "audit.png"
    assert run(f"{ours}:make", "--picture", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(ours: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "must end in" in refusal("nobody:make", "--picture", tmp_path / "audit.xyz")
    assert "no directory" in refusal("nobody:make", "--picture", tmp_path / "nowhere" / "audit.png")
