"""The ranks arm: one training over several ranks; a turn is a step of all, and takes as long as the slowest.

Its process is rank 0 and starts the others, which are workers of the same kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._processes.child import Child
from .._processes.resident_memory import peak_bytes, reset_peak, resident_bytes
from .._processes.serve import Tell
from .._workload import parallel
from .._workload.llama import Block, Llama, LlamaSizes, loss_of
from .._workload.tools import local, tensor_hash

_TIMEOUT_S = 600.0
_MICRO_BATCHES = 2  # of a pipeline's step
_COUNTED = (
    "saved_bytes",
    "weight_bytes",
    "duplicate_bytes",
    "written_bytes",
    "wait_s",
    "backpressure_s",
    "agreement_s",
)


@dataclass(frozen=True, kw_only=True)
class RanksOptions:
    """Options of the arm, sent to its process as JSON.

    Attributes:
        wrap: the name of a function of `_workload.parallel`; "" for stages of a pipeline, each sharded; "zero3" for
            DeepSpeed, "zero3-nvme" for that with parameters and optimizer in files.
        mesh: the ranks, by the mesh's dimensions.
        dimensions: the names of these.
        sizes: the fields of `LlamaSizes`.
        batch: examples of a step, all of them on each rank.
        tier: of `offload_context`; None trains without it.
        settings: fields of `OffloadConfig`, the same for each rank.
        own: for each rank, fields that it has for itself.
        checkpoint: have PyTorch checkpoint each block.
        folder: an empty folder of the arm's own.
        rank: of this process.
    """

    wrap: str
    mesh: Sequence[int]
    dimensions: Sequence[str]
    sizes: Mapping[str, int]
    batch: int
    folder: str
    tier: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: Sequence[Mapping[str, Any]] = ()
    checkpoint: bool = False
    rank: int = 0


class Training(Protocol):
    """How one rank trains.

    Attributes:
        module: what is trained.
        offload: the Offloader, if there is one.
    """

    module: nn.Module
    offload: Any

    def step(self, tokens: Tensor) -> Tensor:
        """Run forward, backward and the optimizer; return the loss."""

    def results(self) -> Iterable[Tensor]:
        """Return what a step has computed, to be hashed: gradients, or weights."""

    def figures(self) -> Mapping[str, float]:
        """Return what it tells of the last step itself."""

    def close(self) -> None:
        """Leave the context, if any, and close the Offloader."""


class Loop:
    """Training as in PyTorch: forward and backward, then an optimizer.

    Args:
        module: what is trained.
        run: runs forward and backward, and returns the loss.
        settings: of `offload_context`; None trains without it.
    """

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor], settings: Mapping[str, Any] | None) -> None:
        self.module, self._run = module, run
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.offload: Any = None
        if settings is not None:
            from tba import offload_context

            self.offload = offload_context(module, **settings).__enter__()

    def step(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._run(tokens)
        self._optimizer.step()
        return loss

    def results(self) -> Iterable[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def figures(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        if self.offload is not None:
            self.offload.__exit__(None, None, None)
            self.offload.close()


class Rank:
    """One rank of the training."""

    def __init__(self, raw: Mapping[str, Any], tell: Tell) -> None:
        self.options = o = RanksOptions(**raw)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        ranks = prod(o.mesh)
        # By name: a host that several ranks share need not resolve to an address that they reach one another by.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{o.folder}/meeting", rank=o.rank, world_size=ranks)
        self.training = self._make()
        self.idle_bytes: int | None = None
        self._before: dict[str, float] = {}
        self.about = {
            "parameters": sum(parameter.numel() for parameter in self.training.module.parameters()),
            "unit": "tokens",
            "units": o.batch * o.sizes["sequence"],
        }

    def _make(self) -> Training:
        from torch.distributed.device_mesh import init_device_mesh

        o = self.options
        mesh = init_device_mesh("cpu", tuple(o.mesh), mesh_dim_names=tuple(o.dimensions))
        sizes, settings = LlamaSizes(**o.sizes), self._settings()
        training: Training
        if o.wrap.startswith("zero3"):
            from .zero3 import Zero3

            files = Path(o.folder, "deepspeed") if o.wrap == "zero3-nvme" else None
            training = Zero3(Llama(sizes), o.batch, settings, files=files, rank=o.rank, ranks=prod(o.mesh))
        elif o.wrap:
            model = Llama(sizes)
            wrap: parallel.Wrap = getattr(parallel, o.wrap)
            trained = wrap(model, mesh) or model
            training = Loop(trained, partial(_run, trained), settings)
        else:
            pipeline = parallel.Pipeline(sizes, mesh, _MICRO_BATCHES)
            training = Loop(pipeline.module, pipeline.step, settings)
        if o.checkpoint:  # within the hooks of whatever shards the block, as FSDP asks for
            for module in training.module.modules():
                if isinstance(module, Block):
                    vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
        return training

    def _settings(self) -> dict[str, Any] | None:
        o = self.options
        if o.tier is None:
            return None
        folder = Path(o.folder, str(o.rank))
        folder.mkdir()
        own = o.own[o.rank] if o.own else {}
        return {"tier": o.tier, "storage_paths": str(folder), **o.settings, **own}

    def turn(self, index: int) -> dict[str, Any]:
        """Take one step; return seconds, CPU seconds, peak over idle, loss, the gradients' hash, and the plan."""
        o = self.options
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(o.sizes["vocabulary"], (o.batch, o.sizes["sequence"]), generator=generator)
        if self.idle_bytes is None:
            self.idle_bytes = resident_bytes()
        reset_peak()
        dist.barrier()
        begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
        loss = self.training.step(tokens)
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
        peak = peak_bytes()
        if self.training.offload is not None:
            self.training.offload.flush()
        return {
            "wall_s": ended_s - begun_s,
            "cpu_s": ended_cpu_s - begun_cpu_s,
            "idle_bytes": self.idle_bytes,
            "peak_bytes": peak - self.idle_bytes,
            "loss": local(loss.detach()).item(),
            "figures": self.training.figures(),  # before results are gathered, maybe from files
            "gradients_sha256": tensor_hash(self.training.results()),
            "plan": self._plan(),
        }

    def _plan(self) -> dict[str, Any] | None:
        offload = self.training.offload
        if offload is None:
            return None
        stats, plan, before = offload.stats(), offload.plan, self._before
        self._before = {name: getattr(stats, name) for name in _COUNTED}
        seen = {name: value - before.get(name, 0) for name, value in self._before.items()}
        found = {
            **seen,
            "worth_bytes": seen["saved_bytes"] - seen["weight_bytes"] - seen["duplicate_bytes"],
            "recomputed": sorted(plan.recomputed) if plan else [],
            "agreed": plan.agreed if plan else "",
            "budget_bytes": plan.budget_bytes if plan else 0,
            "moved_bytes": sum(plan.sends.values()) if plan else 0,
            "blocks": len(plan.facts.blocks) if plan else 0,
            "held_bytes": plan.measured.peak_bytes if plan and plan.measured is not None else 0,
        }
        return found if plan else {**found, "agreed": str(plan)}

    def close(self) -> dict[str, Any]:
        """Leave the context, and close the offloader."""
        self.training.close()
        dist.barrier()  # nobody is gone while another still talks to it
        return {}


def _run(model: nn.Module, tokens: Tensor) -> Tensor:
    """Run forward and backward; return the loss."""
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    return loss


class RanksArm:
    """All ranks of one training, as one arm."""

    def __init__(self, raw: Mapping[str, Any], tell: Tell) -> None:
        ranks = prod(raw["mesh"])
        self._others = [
            Child(f"rank {rank}", "benchmarks._processes.worker", environment=os.environ) for rank in range(1, ranks)
        ]
        for rank, other in enumerate(self._others, 1):
            other.send({"role": "ranks:Rank", "options": {**raw, "rank": rank}})
        self._own = Rank(raw, tell)
        for other in self._others:
            other.receive(timeout_s=_TIMEOUT_S)
        self.about = self._own.about
        self._agreeing_s: list[float] = []  # in each step, of the rank that took longest
        self._last_s: list[float] = []  # of the rank that took least: it came last to most meetings

    def turn(self, index: int) -> dict[str, Any]:
        """Take one step on all ranks."""
        for other in self._others:
            other.send({"turn": index})
        answers = [self._own.turn(index), *(other.receive(timeout_s=_TIMEOUT_S) for other in self._others)]
        plans = [answer["plan"] for answer in answers if answer["plan"] is not None]
        moved: dict[str, Any] = {}
        if plans:
            moved = {name: max(plan[name] for plan in plans) for name in ("wait_s", "backpressure_s")}
            spent_s = [plan["agreement_s"] for plan in plans]
            self._agreeing_s.append(max(spent_s))
            self._last_s.append(min(spent_s))
            moved |= {"agreeing_s": self._agreeing_s, "last_agreeing_s": self._last_s}
            moved |= {"written_bytes": sum(plan["written_bytes"] for plan in plans), "plans": plans}
        figures = [answer["figures"] for answer in answers]
        return {
            "wall_s": max(answer["wall_s"] for answer in answers),
            "cpu_s": sum(answer["cpu_s"] for answer in answers),
            "idle_bytes": max(answer["idle_bytes"] for answer in answers),
            "peak_bytes": max(answer["peak_bytes"] for answer in answers),
            "loss": answers[-1]["loss"],
            "gradients_sha256": "".join(answer["gradients_sha256"] for answer in answers),
            "moved": moved,
            # Seconds: of the slowest rank; bytes: of all.
            "figures": {
                name: (max if name.endswith("_s") else sum)(each[name] for each in figures) for name in figures[0]
            },
        }

    def close(self) -> dict[str, Any]:
        """End all ranks."""
        for other in self._others:
            other.send({"close": True})
        answer = self._own.close()
        for other in self._others:
            other.receive(timeout_s=_TIMEOUT_S)
            other.close()
        return answer
