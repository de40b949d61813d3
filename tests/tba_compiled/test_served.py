"""An Offloader serves the whole model that its settings allow it to, and dynamo asks it as that model is called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tba import OffloadConfig
from tba._compiled.served import Served
from tba._stats import Counters
from tba._torch.dynamo import _Asking, compile_by


class Parts(nn.Module):
    """Four layers; a model with a head has one parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


def served(model: nn.Module | None, **settings: Any) -> Served:
    return Served(OffloadConfig(**{"tier": "nvme"} | settings), lambda: model, threading.RLock(), Counters())


def test_the_model_and_what_holds_nearly_all_of_it_is_whole() -> None:
    model = Parts()
    headed = nn.Sequential(model, nn.Linear(2, 2, bias=False))
    serving = served(headed)
    whole = [headed, nn.Sequential(headed), model]
    assert [serving.serves(each) for each in (*whole, model.layers[0], model.layers[:2])] == [True] * 3 + [False] * 2
    assert serving.backend() is serving.backend() is not None
    serving.close()
    assert not serving.serves(headed)
    assert not served(None).serves(model)
    assert not served(model.to("meta")).serves(model)  # any device but a CPU


@pytest.mark.parametrize(
    "settings",
    [{"tier": "keep"}, {"compress": "exact"}, {"tier": "auto", "blocks": "Linear"}, {"tier": "auto", "policy": "tba"}],
    ids=lambda settings: ",".join(settings),
)
def test_settings_without_effect_in_a_graph_leave_a_model_to_the_hooks(settings: dict[str, Any]) -> None:
    model = Parts()
    assert not served(model, **settings).serves(model)


def test_where_free_memory_decides_a_model_keeps_its_code_until_it_does_not_fit() -> None:
    counters = Counters()
    serving = Served(OffloadConfig(), lambda: None, threading.RLock(), counters)
    assert serving.backend() is None
    counters.offloaded_bytes = 1
    assert serving.backend() is not None
    serving.close()


class Backend:
    def __call__(self, model: Any, inputs: Any, *, options: dict[str, Any]) -> Any:
        raise AssertionError("nothing is compiled here")


def _asking(found: Callable[[nn.Module], Any]) -> tuple[Any, Callable[..., Any]]:
    """A stand-in, and what calls it as dynamo's wrapper of `fn` does."""
    frames = sys.modules["torch._dynamo.eval_frame"]
    own = frames._callback_from_stance
    asking = _Asking(frames, own if not isinstance(own, _Asking) else own._own, found)

    def call(fn: Any, callback: Any) -> Any:
        return asking(callback)

    return frames, call


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_dynamo_asks_for_a_module_by_each_of_its_forms_and_keeps_the_answer() -> None:
    model, backend = Parts(), Backend()
    callback = torch.compile(model).dynamo_ctx.callback
    seen: list[nn.Module] = []
    answers: list[Any] = [backend]
    frames, call = _asking(lambda module: seen.append(module) or answers[0])
    before = frames.set_eval_frame_isolate_recompiles_id(-1)
    try:
        other = call(model.__call__, callback)
        region = frames.set_eval_frame_isolate_recompiles_id(-1)
        assert region >= 0
        assert call(frames.external_utils.wrap_inline(model), callback) is other is not callback
        assert frames.set_eval_frame_isolate_recompiles_id(-1) == region
        assert seen == [model, model]
        assert call(lambda: None, callback) is callback  # a function of no module
        answers[0] = None
        assert call(model.__call__, callback) is callback
        answers[0] = Backend()
        assert call(model.__call__, callback) is not other
    finally:
        frames.set_eval_frame_isolate_recompiles_id(before)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", [{"backend": "eager"}, {"mode": "reduce-overhead"}, {"stance": "force_eager"}], ids=str)
def test_what_a_program_has_chosen_itself_is_as_ever(how: dict[str, str]) -> None:
    how = dict(how)
    stance = torch.compiler.set_stance(how.pop("stance", "default"))
    model = Parts()
    callback = torch.compile(model, **how).dynamo_ctx.callback
    _, call = _asking(lambda module: Backend())
    with stance:
        assert call(model.__call__, callback) is (None if not how else callback)


def test_a_torch_of_another_form_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.eval_frame as frames

    monkeypatch.delattr(frames, "_callback_from_stance")
    compile_by(lambda module: None)
    assert not hasattr(frames, "_callback_from_stance")
    model, backend = Parts(), Backend()
    callback = torch.compile(model).dynamo_ctx.callback
    monkeypatch.setattr(frames, "_callback_from_stance", lambda callback: callback, raising=False)
    _, call = _asking(lambda module: backend)
    monkeypatch.delattr(frames, "_next_isolate_recompiles_id")
    assert call(model.__call__, callback) is callback
