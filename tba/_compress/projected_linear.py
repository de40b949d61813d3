"""ProjectedLinear: a replacement for `linear` that saves a projection or sample of the input, in any model.

`SavedBy` calls it instead of `torch.nn.functional.linear`. It runs `compact.compact_linear`, so autograd saves z = x P,
[..., r], instead of x [..., n]. The output, the input gradient and the bias gradient are bit for bit those of the plain
call. The weight gradient is full-size and its mean is the plain one, so any optimizer takes it. CompAct, arXiv
2410.15352, section 3 (its optimizer in the small space needs `compact.convert`). With `Sampled`, rows of x take the
place of z, and their draw that of P.

Guarantees:

1. P depends only on (seed, layer, step); a new P in each step averages best. A layer is identified by its parameter's
   name in the model, or else by the order in which parameters were first used.
2. Layers that read one tensor, unchanged in between, share one P (that of the first layer) and one z.
3. These calls are left alone: frozen weights and weights that are not parameters, integers and complex numbers, a rank
   equal to the width, `torch.func` transforms, and checkpointed regions. The latter keep nothing until backward, and
   must save equal tensors when they rerun, outside any mode.
4. Any thread may call. One lock guards the tables; products are computed without it. Inputs and parameters are held
   weakly: `WeakIdKeyDictionary` drops their entries when they die, takes no lock, and never confuses a new tensor with
   a dead one that had its id.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from compact import Projected, Sampled, SharedInput, compact_linear, key

from .._errors import ConfigError
from .._torch import private
from .classes import is_float


class ProjectedLinear:
    """Replacement for `linear(x, weight, bias)`.

    Args:
        projected: rank (a number of columns, or a share of each width) and kind of projection; or a sample's rank.
        seed: seed of the run. Equal seeds and layers give equal projections on every rank and device.
        model: names the layers, and is checked before anything runs. Only its parameters are held, weakly.

    Raises:
        ConfigError: a model without a linear layer.
        RankError: a rank above a layer's width, naming the layer; without a model a call raises it.
    """

    def __init__(self, projected: Projected | Sampled, *, seed: int = 0, model: nn.Module | None = None) -> None:
        self._projected = projected
        self._how: dict[str, Any] = (
            {"kind": projected.kind} if isinstance(projected, Projected) else {"method": "wta-crs"}
        )
        self._seed = seed
        self._steps = 0
        self._lock = threading.Lock()
        self._names = WeakIdKeyDictionary()  # parameter -> name of its layer
        self._met = 0
        self._inputs = WeakIdKeyDictionary()  # tensor -> _Input
        if model is not None:
            self._learn(model)

    def step(self) -> None:
        """End a training step: later calls get new projections. Existing graphs keep theirs."""
        with self._lock:
            self._steps += 1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Map x [..., n] with weight [out, n] and bias [out] or None to [..., out]; None if the call is left alone.

        Raises:
            RankError: a rank above n, naming the layer.
        """
        parameter = _trained(weight)
        if parameter is None or not _plain(x, weight, bias) or private.transforming() or _in_checkpoint():
            return None
        width = weight.shape[1]
        with self._lock:
            rank = self._projected.rank_of(width, f"layer {self._name(parameter)!r}")
            if rank == width:
                return None
            source = self._source(x, parameter)
        return compact_linear(x, weight, bias, rank=rank, key=source.key, shared=source.shared, **self._how)

    # -- with the lock held --------------------------------------------------------------------------------------

    def _learn(self, model: nn.Module) -> None:
        layers = [(name, module) for name, module in model.named_modules() if _is_linear(module)]
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} has no linear layer, so there is nothing whose input could be projected: "
                "choose another preset"
            )
        for name, module in layers:
            weight: Any = module.weight
            if weight.requires_grad:
                width = weight.shape[1 if isinstance(module, nn.Linear) else 0]
                self._projected.rank_of(width, f"layer {name!r}")
        for name, parameter in model.named_parameters():
            self._names[parameter] = name.removesuffix(".weight")

    def _name(self, parameter: Tensor) -> str:
        name: str | None = self._names.get(parameter)
        if name is None:
            name = self._names[parameter] = f"#{self._met}"
            self._met += 1
        return name

    def _source(self, x: Tensor, parameter: Tensor) -> _Input:
        """The projection of an input: that of the layer that read it first, if nothing has changed since."""
        source: _Input | None = self._inputs.get(x)
        if source is None or (source.version, source.step) != (x._version, self._steps):
            number = key(self._seed, self._name(parameter), self._steps)
            source = self._inputs[x] = _Input(x._version, self._steps, number, SharedInput())
        return source


class _Input(NamedTuple):
    """An input of linear layers: its version, the step, the key of its projection, and the cache of its z."""

    version: int
    step: int
    key: int
    shared: SharedInput


def _trained(weight: Any) -> Tensor | None:
    """The parameter that a weight [out, n] is, or transposes; None if it is neither or needs no gradient."""
    parameter = weight if type(weight) is nn.Parameter else getattr(weight, "_base", None)
    if type(parameter) is not nn.Parameter or not parameter.requires_grad or weight.numel() != parameter.numel():
        return None
    return parameter


def _plain(x: Any, weight: Tensor, bias: Any) -> bool:
    """Whether the arguments are plain and fit each other; if not, torch raises its own errors."""
    return (
        type(x) is Tensor
        and is_float(x)
        and is_float(weight)
        and not x.is_inference()
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and (bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1]))
    )


def _in_checkpoint() -> bool:
    hooks = private.top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return False
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
