"""Tests of the benchmarks that compare: rok, paper, peers, knee, scale, and the report of what is filed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._peers.registry import CHECKED, NVME, PEERS
from benchmarks._peers.trial import judge, run_case
from benchmarks._processes.device import CPU, CUDA, DEVICES
from benchmarks._report.bar import Bar
from benchmarks._report.curve import best_within, curve_bars
from benchmarks._report.results import Grid, Result, file_result
from benchmarks._report.steps import Measured
from benchmarks._workload.families import BY_SIZE, FAMILIES, blocks
from benchmarks._workload.link_need import begins_to_wait, slowed, waiting_s
from benchmarks.all import run_all
from benchmarks.paper import chosen
from benchmarks.report import run_report
from benchmarks.rok import CARD, make_arms
from benchmarks.scale import exponent, lines
from support.benchmarks import quick, run_benchmark


def measured(name: str, peak_bytes: int, *wall_s: float) -> Measured:
    about = {"units": 10, "unit": "tokens"}
    return Measured(name=name, allocator="none", about=about, peak_bytes=peak_bytes, wall_s=list(wall_s))


@pytest.mark.exhaustive
def test_rok_places_every_arm_and_draws(tmp_path: Path) -> None:
    found = run_benchmark("rok", "--threads", "1", "--out", str(tmp_path / "out"), scratch=tmp_path)
    [batches] = found["families"].values()
    [curve] = batches.values()
    assert curve["gradients_bit_equal"] is True
    arms = curve["arms"]
    assert {"plain", "checkpoint", "selective checkpoint", "SSDTrain's rule", "auto 0.40", "nvme"} <= arms.keys()
    assert arms["nvme"]["moved"]["written_bytes"] > 0
    assert arms["keep, safe8"]["moved"]["packed_bytes"] < arms["keep, safe8"]["moved"]["encoded_bytes"]
    assert arms["keep, safe8"]["about"]["inexact"] is True
    peers = [bar["what"].partition(" / ")[2].removesuffix(", at no higher peak") for bar in curve["bars"]]
    assert peers[:2] == ["plain", "checkpoint"]
    for path in map(Path, found["files"]):
        assert path.stat().st_size > 1000


def test_paper_shows_each_model_with_either_window(tmp_path: Path) -> None:
    found = run_benchmark("paper", "--threads", "1", "--out", str(tmp_path / "out"), scratch=tmp_path)
    [model] = found["models"].values()
    assert model["arms"].keys() == {"plain", "nvme", "nvme, 14% held back"}
    assert model["arms"]["nvme"]["moved"]["read_bytes"] > 0
    assert [bar["what"] for bar in found["bars"]] == ["gpt: peak / plain", "gpt: waited", "gpt: other gradients"]
    assert found["bars"][-1]["met"] is True
    [picture] = map(Path, found["files"])
    assert picture.stat().st_size > 1000


def test_the_papers_arm_waits_least_within_the_bar() -> None:
    def arm(name: str, peak_bytes: int, waited: float) -> Measured:
        return replace(measured(name, peak_bytes, 1.0), waited_share=[waited])

    plain, low, middle, high = (
        arm("plain", 100, 0.0),
        arm("low", 20, 0.1),
        arm("middle", 40, 0.01),
        arm("high", 41, 0.0),
    )
    assert chosen({each.name: each for each in (plain, low, middle, high)}) is middle
    assert chosen({each.name: each for each in (plain, high)}) is high


@pytest.fixture
def card_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` takes all but the device: its arms, in bf16, each alone."""
    monkeypatch.setitem(DEVICES, "cuda", replace(CUDA, name="cpu"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("card_here")
def test_rok_on_a_card(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    found = run_benchmark("rok", "--device", "cuda", "--threads", "1", "--out", out, scratch=tmp_path)
    [curve] = found["families"]["gpt"].values()
    assert curve["gradients_bit_equal"] is True
    assert {"plain", "checkpoint", "auto 0.40", "nvme", "cpu", "nvme, safe8"} <= curve["arms"].keys()
    assert curve["arms"]["nvme"]["moved"]["read_bytes"] > 0
    assert curve["arms"]["plain"]["allocator"] == "as Python comes"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("card_here")
def test_peers_on_a_card(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    one = ("--peer", "save_on_cpu")
    found = run_benchmark("peers", "--device", "cuda", *one, "--threads", "1", "--out", out, scratch=tmp_path)
    assert found["arms"].keys() == {"plain", "save_on_cpu", NVME, "SSDTrain's rule", "tba auto 0.40"}
    assert set(found["bit_equal"].values()) == {True}
    assert found["cases"]["save_on_cpu"]["double backward"]["kind"] == "right"


def test_arms_of_a_card() -> None:
    specs = make_arms({"family": "llama"}, CARD, 2, 1000, CUDA)
    assert {"nvme", "cpu", "auto 0.25"} <= {spec.name for spec in specs}
    for spec in specs:
        assert spec.role == "family:FamilyArm"
        assert {"device": "cuda", "dtype": "bfloat16", "size": "large"}.items() <= spec.options.items()
        assert "CUBLAS_WORKSPACE_CONFIG" in spec.environment
    assert (CPU.theme("rok"), CUDA.theme("rok")) == ("rok", "rok-cuda")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_large_members_are_larger_and_train(family: str) -> None:
    small, large = FAMILIES[family], BY_SIZE["large"][family]
    assert large.describe != small.describe
    assert large.batch(0, 1)[0].numel() > small.batch(0, 1)[0].numel()
    model = large.make(False, 2).to(torch.bfloat16)
    assert len(blocks(model)) == 2
    batch = (part.to(torch.bfloat16) if part.is_floating_point() else part for part in large.batch(0, 1))
    loss = model(*batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_curve_names_what_lies_above_or_left() -> None:
    plain, fast = measured("plain", 100, 1.0, 1.0, 1.0), measured("fast", 60, 1.0, 1.01, 1.0)
    low, slow = measured("low", 40, 2.0, 2.0, 2.0), measured("slow", 40, 3.0, 3.1, 2.9)
    lowest = measured("lowest", 10, 9.0, 9.0, 9.0)
    assert best_within(plain, [low, fast]) is fast
    assert best_within(slow, [low, fast]) is low
    assert best_within(lowest, [low, fast]) is None
    arms = {arm.name: arm for arm in (plain, fast, low, slow, lowest)}
    found = curve_bars("here", arms, ["plain", "slow", "lowest"], ["low", "fast"])
    assert [bar.met for bar in found] == [True, True, False]
    assert [bar.measured for bar in found] == [1.0, 1.5, 4.0]
    [beaten] = curve_bars("here", arms, ["fast"], ["low"])
    assert beaten.what == "here: throughput of low / fast, at no higher peak"
    assert beaten.met is False


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore::tba.OffloadWarning")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.missing() and not peer.package])
@pytest.mark.parametrize("family", ["gpt", "conv"])
def test_peers_train_with_plain_gradients(family: str, name: str, tmp_path: Path) -> None:
    gradients: list[Any] = []
    for peer in (None, PEERS[name]):
        torch.manual_seed(0)
        model = FAMILIES[family].make(False, 2)
        before = [block.forward for block in blocks(model)]
        if peer is not None:
            peer.put_under(model, tmp_path)
            wrapped = [block.forward != old for block, old in zip(blocks(model), before, strict=True)]
            assert wrapped == ([False, False] if peer.scope == "model" else [True, peer.every == 1])
        model(*FAMILIES[family].batch(0, 1)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_peers_are_measured_and_judged(tmp_path: Path) -> None:
    found = run_benchmark("peers", "--threads", "1", "--out", str(tmp_path / "out"), scratch=tmp_path)
    assert found["arms"].keys() == {"plain", "checkpoint", "tutorial's files", NVME, "SSDTrain's rule", "tba auto 0.40"}
    assert set(found["bit_equal"].values()) == {True}
    assert set(found["bytes_left_on_disk"].values()) == {0}
    kinds = {name: {case: each["kind"] for case, each in cases.items()} for name, cases in found["cases"].items()}
    assert kinds[NVME]["views of one storage"] == kinds["checkpoint"]["graph dropped"] == "right"
    assert kinds["tutorial's files"]["file vanishes"] == kinds[NVME]["file vanishes"] == "error"
    assert kinds["checkpoint"]["file vanishes"] == "-"
    assert found["failed"] == {}
    assert "trainstream" in found["missing"]


@pytest.mark.parametrize(
    ("peer", "case", "kind"),
    [
        ("save_on_cpu", "edit before backward", "wrong"),
        ("save_on_cpu", "double backward", "right"),
        ("tutorial's files", "bytes change on disk", "wrong"),
        (CHECKED, "bytes change on disk", "error"),
        (CHECKED, "edit before backward", "error"),
        (CHECKED, "graph dropped", "right"),
    ],
)
def test_a_case_is_judged_by_what_it_does(peer: str, case: str, kind: str, tmp_path: Path) -> None:
    assert run_case(peer, case, timeout_s=100, directory=tmp_path).kind == kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["relative", "absolute"])
def test_files_are_found_wherever_they_are(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path(".") if folder == "relative" else tmp_path
    assert run_case(NVME, "bytes change on disk", timeout_s=100, directory=directory).kind == "error"


def test_a_case_that_is_not_tried_is_not_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(PEERS["save_on_cpu"], files=True)
    monkeypatch.setitem(PEERS, "save_on_cpu", nowhere)
    found = judge("save_on_cpu", "file vanishes", tmp_path, "cpu")
    assert found.kind == "not tried"
    assert "nothing was written" in found.words


def test_a_peer_that_cannot_be_set_up_is_no_error_of_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: Any, scratch: Path) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setitem(PEERS, "save_on_cpu", replace(PEERS["save_on_cpu"], make=make))
    assert judge("save_on_cpu", "retain_graph, twice", tmp_path, "cpu") == (
        "crash",
        "cannot be set up: RuntimeError: no compiler",
    )


def test_a_case_that_hangs_or_dies_is_ended(tmp_path: Path) -> None:
    assert run_case(CHECKED, "graph dropped", timeout_s=0, directory=tmp_path).kind == "hang"
    assert run_case("no such peer", "graph dropped", timeout_s=100, directory=tmp_path).kind == "crash"


@pytest.mark.exhaustive
def test_knee_measures_slow_links_beside_a_prediction(tmp_path: Path) -> None:
    found = run_benchmark("knee", "--threads", "1", "--out", str(tmp_path / "out"), scratch=tmp_path)
    assert found["gradients_bit_equal"] is True
    assert found["predicted_bytes_per_s"] > found["arms"]["nvme, 50 MB/s"]["moved"]["written_bytes"]
    assert found["rule_of_thumb_bytes_per_s"] > 0
    slow, free = found["arms"]["nvme, 50 MB/s"], found["arms"]["nvme, free"]
    assert slow["stalled_share"][0] >= slow["waited_share"][0] > 0
    assert min(slow["moved"]["read_bytes"], free["moved"]["read_bytes"]) > 0
    [picture] = map(Path, found["files"])
    assert picture.stat().st_size > 1000


def test_waiting_for_a_link() -> None:
    # Each second 10 bytes: a link of 10 a second keeps up with one transfer under way, one of 5 is a second late each.
    arrivals = [(float(second), 10) for second in range(5)]
    assert waiting_s(arrivals, 10.0, 10) == 0.0
    assert waiting_s(arrivals, 5.0, 10) == 4.0
    assert waiting_s(arrivals, 5.0, 20) == 2.0  # one more may be under way
    assert waiting_s(arrivals, 5.0, 30) == 0.0
    # Half a second of the computation for 10 bytes that move leaves a link of 5 half a second less to be late.
    slow = slowed(arrivals, 0.05)
    assert slow == [(1.5 * second, 10) for second in range(5)]
    assert waiting_s(slow, 5.0, 10) == 2.0
    # Waiting of 40 s * MB / rate - 2 s: begins at 20 MB/s, and is half of the floor, 0.5 s, at 16 MB/s.
    rates = [1e6, 2e6, 4e6, 5e6, 8e6, 20e6, 40e6]
    waited = [max(0.0, 40e6 / rate - 2) for rate in rates]
    assert begins_to_wait(rates, waited, floor_s=1.0) == pytest.approx(16e6)
    assert begins_to_wait(rates, [0.0] * 7, floor_s=1.0) is None


def test_report_answers_from_what_is_filed(tmp_path: Path) -> None:
    both = measured("plain", 100, 1.0, 2.0), measured("nvme", 30, 1.1, 2.2)
    arms = {arm.name: vars(arm) for arm in both}
    bars = [Bar(what="peak", measured=0.3, limit=0.2).data(), Bar(what="time", measured=1.1, limit=None).data()]
    data = {"families": {"gpt": {"8": {"arms": arms, "bars": bars}}}, "missing": {"trl": "not installed"}}
    (tmp_path / "rok.png").write_bytes(b"a picture")
    table = Grid("A table", ("what", "value"), [("a|b", "<1>")])
    picture = tmp_path / "rok.png"
    environment = {"cpu": "a processor", "date": "2026-11-24", "commit": "abc with changes"}
    result = Result(theme="rok", tables=[table], data=data, environment=environment, files=[picture], picture=picture)
    file_result(result, "vm2", tmp_path / "results")
    (tmp_path / "results" / "old_kind_vm3_202610.md").write_text("# Without figures\n")
    found = run_report(tmp_path / "out", tmp_path / "results")
    [answer] = found.data["How much memory, at what cost"]
    assert answer[:5] == ["rok, gpt, batch 8: nvme", "0.30x", "1.100x ± 0.000", "plain", "vm2"]
    assert "python -m benchmarks" in answer[5]
    assert found.data["Bars that are not met"] == [["rok", "peak", "<= 0.2", "0.300", "vm2"]]
    rest = dict(map(tuple, reversed(found.data["Measured and not claimed, and not measured"])))
    assert rest["rok"].startswith("1 values are shown")
    assert "a processor" in rest["all"] or "GPU" in rest["all"]
    assert found.data["Recompute, offload, keep"] == [["plain", "1.00, 1.00"], ["nvme", "0.30, 0.91"]]
    page, text = (path.read_text() for path in found.files[:2])
    assert found.files[2].read_bytes().startswith(b"\x89PNG")
    assert page.count("<details>") == 2
    assert page.count("<img") == 2
    assert "data:image/png;base64,YSBwaWN0dXJl" in page
    for part in ("<td", "&lt;1&gt;", "Without figures"):
        assert part in page
    assert "http" not in page
    assert "| rok, gpt, batch 8: nvme | 0.30x |" in text


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_runs_what_it_is_told_and_names_what_fails() -> None:
    found = run_all(["hooks", "no-such"], quick=True, options=[])
    assert found.data["commands"]["hooks"]["code"] == 0
    assert found.data["commands"]["no-such"]["code"] == 2
    assert [row[1] for row in found.tables[0].rows] == ["yes", "NO"]


def test_a_power_law_is_fitted() -> None:
    assert exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0]) == pytest.approx(2.0)
    arms = {
        size: {"plain": measured("plain", size << 20, float(size)), "nvme": measured("nvme", 5 << 20, 2.0)}
        for size in (4, 8, 16)
    }
    for pair in arms.values():
        for arm in pair.values():
            arm.about = {**arm.about, "parameters": 1 << 18}  # 1 MiB of gradients
    found = lines(arms)
    assert found["step, s"]["plain"].exponent == pytest.approx(1.0)
    assert found["step, s"]["nvme"].exponent == pytest.approx(0.0)
    assert found["peak less gradients, MiB"]["plain"].values == [3.0, 7.0, 15.0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_scale_fits_and_finishes_under_a_limit(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    found = quick("scale", tmp_path, "--out", out)
    assert found["layers"].keys() == {"2", "4"}
    assert found["records_s"].keys() == {"100", "1000"}
    assert len(found["limits"]) + len(found["missing"]) == 2
    for row in found["limits"]:
        assert row["equal"] is True
        assert row["peak_bytes"] <= row["limit_bytes"] < row["saved_bytes"]
        assert row["written_bytes"] > 0
    for why in found["missing"].values():
        assert "cgroup" in why  # where none can be made, that is all that may be missing
    assert [Path(path).name for path in found["files"]] == ["scale.png"]
