"""Presets: what each class of saved tensor gets, and what none may get."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from compact import FLOORS, PRESETS, CodecError, Exact, PresetError, Projected, Quantized, Saved, Verbatim, preset
from compact import Preset as PresetTable

ALWAYS_EXACT = [
    Saved.NORM_STATISTICS,
    Saved.ATTENTION_STATISTICS,
    Saved.PROBABILITIES,
    Saved.MASK,
    Saved.INDEX,
    Saved.UNKNOWN,
]


@pytest.mark.parametrize("name", PRESETS)
def test_attention_has_at_least_eight_bits(name: str) -> None:
    stated = PRESETS[name][Saved.ATTENTION].properties
    assert stated.exact or (stated.bits_per_element is not None and stated.bits_per_element >= 8)
    assert stated.exact or not stated.unbiased  # nearest: softmax is not linear in q and k


@pytest.mark.parametrize("kind", ALWAYS_EXACT)
@pytest.mark.parametrize("name", PRESETS)
def test_statistics_and_what_is_not_recognised_are_exact(name: str, kind: Saved) -> None:
    assert PRESETS[name][kind].properties.exact


def test_the_floors_say_the_same() -> None:
    assert {kind for kind, floor in FLOORS.items() if floor.exact} == set(ALWAYS_EXACT) - {Saved.MASK, Saved.UNKNOWN}
    assert FLOORS[Saved.ATTENTION].bits == 8


def test_exact_is_exact() -> None:
    assert all(codec.properties.exact for codec in PRESETS["exact"].table.values())


@pytest.mark.parametrize("name", PRESETS)
def test_every_class_has_a_codec(name: str) -> None:
    assert set(PRESETS[name].table) == set(Saved)


@pytest.mark.parametrize("name", PRESETS)
def test_below_eight_bits_the_linear_is_unbiased_and_the_rest_is_nearest(name: str) -> None:
    linear = (Saved.LINEAR_INPUT, Saved.PRODUCT_FACTOR)
    for kind, codec in PRESETS[name].table.items():
        bits = codec.properties.bits_per_element
        if not codec.properties.exact and bits is not None and bits < 8:
            assert codec.properties.unbiased is (kind in linear), kind


def test_presets_keep_fewer_and_fewer_bits() -> None:
    for kind in (Saved.LINEAR_INPUT, Saved.NORM_INPUT, Saved.ACTIVATION_INPUT, Saved.PRODUCT_FACTOR):
        bits = [PRESETS[name][kind].properties.bits_per_element or 16 for name in ("exact", "safe8", "balanced", "max")]
        assert bits == sorted(bits, reverse=True), kind


def test_override_by_member_and_by_name() -> None:
    codec = Quantized("e4m3")
    for kind in (Saved.NORM_INPUT, "norm_input"):
        changed = preset("balanced").override({kind: codec})  # type: ignore[dict-item]
        assert changed[Saved.NORM_INPUT] is codec
        assert changed[Saved.LINEAR_INPUT] == preset("balanced")[Saved.LINEAR_INPUT]
    assert preset("balanced")[Saved.NORM_INPUT] != codec
    assert preset("safe8").override({Saved.UNKNOWN: codec})[Saved.UNKNOWN] is codec  # a user may know better


@pytest.mark.parametrize(
    ("kind", "codec", "message"),
    [
        (Saved.ATTENTION, Quantized("int4"), "int4/64 for attention, which needs at least 8 bits: probabilities"),
        (Saved.ATTENTION, Quantized("int2", 16, rotate=True), "attention, which needs at least 8 bits"),
        (Saved.ATTENTION_STATISTICS, Quantized("int8"), "attention_statistics, which needs an exact codec"),
        (Saved.NORM_STATISTICS, Quantized("int8"), "norm_statistics, which needs an exact codec"),
        (Saved.ATTENTION, Projected(), "attention, which needs at least 8 bits"),
        (Saved.PROBABILITIES, Quantized("int8"), "probabilities, which needs an exact codec"),
    ],
)
def test_a_codec_below_the_floor_is_refused_wherever_it_comes_from(kind, codec, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PresetError, match=message):
        preset("safe8").override({kind: codec})
    with pytest.raises(PresetError, match=message):
        PresetTable("mine", {kind: codec})


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(PresetError, match="no preset 'safe16': choose one of exact, safe8, balanced, max, compact"):
        preset("safe16")
    with pytest.raises(PresetError, match="no class of saved tensor 'norms': choose one of linear_input, norm_input"):
        preset("safe8").override({"norms": Exact()})


def test_compact_is_compacts_and_takes_a_rank() -> None:
    assert preset("compact")[Saved.LINEAR_INPUT] == Projected(0.25, "gaussian")
    assert preset("compact", rank=8)[Saved.LINEAR_INPUT] == Projected(8)
    others = [kind for kind in Saved if kind is not Saved.LINEAR_INPUT]
    assert all(preset("compact", rank=8)[kind].properties.exact for kind in others)
    with pytest.raises(PresetError, match="preset 'safe8' was given rank 8, but it projects nothing"):
        preset("safe8", rank=8)
    with pytest.raises(CodecError, match=r"rank 1\.5"):
        preset("compact", rank=1.5)


def test_a_preset_prints_as_a_table() -> None:
    lines = str(preset("balanced")).splitlines()
    assert lines[0] == "preset balanced"
    assert len(lines) == 2 + len(Saved)
    row = next(line for line in lines if line.startswith("linear_input"))
    assert row.split("  ")[-1].strip() == "unbiased"
    assert "int4/64 stochastic rotated" in row
    assert "4.5" in row


def test_a_table_cannot_be_changed_behind_its_back() -> None:
    table = {Saved.NORM_INPUT: Verbatim()}
    mine = PresetTable("mine", table)
    table[Saved.NORM_INPUT] = Quantized("int2")  # type: ignore[assignment]
    assert mine[Saved.NORM_INPUT] == Verbatim()
    with pytest.raises(TypeError):
        mine.table[Saved.NORM_INPUT] = Exact()  # type: ignore[index]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_preset_can_be_copied_and_pickled(how: Callable[[PresetTable], PresetTable]) -> None:
    table = PRESETS["safe8"].override({"norm_input": Quantized("e4m3")})
    same = how(table)
    assert same == table
    assert hash(same) == hash(table)
