"""Each private name of torch that is missing, or has another form, is refused by its name or switches a feature off."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tba
from support import torch_names
from tba._config import UNTESTED_TORCH
from tba._torch import private, versions
from tba._torch.private import Feature


def names() -> dict[Feature, list[str]]:
    """The names that `private` looks up, by the feature that needs each."""
    found: dict[Feature, list[str]] = {feature: [] for feature in Feature}
    lookups = re.findall(r'(_is_exact|_find)\(\s*"([\w.]+)",\s*(?:Feature\.)?(\w+)', Path(private.__file__).read_text())
    for finder, name, needed in lookups:
        feature = "EXACT" if finder == "_is_exact" else needed
        for each in private._MODES if feature == "_MODES" else [Feature[feature]]:
            found[each].append(name)
    return found


NAMES = names()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["gone", pytest.param("changed", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("feature", [feature for feature in Feature if NAMES[feature]], ids=lambda each: each.name)
def test_a_torch_without_a_name_trains_exactly_or_is_refused(feature: Feature, how: str) -> None:
    # Torch refuses a backward in a forked child of a process that sees a card and has run one.
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, torch_names.__file__, how, *NAMES[feature]]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [result["name"] for result in results] == NAMES[feature], ran.stderr
    for result in results:
        name = result["name"]
        assert (result["error"], result["differs"]) == ("", ""), name
        if feature is Feature.EXACT:
            assert result["refused"].startswith(f"tba needs {name}, which torch ")
            assert "tba was tested with torch 2.11 to" in result["refused"]
        else:
            assert result["refused"] is None
            assert [name in text and feature.value in text for text in result["warnings"]] == [True], name


def test_every_feature_has_its_names_but_the_one_seen_in_frames() -> None:
    assert [feature for feature in Feature if not NAMES[feature]] == [Feature.COMPILED, Feature.GRAPHS]
    assert private.missing == {}  # of the torch that runs the tests


def test_nobody_else_reaches_into_torch_c() -> None:
    source = Path(private.__file__)
    root = Path(tba.__file__).parent
    others = [path for path in root.rglob("*.py") if path != source and "torch._C." in path.read_text()]
    assert others == []


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.11.0", None), (f"{versions.TESTED[-1]}.9+cu132", None), ("2.99.0.dev20270101", "2.99"), ("3.0", "3.0")],
)
def test_only_a_torch_newer_than_any_tested_is_told_of(
    version: str, release: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UNTESTED_TORCH, raising=False)
    assert versions.untested(version) == release
    told = versions.newer(version, UNTESTED_TORCH)
    assert [f"torch {release} is newer than any" in text for text in told] == [True] * (release is not None)
    monkeypatch.setenv(UNTESTED_TORCH, "allow")
    assert versions.newer(version, UNTESTED_TORCH) == []
    tba.OffloadConfig()  # the variable is no setting of training


def test_what_is_missing_is_told_once_for_all_that_it_is_for() -> None:
    (text,) = versions.lacking(
        "2.13.0", {"this stops": ["torch._a", "torch._b"], "that stops": ["torch._a", "torch._b"]}
    )
    assert "has no torch._a and no torch._b in the form that tba knows: this stops; that stops." in text
