"""Program: a training program made of numbers, run an instruction at a time, to compare an engine with plain PyTorch.

An instruction is a name and three numbers, each taken modulo what there is to choose from, so that any list of
instructions is a program. Those that PyTorch refuses (shapes, dtypes, edits of leaves) are steps as well: both arms
must refuse them alike.
"""

from __future__ import annotations

import gc
import operator
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Instruction = tuple[str, int, int, int]

_POOL = 14  # tensors a program holds at once
_NUMEL = 2048
EDITED = "modified by an inplace operation"


class Plain:
    """What a program does to the engine: without one, nothing."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def flush(self) -> None: ...

    def suspend(self) -> AbstractContextManager[None]:
        return nullcontext()


class Model(nn.Module):
    """What programs take weights and a buffer from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tall = nn.Parameter(torch.randn(8, 16))
        self.square = nn.Parameter(torch.randn(16, 16))
        self.gain = nn.Parameter(torch.ones(16))
        self.shift = nn.Buffer(torch.randn(8, 16))


class Detach(torch.autograd.Function):
    """x -> x in a tensor that no view relates to it: the same memory and version counter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Square(torch.autograd.Function):
    """Saves its input, its output and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        between, out = x.exp(), x * x
        ctx.save_for_backward(x, out, between)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, out, between = ctx.saved_tensors
        return grads[0] * (2 * x + 0 * out + 0 * between.sin())


class _Dirty(torch.autograd.Function):
    """Works in place, and saves what it made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sin_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return grads[0] * saved


class _Two(torch.autograd.Function):
    """Two results, views of one another's memory, and one that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.stack((x, x * 2))
        place = both.argmax(0)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(both[0], both[1].transpose(0, -1), place)
        return both[0].clone(), both[1].clone(), place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first, second, place = ctx.saved_tensors
        return grads[0] * first + grads[1] * second.transpose(0, -1) + place


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1)[:64].reshape(8, 8)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1)[: x.numel() // 16 * 16].reshape(-1, 16)


def _places(x: Tensor, count: int) -> Tensor:
    return x.detach().reshape(-1)[:8].real.float().nan_to_num().abs().clamp(max=1e6).long() % count


def _overlapping(x: Tensor) -> Tensor:
    if x.numel() < 13:  # a storage may be larger: what `unique` did not write differs from run to run
        raise IndexError(f"{x.numel()} elements, 13 needed")
    return x.contiguous().as_strided((4, 4), (3, 1))


UNARY: list[Callable[[Tensor], Any]] = [
    *(torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.relu, F.gelu, F.silu, torch.square, torch.abs, torch.neg),
    *(torch.clone, lambda x: x.logsumexp(-1), F.leaky_relu, F.elu, F.hardswish, F.mish, F.softplus, torch.triu),
    *(lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x * 0.5),
    *(lambda x: x * x, lambda x: x.abs().log1p(), lambda x: x.cumsum(0), lambda x: x.sort(-1)[0], lambda x: x.amax(-1)),
    *(lambda x: x.max(-1)[0], lambda x: F.dropout(x, 0.5), lambda x: x.masked_fill(x > 0, 1.0), lambda x: x**3),
    *(lambda x: x.abs().sqrt(), lambda x: x.double(), lambda x: x.bfloat16(), lambda x: x.half(), lambda x: x.float()),
    *(lambda x: x.mean(-1, keepdim=True), lambda x: x.sum(0), lambda x: x.norm(), lambda x: x.std(-1), torch.sign),
    *(lambda x: F.normalize(x, dim=-1), lambda x: x.roll(1, 0), lambda x: x.flip(0), lambda x: x.repeat(2, 1)),
    *(lambda x: x.contiguous(), lambda x: F.rms_norm(x, x.shape[-1:]), lambda x: F.max_pool1d(x, 2), torch.angle),
    *(lambda x: torch.view_as_complex(x.reshape(-1, 2)), lambda x: torch.complex(x, x), lambda x: x.prod(0)),
    *(lambda x: F.interpolate(x[None, None], scale_factor=2.0), lambda x: torch.fft.rfft(x), lambda x: x.to(x.dtype)),
    *(lambda x: x.topk(2)[0], lambda x: x.unique(), lambda x: x.tanh().exp() * x, lambda x: x / x.norm()),
]
VIEWS: list[Callable[[Tensor], Tensor]] = [
    *(lambda x: x.view(-1), lambda x: x.transpose(0, -1), lambda x: x[1:], lambda x: x[..., ::2], lambda x: x[0]),
    *(lambda x: x.unsqueeze(0), lambda x: x.expand(2, *x.shape), lambda x: x.narrow(-1, 1, 2), torch.diagonal),
    *(lambda x: x.chunk(2)[1], lambda x: x.chunk(2)[0], lambda x: x.permute(*reversed(range(x.dim()))), torch.squeeze),
    *(lambda x: x.detach(), lambda x: x.unfold(-1, 2, 1), lambda x: x.real, lambda x: x.imag, lambda x: x.conj()),
    *(lambda x: torch._neg_view(x), lambda x: x.unbind(-1)[0], lambda x: x.view(torch.int16), lambda x: x.flatten()),
    *(lambda x: torch.view_as_real(x), lambda x: x.split([2, x.shape[0] - 2])[1], lambda x: x.mT),
    *(lambda x: x.conj().imag, lambda x: x.view_as(x), _overlapping),
    lambda x: x[..., 3:7],
]
INPLACE: list[Callable[[Tensor, Tensor], Any]] = [
    *(lambda x, y: x.add_(1), lambda x, y: x.mul_(0.5), lambda x, y: x.relu_(), lambda x, y: x.zero_()),
    *(lambda x, y: x.copy_(y), lambda x, y: x.exp_(), lambda x, y: x.clamp_(-1, 1), lambda x, y: x.add_(y)),
    *(lambda x, y: x.mul_(y), lambda x, y: x.masked_fill_(x > 0, 0.5), lambda x, y: x.transpose_(0, -1)),
    *(lambda x, y: x.unsqueeze_(0), lambda x, y: x.sigmoid_(), lambda x, y: x[..., 0].fill_(2)),
    lambda x, y: x.detach_(),
    *(lambda x, y: x.requires_grad_(), lambda x, y: F.silu(x, inplace=True), lambda x, y: x[1:].copy_(x[:-1].clone())),
    *(lambda x, y: x.index_fill_(0, torch.tensor([0]), 3), lambda x, y: F.dropout(x, 0.5, inplace=True)),
]
BINARY: list[Callable[[Tensor, Tensor], Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, torch.atan2, torch.maximum, torch.hypot),
    *(lambda x, y: torch.where(x.real > 0, x, y), lambda x, y: torch.addcmul(x, x, y)),
    lambda x, y: torch.lerp(x, y, 0.3),
    *(F.mse_loss, lambda x, y: _matrix(x) @ _matrix(y), lambda x, y: torch.addmm(x[..., :1], _matrix(x), _matrix(y))),
    *(lambda x, y: torch.outer(x.flatten()[:16], y.flatten()[:16]), lambda x, y: torch.cdist(_rows(x), _rows(y))),
    *(lambda x, y: F.scaled_dot_product_attention(_rows(x)[None], _rows(y)[None], _rows(y)[None])[0],),
    *(lambda x, y: torch.cat((_rows(x), _rows(y))), lambda x, y: torch.stack((_matrix(x), _matrix(y)))),
    *(lambda x, y: x.index_select(0, _places(y, x.shape[0])), lambda x, y: F.embedding(_places(y, x.shape[0]), x)),
    *(lambda x, y: F.cross_entropy(_matrix(x), _places(y, 8)), lambda x, y: _rows(x).mv(_rows(y)[0])),
    *(lambda x, y: torch.einsum("ij,kj->ik", _rows(x), _rows(y)), lambda x, y: y - x.mean()),
    lambda x, y: x.index_put((_places(y, x.shape[0]),), y),
    *(lambda x, y: F.conv1d(_rows(x)[:, None], _rows(y)[:1, None, :3]), lambda x, y: F.layer_norm(_rows(x), (16,), y)),
    *(lambda x, y: torch.bmm(_matrix(x).expand(2, 8, 8), _matrix(y).expand(2, 8, 8)), lambda x, y: x.type_as(y) * y),
    *(lambda x, y: torch.linalg.solve(_matrix(x) + 9 * torch.eye(8), _matrix(y)), lambda x, y: x.mul(y.detach())),
]
CUSTOM: list[Callable[..., Any]] = [_Square.apply, _Dirty.apply, _Two.apply, Detach.apply]

NAMES = [
    *["unary"] * 10,
    *["view"] * 7,
    *["binary"] * 7,
    *["inplace"] * 4,
    *["backward"] * 5,
    *["linear", "gradient"] * 3,
    *["custom", "checkpoint", "flush", "delete", "context"] * 2,
    *["suspended", "hook", "look", "take_grad", "edit_grad", "update", "elsewhere", "nested", "collect", "retain_grad"],
]


class Machine:
    """One arm of a program."""

    def __init__(self, model: Model, arm: Plain) -> None:
        torch.manual_seed(2)
        self.model = model
        self.arm = arm
        self.inside = False
        self.leaf = torch.randn(8, 16, requires_grad=True)
        self.pool: list[Tensor] = [*model.parameters(), model.shift, self.leaf, torch.randn(8, 16)]

    def step(self, instruction: Instruction) -> tuple[Any, ...]:
        """Run one instruction: what it raised, and what all tensors are afterwards."""
        name, *numbers = instruction
        try:
            getattr(self, f"_do_{name}")(*numbers)
        except Exception as error:
            told = f"{type(error).__name__}: {EDITED if EDITED in str(error) else str(error)[:60]}"
        else:
            told = ""
        return told, *map(_digest, self.pool), *(_digest(leaf.grad) for leaf in self._leaves())

    def finish(self) -> None:
        """Leave the context, forget everything."""
        if self.inside:
            self._do_context(0, 0, 0)
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
            if not isinstance(tensor, Tensor):
                continue
            if tensor.numel() > _NUMEL:
                tensor = tensor.flatten()[:_NUMEL]
            if len(self.pool) >= _POOL:
                self.pool.pop(5)
            self.pool.append(tensor)

    # -- forward -------------------------------------------------------------------------------------------------

    def _do_unary(self, a: int, b: int, c: int) -> None:
        self._put(UNARY[b % len(UNARY)](self._get(a)))

    def _do_view(self, a: int, b: int, c: int) -> None:
        self._put(VIEWS[b % len(VIEWS)](self._get(a)))

    def _do_binary(self, a: int, b: int, c: int) -> None:
        self._put(BINARY[c % len(BINARY)](*_alike(self._get(a), self._get(b))))

    def _do_inplace(self, a: int, b: int, c: int) -> None:
        edit = INPLACE[c // 2 % len(INPLACE)]
        with torch.no_grad() if c % 2 else nullcontext():
            edit(self._get(a), self._get(b))

    def _do_linear(self, a: int, b: int, c: int) -> None:
        weight = [self.model.square, self.model.tall, self.model.square.t()][b % 3]
        with torch.autocast("cpu", enabled=c % 3 == 0):
            out = F.linear(_rows(self._get(a)), weight)
            self._put(F.layer_norm(out, out.shape[-1:], self.model.gain) if c % 2 and out.shape[-1] == 16 else out)

    def _do_custom(self, a: int, b: int, c: int) -> None:
        self._put(CUSTOM[b % len(CUSTOM)](self._get(a)))

    def _do_checkpoint(self, a: int, b: int, c: int) -> None:
        first, second = UNARY[b % len(UNARY)], UNARY[c // 2 % len(UNARY)]
        self._put(checkpoint(lambda x: second(first(x)), self._get(a), use_reentrant=bool(c % 2)))

    def _do_suspended(self, a: int, b: int, c: int) -> None:
        with self.arm.suspend():
            self._do_unary(a, b, c)

    def _do_nested(self, a: int, b: int, c: int) -> None:
        # Not save_on_cpu, which keeps a CPU tensor itself: results would hold their nodes, and these them, for good.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
            self._do_unary(a, b, c)

    def _do_elsewhere(self, a: int, b: int, c: int) -> None:
        _on_thread(partial(self._do_unary, a, b, c))

    # -- backward ------------------------------------------------------------------------------------------------

    def _loss(self, a: int, b: int) -> Tensor:
        chosen = (self._get(a), self._get(b)) if a % 4 else [x for x in self.pool if x.requires_grad]
        return sum(x.abs().sum() if x.is_complex() else x.sum() for x in chosen)  # type: ignore[return-value]

    def _do_backward(self, a: int, b: int, c: int) -> None:
        go = partial(torch.autograd.backward, self._loss(a, b), retain_graph=c % 3 == 0)
        if c % 5 == 0:
            _on_thread(go)
        else:
            go()

    def _do_gradient(self, a: int, b: int, c: int) -> None:
        wanted = self._get(b) if c % 4 else self.leaf
        out = self._get(a)
        if c % 7 == 0:
            many = torch.ones(3, *out.shape, dtype=out.dtype)
            self._put(torch.autograd.grad(out, wanted, many, allow_unused=True, is_grads_batched=True))
        else:
            loss = self._loss(a, a)
            self._put(torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=c % 2 == 0))

    def _do_update(self, a: int, b: int, c: int) -> None:
        with torch.no_grad():
            for leaf in self._leaves():
                if leaf.grad is not None:
                    leaf.sub_(leaf.grad, alpha=0.1)
                    leaf.grad = None

    def _do_take_grad(self, a: int, b: int, c: int) -> None:
        self._put(self._leaves()[a % len(self._leaves())].grad)

    def _do_edit_grad(self, a: int, b: int, c: int) -> None:
        gradient = self._leaves()[a % len(self._leaves())].grad
        if gradient is not None:
            gradient.mul_(2)

    def _do_hook(self, a: int, b: int, c: int) -> None:
        self._get(a).register_hook(lambda gradient: gradient * 2)

    def _do_retain_grad(self, a: int, b: int, c: int) -> None:
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

    def _do_flush(self, a: int, b: int, c: int) -> None:
        self.arm.flush()

    def _do_delete(self, a: int, b: int, c: int) -> None:
        if len(self.pool) > 6:
            del self.pool[5 + a % (len(self.pool) - 5)]

    def _do_collect(self, a: int, b: int, c: int) -> None:
        gc.collect()

    def _do_context(self, a: int, b: int, c: int) -> None:
        if self.inside:
            self.arm.leave()
        else:
            self.arm.enter()
        self.inside = not self.inside


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        count = min(x.numel(), y.numel())
        return x.flatten()[:count], y.flatten()[:count]
    return x, y


def _on_thread(call: Callable[[], None]) -> None:
    errors: list[Exception] = []

    def run() -> None:
        torch.get_num_threads()  # sets it here too: oneDNN takes OpenMP's number until somebody has asked
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # its C++ half lets go of graphs after that
        os.sched_yield()
    if errors:
        raise errors[0]


@torch.no_grad()
def _digest(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    bits = hash(plain.view(torch.uint8).numpy().tobytes())
    try:
        leaf = tensor.is_leaf
    except RuntimeError as error:  # a view whose base was edited in a way that leaves it without a gradient
        return str(error), bits
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, leaf, bits
