"""Tests of the benchmarks: each end to end at a tiny size through its command line, and their arithmetic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer import BadParameter
from typer.testing import CliRunner

from benchmarks import ranks
from benchmarks.__main__ import app
from benchmarks._processes import measure
from benchmarks._processes.arms import Spec
from benchmarks._report.bar import Bar
from benchmarks._report.options import parse_rate
from benchmarks._report.ratios import median_ratio
from benchmarks._report.results import Grid, Result, file_result
from benchmarks._report.steps import Measured, same_gradients
from benchmarks._workload.gpt import GPT, GPTConfig
from benchmarks._workload.text import Text, sources, standard_library
from benchmarks.overlap import busy_s, hidden_share, needed_rate
from support.benchmarks import quick, run_benchmark

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_forecast_stands_beside_what_was_run(tmp_path: Path) -> None:
    found = quick("forecast", tmp_path)
    [forecast] = found["forecasts"]["conv"]
    assert forecast["device"] == "here"
    assert found["measured_by_forecast"].keys() == {"conv, all kept", "conv, full checkpointing"}
    peak_bytes = forecast["memory_bytes"]["peak_all_kept"] - forecast["memory_bytes"]["weights"]
    assert 0.8 * peak_bytes < found["peak_bytes"]["conv, all kept"] < 2 * peak_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_step_in_processes_of_their_own_shows_equal_gradients_and_all_numbers(tmp_path: Path) -> None:
    found = quick("step", tmp_path)
    [model] = found["models"].values()
    assert model["gradients_bit_equal"] is True
    arms = model["arms"]
    assert {"plain, as Python comes", "plain", "offload nvme", "checkpoint"} <= arms.keys()
    for arm in arms.values():
        assert arm["peak_bytes"] > 0
        assert arm["idle_bytes"] > 0
        assert arm["gradients"] == {key: arms["plain"]["gradients"][key] for key in arm["gradients"]}
        if "mimalloc" not in arm["name"]:
            assert len(arm["wall_s"]) == len(arm["cpu_s"]) == 2
            assert min(arm["wall_s"] + arm["cpu_s"]) > 0
    assert len(set(arms["plain"]["gradients"].values())) == 2 + 2  # the weights do move
    moved = arms["offload nvme"]["moved"]
    parts = ("weight_bytes", "duplicate_bytes", "kept_bytes", "offloaded_bytes")
    assert moved["saved_bytes"] == sum(moved[part] for part in parts)
    assert moved["written_bytes"] > 0
    assert moved["read_bytes"] > 0
    bars = {bar["what"]: bar["limit"] for bar in model["bars"]}
    assert bars["offload nvme: peak over idle / plain"] is bars["offload nvme: backward waited"] is None
    assert found["environment"]["torch"] == torch.__version__


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_shows_that_all_recompute_alike_and_stay_exact(tmp_path: Path) -> None:
    [way] = quick("ranks", tmp_path)["ways"].values()
    arms = way["arms"]
    assert arms.keys() == {"plain", "checkpoint", "auto 0.25", "auto 0.50", "auto 0.75"}
    for arm in arms.values():
        assert arm["gradients"] == {key: arms["plain"]["gradients"][key] for key in arm["gradients"]}
    for name, arm in arms.items():
        if name.startswith("auto"):
            first, second = arm["moved"]["plans"]
            assert first["recomputed"] == second["recomputed"]
            assert first["agreed"] == second["agreed"]
            assert first["budget_bytes"] < way["saved_bytes"]
    counts = {bar["what"]: bar["met"] for bar in way["bars"] if "choices of blocks" in bar["what"]}
    assert list(counts.values()) == [True] * 3


def test_ranks_says_what_a_way_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    assert not ranks.WAYS["zero3-nvme"].runs
    assert ranks.WAYS["fsdp2"].runs
    with pytest.raises(BadParameter, match="zero3-nvme does not run here: deepspeed is not installed"):
        ranks.ranks(way=["zero3-nvme"])


def test_ranks_skips_files_of_deepspeed_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ModuleType("async_io")
    lacking.lacking_for_files = lambda: "libaio is missing"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks._workload.async_io", lacking)
    monkeypatch.setattr(ranks, "find_spec", lambda name: name)
    assert ranks.WAYS["zero3-nvme"].lacks == "libaio is missing"
    assert ranks.WAYS["zero3"].runs


def test_ranks_shows_medians_of_what_deepspeed_tells() -> None:
    told = {"swapped_out_bytes": [1 << 20, 3 << 20, 4 << 20], "swapped_in_bytes": [0, 2 << 20, 9 << 20]}
    told |= {"swap_wait_s": [0.5, 0.25, 1.0], "forward_s": [1, 2, 3], "backward_s": [2, 3, 4], "optimizer_s": [5, 6, 7]}
    arms = {}
    for name in ("plain", "checkpoint"):
        arms[name] = Measured(name=name, allocator="")
        for number in range(3):
            answer = {"idle_bytes": 0, "peak_bytes": 1, "loss": 0.0, "gradients_sha256": "", "moved": {}}
            figures = {key: values[number] for key, values in told.items()}
            arms[name].take(number, {**answer, "wall_s": 1.0, "cpu_s": 1.0, "figures": figures}, timed=True)
    for way, last in (("zero3-nvme", ["3, 2", "500", "2,000, 3,000, 6,000"]), ("zero3", ["-"])):
        grid = ranks._table(way, ranks.WAYS[way].sizes, arms, 0)
        assert [list(row[-len(last) :]) for row in grid.rows] == [last] * 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_waves_shows_seconds_peak_and_error_of_each_arm(tmp_path: Path) -> None:
    found = quick("waves", tmp_path)
    plain, nvme, _ = (found["arms"][f"PyTorch, {name}"] for name in ("plain", "tba nvme", "tba 256MiB"))
    assert plain["written_bytes"] == 0 < nvme["written_bytes"]
    for name, arm in found["arms"].items():
        assert min(arm["seconds"], arm["peak_bytes"]) > 0
        assert arm["gradient_error"] == 0 or not name.startswith("PyTorch")


class FakeArm:
    """Answers a turn at once; otherwise as an `Arm`."""

    allocator, about = "none", {"parameters": 1}

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def turn(self, index: int) -> dict[str, Any]:
        loss = 1.0 if self.spec.name == "other" and index == 3 else 0.5
        figures = {"wall_s": 1.0, "cpu_s": 2.0, "idle_bytes": 1, "peak_bytes": index, "moved": {}}
        return {**figures, "loss": loss, "gradients_sha256": str(index)}

    def close(self) -> dict[str, Any]:
        return {}


def test_step_pools_the_rounds_of_several_sets_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    @contextmanager
    def running(specs: list[Spec]) -> Iterator[list[FakeArm]]:
        started.append(specs)
        yield [FakeArm(spec) for spec in specs]

    monkeypatch.setattr(measure, "running", running)
    specs = [Spec(name=name, role="train", options={}) for name in ("plain", "again", "other")]
    found = measure.measure(specs, rounds=3, title="step", warm_up=1, starts=2)
    assert started == [specs] * 2
    assert list(found) == ["plain", "again", "other"]
    for arm in found.values():
        assert len(arm.wall_s) == len(arm.cpu_s) == 2 * 2  # at least 3, as many from each set
        assert sorted(arm.losses) == sorted(arm.gradients) == list(range(2 * 3))
        assert arm.peak_bytes == 5
    plain, again, other = found.values()
    assert same_gradients([plain, again])
    assert not same_gradients([plain, again, other])
    assert not same_gradients([plain, replace(again, gradients={**again.gradients, 3: "another"})])


def test_arms_apart_have_the_machine_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[str] = []
    order = []

    @contextmanager
    def running(specs: list[Spec]) -> Iterator[list[FakeArm]]:
        alive.extend(spec.name for spec in specs)
        order.append(list(alive))
        yield [FakeArm(spec) for spec in specs]
        alive.clear()

    monkeypatch.setattr(measure, "running", running)
    specs = [Spec(name=name, role="train", options={}) for name in ("plain", "other")]
    found = measure.measure(specs, rounds=4, title="step", warm_up=1, starts=2, apart=True)
    assert order == [["plain"], ["other"]] * 2
    assert [len(arm.wall_s) for arm in found.values()] == [4, 4]
    assert found["plain"].gradients.keys() == found["other"].gradients.keys() == set(range(6))
    assert not same_gradients(list(found.values()))  # their losses of round 3 differ, though the arms never met


@pytest.mark.exhaustive
def test_hooks_measures_every_kind(tmp_path: Path) -> None:
    found = run_benchmark("hooks", scratch=tmp_path)
    light = {"counted: everything fits the budget", "kept: stays under a plan"}
    assert set(found["kinds"]) == {"weight", "below minimum size", "further view", "new record", *light}
    for name, kind in found["kinds"].items():
        assert kind["empty_cpu_us"] > 0
        assert kind["met"] is (None if name in light else kind["cpu_us"] <= kind["limit_us"])
    for name in light:
        assert found["counters"][name]["kept_bytes"] > 0
    moves, passes = found["counters"]["moves"], found["counters"]["passes"]
    assert moves["read_bytes"] >= moves["offloaded_bytes"] > 0  # new records went through the file
    assert moves["weight_bytes"] > 0
    assert moves["duplicate_bytes"] > 0
    assert passes["kept_bytes"] == passes["saved_bytes"] > 0


@pytest.mark.exhaustive
def test_overlap_writes_a_report_of_each_link(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run_benchmark("overlap", "--threads", "1", "--rate", "50MB", "--out", str(out), scratch=tmp_path)
    assert found["gradients_bit_equal"] is True
    assert 0 <= found["hidden_share"] <= 1
    assert set(found["links"]) == {"plain", "offload", "offload, 50 MB/s"}
    limited = found["links"]["offload, 50 MB/s"]
    assert min(limited["io_busy_s"], limited["written_bytes"], limited["read_bytes"]) > 0
    assert found["needed_bytes_per_s"] > 0
    assert limited["forward_s"] + limited["backward_s"] < limited["wall_s"]
    pages = [Path(path) for path in found["files"]]
    assert [page.name for page in pages] == ["overlap.html", "overlap_50MBps.html"]
    for page in pages:
        assert "<svg" in page.read_text()


def test_demo_trains_all_arms_alike(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run_benchmark("demo", "--threads", "1", "--steps", "2", "--out", str(out), scratch=tmp_path)
    assert found["gradients_bit_equal"] is True
    assert found["steps"] == 2
    plain, offload = found["arms"]["plain"], found["arms"]["offload nvme"]
    assert plain["losses"] == offload["losses"]
    assert plain["losses"]["1"] < plain["losses"]["0"]
    assert offload["moved"]["written_bytes"] > 0
    assert found["stats"]["errors"] == 0
    assert found["stats"]["live_records"] == 0
    assert found["text_sha256"] == standard_library().sha256
    assert (out / "demo_memory.png").stat().st_size > 1000


def test_text_is_the_library_without_tests_and_batches_repeat(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a.py",
        "test/c.py",
        "pkg/tests/d.py",
        "pkg/e.py",
        "site-packages/f.py",
        "_sysconfigdata_x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in sources(tmp_path)] == ["a.py", "b.py", "pkg/e.py"]
    text = Text(torch.arange(200, dtype=torch.uint8))
    state = torch.get_rng_state()
    tokens, targets = text.batch(size=3, sequence=8, seed=1, index=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens.shape == targets.shape == (3, 8)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(text.batch(size=3, sequence=8, seed=1, index=5)[0], tokens)
    assert not torch.equal(text.batch(size=3, sequence=8, seed=1, index=6)[0], tokens)
    with pytest.raises(ValueError, match="a sequence of 200 needs 201 bytes of text; there are 200"):
        text.batch(size=1, sequence=200, seed=0, index=0)


def test_gpt_checkpointed_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=16, heads=2, sequence=8))
    tokens = torch.randint(0, 256, (2, 8))
    assert model(tokens).shape == (2, 8, 256)
    gradients = []
    for model.checkpoint in (False, True):
        model.zero_grad()
        model(tokens, tokens).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_io_is_busy_while_a_transfer_is_under_way_and_hidden_unless_waited_for() -> None:
    assert busy_s([(1.0, 3.0), (0.0, 2.0), (5.0, 6.0)]) == 4.0
    assert hidden_share(4.0, 1.0) == 0.75
    assert hidden_share(0.0, 0.0) == 1.0
    assert needed_rate({"written_bytes": 30, "forward_s": 3.0, "read_bytes": 10, "backward_s": 0.5}) == 20.0


@pytest.mark.parametrize(("text", "rate"), [("200MB", 2e8), ("1GiB", 2**30), ("50 MB/s", 5e7)])
def test_rates_parse(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "0", "-1MB"])
def test_rates_that_do_not_parse(text: str) -> None:
    with pytest.raises(BadParameter, match="rate"):
        parse_rate(text)


def test_results_are_filed_with_command_and_environment(tmp_path: Path) -> None:
    table = Grid("A table", ("what", "value"), [("a|b", "1")], "A note.")
    (tmp_path / "picture.png").write_text("of a step")
    files = [tmp_path / "trace.json", tmp_path / "picture.png"]
    result = Result(theme="step", tables=[table], data={"x": 1}, environment={"torch": "2"}, files=files)
    assert len(file_result(result, "vm2", tmp_path)) == 2
    markdown, raw, picture = file_result(replace(result, picture=files[1]), "vm2", tmp_path)
    assert markdown.name.startswith("step_vm2_20")
    assert "- torch: 2" in markdown.read_text()
    assert "| a\\|b | 1 |" in markdown.read_text()
    assert "python -m benchmarks" in markdown.read_text()
    assert json.loads(raw.read_text())["x"] == 1
    assert json.loads(raw.read_text())["files"] == ["trace.json", picture.name]
    assert picture.read_text() == "of a step"
    assert picture.stem == markdown.stem
    for name in ("host.example.org", "/tmp/x", "a-b"):
        refused = CliRunner().invoke(app, ["hooks", "--quick", "--save", "--machine", name])
        assert refused.exit_code == 2
        assert "short neutral" in refused.stderr


def test_bars_and_ratios() -> None:
    assert Bar(what="w", measured=0.90, limit=0.90, sign=">=").met is True
    assert Bar(what="w", measured=0.89, limit=0.90, sign=">=").met is False
    assert Bar(what="w", measured=0.97, limit=1.0, sign=">=", noise=0.04).met is True
    assert Bar(what="w", measured=1.03, limit=1.0, noise=0.04).met is True
    assert Bar(what="w", measured=1.0, limit=1.0, sign="<").met is False
    assert Bar(what="w", measured=1.0, limit=1.0).met is True
    assert Bar(what="w", measured=1.0, limit=None).met is None
    assert Bar(what="w", measured=0.015, limit=0.01, unit="%").row() == ("w", "<= 1.00%", "1.50%", "NO")
    assert Bar(what="w", measured=1.06, limit=1.05, spread=0.02).row() == ("w", "<= 1.050x", "1.060x ± 0.020", "NO")
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0
