"""Tests of the benchmarks codec and bert: end to end at a tiny size, what they count, their arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compact
from benchmarks._arms.codec_speed import cases, make_data
from benchmarks._arms.stored_bytes import stored_bytes, unique_bytes
from benchmarks._report.steps import Measured
from benchmarks.bert import AS_IS, KEEP, NVME, PLAIN
from benchmarks.bert import make_bars as bert_bars
from benchmarks.codec import make_bars as codec_bars
from compact import Saved
from support.benchmarks import run_benchmark

PAGE = 4096


# -- end to end ------------------------------------------------------------------------------------------------------


def test_codec_measures_every_codec_the_layer_and_the_block(tmp_path: Path) -> None:
    found = run_benchmark("codec", "--threads", "1", scratch=tmp_path)
    assert [(one["codec"], one["dtype"]) for one in found["codecs"]] == [(c.name, c.type_name) for c in cases()]
    for one in found["codecs"]:
        for direction in ("encode", "decode"):
            assert len(one[f"{direction}_bytes_per_s"]) == 2
            assert min(one[f"{direction}_bytes_per_s"]) > 0
        assert (one["error"] == 0) is one["exact"]
    assert {name: len(values) for name, values in found["linear"]["seconds"].items()} == {
        "nn.Linear": 2,
        "compact_linear": 2,
    }
    presets, plain = found["block"]["presets"], found["block"]["plain_bytes"]
    assert list(presets) == ["plain", "exact", "safe8", "balanced", "max"]
    assert presets["plain"]["gradients_bit_equal"] is presets["exact"]["gradients_bit_equal"] is True
    # Without a preset all that autograd saves is written, and nothing twice: but for ends of blocks, its own bytes.
    assert plain <= presets["plain"]["stored_bytes"] <= plain + 64 * PAGE
    stored = [presets[name]["stored_bytes"] for name in ("plain", "exact", "safe8", "balanced", "max")]
    assert stored == sorted(stored, reverse=True)
    errors = [presets[name]["relative_error"] for name in ("exact", "safe8", "balanced", "max")]
    assert errors == sorted(errors)
    assert errors[0] == 0 < errors[1]
    assert len(found["bars"]) == 4 + 1 + 4 + 1


def test_bert_measures_every_arm(tmp_path: Path) -> None:
    found = run_benchmark("bert", "--threads", "1", scratch=tmp_path)
    arms = found["arms"]
    assert list(arms) == [AS_IS, PLAIN, KEEP, NVME]
    for name, arm in arms.items():
        assert arm["peak_bytes"] >= 0
        assert arm["about"]["parameters"] == arms[PLAIN]["about"]["parameters"]
        # In each of two layers q, k, v and the feed-forward's two; the attention's output and the rest stay plain.
        assert arm["about"]["converted"] == (10 if name in (KEEP, NVME) else 0)
        assert len(arm["wall_s"]) == 1
    # A sketch changes weight gradients only: the first forward is the same in every arm.
    assert len({arm["losses"]["0"] for arm in arms.values()}) == 1
    assert arms[PLAIN]["gradients"] == arms[AS_IS]["gradients"]
    assert arms[KEEP]["moved"]["written_bytes"] == 0 < arms[NVME]["moved"]["written_bytes"]
    assert [bar["limit"] for bar in found["bars"] if bar["limit"] is not None] == [0.55, 0.35]


# -- codecs ----------------------------------------------------------------------------------------------------------


def test_every_codec_of_every_preset_is_measured() -> None:
    measured = {case.codec.name for case in cases()}
    for preset in compact.PRESETS.values():
        assert {preset[kind].name for kind in Saved} <= measured


def test_data_is_what_it_is_called() -> None:
    mask = make_data("dropout mask", torch.float32, 64, 64, 0)
    assert len(mask.unique()) == 2
    values = make_data("bf16 values", torch.float32, 64, 64, 0)
    assert torch.equal(values, values.bfloat16().float())


# -- stored bytes ----------------------------------------------------------------------------------------------------


def test_unique_bytes_count_each_storage_once_and_no_weight() -> None:
    layer = nn.Linear(64, 128)
    x = torch.randn(32, 64, requires_grad=True)

    def forward() -> Tensor:
        out: Tensor = layer(x)  # saves x and the weight
        return (out * out.exp()).sum()  # saves out, and exp's result twice

    assert unique_bytes(layer, forward) == 4 * (32 * 64 + 2 * 32 * 128)


@pytest.mark.parametrize(("settings", "times"), [({}, 1.0), ({"compress": "safe8"}, (8 + 32 / 64) / 32)])
def test_stored_bytes_are_what_the_engine_wrote(
    settings: Mapping[str, Any], times: float, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_STORAGE_PATHS", str(scratch))
    layer = nn.Linear(64, 128)
    x = torch.randn(256, 64)
    stored = stored_bytes(layer, lambda: layer(x).sum(), lambda loss: loss.backward(), settings)
    wanted = 4 * 256 * 64 * times
    assert wanted <= stored < wanted + PAGE
    assert list(scratch.iterdir()) == []


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_codec_bars_know_their_limits() -> None:
    speeds = {"encode_bytes_per_s": [3.6e9], "decode_bytes_per_s": [3.9e9]}
    codecs = [{"codec": "int8/64", "dtype": "float32", **speeds}, {"codec": "int4/64", "dtype": "float32", **speeds}]
    presets = {
        "plain": {"stored_bytes": 100, "gradients_bit_equal": True},
        "exact": {"stored_bytes": 56, "gradients_bit_equal": False},
        "max": {"stored_bytes": 20, "gradients_bit_equal": False},
    }
    seconds = {"nn.Linear": [1.0, 2.0, 4.0], "compact_linear": [1.0, 1.0, 5.0]}
    bars = codec_bars(codecs, seconds, {"presets": presets, "plain_bytes": 100})
    met = {bar.what: bar.met for bar in bars}
    assert met == {
        "int8/64 encode, float32, one core": True,
        "int8/64 decode, float32, one core": False,
        "compact_linear at n/4 / nn.Linear, forward and backward": True,
        "stored bytes of a Llama block in bf16, exact / plain": False,
        "stored bytes of a Llama block in bf16, max / plain": None,
        "exact: gradients that differ in a bit": False,
    }


def test_bert_bars_are_of_the_worst_step() -> None:
    found = {name: Measured(name=name, allocator="") for name in (AS_IS, PLAIN, KEEP, NVME)}
    answer = {"idle_bytes": 30, "loss": 0.7, "gradients_sha256": "", "moved": {}, "cpu_s": 1.0}
    for name, peaks in ((AS_IS, [200, 100]), (PLAIN, [100, 80]), (KEEP, [54, 20]), (NVME, [36, 10])):
        for number, peak in enumerate(peaks):
            found[name].take(number, {**answer, "peak_bytes": peak, "wall_s": 9.0 - 8 * number}, timed=number > 0)
    assert found[PLAIN].peak_bytes == 100
    assert found[PLAIN].wall_s == [1.0]  # the first of several steps warms up
    bars = {bar.what: bar for bar in bert_bars(found)}
    assert bars[f"{KEEP}: peak over idle / plain, same allocator"].measured == 0.54
    assert bars[f"{KEEP}: peak over idle / plain, same allocator"].met is True
    assert bars[f"{NVME}: peak over idle / plain, same allocator"].met is False
    assert bars[f"{NVME}: peak over idle / plain as Python comes"].measured == 0.18
