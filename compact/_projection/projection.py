"""Projection: a random matrix P of width n x rank r with E[P P^T] = I, made from a key whenever it is needed.

kind          entries                                            E |P P^T g - g|^2 / |g|^2    bit-equal on every device
gaussian      sums of twelve uniform bytes, variance 1 / r       (n + 0.9) / r                P
rademacher    -1 or 1, times 1 / sqrt(r)                         (n - 1) / r                  P
orthonormal   r rows of a mixed Hadamard matrix (SRHT), columns  n / r - 1                    P, and what is projected
              orthogonal with square n / r: see `walsh`
sparse        one -1 or 1 a row, n / r or one more a column      n / r - 1, r dividing n      P, and what is projected

`gaussian` is CompAct's N(0, 1 / r) (arXiv 2410.15352, section 3); its entries have an excess kurtosis of -0.1, hence n
+ 0.9 and not n + 1. Matrices made from integers have equal bits everywhere; products with them do not, because devices
sum in different orders. `orthonormal` is the subsampled randomized Hadamard transform (Tropp, arXiv 1011.1595),
`sparse` a CountSketch with buckets of equal size: both are applied by sums in a fixed order, in fp32 or the input's
wider type.

Shapes: n width, r rank, c columns (tokens).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import _seeds
from .._errors import CodecError, RankError
from .walsh import Buckets, Walsh

ProjectionKind = Literal["gaussian", "rademacher", "orthonormal", "sparse"]
KINDS: tuple[ProjectionKind, ...] = get_args(ProjectionKind)

# Elements per block of columns. On a CPU a block and its copy fit the caches; elsewhere it only limits scratch memory.
_CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 26


def check_kind(kind: str) -> None:
    """Raise CodecError for an unknown kind of projection."""
    if kind not in KINDS:
        raise CodecError(f"projection kind {kind!r} is not known: choose one of {', '.join(KINDS)}")


def check_rank(rank: int, width: int, what: str) -> None:
    """Raise RankError unless 1 <= rank <= width. `what` names the rank's owner."""
    if not 1 <= rank <= width:
        raise RankError(f"{what} was given rank {rank}, but its width is {width}: choose a rank from 1 to {width}")


@dataclass(frozen=True)
class Projection:
    """Random matrix of a key. Holds no memory, and is not differentiable.

    Args:
        kind: "gaussian", "rademacher", "orthonormal" or "sparse".
        width: n, the number of features.
        rank: r, 1 to n.
        key: 64 bits (`compact.key`). Equal keys, kinds and sizes give equal matrices on every device.

    Raises:
        RankError: a rank outside 1 to n.
        CodecError: an unknown kind.
    """

    kind: ProjectionKind
    width: int
    rank: int
    key: int

    def __post_init__(self) -> None:
        check_kind(self.kind)
        check_rank(self.rank, self.width, f"a {self.kind} projection")

    def matrix(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Make P, [n, r], in fp32 (fp64 for fp64), rounded to `dtype`."""
        wide = _wide(dtype)
        if self._is_dense():
            unit, rest = self._unit(wide, device)
            return unit.mul_(rest).to(dtype)
        return self.back(torch.eye(self.rank, dtype=wide, device=device)).t().contiguous().to(dtype)

    @torch.no_grad()
    def project(self, x: Tensor) -> Tensor:
        """Compute x P: floating-point [..., n] to contiguous [..., r] of x's dtype and device.

        Raises:
            ValueError: another size of the last dimension, or an integer dtype.
        """
        return self._apply(x, down=True)

    @torch.no_grad()
    def back(self, z: Tensor) -> Tensor:
        """Compute z P^T: [..., r] to [..., n]. Raises as `project` does. The mean of `back(project(x))` is x."""
        return self._apply(z, down=False)

    def _apply(self, x: Tensor, *, down: bool) -> Tensor:
        size, new_size = (self.width, self.rank) if down else (self.rank, self.width)
        if x.dim() == 0 or x.shape[-1] != size or not x.is_floating_point():
            raise ValueError(
                f"a projection between width {self.width} and rank {self.rank} was asked to map the last dimension of "
                f"a {x.dtype} tensor of shape {list(x.shape)} from {size} to {new_size}: give a floating-point tensor "
                f"with {size} elements along its last dimension"
            )
        out = x.new_empty((*x.shape[:-1], new_size))
        if out.numel():
            rows, new_rows = x.reshape(-1, size), out.view(-1, new_size)
            self._multiply(rows, new_rows, down) if self._is_dense() else self._transform(rows, new_rows, down)
        return out

    def _is_dense(self) -> bool:
        return self.kind in ("gaussian", "rademacher")

    def _multiply(self, rows: Tensor, new_rows: Tensor, down: bool) -> None:
        # On a CPU rows are widened block by block: see `product`.
        dtype = _wide(rows.dtype) if rows.device.type == "cpu" else rows.dtype
        unit, rest = self._unit(dtype, rows.device)
        factor = unit if down else unit.t()
        step = len(rows) if dtype == rows.dtype else max(_CPU_BLOCK // rows.shape[1], 1)
        for start in range(0, len(rows), step):
            new_rows[start : start + step].copy_(product(rows[start : start + step].to(dtype), factor).mul_(rest))

    def _unit(self, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, float]:
        """Make P as a matrix of exact entries and a factor in (0.5, 1] to apply to the product.

        A factor rounded into bf16 entries would bias every product by up to 0.4%. Integers times a power of two are
        exact (except bells in bf16: rounded to nearest, which adds less than 1e-5 to their variance).
        """
        count, wide = self.width * self.rank, _wide(dtype)
        if self.kind == "gaussian":
            entries, square = _seeds.bells(self.key, count, device).to(wide), self.rank * _seeds.BELL_VARIANCE
        else:
            entries, square = _seeds.signs(self.key, count, device).to(wide), self.rank
        rest, exponent = math.frexp(1 / math.sqrt(square))
        if rest == 0.5:
            rest, exponent = 1.0, exponent - 1
        return entries.mul_(2.0**exponent).to(dtype).view(self.width, self.rank), rest

    def _transform(self, rows: Tensor, new_rows: Tensor, down: bool) -> None:
        wide = _wide(rows.dtype)
        transform = self._transformation(wide, rows.device)
        block = _CPU_BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
        step = max(block // self.width, 1)
        for start in range(0, len(rows), step):
            columns = rows[start : start + step].t().to(wide, copy=True, memory_format=torch.contiguous_format)
            mapped = transform.down(columns) if down else transform.up(columns)
            new_rows[start : start + step].copy_(mapped.t())

    def _transformation(self, dtype: torch.dtype, device: torch.device) -> Walsh | Buckets:
        signs = _seeds.signs(_seeds.key(self.key, "signs"), self.width, device).to(dtype)
        order = _seeds.permutation(_seeds.key(self.key, "order"), self.width, device)
        if self.kind == "orthonormal":
            return Walsh(signs, order[: self.rank].sort().values)
        return Buckets(signs, order, self.rank)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b for two matrices of one dtype: contiguous, unaffected by autocast, not differentiable.

    A CPU without 16-bit instructions multiplies bf16 matrices a hundred times slower than fp32 ones (measured: 3 s
    versus 30 ms), so 16-bit matrices on a CPU go through fp32.
    """
    wide = torch.float32 if a.device.type == "cpu" and a.dtype.itemsize == 2 else a.dtype
    # Autocast ignores the variants with `out`.
    out = torch.empty(len(a), b.shape[1], dtype=wide, device=a.device)
    return torch.mm(a.detach().to(wide), b.detach().to(wide), out=out).to(a.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
