"""Trial: one program trained plain and under its budget, and how losses, gradients, weights and state compare."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import itertools
import os
import random
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tba import BudgetError, Offloader, offload_context

from ..saved import Saved
from .program import Program, sources

_LEAST_BYTES = 256
_SLOW = {"max_write_rate": "5MB", "max_read_rate": "5MB"}  # recomputing wins on it
_SHARES = (0.0, 0.2, 0.4)  # added to the share where no plan meets a budget
BAD = ("wrong", "error", "hung", "crashed")
VERDICTS = ("equal", "refused", "invalid", *BAD)


@dataclass
class Outcome:
    """What came of a program.

    Attributes:
        verdict: one of `VERDICTS`; invalid: plain PyTorch raises, or differs from itself.
        kinds: those of its states.
        stateless: whether it has none.
        blocks, recomputed: how many there are, and how many recompute in the step that had most do so.
        sent_bytes: that plans moved.
        why_not: reasons for which blocks never recompute, and of how many.
    """

    seed: int
    verdict: str
    detail: str = ""
    text: str = ""
    kinds: tuple[str, ...] = ()
    stateless: bool = False
    slow: bool = True
    blocks: int = 0
    recomputed: int = 0
    sent_bytes: int = 0
    why_not: dict[str, int] = field(default_factory=dict)


def run_program(program: Program, directory: Path) -> Outcome:
    """Train a program both ways."""
    outcome = Outcome(
        program.seed,
        "equal",
        text=str(program),
        kinds=tuple(name for state in program.states for name in state.names()),
        stateless=not program.states,
        slow=program.slow,
    )
    try:
        plain = _train(program, lambda net: nullcontext())
    except Exception as error:
        outcome.verdict, outcome.detail = "invalid", _words(error)
        return outcome
    nbytes = _saved_bytes(program)
    for more in _SHARES:
        share = min(0.9, program.share + more)
        try:
            ours = _planned(program, int(share * nbytes), directory, outcome)
        except BudgetError as error:
            outcome.verdict, outcome.detail = "refused", str(error)
            continue
        except Exception as error:
            outcome.verdict, outcome.detail = "error", _words(error)
            return outcome
        outcome.verdict, outcome.detail = "equal", ""
        if found := _difference(ours, plain):
            again = _difference(_train(program, lambda net: nullcontext()), plain)
            outcome.verdict = "invalid" if again else "wrong"
            outcome.detail = f"plain differs from plain: {again}" if again else found
        return outcome
    return outcome


def _planned(program: Program, budget: int, directory: Path, outcome: Outcome) -> list[Any]:
    made: list[Offloader] = []
    plans: list[Any] = []

    def context(net: nn.Module) -> Offloader:
        settings: dict[str, Any] = {
            "memory_budget": budget,
            "storage_paths": directory,
            **(_SLOW if program.slow else {}),
        }
        made.append(offload_context(net, "auto", min_tensor_bytes=_LEAST_BYTES, **settings))
        plans.append(made[-1].plan)
        return made[-1]

    try:
        return _train(program, context)
    finally:
        if made:
            plans.append(made[-1].plan)
            made[-1].close()
        for plan in {id(plan): plan for plan in plans if plan}.values():
            outcome.blocks = len(plan.facts.blocks)
            outcome.recomputed = max(outcome.recomputed, len(plan.recomputed))
            outcome.sent_bytes += sum(plan.sends.values())
            reasons = [block.why_not for block in plan.facts.blocks if block.replay_s is None]
            outcome.why_not = dict(collections.Counter(reasons))


def _saved_bytes(program: Program) -> int:
    with _Loaded(program) as module:
        net = module.Net().train()
        with Saved(net, _LEAST_BYTES) as saved:
            losses = [net(torch.randn(program.rows[0], 16)) for _ in range(program.forwards)]
        del losses
        return saved.nbytes


def _train(program: Program, context: Callable[[nn.Module], AbstractContextManager[Any]]) -> list[Any]:
    """Losses, gradients, weights and state, all that a program leaves."""
    with _Loaded(program) as module:
        net = module.Net().train()
        found: list[Any] = []
        for step in range(program.steps):
            module.STEP = step
            rows = program.rows[step % len(program.rows)]
            losses: list[Tensor] = []
            with module.around_step():
                with context(net):
                    with module.around_forward():
                        losses += [net(torch.randn(rows, 16)) for _ in range(program.forwards)]
                    module.between(net)
                    if not program.outside:
                        for loss in losses:
                            loss.backward()
                if program.outside:
                    for loss in losses:
                        loss.backward()
            found.append((f"loss of step {step + 1}", [loss.detach().clone() for loss in losses]))
            found += [(f"gradient of {name}, step {step + 1}", copied(p.grad)) for name, p in net.named_parameters()]
            with torch.no_grad():
                for weight in net.parameters():
                    if weight.grad is not None:
                        weight.sub_(weight.grad, alpha=0.05)
            net.zero_grad(set_to_none=program.none)
            module.after_step(net)
            if program.evaluated and step % 3 == 1:
                with torch.no_grad():
                    net.eval()
                    found.append((f"evaluation after step {step + 1}", net(torch.randn(rows, 16))))
                    net.train()
                module.after_step(net)
        found += [(name, tensor.detach().clone()) for name, tensor in net.state_dict().items()]
        found.append(("state", canonical(module.dump(net))))
        found.append(("random numbers", [random.random(), numpy.random.rand(), float(torch.rand(()))]))
        return found


class _Loaded:
    """The module of a program, fresh and from equal seeds, while the context lasts."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __enter__(self) -> Any:
        random.seed(self._program.seed)
        numpy.random.seed(self._program.seed)
        torch.manual_seed(self._program.seed)
        code, other = _compiled(self._program)
        self._modules = {name: types.ModuleType(name) for name in ("other", "stateful_program")}
        sys.modules |= self._modules
        exec(other, vars(self._modules["other"]))
        exec(code, vars(self._modules["stateful_program"]))
        return self._modules["stateful_program"]

    def __exit__(self, *error: object) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)
        for name in [name for name in vars(builtins) if name.startswith("tba_test_")]:
            delattr(builtins, name)
        for name in [name for name in os.environ if name.startswith("TEST_STATE")]:
            del os.environ[name]


@functools.lru_cache(maxsize=2)
def _compiled(program: Program) -> tuple[Any, Any]:
    code, other = sources(program)
    return compile(code, f"<program {program.seed}>", "exec"), compile(other, "<its other module>", "exec")


def copied(tensor: Tensor | None) -> Tensor | None:
    """A copy of a gradient."""
    return None if tensor is None else tensor.detach().clone()


def canonical(value: Any, depth: int = 0) -> Any:
    """A state as numbers, text, tensors and lists of these. What can be gone through is, as the program has ended."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if depth > 8:
        return type(value).__name__
    inner = functools.partial(canonical, depth=depth + 1)
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, (random.Random, numpy.random.Generator)):
        return [float(value.random()) for _ in range(3)]
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (collections.abc.Mapping, collections.ChainMap)):
        return ["mapping", *([inner(key), inner(each)] for key, each in list(value.items()))]
    if isinstance(value, (set, frozenset)):
        return ["set", *map(inner, sorted(value, key=str))]
    if isinstance(value, collections.abc.Iterator):
        return ["next", *map(inner, itertools.islice(value, 3))]
    if isinstance(value, (list, tuple, collections.deque, bytearray, memoryview)) or hasattr(value, "typecode"):
        return [type(value).__name__, *map(inner, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [inner(getattr(value, each.name)) for each in dataclasses.fields(value)]
    for name in ("tell", "hexdigest", "cache_info", "qsize"):
        if callable(getattr(value, name, None)):
            return [name, inner(getattr(value, name)())]
    for name in ("value", "count"):
        if hasattr(value, name):
            return [name, inner(getattr(value, name))]
    return [type(value).__name__, *(inner(each) for each in getattr(value, "__dict__", {}).values())]


def _difference(ours: list[Any], theirs: list[Any]) -> str:
    """Say where two runs first differ, or ""."""
    for (name, mine), (_, other) in zip(ours, theirs, strict=False):
        if found := _differs(mine, other):
            return f"{name}: {found}"
    return "" if len(ours) == len(theirs) else "another number of results"


def _differs(mine: Any, other: Any) -> str:
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        if mine.shape != other.shape or mine.dtype is not other.dtype:
            return f"{tuple(mine.shape)} for {tuple(other.shape)}"
        one, two = (each.contiguous().view(-1).view(torch.uint8) for each in (mine, other))
        return "" if torch.equal(one, two) else f"off by {float((mine.double() - other.double()).abs().max()):.3g}"
    if isinstance(mine, list) and isinstance(other, list):
        if len(mine) != len(other):
            return f"{len(mine)} for {len(other)}"
        return next((found for one, two in zip(mine, other, strict=True) if (found := _differs(one, two))), "")
    same = type(mine) is type(other) and (mine == other or (mine != mine and other != other))
    return "" if same else f"{mine!r:.60} for {other!r:.60}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
