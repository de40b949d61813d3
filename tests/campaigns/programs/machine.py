"""Machine: runs a training program made of numbers, an instruction at a time, plain or with an engine.

An instruction is a name and three numbers, each taken modulo the number of choices, so that any list of instructions is
a program. Those that PyTorch refuses (shapes, dtypes, edits of leaves) are steps as well: both arms must refuse them
alike.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.exactness import CPU
from tba._device.streams import as_bytes

from .operators import BINARY, CUSTOM, INPLACE, UNARY, VIEWS, rows

Instruction = tuple[str, int, int, int]

_POOL = 14  # tensors a program holds at once
_NUMEL = 2048
EDITED = "modified by an inplace operation"
NAMES = [
    *["unary"] * 10,
    *["view"] * 7,
    *["binary"] * 7,
    *["inplace"] * 4,
    *["backward"] * 5,
    *["linear", "gradient"] * 3,
    *["custom", "checkpoint", "flush", "delete", "context"] * 2,
    *["suspended", "hook", "look", "take_grad", "edit_grad", "update", "elsewhere", "nested", "collect", "retain_grad"],
    "aside",
]
_BYTES = st.integers(0, 255)
_INSTRUCTIONS = st.tuples(st.sampled_from(NAMES), _BYTES, _BYTES, _BYTES)
# Of a drawn length: lists whose length is left to hypothesis are short.
PROGRAMS = st.integers(4, 40).flatmap(lambda length: st.lists(_INSTRUCTIONS, min_size=length, max_size=length))


class Plain:
    """An arm without an engine: what a program asks of an `Offloader` does nothing."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def flush(self) -> None: ...

    def suspend(self) -> AbstractContextManager[None]:
        return nullcontext()


class Model(nn.Module):
    """The weights and the buffer of a program."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tall = nn.Parameter(torch.randn(8, 16))
        self.square = nn.Parameter(torch.randn(16, 16))
        self.gain = nn.Parameter(torch.ones(16))
        self.shift = nn.Buffer(torch.randn(8, 16))
        self.to(device)


class Machine:
    """One arm of a program: `Plain`, or an Offloader."""

    def __init__(self, model: Model, arm: Any) -> None:
        torch.manual_seed(2)
        self.model = model
        self.arm = arm
        self.device = model.shift.device
        self.side = None if self.device.type == "cpu" else torch.Stream(self.device)
        self.inside = False
        self.done = 0  # instructions that have ended
        self.leaf = torch.randn(8, 16).to(self.device).requires_grad_()
        self.pool: list[Tensor] = [*model.parameters(), model.shift, self.leaf, torch.randn(8, 16).to(self.device)]

    def step(self, instruction: Instruction) -> tuple[Any, ...]:
        """Run one instruction; return the error it raised, and a digest of every tensor afterwards."""
        name, *numbers = instruction
        try:
            getattr(self, f"_do_{name}")(*numbers)
        except Exception as error:
            told = f"{type(error).__name__}: {EDITED if EDITED in str(error) else str(error)[:60]}"
        else:
            told = ""
        return told, *map(_digest, self.pool), *(_digest(leaf.grad) for leaf in self._leaves())

    def run(self, program: list[Instruction]) -> list[tuple[Any, ...]]:
        """Run a program within the context; return what `step` returns, of the entry and of each instruction."""
        found = []
        for instruction in [("context", 0, 0, 0), *program]:
            found.append(self.step(instruction))
            self.done += 1
        return [(told, *map(_settled, digests)) for told, *digests in found]

    def finish(self) -> None:
        """Leave the context and release every tensor."""
        if self.inside:
            self._do_context()
        self.pool.clear()
        del self.leaf, self.model.shift  # the buffer of a program that edited it holds a graph
        for weight in self.model.parameters():
            weight.grad = None
        gc.collect()

    def _leaves(self) -> list[Tensor]:
        return [*self.model.parameters(), self.leaf]

    def _get(self, number: int) -> Tensor:
        return self.pool[number % len(self.pool)]

    def _put(self, made: Any) -> None:
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                if len(self.pool) >= _POOL:
                    self.pool.pop(5)
                self.pool.append(tensor if tensor.numel() <= _NUMEL else tensor.flatten()[:_NUMEL])

    # -- forward -------------------------------------------------------------------------------------------------

    def _do_unary(self, a: int, b: int, *_: int) -> None:
        self._put(UNARY[b % len(UNARY)](self._get(a)))

    def _do_view(self, a: int, b: int, *_: int) -> None:
        self._put(VIEWS[b % len(VIEWS)](self._get(a)))

    def _do_custom(self, a: int, b: int, *_: int) -> None:
        self._put(CUSTOM[b % len(CUSTOM)](self._get(a)))

    def _do_binary(self, a: int, b: int, c: int) -> None:
        self._put(BINARY[c % len(BINARY)](*_alike(self._get(a), self._get(b))))

    def _do_inplace(self, a: int, b: int, c: int) -> None:
        with torch.no_grad() if c % 2 else nullcontext():
            INPLACE[c // 2 % len(INPLACE)](self._get(a), self._get(b))

    def _do_linear(self, a: int, b: int, c: int) -> None:
        weight = [self.model.square, self.model.tall, self.model.square.t()][b % 3]
        with torch.autocast(self.device.type, enabled=c % 3 == 0):
            out = F.linear(rows(self._get(a)), weight)
            self._put(F.layer_norm(out, out.shape[-1:], self.model.gain) if c % 2 and out.shape[-1] == 16 else out)

    def _do_checkpoint(self, a: int, b: int, c: int) -> None:
        first, second = UNARY[b % len(UNARY)], UNARY[c // 2 % len(UNARY)]
        self._put(checkpoint(lambda x: second(first(x)), self._get(a), use_reentrant=bool(c % 2)))

    def _do_suspended(self, a: int, b: int, *_: int) -> None:
        with self.arm.suspend():
            self._do_unary(a, b)

    def _do_nested(self, a: int, b: int, *_: int) -> None:
        # Not save_on_cpu, which keeps a CPU tensor itself: results would hold their nodes, and these them, for good.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
            self._do_unary(a, b)

    def _do_elsewhere(self, a: int, b: int, *_: int) -> None:
        _on_thread(partial(self._do_unary, a, b))

    def _do_aside(self, a: int, b: int, *_: int) -> None:
        """Run an operator, and its backward, on a stream of its own where there are streams."""
        with self._streams_meet(), self.side or nullcontext():
            self._do_unary(a, b)

    @contextmanager
    def _streams_meet(self) -> Iterator[None]:
        """What runs in this region may use both streams, by PyTorch's rules for tensors of one and the other."""
        if self.side is None:
            yield
            return
        here = torch.accelerator.current_stream()
        self._record(here)
        self.side.wait_stream(here)
        try:
            yield
        finally:
            here.wait_stream(self.side)
            self._record(here)

    def _record(self, here: torch.Stream) -> None:
        for tensor in (*self.pool, *(leaf.grad for leaf in self._leaves())):
            if tensor is not None:
                as_bytes(tensor).record_stream(here)
                as_bytes(tensor).record_stream(self.side)  # type: ignore[arg-type]

    # -- backward ------------------------------------------------------------------------------------------------

    def _loss(self, a: int, b: int) -> Tensor:
        chosen = (self._get(a), self._get(b)) if a % 4 else [x for x in self.pool if x.requires_grad]
        return sum(x.abs().sum() if x.is_complex() else x.sum() for x in chosen)  # type: ignore[return-value]

    def _do_backward(self, a: int, b: int, c: int) -> None:
        go = partial(torch.autograd.backward, self._loss(a, b), retain_graph=c % 3 == 0)
        with self._streams_meet():
            _on_thread(go) if c % 5 == 0 else go()

    def _do_gradient(self, a: int, b: int, c: int) -> None:
        with self._streams_meet():
            self._take_gradient(a, b, c)

    def _take_gradient(self, a: int, b: int, c: int) -> None:
        wanted = self._get(b) if c % 4 else self.leaf
        out = self._get(a)
        if c % 7 == 0:
            many = torch.ones(3, *out.shape, dtype=out.dtype, device=out.device)
            self._put(torch.autograd.grad(out, wanted, many, allow_unused=True, is_grads_batched=True))
        else:
            loss = self._loss(a, a)
            self._put(torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=c % 2 == 0))

    @torch.no_grad()
    def _do_update(self, *_: int) -> None:
        for leaf in self._leaves():
            if leaf.grad is not None:
                leaf.sub_(leaf.grad, alpha=0.1)
                leaf.grad = None

    def _do_take_grad(self, a: int, *_: int) -> None:
        self._put(self._leaves()[a % len(self._leaves())].grad)

    def _do_edit_grad(self, a: int, *_: int) -> None:
        gradient = self._leaves()[a % len(self._leaves())].grad
        if gradient is not None:
            gradient.mul_(2)

    def _do_hook(self, a: int, *_: int) -> None:
        self._get(a).register_hook(lambda gradient: gradient * 2)

    def _do_retain_grad(self, a: int, *_: int) -> None:
        self._get(a).retain_grad()

    def _do_look(self, a: int, b: int, c: int) -> None:
        node: Any = self._get(a).grad_fn
        if node is None:
            return
        nodes = [node, *(edge[0] for edge in node.next_functions if edge[0] is not None)]
        node = nodes[b % len(nodes)]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        if names and isinstance(value := getattr(node, names[c % len(names)]), Tensor):
            self._put(value.detach().clone())

    # -- about ---------------------------------------------------------------------------------------------------

    def _do_flush(self, *_: int) -> None:
        self.arm.flush()

    def _do_delete(self, a: int, *_: int) -> None:
        if len(self.pool) > 6:
            del self.pool[5 + a % (len(self.pool) - 5)]

    def _do_collect(self, *_: int) -> None:
        gc.collect()

    def _do_context(self, *_: int) -> None:
        if self.inside:
            self.arm.__exit__(None, None, None)
        else:
            self.arm.__enter__()
        self.inside = not self.inside


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        count = min(x.numel(), y.numel())
        return x.flatten()[:count], y.flatten()[:count]
    return x, y


def _on_thread(call: Callable[[], None]) -> None:
    # Asking for the number of threads sets it there too: oneDNN takes OpenMP's until somebody asks.
    with ThreadPoolExecutor(1, initializer=torch.get_num_threads) as pool:
        number, done = pool.submit(threading.get_native_id).result(), pool.submit(call)
    while os.path.exists(f"/proc/self/task/{number}"):  # the thread's C++ half releases graphs after its Python half
        os.sched_yield()
    done.result()


@torch.no_grad()
def _digest(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    bits = _bits(plain) if plain.is_cpu else plain  # a device is not waited for, so that it lags behind the program
    try:
        leaf = tensor.is_leaf
    except RuntimeError as error:  # a view whose base was edited in a way that leaves it without a gradient
        return str(error), bits
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, leaf, bits


def _bits(plain: Tensor) -> int:
    return hash(plain.view(torch.uint8).numpy().tobytes())


def _settled(digest: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if digest is None or not isinstance(digest[-1], Tensor):
        return digest
    return *digest[:-1], _bits(digest[-1].cpu())
