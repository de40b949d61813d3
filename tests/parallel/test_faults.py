"""Faults: over 500 steps of each kind, by plans, ranks are late, go other ways, leave, die and start again."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._workload.llama import loss_of
from benchmarks._workload.parallel import Wrap, parts_sharded, tensor_parallel
from benchmarks._workload.tools import local
from support.engine import give_up_soon
from support.parallel import maker
from support.ranks import batch, process_group, start
from tba import Offloader, OffloadError, attach
from tba._blocks.communication import Communication
from tba._blocks.recompute import _Twice

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

STEPS, SAVED, LIFE = 500, 5, 60  # in all; from one saved state to the next; until a rank dies
LIMIT_S = 600  # of one life of the ranks, which takes some seconds
SETTINGS = (  # of each rank
    {"memory_budget": 240_000, "max_write_rate": "1MB"},
    {"memory_budget": 2**30, "max_write_rate": "8MB"},
)
PLACES = ("forward", "backward", "optimizer")


class Fault(NamedTuple):
    """What one rank does in a step; `where` it dies."""

    rank: int
    how: str
    where: str


def faults() -> dict[int, Fault]:
    """Give the faults of all steps. After a rank was late or has left, ranks plan alone until they start again."""
    found = {}
    for number, begin in enumerate(range(0, STEPS, LIFE)):
        one, other, where = number % 2, 1 - number % 2, PLACES[number % 3]
        found[begin + 10] = found[begin + 30] = Fault(one, "is delayed", where)
        found[begin + 20] = Fault(other, "departs", where)
        found[begin + 45] = Fault(one, "leaves" if number % 4 < 2 else "is late", where)
        found[begin + LIFE - 3] = Fault(other, "is killed", where)
    return {step: fault for step, fault in found.items() if step < STEPS}


class Line(NamedTuple):
    """What a rank notes of a step: a checksum of its loss and gradients, collectives, and blocks that ran again."""

    step: int
    checksum: int
    collectives: int
    again: int


def _die(*_: object) -> None:
    os._exit(0)  # at once, and without telling anybody; what started the ranks takes it for an end


def _more(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out + 0 * torch.zeros(64, 64, requires_grad=True).exp().sum()  # saves what no plan knows of


class _Life:
    """One rank, from a saved state until it ends."""

    def __init__(self, rank: int, model: nn.Module, offload: Offloader | None, folder: Path, dies: int) -> None:
        self._rank, self._model, self._offload, self._folder, self._dies = rank, model, offload, folder, dies
        self._again = 0

    def train(self, begin: int, plan: dict[int, Fault]) -> None:
        weights = list(self._model.parameters())
        optimizer = torch.optim.SGD(weights, lr=0.1)
        if begin:
            with torch.no_grad():
                for weight, saved in zip(weights, torch.load(self._folder / f"{self._rank} {begin}.pt"), strict=True):
                    local(weight).copy_(saved)
        run_again = _Twice._run_again

        def counted(twice: _Twice) -> None:
            self._again += 1
            run_again(twice)

        with (self._folder / f"{self._rank}.lines").open("a") as lines, patch.object(_Twice, "_run_again", counted):
            for step in range(begin, STEPS):
                if step % SAVED == 0:
                    path = self._folder / f"{self._rank} {step}"
                    torch.save([local(weight.detach()) for weight in weights], path)
                    path.rename(path.with_suffix(".pt"))
                fault = plan.get(step)
                self._again = 0
                with Communication() as communication:
                    loss = self._step(step, fault, step - begin > 1)
                checksum = zlib.crc32(loss.detach().numpy().tobytes())
                for weight in weights:
                    checksum = zlib.crc32(local(weight.grad).numpy().tobytes(), checksum)
                print(*Line(step, checksum, sum(communication.counts), self._again), file=lines, flush=True)
                if self._dies == step and fault is not None and fault.rank == self._rank:
                    _die()
                optimizer.step()
                optimizer.zero_grad()

    def _step(self, step: int, fault: Fault | None, meets: bool) -> Tensor:
        """Train for a step; `meets`: the ranks have come to know each other."""
        hooks = []
        offload, is_mine = self._offload, fault is not None and fault.rank == self._rank
        how = "" if fault is None else fault.how
        dies = step == self._dies and is_mine
        if offload is not None and meets:
            if how == "is delayed" and is_mine:
                time.sleep(0.02)
            elif how == "leaves" and is_mine:
                offload.close()
            elif how == "is late" or step == self._dies:
                if not is_mine:
                    give_up_soon(offload)
                elif how == "is late":
                    time.sleep(0.3)
        if how == "departs" and is_mine:
            hooks.append(self._model.norm.register_forward_hook(_more))  # type: ignore[operator, union-attr]
        if dies and fault is not None and fault.where == "forward":
            hooks.append(self._model.norm.register_forward_pre_hook(_die))  # type: ignore[operator, union-attr]
        tokens = batch(step)
        logits = self._model(tokens)
        if dies and fault is not None and fault.where == "backward":
            self._model.norm.weight.register_hook(_die)  # type: ignore[operator, union-attr]
        loss = loss_of(logits, tokens)
        loss.backward()
        for hook in hooks:
            hook.remove()
        return loss


def _live(rank: int, wrap: Wrap, begin: int, dies: int, own: bool, folder: str, rendezvous: str) -> None:
    with process_group(rank, 2, rendezvous), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, offload = maker(wrap)(), None
        if own:
            settings = {"min_tensor_bytes": 0, "storage_paths": f"{folder}/files", **SETTINGS[rank]}
            offload = attach(model, "auto", **settings)
        plan = faults()
        try:
            _Life(rank, model, offload, Path(folder), dies).train(begin, plan)
        except RuntimeError as error:  # the group's own, as in plain PyTorch
            if isinstance(error, OffloadError) or dies == STEPS or plan[dies].rank == rank:
                raise
            os._exit(0)
        if offload is not None:
            offload.close()


def _lines(folder: Path, rank: int) -> list[Line]:
    text = (folder / f"{rank}.lines").read_text()
    return [Line(*map(int, line.split())) for line in text.splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrap", [tensor_parallel, parts_sharded])
def test_steps_with_faults_are_those_of_plain(wrap: Wrap, scratch: Path) -> None:
    plain, folder = scratch / "plain", scratch / "planned"
    for each in (plain, folder, folder / "files"):
        each.mkdir()
    start(_live, str(plain), wrap, 0, STEPS, False, str(plain), ranks=2)
    expected = [_lines(plain, rank) for rank in range(2)]
    for dies in (*(step for step, fault in faults().items() if fault.how == "is killed"), STEPS):
        saved = [{int(path.stem.split()[1]) for path in folder.glob(f"{rank} *.pt")} for rank in range(2)]
        begin = max(saved[0] & saved[1], default=0)
        rendezvous = scratch / f"until {dies}"
        rendezvous.mkdir()
        start(_live, str(rendezvous), wrap, begin, dies, True, str(folder), ranks=2, limit_s=LIMIT_S)
        assert list((folder / "files").iterdir()) == []
    ranks = [_lines(folder, rank) for rank in range(2)]
    for rank, lines in enumerate(ranks):
        assert {line.step for line in lines} == set(range(STEPS))
        assert all(line.checksum == expected[rank][line.step].checksum for line in lines)
    common = [(one, other) for one, other in zip(*map(_by_step, ranks), strict=True)]
    assert all(one.collectives == other.collectives for one, other in common)
    assert sum(one.again > 0 and other.again > 0 for one, other in common) > STEPS // 10


def _by_step(lines: list[Line]) -> list[Line]:
    """The last that was noted of each step."""
    return [line for _, line in sorted({line.step: line for line in lines}.items())]
