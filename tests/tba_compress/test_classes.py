"""Classes of saved tensors: each rule with the real operator, where numbers coincide, and whole blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from compact import Saved
from support.classes import (
    FACTOR,
    HEADS,
    LINEAR,
    NORM,
    STATISTIC,
    B,
    D,
    Found,
    M,
    N,
    S,
    Twice,
    X,
    kinds,
    rand,
    saved,
    weight,
)
from support.models import llama, transformer
from tba._compress.calls import SavedBy
from tba._compress.classes import RULES

Q = (B, HEADS, S, D)
q, k, v = rand(*Q), rand(*Q), rand(*Q)
x, y, w, wt = rand(*X), rand(*X), weight(M, N), weight(N, M)
tokens = torch.zeros(B * S, dtype=torch.int64)

CASES: dict[str, tuple[Callable[[], Any], Found]] = {
    "linear": (lambda: functional.linear(x, w, weight(M)), [LINEAR]),
    "linear by keyword": (lambda: functional.linear(input=x, weight=w), [LINEAR]),
    "linear of a transposed input": (lambda: functional.linear(x.transpose(0, 1), w), [LINEAR]),
    "nn.Linear": (lambda: nn.Linear(N, M)(x), [LINEAR]),
    "matmul": (lambda: x.matmul(w.t()), [LINEAR]),
    "@": (lambda: x @ wt, [LINEAR]),
    "weight @": (lambda: w @ x[0].t(), [("linear_input", (N, S))]),
    "torch.addmm": (lambda: torch.addmm(weight(M), x.view(-1, N), wt), [LINEAR]),
    "Tensor.addmm": (lambda: weight(M).addmm(x.view(-1, N), wt), [LINEAR]),
    "bmm": (lambda: torch.bmm(x, weight(B, N, M)), [("linear_input", X)]),
    "baddbmm": (lambda: torch.baddbmm(weight(M), x, weight(B, N, M)), [("linear_input", X)]),
    "conv1d": (lambda: functional.conv1d(x, weight(M, S, 3)), [("linear_input", X)]),
    "conv2d": (lambda: nn.Conv2d(1, 4, 3)(rand(B, 1, S, N)), [("linear_input", (B, 1, S, N))]),
    "conv3d": (lambda: nn.Conv3d(1, 4, 2)(rand(B, 1, 3, 3, 3)), [("linear_input", (B, 1, 3, 3, 3))]),
    "linear without a trained weight": (lambda: functional.linear(x, w.detach()), [("unknown", (N, M))]),
    "linear of a computed weight": (
        lambda: functional.linear(x, w * 2),
        [("unknown", (B * S, N)), ("unknown", (N, M))],
    ),
    "matmul of activations": (lambda: q @ k.transpose(2, 3), [("unknown", (6, 4, 5)), ("unknown", (6, 5, 4))]),
    "layer_norm": (lambda: nn.LayerNorm(N)(x), [NORM, STATISTIC, STATISTIC]),
    "torch.layer_norm": (lambda: torch.layer_norm(x, (N,)), [NORM, STATISTIC, STATISTIC]),
    "rms_norm": (lambda: nn.RMSNorm(N)(x), [NORM, NORM, NORM, STATISTIC, STATISTIC]),
    "group_norm": (lambda: functional.group_norm(x, S), [NORM, *[("norm_statistics", (B, S))] * 2]),
    "batch_norm": (lambda: nn.BatchNorm1d(S)(x), [NORM, *[("norm_statistics", (S,))] * 4]),
    "instance_norm": (
        lambda: functional.instance_norm(x),
        [("norm_input", (1, B * S, N)), *[("norm_statistics", (B * S,))] * 2],
    ),
    **{
        name: (lambda name=name: getattr(functional, name)(x), [("activation_input", X)])
        for name in ("gelu", "silu", "mish", "softplus", "hardswish")
    },
    **{
        name: (lambda name=name: getattr(functional, name)(x), [("unknown", X)])
        for name in ("leaky_relu", "elu", "celu", "selu")
    },
    "silu in place": (lambda: functional.silu(x + 0, inplace=True), [("activation_input", X)]),
    **{name: (lambda name=name: getattr(x, name)(), [("unknown", X)]) for name in ("relu", "tanh", "sigmoid", "exp")},
    "x * y": (lambda: x * y, [FACTOR, FACTOR]),
    "torch.mul": (lambda: torch.mul(x, y), [FACTOR, FACTOR]),
    "mul_": (lambda: (x + 0).mul_(y), [FACTOR, FACTOR]),
    "x * a mask": (lambda: x * (y.detach() > 0).float(), [("unknown", X)]),
    "x * a row": (lambda: x * rand(N), [FACTOR, ("unknown", (N,))]),
    "column * row": (lambda: rand(M, 1) * rand(1, N), [("unknown", (1, N)), ("unknown", (M, 1))]),
    "x * a weight": (lambda: x * weight(*X), [FACTOR]),
    "x * integers": (lambda: x * torch.ones(*X, dtype=torch.int32), [("index", X)]),
    "x * 2": (lambda: x * 2, []),
    "x / y": (lambda: x / y, [("unknown", X), ("unknown", X)]),
    "pow": (lambda: x.pow(3), [("unknown", X)]),
    "attention": (
        lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [*[("attention", Q)] * 4, ("attention_statistics", Q[:3])],
    ),
    "attention with a mask": (
        lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S).bool().tril()),
        [*[("attention", Q)] * 4, ("attention_statistics", Q[:3]), ("attention_statistics", (S, S))],
    ),
    "attention with dropout": (  # not fused: its probabilities, before and after dropout, and the mask
        lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        [
            *(("attention", shape) for shape in ((6, 4, 5), (6, 5, 4), (6, 5, 4))),
            *(("attention_statistics", shape) for shape in ((2, 3, 5, 5), (2, 3, 5, 5), (6, 5, 5))),
        ],
    ),
    "attention of fewer keys": (
        lambda: functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
        [
            *(("attention", shape) for shape in ((B, 1, S, D), (B, 1, S, D), Q, Q)),
            ("attention_statistics", Q[:3]),
        ],
    ),
    "attention of one query's batch to many": (  # not fused: its probabilities have as many elements as q
        lambda: functional.scaled_dot_product_attention(rand(1, 3, 4, 4), rand(2, 3, 4, 4), rand(2, 3, 4, 4)),
        [("attention_statistics", (2, 3, 4, 4)), *[("attention_statistics", (6, 4, 4))] * 4],
    ),
    "softmax": (lambda: x.softmax(-1), [("probabilities", X)]),
    "functional.log_softmax": (lambda: functional.log_softmax(x, -1), [("probabilities", X)]),
    "cross_entropy": (
        lambda: functional.cross_entropy(x.view(-1, N), tokens),
        [("index", (10,)), ("probabilities", ()), ("probabilities", (10, N)), ("probabilities", (10, N))],
    ),
    "dropout": (lambda: functional.dropout(x, 0.5), [("mask", X)]),
    "native_dropout": (lambda: torch.native_dropout(x, 0.5, True), [("mask", X)]),
    "embedding": (lambda: functional.embedding(tokens, w), [("index", (10,))]),
    "gather": (lambda: x[0].gather(1, tokens[:4, None]), [("index", (4, 1)), ("unknown", (S, N))]),
    "max_pool1d": (lambda: functional.max_pool1d(x, 2), [("index", (B, S, 1, 4)), ("unknown", (B, S, 1, N))]),
    "multi-head attention": (lambda: nn.MultiheadAttention(N, 2)(x, x, x, need_weights=False), []),
    "custom Function": (lambda: Twice.apply(x), [("unknown", X)]),
}


@pytest.mark.parametrize("name", sorted(set(CASES) - {"multi-head attention"}))
def test_each_rule_with_its_operator(name: str) -> None:
    function, expected = CASES[name]
    assert saved(function) == sorted(expected)


def test_function_that_hides_others_is_unknown() -> None:
    assert kinds(CASES["multi-head attention"][0]) == {"unknown"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats(dtype: torch.dtype) -> None:
    layer, a = nn.Linear(N, M, dtype=dtype), x.detach().to(dtype).requires_grad_()
    assert saved(lambda: layer(a)) == [LINEAR]
    assert saved(lambda: functional.silu(a)) == [("activation_input", X)]


def test_complex_numbers_are_left_alone() -> None:
    a = torch.randn(*X, dtype=torch.complex64, requires_grad=True)
    assert kinds(lambda: a * a) | kinds(lambda: nn.Linear(N, M, dtype=torch.complex64)(a)) == {"unknown"}


def test_under_autocast_the_cast_input_is_the_input() -> None:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            functional.linear(x, w)
            x @ wt
            nn.LayerNorm(N)(x.bfloat16())

    assert saved(run) == sorted([LINEAR, LINEAR, NORM, STATISTIC, STATISTIC])


# -- where numbers coincide -------------------------------------------------------------------------------------------


def test_a_frozen_weight_of_the_input_s_size_is_no_input() -> None:
    a, frozen = rand(N, N), nn.Parameter(torch.randn(N, N), requires_grad=False)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):  # saves a cast that nothing links to the weight
            functional.linear(a, frozen)
            a @ frozen

    assert kinds(run) == {"unknown"}


def test_a_cast_that_autocast_made_without_gradients_is_no_input() -> None:
    a, square = rand(N, N), weight(N, N)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                functional.linear(a, square)  # leaves an unlinked cast in autocast's cache
            functional.linear(a, square)

    assert saved(run).count(("linear_input", (N, N))) == 1  # the input; the cast is a weight, or unknown
    rule, unlinked = RULES[functional.linear], square.detach().bfloat16()
    assert rule(unlinked, (a, square), {}) is Saved.UNKNOWN
    assert rule(unlinked, (a.detach(), square), {}) is Saved.LINEAR_INPUT  # then no weight would be saved


def test_norm_of_single_elements_keeps_its_statistics() -> None:
    assert kinds(lambda: nn.LayerNorm(1)(rand(S, 1))) == {"norm_statistics"}
    assert kinds(lambda: functional.group_norm(rand(B, S), S)) == {"norm_statistics"}
    assert kinds(lambda: functional.layer_norm(rand(N), (N,), rand(N))) == {"norm_statistics"}  # input or weight?


def test_attention_whose_probabilities_are_as_many_as_its_queries() -> None:
    a = rand(B, HEADS, D, D)
    found = saved(lambda: functional.scaled_dot_product_attention(a, a, a, dropout_p=0.5))
    assert {kind for kind, _ in found} == {"attention_statistics"}  # the operator saved views of what it was given
    assert saved(lambda: functional.scaled_dot_product_attention(a, a, a)).count(("attention", (B, HEADS, D, D))) == 3


def test_padded_log_sum_exp_of_as_many_elements_as_queries() -> None:
    one = rand(1, 1, 1, 32)  # CUDA's memory-efficient kernel pads its log-sum-exp to 32 rows
    rule = RULES[functional.scaled_dot_product_attention]
    assert rule(torch.empty(1, 1, 32), (one, one, one), {}) is Saved.ATTENTION_STATISTICS
    assert rule(one, (one, one, one), {}) is Saved.ATTENTION


def test_attention_mask_of_as_many_elements_as_its_queries() -> None:
    a = rand(1, 1, 4, 6)
    mask = torch.zeros(4, 6)
    keys = rand(1, 1, 6, 6)
    found = saved(lambda: functional.scaled_dot_product_attention(a, keys, keys, attn_mask=mask))
    assert ("attention_statistics", (4, 6)) in found
    assert [shape for kind, shape in found if kind == "attention"] == [(1, 1, 4, 6), (1, 1, 6, 6), (1, 1, 6, 6)]


# -- the whole --------------------------------------------------------------------------------------------------------


def test_every_name_of_the_table_exists_and_is_seen() -> None:
    seen: list[Any] = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for function, _ in CASES.values():
        with Spy():
            function()
    assert len(RULES) > 75
    known = {RULES[func] for func in seen if func in RULES}
    assert known == set(RULES.values())  # each rule is met by a real operator above


# Sizes of blocks: no two of B, S, width, feed-forward and head are equal or multiples that coincide.
BATCH, SEQUENCE, WIDTH, INNER = 2, 24, 32, 80
HIDDEN, GATE = (BATCH, SEQUENCE, WIDTH), (BATCH, SEQUENCE, INNER)
ROWS, INNER_ROWS = (BATCH * SEQUENCE, WIDTH), (BATCH * SEQUENCE, INNER)
MEAN = (BATCH, SEQUENCE, 1)
HEAD = (BATCH, 4, SEQUENCE, 8)


def _llama(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Callable[[], Any]]:
    model = llama(inner=INNER, layers=1).to(dtype).model
    hidden = torch.randn(HIDDEN, dtype=dtype, requires_grad=True)
    turns = model.rotary_emb(hidden, torch.arange(SEQUENCE)[None])
    block = model.layers[0]
    return block, lambda: block(hidden, position_embeddings=turns, attention_mask=None)


def _gpt2() -> tuple[nn.Module, Callable[[], Any]]:
    sizes = {"width": WIDTH, "layers": 1, "heads": 4, "positions": 64}
    block = transformer("GPT2LMHeadModel", **sizes, attn_pdrop=0.0).transformer.h[0]
    return block, lambda: block(rand(*HIDDEN))


BLOCKS: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Any]]], dict[tuple[str, tuple[int, ...]], int]]] = {
    "llama": (
        _llama,
        {
            ("norm_input", HIDDEN): 6,  # of each of two norms: the input twice, and the normalised input
            ("norm_statistics", MEAN): 4,
            ("linear_input", ROWS): 6,  # q, k, v, o, gate, up
            ("linear_input", INNER_ROWS): 1,  # down
            ("unknown", (1, 1, SEQUENCE, 8)): 4,  # cosines and sines
            ("attention", HEAD): 2,  # q and the output
            ("attention", (BATCH, 2, SEQUENCE, 8)): 2,  # k and v
            ("attention_statistics", HEAD[:3]): 1,
            ("activation_input", GATE): 1,
            ("product_factor", GATE): 2,
        },
    ),
    "gpt2": (
        _gpt2,
        {
            ("norm_input", HIDDEN): 2,
            ("norm_statistics", MEAN): 4,
            ("linear_input", ROWS): 3,
            ("linear_input", (BATCH * SEQUENCE, 4 * WIDTH)): 1,
            ("attention", HEAD): 4,
            ("attention_statistics", HEAD[:3]): 1,
            ("mask", HIDDEN): 2,
            ("product_factor", (BATCH, SEQUENCE, 4 * WIDTH)): 2,  # its GELU is written in Python:
            ("unknown", (BATCH, SEQUENCE, 4 * WIDTH)): 2,  # the cube's argument and a tanh's result
        },
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers(name: str) -> None:
    make, expected = BLOCKS[name]
    block, run = make()
    mode = SavedBy()
    remove = mode.norms(block)
    found = Counter(saved(run, mode))
    remove()
    assert found == expected
