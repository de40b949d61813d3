"""Architectures of transformers, caches and dropout as they come, by plan on a slow link: gradients as plain ones.

`python -m tests.campaigns families` tries every architecture that can be built small.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from campaigns.families.catalog import families
from campaigns.families.command import KERNELS
from campaigns.runner import Runner

# The first two drop their caches where they recompute by transformers' switch, and then run other operators.
NAMES = ("causal/gptj", "seq2seq/mt5", "causal/llama", "masked/bert")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of them, from one process: MKL's kernels are chosen as it begins."""
    arguments = [str(tmp_path_factory.mktemp("families")), "0", "0.6"]
    module = "tests.campaigns.families.worker"
    with closing(Runner(module, lambda: arguments, timeout_s=300, variables=KERNELS)) as runner:
        return {name: runner.ask(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_family_by_plan_has_the_gradients_of_plain(name: str, outcomes: dict[str, Any]) -> None:
    found = outcomes[name]
    assert found["verdict"] == "equal", found["detail"]
    (arm,) = found["arms"]
    assert arm["recomputed"] or arm["moved_bytes"], arm
    # Those that have the same graph again recompute on a link that slow; the others say why they do not.
    assert arm["recomputed"] or arm["why_not"], arm


def test_the_catalog_has_every_task_and_class_once() -> None:
    found = families()
    assert len({family.name for family in found}) == len({family.model for family in found}) == len(found)
    assert {"causal/gptj", "seq2seq/mt5", "masked/bert", "image/vit", "audio/wav2vec2"} <= {f.name for f in found}
