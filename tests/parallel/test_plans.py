"""Plans of ranks: those that exchange data agree on what recomputes; one that plans alone changes no gradient."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._workload.llama import Block, loss_of
from benchmarks._workload.parallel import (
    Wrap,
    blocks_sharded,
    ddp,
    fsdp1,
    parts_in_fsdp1,
    parts_sharded,
    sequence_parallel,
    tensor_parallel,
    with_dtensor_outputs,
)
from io_backends import Ticket
from support.clock import RATE, Counted, put
from support.engine import give_up_soon
from support.exactness import assert_bit_equal
from support.parallel import maker
from support.ranks import BLOCKS, Llama, Step, batch, plain_step, process_group, start, train
from tba import Offloader, OffloadError, attach, offload_context
from tba._blocks.communication import Communication
from tba._plan.clock import Carried

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


WRAPS: dict[
    Wrap, tuple[bool, bool]
] = {  # whether a block that is wrapped so, and a part of it, may recompute on one rank alone
    ddp: (True, True),
    fsdp1: (True, True),
    blocks_sharded: (True, True),
    parts_sharded: (False, True),
    parts_in_fsdp1: (False, True),
    tensor_parallel: (False, False),
    with_dtensor_outputs: (False, False),
    sequence_parallel: (False, False),
}
BUDGETS = 240_000, 2**30  # rank 1 has room for everything: alone it would plan nothing
RATES = "1MB", "8MB"
AGREED = 3  # the first step by a plan
TIMING = 5  # one by it that is timed
STEPS, PLANNED = 14, 12  # the steps before have agreed, and timed two choices
LONG = 20  # steps, in which those that have departed ask again


def _settings(rank: int, folder: str, **settings: Any) -> dict[str, Any]:
    own = {"memory_budget": BUDGETS[rank], "max_write_rate": RATES[rank]}
    return {"min_tensor_bytes": 0, "storage_paths": folder, **own, **settings}


def _one_plans(rank: int, wrap: Wrap, folder: str) -> None:
    with process_group(rank, 2, folder):
        make = maker(wrap)
        model = make()
        plain = train(model, plain_step(model)(None), nullcontext(), 4)
        model = make()
        offload = offload_context(model, "auto", **_settings(rank, folder, rank_timeout=0))
        moved = train(model, plain_step(model)(offload), offload, 4)
        plan, stats = offload.plan, offload.stats()
        offload.close()
        assert_bit_equal(moved, plain, f"rank {rank}:")
        assert not stats.errors
        assert bool(plan) == (rank == 0)
        if plan:
            whole = plan.facts.kinds[""]
            assert len(whole) == BLOCKS
            parts = range(BLOCKS, len(plan.facts.blocks))
            may = tuple({not plan.facts.blocks[number].why_not for number in each} for each in (whole, parts))
            assert may == tuple({each} for each in WRAPS[wrap])
            assert bool(plan.recomputed) == any(WRAPS[wrap])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_plans_alone_recomputes_only_what_does_not_communicate(wrap: Wrap, scratch: Path) -> None:
    start(_one_plans, str(scratch), wrap, ranks=2)


def _counted(step: Step, at: int, counts: list[int]) -> Step:
    """Count the collectives of one step."""

    def counted(number: int) -> list[Tensor]:
        with Communication() as communication:
            found = step(number)
        if number == at:
            counts.extend(communication.counts)
        return found

    return counted


def _checkpoint(model: nn.Module, numbers: Iterable[int]) -> None:
    """Have torch checkpoint some of the blocks: within their hooks, as FSDP asks for."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number in numbers:
        vars(blocks[number])["forward"] = partial(checkpoint, blocks[number].forward, use_reentrant=False)


def _all_plan(rank: int, wrap: Wrap, folder: str) -> None:
    with process_group(rank, 2, folder):
        make = maker(wrap)
        model = make()
        plain = train(model, plain_step(model)(None), nullcontext(), STEPS)
        model, counts = make(), list[int]()
        offload = offload_context(model, "auto", **_settings(rank, folder))
        moved = train(model, _counted(plain_step(model)(offload), PLANNED, counts), offload, STEPS)
        plan, stats = offload.plan, offload.stats()
        offload.close()
        assert_bit_equal(moved, plain, f"rank {rank}:")
        assert not stats.errors
        assert plan
        plans: list[Any] = [None, None]
        dist.all_gather_object(plans, (plan.recomputed, plan.agreed))
        assert plans[0] == plans[1]
        assert 0 < len(plan.recomputed) < BLOCKS
        assert plan.agreed in str(plan)
        assert plan.agreed.startswith(
            "agreed by ranks 0, 1: rank 0 has the least room, 234 KiB, rank 0 the slowest link, 977"
        )
        assert plan.measured is not None
        assert plan.measured.peak_bytes <= BUDGETS[rank]
        assert stats.last_step is not None
        assert stats.agreement_s > stats.last_step.agreement_s >= 0
        assert rank == 0 or not stats.last_step.offloaded_bytes
        checkpointed, model = list[int](), make()
        _checkpoint(model, plan.recomputed)
        again = train(model, _counted(plain_step(model)(None), PLANNED, checkpointed), nullcontext(), STEPS)
        assert_bit_equal(again, plain)
        assert counts == checkpointed


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [wrap for wrap in WRAPS if wrap is not ddp])
def test_ranks_agree_on_what_recomputes_and_repeat_what_a_checkpoint_does(wrap: Wrap, scratch: Path) -> None:
    start(_all_plan, str(scratch), wrap, ranks=2)


class Hampered(Counted):
    """From some step on, what moves takes many times as long, and no rank counts that as its own wait: as others'."""

    slower = 0.0

    def carried(self, ticket: Ticket) -> Carried:
        self._lost_s += self.slower * ticket.moved_bytes / RATE
        return super().carried(ticket)

    _lost_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self._lost_s


def _waits_add_up(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        put(hampered := Hampered())
        make = maker(tensor_parallel)
        model = make()
        plain = train(model, plain_step(model)(None), nullcontext(), STEPS)
        model = make()
        settings: dict[str, Any] = {"memory_budget": BUDGETS[0], "min_tensor_bytes": 0, "storage_paths": folder}
        moved_bytes, recomputed = [], []

        def step(number: int) -> list[Tensor]:
            hampered.slower = 1024.0 if number >= AGREED else 0.0
            found = plain_step(model)(None)(number)
            moved_bytes.append(offload.stats().written_bytes)
            recomputed.append(offload.plan.recomputed if offload.plan else None)
            return found

        offload = offload_context(model, "auto", **settings)
        moved = train(model, step, offload, STEPS)
        plan = offload.plan
        offload.close()
        assert_bit_equal(moved, plain, f"rank {rank}:")
        assert plan
        assert frozenset() in recomputed  # at first all of it moved
        assert plan.recomputed == recomputed[-1] != frozenset()
        assert moved_bytes[-1] == moved_bytes[-4] > 0
        assert "was tried, and stays: it takes " in plan.tried
        assert plan.tried in str(plan)
        plans: list[Any] = [None, None]
        dist.all_gather_object(plans, (plan.recomputed, plan.agreed, plan.tried, recomputed))
        assert plans[0] == plans[1]


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_try_recomputing_together_and_stay_with_it(scratch: Path) -> None:
    start(_waits_add_up, str(scratch), ranks=2)


def _two_kinds(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        make = maker(tensor_parallel)

        def run(model: nn.Module, context: Any) -> list[Any]:
            def step(number: int) -> list[Tensor]:
                tokens = batch(number)[:, : 16 - 4 * (number % 2)]
                loss = loss_of(model(tokens), tokens)
                loss.backward()
                return [loss]

            return train(model, step, context, 48)

        plain = run(make(), nullcontext())
        model = make()
        offload = offload_context(model, "auto", **_settings(0, folder, memory_budget=160_000))
        assert_bit_equal(run(model, offload), plain, f"rank {rank}:")
        assert offload._saver.planner is not None
        decided = [kind.decision for kind in offload._saver.planner.kinds if kind.plan is not None]
        assert [each is not None and bool(each.recomputed) for each in decided] == [True, True]
        every: list[Any] = [None, None]
        dist.all_gather_object(every, decided)
        assert every[0] == every[1]
        offload.close()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_agree_on_each_of_two_kinds_of_steps(scratch: Path) -> None:
    start(_two_kinds, str(scratch), ranks=2)


def _one_goes_another_way(rank: int, how: str, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with process_group(rank, 2, folder), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cpu", (2,))
        planned = TIMING if how == "departs early" else PLANNED
        given_up = Path(folder) / "given up"

        def run(offload: Offloader | None, model: Any) -> list[Any]:
            def more(_: nn.Module, __: Any, out: Tensor) -> Tensor:
                return out + 0 * torch.zeros(64, 64, requires_grad=True).exp().sum()  # saves what no plan knows of

            def step(number: int) -> list[Tensor]:
                tokens = batch(number)
                if rank == 1 and how.startswith("departs") and number == planned:
                    hooks.append(model.norm.register_forward_hook(more))
                elif hooks:
                    hooks.pop().remove()
                if number == planned and offload is not None:
                    meddle(offload)
                with Communication() as communication:
                    loss = loss_of(model(tokens), tokens)
                    loss.backward()
                exchanges.append(sum(communication.counts))
                return [loss]

            hooks: list[Any] = []
            return train(model, step, nullcontext(), LONG)

        def meddle(offload: Offloader) -> None:
            if rank == 1 and how == "leaves":
                offload.close()
            elif rank == 1 and how == "is killed":
                os._exit(0)
            elif rank == 0 and how in ("is late", "is killed"):
                give_up_soon(offload)
            elif how == "is late":
                while not given_up.exists():
                    time.sleep(1e-3)

        def told(*_: Any, **__: Any) -> None:
            given_up.touch()

        exchanges: list[int] = []
        model = Llama()
        tensor_parallel(model, mesh)
        plain = run(None, model)
        least = exchanges[0]
        assert exchanges == [least] * LONG
        exchanges.clear()
        model = Llama()
        tensor_parallel(model, mesh)
        offload = attach(model, "auto", **_settings(rank, folder))
        with patch("tba._group.agreement.warn", told) if how == "is late" else nullcontext():
            if how == "is killed":
                with pytest.raises(RuntimeError) as error:
                    run(offload, model)
                assert not isinstance(error.value, OffloadError)  # the group's own, as in plain PyTorch
                os._exit(0)
            moved = run(offload, model)
        assert_bit_equal(moved, plain, f"rank {rank}:")
        counts: list[Any] = [None, None]
        dist.all_gather_object(counts, exchanges)
        assert counts[0] == counts[1]
        assert exchanges[planned - 1] > least
        texts = [str(each.message) for each in warned if "ranks do not agree on a plan any more" in str(each.message)]
        if how.startswith("departs"):  # from the next step on; and they agree anew
            assert exchanges[planned] > exchanges[planned + 1] == least
            assert exchanges[-1] > least
            assert not texts
        else:
            assert exchanges[PLANNED:] == [least] * (LONG - PLANNED)
            assert len(texts) == (how == "leaves" and rank == 0)
        offload.close()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["departs", "departs early", "leaves", "is late", "is killed"])
def test_ranks_fall_back_together_where_one_goes_another_way(how: str, scratch: Path) -> None:
    start(_one_goes_another_way, str(scratch), how, ranks=2)
