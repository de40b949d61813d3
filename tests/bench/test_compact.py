"""Tests of the benchmarks codec, fidelity and bert: end to end at a tiny size, what they count, their arithmetic."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compact
from benchmarks._arms.codec_speed import cases, make_data
from benchmarks._arms.fidelity import FidelityOptions, best_rate, scheduled_rate, train, validate
from benchmarks._arms.stored_bytes import stored_bytes, unique_bytes
from benchmarks._pictures.pareto import frontier, labelled_below
from benchmarks._report.steps import Measured
from benchmarks._workload.gpt import GPT
from benchmarks._workload.text import Text, is_held_out, sources, split_library
from benchmarks.bert import AS_IS, KEEP, NVME, PLAIN
from benchmarks.bert import make_bars as bert_bars
from benchmarks.codec import make_bars as codec_bars
from benchmarks.fidelity import ARMS, TINY, run_fidelity, spread, summarise
from benchmarks.fidelity import make_bars as fidelity_bars
from compact import Saved
from support.benchmarks import arms_in_this_process, run_benchmark

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


def test_fidelity_trains_every_arm_on_every_seed_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kinds = ("exact", "balanced", "CompAct n/4", "fresh Gaussian n/4, Adam")  # one of each: a process each takes long
    arms = {name: ARMS[name] for name in kinds}
    with arms_in_this_process(tmp_path):
        result = run_fidelity(TINY, seeds=2, rates=[1e-2], jobs=1, out=out, arms=arms)
    found = json.loads(json.dumps(result.data, default=dict))
    assert list(found["arms"]) == list(kinds)
    exact = found["arms"]["exact"]
    for name, arm in found["arms"].items():
        assert list(arm["losses"]) == ["0", "1"]
        assert [run["seed"] for run in found["runs"][name]] == [0, 1]
        for seed, loss in arm["losses"].items():
            assert 4 < loss < 6  # about log(256), and falling
            assert arm["gaps"][seed] == loss - exact["losses"][seed]
        assert 0 < arm["stored_share"] < 1.1
        # Seeds differ, in weights and in data; steps do train.
        assert len(set(arm["losses"].values())) == 2
        for run in found["runs"][name]:
            assert len(run["losses"]) == TINY.steps
            assert run["losses"][-1] < run["losses"][0]
    assert found["arms"]["balanced"]["stored_share"] < exact["stored_share"]
    assert len({arm["losses"]["0"] for arm in found["arms"].values()}) == len(kinds)  # each arm trains its own way
    assert found["tokens"] == 4 * 4 * 32
    assert (out / "fidelity.png").stat().st_size > 1000
    assert found["seed_spread"] == abs(exact["losses"]["0"] - exact["losses"]["1"])


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


# -- training --------------------------------------------------------------------------------------------------------


def test_no_package_is_trained_on_and_validated_on(tmp_path: Path) -> None:
    names = [f"package{number}" for number in range(120)]
    for name in names:
        (tmp_path / name).mkdir()
        for part in "ab":
            (tmp_path / name / f"{part}.py").write_text(f"{name}.{part};")
    training, validation = ({*bytes(text.data.tolist()).decode().split(";")} - {""} for text in split_library(tmp_path))
    held_out = {name for name in names if is_held_out(name)}
    assert 0 < len(held_out) < 24
    assert validation == {f"{name}.{part}" for name in held_out for part in "ab"}
    assert training == {f"{name}.{part}" for name in set(names) - held_out for part in "ab"}


def test_this_pythons_library_has_a_part_to_validate_on() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    training, validation = split_library()
    assert len(training.data) + len(validation.data) == sum(p.stat().st_size for p in sources(library))
    assert 0.01 < len(validation.data) / len(training.data) < 0.2


def test_a_library_with_nothing_to_validate_on_is_an_error(tmp_path: Path) -> None:
    name = next(name for name in "abcdefgh" if not is_held_out(f"{name}.py"))
    (tmp_path / f"{name}.py").write_text("x")
    with pytest.raises(FileNotFoundError, match="no Python source to read below"):
        split_library(tmp_path)


def test_every_seed_is_validated_on_the_same_batches() -> None:
    text = Text(torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    model = GPT(TINY)
    losses = {validate(model, text, replace(TINY, seed=seed)) for seed in range(3)}
    assert len(losses) == 1
    assert 5 < losses.pop() < 6


def test_exact_trains_to_the_very_loss_of_plain_and_lossy_ones_do_not() -> None:
    text = Text(torch.randint(97, 123, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    base = FidelityOptions(
        layers=1, width=16, heads=2, sequence=16, batch=4, steps=6, learning_rate=1e-2, validation_batches=2
    )

    def loss(**how: Any) -> float:
        found: float = train(replace(base, **how), (text, text))["validation_loss"]
        return found

    plain = loss()
    assert loss(settings={"compress": "exact"}) == plain
    assert plain == loss()
    others = [loss(convert_rank=0.25)]
    others += [loss(settings=how) for how in ({"compress": "balanced"}, {"compress": "compact", "rank": 0.25})]
    assert len({plain, *others}) == 4
    assert loss(seed=1) != plain


def test_a_loss_that_is_no_number_counts_as_infinite() -> None:
    text = Text(torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    options = FidelityOptions(layers=1, width=16, heads=2, sequence=8, batch=2, steps=3, learning_rate=1e36)
    assert train(options, (text, text))["validation_loss"] == float("inf")


def test_the_rate_rises_and_falls() -> None:
    rates = [scheduled_rate(1.0, step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[5] == 1.0
    assert 0.1 < rates[-1] < 0.102


def test_the_best_rate() -> None:
    runs = [{"learning_rate": rate, "validation_loss": loss} for rate, loss in ((1, float("inf")), (2, 3.0), (3, 4.0))]
    assert best_rate(runs) == 2


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _body(losses: Mapping[tuple[float, int], float], best: float, stored: int) -> dict[str, Any]:
    runs = [{"learning_rate": rate, "seed": seed, "validation_loss": loss} for (rate, seed), loss in losses.items()]
    return {"runs": runs, "best_rate": best, "stored_bytes": stored, "plain_bytes": 100}


def test_gaps_are_within_a_seed_and_at_the_arms_own_rate() -> None:
    raw = {
        "exact": _body({(0.1, 0): 2.0, (0.2, 0): 1.0, (0.2, 1): 1.5}, 0.2, 90),
        "safe8": _body({(0.1, 0): 1.25, (0.2, 0): 1.5, (0.1, 1): 1.5}, 0.1, 30),
        "CompAct n/2": _body({(0.1, 0): 2.0, (0.1, 1): 2.0}, 0.1, 80),
        "CompAct n/4": _body({(0.1, 0): 1.75, (0.1, 1): 2.0}, 0.1, 70),
    }
    found = summarise(raw)
    assert found["safe8"].gaps == {0: 0.25, 1: 0.0}
    assert found["safe8"].gap == 0.125
    assert found["safe8"].stored_share == 0.3
    assert spread(found) == 0.5
    met = {bar.what: bar.met for bar in fidelity_bars(found)}
    assert met["safe8: gap to exact"] is False
    assert met["safe8: gap, within the spread of seeds"] is True
    assert met["loss of CompAct n/2 less that of CompAct n/4"] is False
    assert met["CompAct n/4: gap to exact"] is None


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


def test_the_frontier_and_labels() -> None:
    points = {"a": (0.2, 0.5), "b": (0.3, 0.5), "c": (0.4, 0.1), "d": (0.4, 0.0), "e": (1.0, 0.0)}
    assert frontier(points) == ["a", "d"]
    assert labelled_below({"a": (0.2, 0.0), "b": (0.21, 0.0), "c": (1.0, 0.0)}) == {"a"}
    assert labelled_below({"a": (0.2, 0.0), "b": (0.21, 0.1), "c": (1.0, 0.0)}) == set()
    assert labelled_below({"a": (0.2, 0.001), "b": (0.21, 0.0), "c": (0.22, 0.0)}) == {"b"}
