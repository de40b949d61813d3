"""Tests of the first hour on a card: its parts in order, gone on with after a failure, and run without a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import card
from benchmarks.__main__ import app
from benchmarks._report.environment import environment_block
from benchmarks._workload.tools import sums
from benchmarks.card import CALL_S, PARTS, Part
from support import accelerator
from support.accelerator import build
from support.benchmarks import quick

ROOT = Path(__file__).resolve().parents[2]
HERE = {"device": "cuda", "machine": "h100", "quick": False}


def write(path: Path) -> list[str]:
    """A command that adds a line to a file."""
    return [sys.executable, "-c", f"open({str(path)!r}, 'a').write('again\\n')"]


def parts(**limits_s: float) -> list[Part]:
    return [Part(name=name, limit_s=limit_s) for name, limit_s in limits_s.items()]


def logs(folder: Path) -> dict[str, int]:
    """How often each part's command ran, by the file that it writes to."""
    return {path.stem: len(path.read_text().splitlines()) for path in sorted(folder.glob("*.txt"))}


def test_each_call_does_the_next_parts_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = parts(tests=60, step=60, curve=60)
    commands = {part.name: write(tmp_path / f"{part.name}.txt") for part in every}
    for number in (1, 2, 3):
        assert card.do_next(every, commands, tmp_path / "out", call_s=50)
        assert logs(tmp_path) == dict.fromkeys(sorted(["tests", "step", "curve"][:number]), 1)
    assert "all is done" in capsys.readouterr().out
    assert card.do_next(every, commands, tmp_path / "out", call_s=50)
    assert set(logs(tmp_path).values()) == {1}
    assert "curve: done before\nall is done" in capsys.readouterr().out
    commands["step"] = write(tmp_path / "another.txt")  # what was done is another command's
    assert card.do_next(every, commands, tmp_path / "out", call_s=200)
    assert logs(tmp_path) == {"another": 1, "curve": 1, "step": 1, "tests": 1}


def test_a_part_that_fails_or_hangs_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = parts(tests=60, step=0.5, curve=60)
    good = tmp_path / "good"
    commands = {
        "tests": [sys.executable, "-c", f"print('no luck'); assert __import__('os').path.exists({str(good)!r})"],
        "step": [sys.executable, "-c", f"import os, time; os.path.exists({str(good)!r}) or time.sleep(600)"],
        "curve": write(tmp_path / "curve.txt"),
    }
    assert not card.do_next(every, commands, tmp_path)
    told = capsys.readouterr().out
    assert "tests: failed with exit status 1" in told
    assert "no luck" in told
    assert "step: ran out of time" in told
    assert "not done: tests, step; the next call does them again" in told
    good.touch()
    every[1] = Part(name="step", limit_s=60)
    assert card.do_next(every, commands, tmp_path)
    assert "all is done" in capsys.readouterr().out
    assert logs(tmp_path) == {"curve": 1}
    assert "no luck" in (tmp_path / "tests.log").read_text()


def test_a_part_that_fails_keeps_no_other_from_its_turn(tmp_path: Path) -> None:
    every = parts(tests=60, step=60, curve=60)
    commands = {part.name: write(tmp_path / f"{part.name}.txt") for part in every}
    commands["tests"] = [sys.executable, "-c", "raise SystemExit(1)"]
    assert not card.do_next(every, commands, tmp_path / "out", call_s=50)
    for number in (1, 2):
        assert card.do_next(every, commands, tmp_path / "out", call_s=50)
        assert logs(tmp_path) == dict.fromkeys(["step", "curve"][:number], 1)
    assert not card.do_next(every, commands, tmp_path / "out", call_s=50)


def test_four_calls_do_all_parts() -> None:
    calls, left_s = 0, 0.0
    for part in PARTS:
        if part.limit_s > left_s:
            calls, left_s = calls + 1, CALL_S
        left_s -= part.limit_s
        assert left_s >= 0
    assert calls <= 4


@pytest.mark.parametrize("small", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize("device", ["cuda", "simulated"])
def test_the_commands_of_all_parts_parse(device: str, small: bool, tmp_path: Path) -> None:
    group: Any = typer.main.get_command(app)
    for part in PARTS:
        command = part.command(tmp_path, device=device, machine="h100", quick=small)
        if not part.benchmark:
            done = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
            assert f"{sys.executable} -m pytest -m gpu tests/gpu" in done.stdout
            continue
        assert command[:3] == [sys.executable, "-m", "benchmarks"]
        found = group.commands[command[3]].make_context(command[3], command[4:])
        assert found.params["device"] == device
        assert found.params["save"] is (device == "cuda" and not small)


def test_results_name_the_commit_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "d06d1f2")
    assert environment_block({}, threads=1)["commit"] == "d06d1f2"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_a_vector_tell_other_bits_and_another_order(dtype: torch.dtype) -> None:
    x = torch.randn((1 << 20) + 5, dtype=dtype)
    found = sums(x)
    assert found.shape == (2,)
    assert torch.equal(sums(x.clone()), found)
    for place in (3, -1):
        edited = x.clone()
        edited[place] = torch.nextafter(edited[place], torch.tensor(9.0, dtype=dtype))
        assert not torch.equal(sums(edited), found)
    turned = x.clone()
    turned[:2] = x[:2].flip(0)
    assert not torch.equal(sums(turned), found)


@pytest.fixture
def simulated() -> None:
    if reason := accelerator.why_not():
        pytest.skip(reason)
    build.build()  # in a minute, once; not within the time that a benchmark has


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_step_on_a_simulated_card_counts_its_memory(tmp_path: Path) -> None:
    found = quick("step", tmp_path, "--device", "simulated")
    assert found["theme"] == "step-sim"
    assert found["environment"]["gpu"] == "accelerator 0 made of a CPU"
    [model] = found["models"].values()
    assert model["gradients_bit_equal"] is True
    arms = model["arms"]
    assert arms.keys() == {"plain", "offload nvme", "offload cpu", "checkpoint"}
    for arm in arms.values():
        assert 0 < arm["peak_bytes"] <= arm["active_bytes"] <= arm["reserved_bytes"]
        assert arm["host_bytes"] > 0
    for name in ("offload nvme", "offload cpu"):
        assert arms[name]["moved"]["written_bytes"] > 0
        assert arms[name]["peak_bytes"] < arms["plain"]["peak_bytes"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("simulated")
def test_a_plan_of_a_simulated_card_uses_host_memory_and_files(tmp_path: Path) -> None:
    set_of_arms = ("--arms", "two-links", "--rate", "200MB/s", "--link", "2GB/s")
    found = quick("curve", tmp_path, *set_of_arms, "--device", "simulated", "--out", str(tmp_path))
    [arms] = (batch["arms"] for family in found["families"].values() for batch in family.values())
    autos = {"auto 0.40, ample host memory", "auto 0.40, two links"}
    assert arms.keys() == {"plain", "checkpoint", "nvme", "cpu", *autos}
    assert all(arms["cpu"]["moved"]["written_bytes"] > arms[auto]["moved"]["written_bytes"] > 0 for auto in autos)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("simulated")
def test_links_of_a_simulated_card_are_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks",
            "links",
            "--device",
            "simulated",
            "--quick",
            "--json",
            "--path",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    links = json.loads(done.stdout)["links"]
    assert links["a file, by kvikio"] == {"mode": "needs CUDA"}
    for name in ("pinned host memory", "a file, through pinned host memory"):
        assert len(links[name]["out"]) == len(links[name]["back"]) == 1
        assert min(links[name]["out"] + links[name]["back"]) > 0
    assert list(tmp_path.iterdir()) == []
