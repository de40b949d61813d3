"""The ranks arm: one training over several ranks; a turn is a step of all, and takes as long as the slowest.

Its process is rank 0 and starts the others, which are workers of the same kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._processes.child import Child
from .._processes.resident_memory import peak_bytes, reset_peak, resident_bytes
from .._processes.serve import Tell
from .._workload import parallel
from .._workload.llama import Block, Llama, LlamaSizes, loss_of
from .._workload.tools import gradient_hash, local, tensor_hash

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
            DeepSpeed.
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


class Rank:
    """One rank of the training."""

    def __init__(self, raw: Mapping[str, Any], tell: Tell) -> None:
        self.options = o = RanksOptions(**raw)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        ranks = prod(o.mesh)
        # By name: a host that several ranks share need not resolve to an address that they reach one another by.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{o.folder}/meeting", rank=o.rank, world_size=ranks)
        self._pipeline: parallel.Pipeline | None = None
        self._zero3: Any = None
        self.model = self._make()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)
        self.offload = self._enter_context()
        self.idle_bytes: int | None = None
        self._before: dict[str, float] = {}
        self.about = {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "unit": "tokens",
            "units": o.batch * o.sizes["sequence"],
        }

    def _make(self) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        o = self.options
        mesh = init_device_mesh("cpu", tuple(o.mesh), mesh_dim_names=tuple(o.dimensions))
        sizes = LlamaSizes(**o.sizes)
        if o.wrap == "zero3":
            from .zero3 import Zero3

            settings = None if o.tier is None else {"tier": o.tier, **self._settings()}
            self._zero3 = Zero3(Llama(sizes), o.batch, settings, rank=o.rank, ranks=prod(o.mesh))
            trained = self._zero3.module
        elif o.wrap:
            model = Llama(sizes)
            wrap: parallel.Wrap = getattr(parallel, o.wrap)
            trained = wrap(model, mesh) or model
        else:
            self._pipeline = parallel.Pipeline(sizes, mesh, _MICRO_BATCHES)
            trained = self._pipeline.module
        if o.checkpoint:  # within the hooks of whatever shards the block, as FSDP asks for
            for module in trained.modules():
                if isinstance(module, Block):
                    vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
        return trained

    def _enter_context(self) -> Any:
        o = self.options
        if self._zero3 is not None:
            return self._zero3.offload
        if o.tier is None:
            return None
        from tba import offload_context

        return offload_context(self.model, o.tier, **self._settings()).__enter__()

    def _settings(self) -> dict[str, Any]:
        o = self.options
        folder = Path(o.folder, str(o.rank))
        folder.mkdir()
        own = o.own[o.rank] if o.own else {}
        return {"storage_paths": str(folder), **o.settings, **own}

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
        if self._zero3 is not None:
            loss = self._zero3.step(tokens)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._step(tokens)
            self.optimizer.step()
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
        peak = peak_bytes()
        if self.offload is not None:
            self.offload.flush()
        return {
            "wall_s": ended_s - begun_s,
            "cpu_s": ended_cpu_s - begun_cpu_s,
            "idle_bytes": self.idle_bytes,
            "peak_bytes": peak - self.idle_bytes,
            "loss": local(loss.detach()).item(),
            # ZeRO-3 has no gradients left after a step.
            "gradients_sha256": gradient_hash(self.model.parameters())
            if self._zero3 is None
            else tensor_hash(self._zero3.weights),
            "plan": self._plan(),
        }

    def _step(self, tokens: Tensor) -> Tensor:
        """Run forward and backward; return the loss."""
        if self._pipeline is not None:
            return self._pipeline.step(tokens)
        loss = loss_of(self.model(tokens), tokens)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss

    def _plan(self) -> dict[str, Any] | None:
        if self.offload is None:
            return None
        stats, plan, before = self.offload.stats(), self.offload.plan, self._before
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
        if self.offload is not None:
            if self._zero3 is None:  # otherwise it is attached
                self.offload.__exit__(None, None, None)
            self.offload.close()
        dist.barrier()  # nobody is gone while another still talks to it
        return {}


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

    def turn(self, index: int) -> dict[str, Any]:
        """Take one step on all ranks."""
        for other in self._others:
            other.send({"turn": index})
        answers = [self._own.turn(index), *(other.receive(timeout_s=_TIMEOUT_S) for other in self._others)]
        plans = [answer["plan"] for answer in answers if answer["plan"] is not None]
        moved: dict[str, Any] = {}
        if plans:
            moved = {name: max(plan[name] for plan in plans) for name in ("wait_s", "backpressure_s")}
            self._agreeing_s.append(max(plan["agreement_s"] for plan in plans))
            moved["agreeing_s"] = self._agreeing_s
            moved |= {"written_bytes": sum(plan["written_bytes"] for plan in plans), "plans": plans}
        return {
            "wall_s": max(answer["wall_s"] for answer in answers),
            "cpu_s": sum(answer["cpu_s"] for answer in answers),
            "idle_bytes": max(answer["idle_bytes"] for answer in answers),
            "peak_bytes": max(answer["peak_bytes"] for answer in answers),
            "loss": answers[-1]["loss"],
            "gradients_sha256": "".join(answer["gradients_sha256"] for answer in answers),
            "moved": moved,
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
