"""CompActAdamW: Adam whose gradients and moments live in the small space of each compact layer (arXiv 2410.15352).

Step t of a compact weight W, [out, n], with the P, [n, r], of its forward (section 3, transposed as torch's weights
are):

    G = d^T x P                              [out, r], accumulated by backward
    M = beta1 M + (1 - beta1) G              V = beta2 V + (1 - beta2) G * G
    N = (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)
    W = W - lr * weight_decay * W - lr * alpha * N P^T
    every T steps P is redrawn

All other parameters get AdamW by torch's own function, equal to the last bit.

In the paper M and V stay unchanged at a refresh, although they belong to another basis. `at_refresh` chooses:

"keep"    as in the paper
"carry"   change them to the new basis by least squares: `moments.carry`
"reset"   restart both at zero, bias correction included

Gradients in the small space are not in `weight.grad`. Clip with `compact.clip_grad_norm_` instead of torch's. Clear
with the optimizer's `zero_grad` (a step clears them too, so `model.zero_grad()` after it suffices). Under
DistributedDataParallel, which `convert` tells to leave those weights alone, call `reduce_gradients` before `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from .._errors import CheckpointError
from .._projection.projection import KINDS
from .._projection.subspace import Subspace, subspace_of, subspaces_of
from .moments import advance, carry

AtRefresh = Literal["keep", "carry", "reset"]


class CompActAdamW(Optimizer):
    """Adam in the small space for compact weights, AdamW for all others.

    `convert` sets a layer's rank, alpha and period T. State of a compact weight: `exp_avg` and `exp_avg_sq`, [out, r],
    in the weight's dtype; `step`; and their projection, so a run resumes to the last bit even if `convert` is called
    with another seed.

    Args:
        params: parameters or groups of them, as for any optimizer.
        lr: learning rate (the paper: 0.01 in pretraining with alpha 0.25).
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled (the paper: none).
        at_refresh: "keep", "carry" or "reset"; see the top of this module.

    Raises:
        ValueError: a number out of range, or an unknown `at_refresh`.
    """

    # Makes GradScaler pass its scale, for `step` to refuse: `unscale_` sees only `.grad`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        at_refresh: AtRefresh = "keep",
    ) -> None:
        for name, value, fine in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not fine:
                raise ValueError(f"{name} is {value}: it must not be negative" + (", and below 1" * (name == "betas")))
        if at_refresh not in get_args(AtRefresh):
            raise ValueError(f"at_refresh {at_refresh!r} is not known: choose one of {get_args(AtRefresh)}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "at_refresh": at_refresh}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, which also clears gradients in the small space.

        Raises:
            RuntimeError: a compact weight also has a full gradient (it is used outside its layer); or a GradScaler.
        """
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "CompActAdamW was stepped by a GradScaler, which cannot unscale gradients in the small space: train in "
                "bfloat16 or float32, which need no scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            plain = []
            for parameter in group["params"]:
                subspace = subspace_of(parameter)
                if subspace is None:
                    plain.append(parameter)
                elif parameter.grad is not None:
                    raise RuntimeError(
                        f"the weight of compact layer {subspace.name!r} has a full gradient of shape "
                        f"{list(parameter.grad.shape)} as well as one of rank {subspace.rank}: it is used outside its "
                        "layer; leave that layer out with convert(..., skip=...)"
                    )
                elif subspace.grad is not None:
                    self._small_step(parameter, subspace, group)
            self._plain_step([p for p in plain if p.grad is not None], group)
        return loss

    def _small_step(self, parameter: Tensor, subspace: Subspace, group: dict[str, Any]) -> None:
        gradient, state = subspace.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
            # `load_state_dict` does not cast plain numbers.
            state["base_key"], state["refreshes"] = subspace.base_key, subspace.refreshes
            state["kind"] = KINDS.index(subspace.kind)
        state["step"] += 1
        steps = int(state["step"].item())
        update = advance(state["exp_avg"], state["exp_avg_sq"], gradient, steps, group["betas"], group["eps"])
        lr = float(group["lr"])
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        step = subspace.projection().back(update)
        parameter.add_(step.t() if subspace.transposed else step, alpha=-lr * subspace.alpha)
        subspace.grad = None
        if subspace.period is not None and steps % subspace.period == 0:
            self._refresh(subspace, state, group["at_refresh"])

    def _refresh(self, subspace: Subspace, state: dict[str, Any], at_refresh: AtRefresh) -> None:
        old = subspace.projection()
        subspace.refresh()
        state["refreshes"] = subspace.refreshes
        if at_refresh == "carry":
            carry(state["exp_avg"], state["exp_avg_sq"], old, subspace.projection())
        elif at_refresh == "reset":
            for name in ("step", "exp_avg", "exp_avg_sq"):
                state[name].zero_()

    def _plain_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. Those in the small space are dropped, never filled with zeros."""
        super().zero_grad(set_to_none)
        for subspace in subspaces_of(self._parameters()):
            subspace.grad = None

    @torch.no_grad()
    def reduce_gradients(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Average the small gradients over ranks: out x r numbers per layer, one all-reduce per dtype and device.

        Call it on every rank, after backward and before `step`. Ranks must have converted alike (same rank, kind and
        seed, hence the same projections). A layer that only some ranks used counts as zero on the others; a layer that
        no rank used stays without a gradient. DistributedDataParallel reduces the gradients of other parameters.
        """
        buckets: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Subspace]]] = {}
        for parameter in self._parameters():
            subspace = subspace_of(parameter)
            if subspace is not None:
                buckets.setdefault((parameter.dtype, parameter.device), []).append((parameter, subspace))
        world = dist.get_world_size(process_group)
        for members in buckets.values():
            # All gradients, then one number per layer: whether this rank has a gradient.
            shapes = [(w.shape[s.transposed], s.rank) for w, s in members]
            parts = [
                w.new_zeros(shape) if s.grad is None else s.grad for (w, s), shape in zip(members, shapes, strict=True)
            ]
            there = members[0][0].new_tensor([s.grad is not None for _, s in members])
            flat = torch.cat([*(part.reshape(-1) for part in parts), there])
            dist.all_reduce(flat, group=process_group)
            sums = flat[: -len(members)].div_(world).split([out * rank for out, rank in shapes])
            used = flat[-len(members) :].tolist()
            for (_, subspace), shape, total, ranks in zip(members, shapes, sums, used, strict=True):
                subspace.grad = total.view(shape) if ranks else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, including the projections of compact layers. Drops their gradients.

        Raises:
            CheckpointError: a layer of another rank, size or kind, or compact on one side only.
        """
        parameters = list(self._parameters())
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        if len(indices) == len(parameters):  # otherwise torch reports the mismatch
            for position, (parameter, index) in enumerate(zip(parameters, indices, strict=True)):
                _check_state(position, parameter, state_dict["state"].get(index, {}))
        super().load_state_dict(state_dict)
        for parameter in parameters:
            subspace = subspace_of(parameter)
            if subspace is not None:
                state = self.state.get(parameter, {})
                subspace.base_key = state.get("base_key", subspace.base_key)
                subspace.refreshes = state.get("refreshes", 0)
                subspace.grad = None

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, including those in the small space.

    The mean of a small gradient's squared 2-norm is that of the full gradient, so one bound serves both. Arguments and
    errors are torch's.

    Returns:
        The norm of all gradients before clipping.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients += [subspace.grad for subspace in subspaces_of(parameters) if subspace.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return total


def _check_state(position: int, parameter: Tensor, state: dict[str, Any]) -> None:
    """Raise CheckpointError if a saved state does not fit the parameter at this position."""
    subspace = subspace_of(parameter)
    if not state or (subspace is None and "refreshes" not in state):
        return
    if subspace is None:
        raise CheckpointError(
            f"parameter {position} of shape {list(parameter.shape)} is plain, but was saved from a compact layer of "
            f"rank {state['exp_avg'].shape[1]}: convert the model as it was before loading"
        )
    found, wanted = list(state["exp_avg"].shape), [parameter.shape[subspace.transposed], subspace.rank]
    if "refreshes" not in state:
        raise CheckpointError(
            f"layer {subspace.name!r} is compact with rank {subspace.rank}, but was saved from a plain one with "
            f"moments of shape {found}: load before converting, or begin with a new optimizer"
        )
    if found != wanted:
        raise CheckpointError(
            f"layer {subspace.name!r} has rank {subspace.rank} and moments of shape {wanted}, but was saved with rank "
            f"{found[1]} and moments of shape {found}: convert with rank={found[1]}"
        )
    kind = KINDS[state["kind"]]
    if kind != subspace.kind:
        raise CheckpointError(
            f"layer {subspace.name!r} has a {subspace.kind} projection, but was saved with a {kind} one: convert with "
            f"kind={kind!r}"
        )
