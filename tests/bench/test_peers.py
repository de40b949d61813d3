"""Tests of the benchmark of peers and of the families that are trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._peers.registry import CHECKED, NVME, PEERS
from benchmarks._peers.trial import judge, run_case
from benchmarks._processes.device import CUDA, DEVICES
from benchmarks._workload.families import BY_SIZE, FAMILIES, LARGE, blocks, families
from support.benchmarks import run_benchmark


@pytest.fixture
def card_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` takes all but the device: its arms, in bf16, each alone."""
    monkeypatch.setitem(DEVICES, "cuda", replace(CUDA, name="cpu"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("card_here")
def test_peers_on_a_card(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    one = ("--peer", "save_on_cpu")
    found = run_benchmark("peers", "--device", "cuda", *one, "--threads", "1", "--out", out, scratch=tmp_path)
    assert found["arms"].keys() == {"plain", "save_on_cpu", NVME, "tba cpu", "SSDTrain's rule", "tba auto 0.40"}
    assert set(found["bit_equal"].values()) == {True}
    assert found["cases"]["save_on_cpu"]["double backward"]["kind"] == "right"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_large_members_are_larger_and_train_in_bf16(family: str) -> None:
    small, large = FAMILIES[family], BY_SIZE["large"][family]
    assert large.describe != small.describe
    assert large.batch(0, 1)[0].numel() > small.batch(0, 1)[0].numel()
    narrow = families(replace(LARGE, width=256, heads=8, sequence=128, channels=32))[family]  # a card's width takes one
    model = narrow.make(False, 2).to(torch.bfloat16)
    assert len(blocks(model)) == 2
    batch = (part.to(torch.bfloat16) if part.is_floating_point() else part for part in narrow.batch(0, 1))
    loss = model(*batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore::tba.OffloadWarning")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.missing() and not peer.package])
@pytest.mark.parametrize("family", ["gpt", "conv"])
def test_peers_train_with_plain_gradients(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # whatever ran in this process before
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


@pytest.mark.sampled(1)
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
