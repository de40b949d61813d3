"""Operators that a program chooses from by number: of one tensor or two, views, edits in place, custom Functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Detach(torch.autograd.Function):
    """x -> x in a tensor that no view relates to it: the same memory and version counter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Square(torch.autograd.Function):
    """A Function that saves its input, its output and an intermediate result."""

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
    """A Function that works in place and saves its result."""

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
    """A Function with two results that share memory, and one that needs no gradient."""

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


def rows(x: Tensor) -> Tensor:
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
    *(
        lambda x, y: x.index_fill_(0, torch.tensor([0], device=x.device), 3),
        lambda x, y: F.dropout(x, 0.5, inplace=True),
    ),
]
BINARY: list[Callable[[Tensor, Tensor], Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, torch.atan2, torch.maximum, torch.hypot),
    *(lambda x, y: torch.where(x.real > 0, x, y), lambda x, y: torch.addcmul(x, x, y)),
    lambda x, y: torch.lerp(x, y, 0.3),
    *(F.mse_loss, lambda x, y: _matrix(x) @ _matrix(y), lambda x, y: torch.addmm(x[..., :1], _matrix(x), _matrix(y))),
    *(lambda x, y: torch.outer(x.flatten()[:16], y.flatten()[:16]), lambda x, y: torch.cdist(rows(x), rows(y))),
    *(lambda x, y: F.scaled_dot_product_attention(rows(x)[None], rows(y)[None], rows(y)[None])[0],),
    *(lambda x, y: torch.cat((rows(x), rows(y))), lambda x, y: torch.stack((_matrix(x), _matrix(y)))),
    *(lambda x, y: x.index_select(0, _places(y, x.shape[0])), lambda x, y: F.embedding(_places(y, x.shape[0]), x)),
    *(lambda x, y: F.cross_entropy(_matrix(x), _places(y, 8)), lambda x, y: rows(x).mv(rows(y)[0])),
    *(lambda x, y: torch.einsum("ij,kj->ik", rows(x), rows(y)), lambda x, y: y - x.mean()),
    lambda x, y: x.index_put((_places(y, x.shape[0]),), y),
    *(lambda x, y: F.conv1d(rows(x)[:, None], rows(y)[:1, None, :3]), lambda x, y: F.layer_norm(rows(x), (16,), y)),
    *(lambda x, y: torch.bmm(_matrix(x).expand(2, 8, 8), _matrix(y).expand(2, 8, 8)), lambda x, y: x.type_as(y) * y),
    *(
        lambda x, y: torch.linalg.solve(_matrix(x) + 9 * torch.eye(8, device=x.device), _matrix(y)),
        lambda x, y: x.mul(y.detach()),
    ),
]
CUSTOM: list[Callable[..., Any]] = [_Square.apply, _Dirty.apply, _Two.apply, Detach.apply]
