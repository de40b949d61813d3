"""Forecasts of a group: ranks of a replica recompute alike, for the hardest of them, and each moves what it decides."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from support.forecast import FAMILIES, LEAST_BYTES, language
from tba import ConfigError
from tba._forecast.forecast import forecast
from tba._forecast.group import Group
from tba._forecast.hardware import DEVICES, Disk
from tba._forecast.observe import Observed, observe
from tba._forecast.report import report
from tba._forecast.together import Together, forecast_together

pytest.importorskip("transformers")

CARD = DEVICES["h100"]
# It computes so slowly that what moves depends on the disk alone.
SLOW = replace(CARD, flops_per_s={None: 1e9}, memory_bytes_per_s=1e15, link_bytes_per_s=1e15)
LAYERS = 8


@pytest.fixture(scope="module")
def seen() -> Observed:
    subject = language("LlamaForCausalLM", layers=LAYERS, inner=172, num_key_value_heads=2)
    return observe(subject, SLOW, min_tensor_bytes=LEAST_BYTES)


def saved_bytes(seen: Observed) -> int:
    return sum(each.nbytes for each in seen.saved)


def drive(seen: Observed, steps: float) -> Disk:
    """A disk that writes, or reads, all that a step saves in so many times forward."""
    rate = saved_bytes(seen) / steps / seen.forward_s
    return Disk("disk", rate, rate, None, "a test's figures")


def tight(seen: Observed, group: Group, disk: Disk | None, share: float = 0.6) -> Together:
    return forecast_together(seen, SLOW, disk, group, budget_bytes=int(share * saved_bytes(seen)))


def test_one_rank_plans_as_it_would_alone(seen: Observed) -> None:
    disk = drive(seen, 1)
    found = tight(seen, Group(), disk)
    (alike,) = found.alike
    alone = forecast(seen, SLOW, disk, budget_bytes=int(0.6 * saved_bytes(seen)))
    assert (alike.ranks, alike.forecast.plan) == ((0,), alone.plan)
    assert not alike.forecast.plan.agreed
    assert "ranks" not in report(found)


def test_replicas_that_exchange_nothing_in_forward_plan_alone(seen: Observed) -> None:
    found = tight(seen, Group(4, per_node=4), drive(seen, 1))
    assert [each.ranks for each in found.alike] == [(0, 1, 2, 3)]
    assert not found.hardest.plan.agreed


def test_a_replica_recomputes_alike_for_its_slowest_disk_and_moves_by_its_own(seen: Observed) -> None:
    """Of a replica of 12, eight share the disk of one node, and four that of the other."""
    disk = drive(seen, 0.5)
    found = tight(seen, Group(12, fsdp=12, per_node=8), disk, 0.5)
    crowded, roomy = (each.forecast.plan for each in found.alike)
    assert [each.ranks for each in found.alike] == [tuple(range(8)), tuple(range(8, 12))]
    assert crowded.recomputed == roomy.recomputed != frozenset()
    assert crowded.fits
    assert roomy.fits
    assert crowded.facts.link.write_bytes_per_s == pytest.approx(disk.write_bytes_per_s / 8)
    assert roomy.facts.link.write_bytes_per_s == pytest.approx(disk.write_bytes_per_s / 4)
    assert crowded.agreed == roomy.agreed
    assert crowded.agreed.startswith("agreed by ranks 0 to 11: rank 0 has the least room")
    assert found.step_s == max(each.forecast.step_s(each.forecast.plan) for each in found.alike)
    # Alone, the ranks of the node that is not full would recompute less.
    alone = forecast(seen, SLOW, disk.shared(4), budget_bytes=crowded.budget_bytes, shards=12).plan
    assert len(alone.recomputed) < len(roomy.recomputed)


def test_replicas_on_different_nodes_decide_apart(seen: Observed) -> None:
    found = tight(seen, Group(12, fsdp=4, per_node=8), drive(seen, 0.5), 0.5)
    crowded, roomy = found.alike
    assert (crowded.ranks, roomy.ranks) == (tuple(range(8)), tuple(range(8, 12)))
    assert len(roomy.forecast.plan.recomputed) < len(crowded.forecast.plan.recomputed)
    assert roomy.forecast.plan.agreed.startswith("agreed by ranks 8 to 11:")


def test_without_a_disk_nothing_moves_on_any_rank(seen: Observed) -> None:
    found = tight(seen, Group(4, fsdp=4), None)
    assert found.hardest.plan.recomputed
    assert not found.hardest.plan.sends
    assert found.hardest.plan.fits


def test_ranks_of_a_node_share_the_memory_of_a_cpu(seen: Observed) -> None:
    cpu = replace(CARD, like_cuda=False)
    found = forecast_together(seen, cpu, None, Group(3, fsdp=3, per_node=2))
    assert [each.forecast.device.memory_bytes for each in found.alike] == [cpu.memory_bytes // 2, cpu.memory_bytes]
    assert [each.ranks for each in found.alike] == [(0, 1), (2,)]


def test_fsdp_shards_weights_and_gathers_blocks_and_keeps_activations_whole(seen: Observed) -> None:
    one, four = (forecast_together(seen, CARD, None, Group(ranks, fsdp=ranks)).hardest for ranks in (1, 4))
    assert four.training.weights == one.training.weights // 4
    assert four.training.gathered == 3 * seen.block_weight_bytes + 2 * seen.outside_weight_bytes
    assert seen.outside_weight_bytes + LAYERS * seen.block_weight_bytes == 4 * seen.parameters  # of float32
    assert sum(four.fates.values()) == sum(one.fates.values()) == saved_bytes(seen) + seen.small_bytes


def test_ranks_that_share_layers_share_a_batch() -> None:
    seen = observe(FAMILIES["llama"], CARD, min_tensor_bytes=LEAST_BYTES, tensor=2)
    found = forecast_together(seen, CARD, None, Group(8, fsdp=2, tensor=2))
    assert found.tokens_per_s == pytest.approx(4 * seen.tokens / found.step_s)


def test_a_budget_beyond_what_the_fullest_node_leaves_is_refused(seen: Observed) -> None:
    cpu = replace(CARD, like_cuda=False)
    with pytest.raises(ConfigError, match=r"--memory-budget .* is more than the"):
        forecast_together(seen, cpu, None, Group(3, fsdp=3, per_node=2), budget_bytes=cpu.memory_bytes // 2)


def test_the_report_and_the_dict_tell_what_each_rank_does(seen: Observed) -> None:
    found = tight(seen, Group(12, fsdp=12, per_node=8), drive(seen, 0.5), 0.5)
    text = report(found)
    assert "; 12 ranks: 12 FSDP; " in text.splitlines()[0]
    rows = [line for line in text.splitlines() if line.startswith("rank")]
    assert [row.split("  ")[0] for row in rows] == ["ranks 0 to 7", "ranks 8 to 11"]
    count = len(found.hardest.plan.recomputed)
    assert all(f"{count} of {len(seen.blocks)}" in row for row in rows)
    assert found.hardest.plan.agreed in text
    assert "do not include communication between ranks" in text
    told = json.loads(json.dumps(found.to_dict()))
    assert (told["world"], told["shards"], told["tensor"], told["replicas"]) == (12, 12, 1, 1)
    for each, alike in zip(told["ranks"], found.alike, strict=True):
        assert each["ranks"] == list(alike.ranks)
        fates = (each["small_bytes"], each["kept_bytes"], each["moved_bytes"], each["recomputed_bytes"])
        assert sum(fates) == saved_bytes(seen) + seen.small_bytes
        assert each["moved_bytes"] == sum(alike.forecast.plan.sends.values())
        assert each["peak_bytes"] == alike.forecast.peak_bytes(alike.forecast.plan)
        assert each["fits"]
