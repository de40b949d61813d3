"""A framework that is not installed: its integration says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

EXTRAS = {
    "accelerate": "hf",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "transformers": "hf",
}


class Without:
    """A finder that does not find a package, whether it is installed or not."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_framework_comes_with_the_line_that_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delitem(sys.modules, f"tba.integrations.{name}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Without(name), *sys.meta_path])
    with pytest.raises(ImportError, match=rf"not installed here; run: pip install 'tba-offload\[{EXTRAS[name]}\]'"):
        importlib.import_module(f"tba.integrations.{name}")
