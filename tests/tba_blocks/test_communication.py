"""Communication: which exchanges between ranks are seen, and that a call which has some is not repeated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._workload.tools import local
from support.ranks import process_group, start
from tba import OffloadError
from tba._blocks import communication as communication_module
from tba._blocks.communication import Communication
from tba._blocks.recompute import recompute
from tba._blocks.trial import Trial
from tba._group.agreement import Agreement, Ballot

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def _functional(x: Tensor) -> None:
    from torch.distributed._functional_collectives import all_reduce

    all_reduce(x, "sum", dist.group.WORLD).sum()


def _passed_on(x: Tensor) -> None:
    if dist.get_rank():
        dist.send(x, 0)
    else:
        dist.recv(x, 1)


class Sometimes(nn.Module):
    """Communicates where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.communicates = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if self.communicates:
            dist.all_reduce(x.detach().clone())
        return self.linear(x)


def _seen(function: Callable[[Tensor], Any]) -> bool:
    with Communication() as communication:
        function(torch.ones(4))
    return communication.possible


def _two_ranks(rank: int, folder: str) -> None:
    methods = [vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")]
    with process_group(rank, 2, folder):
        group = dist.new_group([0, 1])
        for function in (dist.all_reduce, _functional, _passed_on, lambda x: dist.broadcast(x, 1, group=group)):
            assert _seen(function)
            assert not _seen(torch.exp)
        assert methods == [vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")]

        _passed_on(torch.ones(4))  # by what has been put back

        block, x = Sometimes(), torch.ones(3, 4, requires_grad=True) * 1.0
        for communicates in (False, True):
            block.communicates = communicates
            out, _ = recompute(block, block.forward, (x,), {}, lambda tensor: tensor.detach(), lambda kept: kept)
            dist.all_reduce(torch.ones(1))  # between its runs, by others
            with Communication() as communication:
                out.sum().backward(retain_graph=True)
            assert not communication.possible


def test_each_exchange_is_seen_and_a_call_with_one_is_not_repeated(scratch: Path) -> None:
    start(_two_ranks, str(scratch), ranks=2)


class Counts(nn.Module):
    """A layer; where it is told to count its calls, a call changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counts, self.calls = nn.Linear(4, 4), False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        return self.linear(x)


class Sums(nn.Module):
    """Sums over ranks what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Counts()

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        return torch.tanh(all_reduce(torch.tanh(self.part(x))))


class Gathers(Sums):
    """Has a part whose weights hooks gather from both ranks."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        fully_shard(self.part, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.part(torch.tanh(x)))


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _given(kept: Tensor) -> Tensor:
    return kept


def _together(rank: int, kind: type[Sums], folder: str) -> None:
    with process_group(rank, 2, folder):
        torch.manual_seed(0)
        block, both = kind(), frozenset({0, 1})
        x = torch.full((3, 4), rank + 1.0, requires_grad=True)
        block(x).sum().backward()
        plain = local(block.part.linear.weight.grad).clone()
        for one_keeps in (False, True):
            block.zero_grad()
            block.part.counts = one_keeps and rank == 1  # so this rank keeps what it has saved
            with Communication() as forward:
                out, graph = recompute(block, block.forward, (x,), {}, _kept, _given, both)
            with Communication() as backward:
                out.sum().backward()
            assert (graph is None) == block.part.counts
            assert block.part.calls == block.part.counts  # what the second call counts is undone
            assert torch.equal(local(block.part.linear.weight.grad), plain)
            # One of the second call, or before it, and one of its own: the other rank has as many.
            assert sum(backward.counts) == 2 * sum(forward.counts)
        with pytest.raises(OffloadError, match="communicates with ranks that have not agreed"):
            recompute(block, block.forward, (x,), {}, _kept, _given, frozenset({rank}))


@pytest.mark.parametrize("kind", [Sums, Gathers])
def test_ranks_that_recompute_together_all_repeat_what_they_exchange(kind: type[Sums], scratch: Path) -> None:
    start(_together, str(scratch), kind, ranks=2)


def _one_refuses(rank: int, kind: type[Sums], folder: str) -> None:
    with process_group(rank, 2, folder):
        agreement = Agreement.of("Sums", 60.0)
        assert agreement is not None
        agreement.form(frozenset({0, 1}))
        verdicts = []
        for number, refuses in enumerate((False, True)):
            block = kind()
            block.part.counts = refuses and rank == 1
            trial = Trial(block, block.forward, _kept, _given, nullcontext, Ballot(agreement, str(number)))
            trial.call((torch.ones(3, 4, requires_grad=True) * 1.0,), {}).sum().backward()
            assert trial.verdict is not None
            verdicts.append(trial.verdict.why_not)
        assert verdicts[0] == ""
        assert ("it changes" if rank == 1 else "one of which could not try it") in verdicts[1]


@pytest.mark.parametrize("kind", [Sums, Gathers])
def test_a_block_that_one_rank_cannot_try_is_tried_on_none(kind: type[Sums], scratch: Path) -> None:
    start(_one_refuses, str(scratch), kind, ranks=2)


def _one_rank_tries(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with process_group(rank, 2, folder):
        mesh = init_device_mesh("cpu", (2,))
        block = nn.Linear(4, 4)
        for name, parameter in list(block.named_parameters()):
            whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            setattr(block, name, nn.Parameter(whole))
        local = torch.full((3, 4), float(rank), requires_grad=True) * 1.0
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        with Communication() as whole_step:
            if rank == 0:
                trial = Trial(block, block.forward, lambda kept: kept, lambda kept: kept, nullcontext)
                trial.call((x,), {}).to_local().sum().backward()
                assert trial.verdict is not None
                assert not trial.verdict.why_not
            else:
                block(x).to_local().sum().backward()
        assert not whole_step.possible


def test_a_trial_on_one_rank_compares_dtensors_without_asking_the_others(scratch: Path) -> None:
    start(_one_rank_tries, str(scratch), ranks=2)


class _Group:
    """A group of two ranks, as NCCL's counts: sends and receives are not among the operations."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts

    def size(self) -> int:
        return 2

    def _get_backend(self, _: torch.device) -> _Group:
        return self

    def _get_sequence_number_for_group(self) -> int:
        if not self._counts:
            raise RuntimeError("does not implement sequence numbers")
        return 7


def test_sends_are_seen_where_the_backend_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication_module, "process_groups", lambda: [_Group(counts=True)])
    with Communication() as outer:
        with Communication() as inner:
            pass
        assert not inner.possible
        with pytest.raises(TypeError):
            dist.ProcessGroup.send(None, [torch.ones(1)], 0, 0)  # type: ignore[arg-type]
    assert outer.possible
    assert not any(outer.counts)


def test_a_backend_that_does_not_count_may_communicate_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication_module, "process_groups", lambda: [_Group(counts=False)])
    assert _seen(torch.exp)
