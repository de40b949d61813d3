"""Settings: where they come from, what they accept, and that everything else is an error that helps."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest

from tba import ConfigError, OffloadConfig, _config
from tba._config import Setting, describe
from tba._text import Bytes


def variable(name: str) -> str:
    return f"TBA_{name.upper()}"


def test_defaults() -> None:
    config = OffloadConfig()
    assert (config.tier, config.compress, config.storage_paths, config.io_backend) == ("auto", None, None, "auto")
    assert (config.min_tensor_bytes, config.io_timeout, config.checksum) == (1 << 20, 60.0, False)
    assert config.memory_budget is config.staging_bytes is config.prefetch_bytes is config.io_threads is None
    assert config.cpu_budget is config.nvme_budget is config.max_write_bytes_per_day is None
    assert config.max_write_rate is config.max_read_rate is None


@pytest.mark.parametrize("tier", ["nvme", "cpu", "keep"])
def test_only_tier_auto_takes_a_budget(tier: Any) -> None:
    with pytest.raises(ConfigError, match=rf"memory_budget=1GiB was given with tier='{tier}'.*use tier 'auto'"):
        OffloadConfig(tier=tier, memory_budget="1GiB")


def test_argument_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OffloadConfig().tier == "auto"
    monkeypatch.setenv("TBA_TIER", "nvme")
    assert OffloadConfig().tier == "nvme"
    assert OffloadConfig(tier="keep").tier == "keep"
    monkeypatch.setenv("TBA_TIER", "cpu")
    assert OffloadConfig().tier == "cpu"  # read when the object is made, not once


def test_a_variable_set_to_nothing_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OffloadConfig.model_fields:
        monkeypatch.setenv(variable(name), "")
    assert OffloadConfig() == OffloadConfig(tier="auto")


SIZES = {
    "8GiB": 8 << 30,
    "512MB": 512_000_000,
    "1.5 KiB": 1536,
    "2g": 2_000_000_000,
    "2TB": 2 * 10**12,
    "4096B": 4096,
    "8Gi": 8 << 30,
    4096: 4096,
    2.0**20: 1 << 20,
    0: 0,  # nothing at all, unlike None
    "0": 0,
}
RATES = {"100MB": 10**8, "100MB/s": 10**8, "1 GiB / s": 1 << 30, "2MiB/s": 2 << 20, 5: 5, "7B/s": 7}
READ: dict[str, dict[Any, Any]] = {
    "memory_budget": SIZES,
    **{
        name: {"1.5GiB": 3 << 29, 0: 0}
        for name in ("cpu_budget", "nvme_budget", "max_write_bytes_per_day", "staging_bytes")
    },
    "max_write_rate": RATES,
    "max_read_rate": RATES,
    "checksum": {True: True, "on": True, "1": True, "no": False, "off": False},
    "io_backend": {name: name for name in ("auto", "posix", "kvikio")},
    "io_timeout": {60: 60.0, "60": 60.0, "60s": 60.0, " 1.5 s ": 1.5, 0.25: 0.25},
    "rank_timeout": {0: 0.0, "5s": 5.0},
}


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, values in READ.items() for given in values])
def test_a_setting_is_read_alike_from_argument_and_variable(
    name: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = READ[name][given]
    assert getattr(OffloadConfig(**{name: given}), name) == value
    if isinstance(given, str):
        monkeypatch.setenv(variable(name), given)
        assert getattr(OffloadConfig(), name) == value


SIZE = r"(is|has) .*(; did you mean '.*'\?|; give a size such as '8GiB')"
RATE = r"(is|has) .*(; did you mean '.*/s'\?|; give a rate such as '1GiB/s')"
WRONG_SIZES = ["12q", "many", "-1", -1, "8 GiB more", "1,5GiB", "1_0", True, 1.5, "1e3", "9" * 20 + "GiB", 2**63, [1]]
WRONG_RATES = [0, -1, "0MB/s", "1GB/m", "/s", "fast", True, [1]]  # nothing would ever arrive at rate 0
WRONG: list[tuple[str, str, list[Any]]] = [
    ("min_tensor_bytes", SIZE, [*WRONG_SIZES, None]),
    *((name, SIZE, ["x"]) for name in ("cpu_budget", "nvme_budget", "max_write_bytes_per_day", "staging_bytes")),
    *((name, RATE, WRONG_RATES) for name in ("max_write_rate", "max_read_rate")),
    ("checksum", "is not True or False, or text such as on, off", ["xxh3"]),
    ("io_backend", r"is not one of .*; did you mean kvikio\?", ["kvikia"]),
    ("io_timeout", "is not a number of seconds above 0", [0, -1, "1h", "soon", float("inf"), float("nan"), True, None]),
    ("rank_timeout", "is not a number of seconds", [-1, "soon", None]),
    ("io_threads", "is not a whole number from 1 to 256", [0, -2, 257, 1.5, "two", True]),
    (
        "storage_paths",
        "is not a directory, as a str or a Path, or several",
        ["", ":", [], 5, b"/tmp", [5], "~nobody-of-that-name/x", "/a\0b"],
    ),
]


@pytest.mark.parametrize(
    ("name", "message", "given"), [(name, message, given) for name, message, values in WRONG for given in values]
)
def test_a_value_that_does_not_parse_is_an_error_that_says_what_would(name: str, message: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* {message}"):
        OffloadConfig(**{name: given})


def test_storage_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (tmp_path,)
    for given in (tmp_path, str(tmp_path), [tmp_path], (str(tmp_path),), f"{tmp_path}:"):
        assert OffloadConfig(storage_paths=given).storage_paths == expected
    monkeypatch.setenv("TBA_STORAGE_PATHS", str(tmp_path))
    assert OffloadConfig().storage_paths == expected
    monkeypatch.chdir(tmp_path.parent)
    assert OffloadConfig(storage_paths=tmp_path.name).storage_paths == expected  # a later chdir does not move it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert OffloadConfig(storage_paths="~/x").storage_paths == (tmp_path / "x",)


def test_several_storage_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for given in ((one, two), [str(one), two], f"{one}:{two}", f"{one}::{two}:"):
        assert OffloadConfig(storage_paths=given).storage_paths == (one, two)
    monkeypatch.setenv("TBA_STORAGE_PATHS", f"{two}:{one}")
    assert OffloadConfig().storage_paths == (two, one)
    with pytest.raises(ConfigError, match=f"{one} is named twice"):
        OffloadConfig(storage_paths=f"{one}:{two}:{one}")


@pytest.mark.parametrize(("asked", "meant"), [("nvm", "nvme"), ("gpu", None), (None, None), (3, None)])
def test_an_unknown_tier_names_the_known_ones_and_the_nearest(asked: Any, meant: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(tier=asked)
    message = str(caught.value)
    assert message.startswith(f"tier={asked!r} is not one of 'keep', 'cpu', 'nvme', 'auto'")
    assert message.endswith(f"did you mean {meant}?") == (meant is not None)


@pytest.mark.parametrize(("said", "tier"), [("disk", "nvme"), ("SSD", "nvme"), ("host", "cpu"), (" Auto ", "auto")])
def test_a_tier_has_other_names(said: Any, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OffloadConfig(tier=said) == OffloadConfig(tier=tier)
    monkeypatch.setenv("TBA_TIER", said)
    assert OffloadConfig().tier == tier


def test_a_size_is_shown_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_STAGING_BYTES", "1.5 GiB")
    config = OffloadConfig(budget="8GiB", nvme_budget=500_000_000, prefetch_bytes=1 << 20, max_write_rate="1 GB/s")
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.model_copy()):
        text = repr(same)
        for shown in ("memory_budget='8GiB'", "staging_bytes='1.5GiB'", "nvme_budget='500MB'", "'1MiB'", "'1GB/s'"):
            assert shown in text
    assert config.memory_budget == 8 << 30
    assert {each.name: str(each.value) for each in describe(config)}["min_tensor_bytes"] == "1MiB"


def test_the_shortest_exact_size_is_read_back() -> None:
    for nbytes in (0, 1, 1023, 1024, 1000, 1 << 40, 8 << 30, 10**9, 3 << 29, 123_456_789, 2**63 - 1):
        assert OffloadConfig(staging_bytes=str(Bytes(nbytes))).staging_bytes == nbytes
    assert [str(Bytes(nbytes)) for nbytes in (1024, 10**6, 3 << 29)] == ["1KiB", "1MB", "1536MiB"]


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'min_tensor_byte'; did you mean min_tensor_bytes\?"):
        OffloadConfig(min_tensor_byte=1)
    with pytest.raises(ConfigError, match="unknown setting '_env_file'"):
        OffloadConfig(_env_file="x")


@pytest.mark.parametrize(("misspelt", "nearest"), [("TBA_TEIR", "TBA_TIER"), ("tba_io_thread", "TBA_IO_THREADS")])
def test_a_misspelt_variable_is_an_error_that_names_the_nearest(
    misspelt: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(misspelt, "1")
    with pytest.raises(ConfigError, match=rf"{misspelt}; did you mean {nearest}\?"):
        OffloadConfig(tier="keep")


def test_a_variable_like_none_of_ours_is_an_error_that_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_XYZZY", "1")
    with pytest.raises(ConfigError) as caught:
        OffloadConfig()
    assert "did you mean" not in str(caught.value)
    assert all(variable(name) in str(caught.value) for name in OffloadConfig.model_fields)


def test_a_wrong_variable_is_named_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_STAGING_BYTES", "much")
    with pytest.raises(ConfigError, match="TBA_STAGING_BYTES='much' is not a number and a unit"):
        OffloadConfig()
    assert OffloadConfig(staging_bytes=1).staging_bytes == 1  # the argument wins


def test_several_wrong_settings_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(tier="tape", min_tensor_bytes="x", io_threads=0)
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["tier", "min_tensor_bytes", "io_threads"]


def test_none_may_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_COMPRESS", "none")
    monkeypatch.setenv("TBA_CHECKSUM", "off")
    assert OffloadConfig() == OffloadConfig(compress=None, checksum=False)


def test_every_setting_is_described_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_TIER", "cpu")
    monkeypatch.setenv("TBA_IO_THREADS", "4")
    monkeypatch.setenv("TBA_CHECKSUM", "")
    config = OffloadConfig(tier="nvme", storage_paths=tmp_path)
    told = describe(config)
    assert [setting.name for setting in told] == list(OffloadConfig.model_fields)
    assert {setting for setting in told if setting.origin != "default"} == {
        Setting("tier", "nvme", "argument"),
        Setting("storage_paths", (tmp_path,), "argument"),
        Setting("io_threads", 4, "TBA_IO_THREADS"),
    }
    monkeypatch.delenv("TBA_IO_THREADS")
    assert describe(config) == told  # what it was made of, not what the environment says by now
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.model_copy()):
        assert describe(same) == told
    changed = {setting.name: setting for setting in describe(config.model_copy(update={"io_threads": 8}))}
    assert changed["io_threads"] == Setting("io_threads", 8, "argument")
    assert [changed[name].origin for name in ("tier", "checksum")] == ["argument", "default"]


def test_where_a_setting_came_from_does_not_make_it_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_TIER", "nvme")
    by_variable = OffloadConfig()
    monkeypatch.delenv("TBA_TIER")
    by_argument = OffloadConfig(tier="nvme")
    assert [describe(config)[0].origin for config in (by_variable, by_argument)] == ["TBA_TIER", "argument"]
    assert by_variable == by_argument
    assert hash(by_variable) == hash(by_argument)
    assert by_variable.model_dump() == by_argument.model_dump()
    assert repr(by_variable) == repr(by_argument)


def test_settings_round_trip(tmp_path: Path) -> None:
    config = OffloadConfig(tier="nvme", storage_paths=tmp_path, min_tensor_bytes=0, io_timeout="5s")
    copies = [
        OffloadConfig(**config.model_dump()),
        OffloadConfig.model_validate(config.model_dump()),
        OffloadConfig.model_validate_json(config.model_dump_json()),
        config.model_copy(),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ]
    assert all(made == config and hash(made) == hash(config) for made in copies)
    assert config.model_copy(update={"tier": "cpu"}) == OffloadConfig(**{**config.model_dump(), "tier": "cpu"})


def test_settings_cannot_change() -> None:
    config = OffloadConfig()
    with pytest.raises(ConfigError, match="immutable"):
        config.tier = "nvme"
    with pytest.raises(ValueError, match="frozen"):
        del config.tier
    assert config == OffloadConfig()


def test_every_way_in_is_checked() -> None:
    with pytest.raises(ConfigError, match="tier='tape'"):
        OffloadConfig().model_copy(update={"tier": "tape"})
    with pytest.raises(ValueError, match="tier='tape'"):
        OffloadConfig.model_validate({"tier": "tape"})


def test_every_setting_is_documented_with_its_unit() -> None:
    for name, field in OffloadConfig.model_fields.items():
        assert field.description, name
        unit = {"_bytes": "bytes", "budget": "bytes", "_rate": "bytes per second", "timeout": "seconds"}
        for ending, word in unit.items():
            assert not name.endswith(ending) or word in field.description.lower(), name


def test_importing_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_TEIR", "x")
    spec = importlib.util.spec_from_file_location("tba._config_again", _config.__file__)
    assert spec is not None
    again = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(again)
    with pytest.raises(ConfigError, match="unknown environment variable TBA_TEIR"):
        again.OffloadConfig()
