"""Tests of the benchmark codec: end to end at a tiny size, what it counts, its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compact
from benchmarks._arms.codec_speed import cases, make_data
from benchmarks.codec import make_bars as codec_bars
from compact import Saved
from support.benchmarks import run_benchmark

# -- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
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
    assert list(presets) == ["exact", "safe8", "balanced", "max"]
    assert presets["exact"]["gradients_bit_equal"] is True
    stored = [preset["stored_bytes"] for preset in presets.values()]
    assert stored == sorted(stored, reverse=True)
    assert plain > stored[0]
    errors = [presets[name]["relative_error"] for name in ("exact", "safe8", "balanced", "max")]
    assert errors == sorted(errors)
    assert errors[0] == 0 < errors[1]
    methods = found["gradients"]["methods"]
    assert list(methods) == ["gaussian", "orthonormal", "wta-crs"]
    for role, layers in methods["wta-crs"].items():
        for projected, sampled in zip(methods["gaussian"][role], layers, strict=True):
            assert sampled["bytes"] - projected["bytes"] == 64 * 8  # index and factor of a quarter of 256 tokens
            assert sampled["variance"] > 0
    ratios = [layer["bias_ratio"] for layers in methods["wta-crs"].values() for layer in layers]
    assert sum(ratios) / len(ratios) < 2  # without bias it averages 1
    assert len(found["bars"]) == 4 + 1 + 4 + 1


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


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_codec_bars_know_their_limits() -> None:
    speeds = {"encode_bytes_per_s": [3.6e9], "decode_bytes_per_s": [3.9e9]}
    codecs = [{"codec": "int8/64", "dtype": "float32", **speeds}, {"codec": "int4/64", "dtype": "float32", **speeds}]
    presets = {
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
