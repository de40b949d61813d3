"""Notes of who saves a tensor: how long they hold, in which thread, in backward, in norms, in compiled code."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from compact import Saved
from support.classes import FACTOR, LINEAR, NORM, STATISTIC, B, Found, M, N, S, Twice, X, kinds, rand, saved, weight
from support.models import Made
from tba import offload_context
from tba._compress.calls import SavedBy, kind_of

x, wt = rand(*X), weight(N, M)

# -- how long a note holds --------------------------------------------------------------------------------------------


def test_nothing_is_known_without_the_mode_or_outside_of_it() -> None:
    found: set[Saved] = set()

    def pack(tensor: Tensor) -> Tensor:
        found.add(kind_of(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.silu(x)
        with SavedBy():
            pass
        functional.silu(x)
    assert found == {Saved.UNKNOWN}
    assert kind_of(x) is Saved.UNKNOWN


def test_an_exception_ends_the_note() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            functional.linear(x, wt)
        with pytest.raises(KeyError, match="from pack"):
            fail()
        Twice.apply(x)

    def fail() -> None:
        def pack(tensor: Tensor) -> Tensor:
            raise KeyError("from pack")

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            functional.silu(x)

    assert saved(run) == [LINEAR, ("unknown", X)]  # linear saves its input before it looks at the shapes


def test_functions_within_a_pack_hook_do_not_disturb_the_note() -> None:
    found: list[Saved] = []

    def pack(tensor: Tensor) -> Tensor:
        with SavedBy(), torch.no_grad():
            tensor.sin()  # no rule
            functional.softmax(tensor, -1)  # another
        found.append(kind_of(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), SavedBy():
        functional.silu(x)
        Twice.apply(x)
    assert found == [Saved.ACTIVATION_INPUT, Saved.UNKNOWN]


def test_arguments_are_not_held_after_the_call() -> None:
    with SavedBy():
        a = torch.randn(N)
        functional.silu(a)
        reference = weakref.ref(a)
        del a
        assert reference() is None


def test_threads_do_not_see_each_other_s_notes() -> None:
    inside, done = threading.Event(), threading.Event()
    found: dict[str, Saved] = {}

    def pack(tensor: Tensor) -> Tensor:
        inside.set()
        assert done.wait(60)
        found["first"] = kind_of(tensor)
        return tensor

    def first() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), SavedBy():
            functional.silu(x)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    found["no function"] = kind_of(x)
    assert saved(lambda: Twice.apply(x)) == [("unknown", X)]
    assert saved(lambda: x.softmax(-1)) == [("probabilities", X)]
    done.set()
    thread.join()
    assert found == {"first": Saved.ACTIVATION_INPUT, "no function": Saved.UNKNOWN}


def test_other_modes_act_as_they_did() -> None:
    with torch.device("meta"), SavedBy():
        assert torch.ones(2).is_meta
    with SavedBy(), torch.device("meta"):
        assert torch.ones(2).is_meta
        assert saved(lambda: functional.silu(x)) == [("activation_input", X)]


# -- backward ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("through", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_what_a_backward_saves_is_unknown(through: str) -> None:
    a, layer = rand(S, N), nn.Linear(N, N)
    loss = functional.silu(layer(a)).square().sum()

    def run() -> None:
        if through == "Tensor.backward":
            loss.backward(create_graph=True, inputs=[a])
        elif through == "autograd.backward":
            torch.autograd.backward(loss, create_graph=True, inputs=[a])
        else:
            torch.autograd.grad(loss, a, create_graph=True)

    found = saved(run)
    assert len(found) > 3
    assert {kind for kind, _ in found} == {"unknown"}
    a.grad = None  # a cycle with its graph


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_code_run_again_is_unknown_or_right(reentrant: bool) -> None:
    a, layer = rand(S, N), nn.Linear(N, N)

    def run() -> None:
        out = checkpoint(lambda b: functional.silu(layer(b)), a, use_reentrant=reentrant)
        out.sum().backward()

    plain = torch.autograd.grad(functional.silu(layer(a)).sum(), a)[0]
    found = saved(run)
    assert {kind for kind, shape in found if shape == (S, N)} <= {"unknown", "linear_input", "activation_input"}
    assert torch.equal(a.grad, plain)


# -- norms written in Python ------------------------------------------------------------------------------------------


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(N)
        self.raises = False

    def forward(self, a: Tensor) -> Tensor:
        out = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True))
        if self.raises:
            raise ValueError("from forward")
        return self.weight * out


def _pre_norm() -> Any:
    """A norm and what follows it."""
    return Made(lambda self, a: self.norm(a).tanh().exp(), norm=OwnRMSNorm(), inner=nn.Identity())


class LogNormal(OwnRMSNorm):
    pass


SCOPED: Found = [NORM, NORM, NORM, STATISTIC, STATISTIC]
PLAIN: Found = [FACTOR, FACTOR, ("unknown", X), ("unknown", (B, S, 1)), ("unknown", (B, S, 1))]


def test_norm_module_is_known_by_name_until_removed() -> None:
    module, mode = OwnRMSNorm(), SavedBy()
    remove = mode.norms(module)
    assert saved(lambda: module(x), mode) == sorted(SCOPED)
    assert saved(lambda: x.pow(2), mode) == [("unknown", X)]  # after it
    remove()
    assert saved(lambda: module(x), mode) == sorted(PLAIN)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_the_model_are_not_noted(how: Callable[[nn.Module], nn.Module]) -> None:
    module, mode = nn.Sequential(OwnRMSNorm()), SavedBy()
    remove = mode.norms(module)
    twin = how(module)
    assert saved(lambda: twin(x), mode) == sorted(PLAIN)
    assert saved(lambda: module(x), mode) == sorted(SCOPED)
    remove()


class WithinRMSNorm(OwnRMSNorm):
    def __init__(self, within: Callable[[], None]) -> None:
        super().__init__()
        self.within = within

    def forward(self, a: Tensor) -> Tensor:
        self.within()
        return super().forward(a)


def test_a_mode_that_ends_within_a_norm_leaves_nothing() -> None:
    """As the garbage collector ends one that was dropped, whenever it runs."""
    ends: list[Callable[[], None]] = []
    module, mode, dropped = WithinRMSNorm(lambda: ends.pop()()), SavedBy(), SavedBy()
    remove = mode.norms(module)
    ends.append(dropped.norms(module))
    assert saved(lambda: module(x), mode) == sorted(SCOPED)
    assert not ends
    assert saved(lambda: x.pow(2), mode) == [("unknown", X)]
    remove()


@pytest.mark.filterwarnings("ignore:tier='cpu' moved nothing")
def test_an_interrupt_within_a_norm_leaves_nothing_for_the_next_context() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    module = nn.Sequential(WithinRMSNorm(interrupt))
    with offload_context(module, tier="cpu", compress="balanced"), pytest.raises(KeyboardInterrupt):
        module(x)
    with offload_context(module, tier="cpu", compress="balanced"):
        assert saved(lambda: x.pow(2), SavedBy()) == [("unknown", X)]


@pytest.mark.parametrize(
    ("name", "is_norm"),
    [
        *((name, True) for name in ("LlamaRMSNorm", "T5LayerNorm", "LayerNormalization", "rmsnorm")),
        *((name, False) for name in ("LogNormal", "Normalize", "Attention")),
    ],
)
def test_names_of_norms(name: str, is_norm: bool) -> None:
    module, mode = type(name, (OwnRMSNorm,), {})(), SavedBy()
    remove = mode.norms(module)
    assert saved(lambda: module(x), mode) == sorted(SCOPED if is_norm else PLAIN)
    remove()


def test_other_modules_are_not_taken_for_norms() -> None:
    whole, other, mode = _pre_norm(), LogNormal(), SavedBy()
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(N, M))
    removers = [mode.norms(module) for module in (whole, other, parametrized)]
    assert saved(lambda: whole(x), mode) == sorted([*SCOPED, ("unknown", X), ("unknown", X)])
    assert saved(lambda: other(x), mode) == sorted(PLAIN)
    assert kinds(lambda: parametrized(x), mode) <= {"linear_input", "unknown"}
    for remove in removers:
        remove()


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.parametrize("breaks", [False, True])
def test_compiled_code_is_the_same_and_compiled_once(breaks: bool) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def forward(self: Any, a: Tensor, breaks: bool = False) -> Tensor:
        a = functional.silu(self.up(self.norm(a)))
        if breaks:
            torch._dynamo.graph_break()
        return self.down(a)  # type: ignore[no-any-return]

    net = Made(forward, norm=OwnRMSNorm(), up=nn.Linear(N, M), down=nn.Linear(M, N))
    mode = SavedBy(linear=lambda *_: pytest.fail("asked within compiled code"))
    expected = net(x, breaks)
    grads = torch.autograd.grad(expected.sum(), list(net.parameters()))
    compiled = torch.compile(net, backend=backend)
    remove = mode.norms(net)
    for _ in range(4):

        def run() -> None:
            out = compiled(x, breaks)
            assert torch.equal(out, expected)
            made = torch.autograd.grad(out.sum(), list(net.parameters()))
            assert all(torch.equal(one, two) for one, two in zip(made, grads, strict=True))

        assert kinds(run, mode) == {"unknown"}
        assert len(graphs) == 1 + breaks
    remove()
    torch._dynamo.reset()
