"""Selective checkpointing whose chosen results are compressed and moved like any other saved tensor.

    import functools

    from tba.integrations.checkpoint import create_selective_checkpoint_contexts

    context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with offload_context(model, tier="nvme"):
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

torch's function of that name keeps what its policy chooses in a cache of its own, which no hook sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .._compress.calls import unclassed
from .._device.generators import generator_of, has_generator
from .._errors import edited_in_place
from .._torch.hook_stack import Pack, Unpack, innermost
from .._torch.private import Feature, compiles, has, in_place_is_seen, sizes

Policy = Callable[..., CheckpointPolicy | bool]
States = dict[torch.device, Tensor]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# In torch 2.11 a policy decides before the operator runs and sees no result.
_SHOWS_RESULT = "op_output" in signature(SelectiveCheckpointContext).parameters
_COLLECTIVES = "_c10d_functional"  # the namespace of operators that return before their result is ready
_STORED = frozenset(
    {
        *(CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE),
        *(CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD),
        True,
    }
)


def create_selective_checkpoint_contexts(policy: Policy | Sequence[OpOverload]) -> Contexts:
    """Return the two contexts for `context_fn=` of `torch.utils.checkpoint.checkpoint`.

    Inside an `offload_context` the results that the policy chooses go where saved tensors go; under a lossy preset they
    stay exact, because others are computed from them. Outside of one they stay in memory. A retained graph may be asked
    again. Views and in-place operators always rerun. Compiled code gets torch's own contexts: its saved tensors pass
    the hooks anyway.

    Args:
        policy: called as torch's is, with a `SelectiveCheckpointContext`, the operator and its arguments; returns a
            `CheckpointPolicy` or a bool (saving and offloading are the same here). Or a list of the operators to store.

    Raises:
        TypeError: anything else, such as `torch.ops.aten.mm` without its overload `.default`.
    """
    if compiles() or not has(Feature.CHECKPOINT):
        return checkpoint.create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return]
    if isinstance(policy, OpOverload | OpOverloadPacket) or not callable(policy):
        operators: list[Any] = list(policy) if isinstance(policy, Iterable) else [policy]
        if wrong := [each for each in operators if not isinstance(each, OpOverload)]:
            raise TypeError(
                "a policy function, or a list of operators such as [torch.ops.aten.mm.default], was expected; got "
                f"{wrong[0]!r} ({type(wrong[0]).__name__})"
            )
        policy = partial(_is_one_of, frozenset(operators))
    results = _Results(*(innermost() or (_keep, _give)))
    return _Store(policy, results), _Load(results)


class _Results:
    """Stored results of one checkpointed region, by operator in order; None if one reruns."""

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self.pack, self.unpack = pack, unpack
        self.of: dict[OpOverload, list[_Result | None]] = {}


class _Result:
    """A stored result, and the states of the default generators that the operator changed, before and after it."""

    __slots__ = ("after", "before", "packed")

    def __init__(self, packed: Any, before: States, after: States) -> None:
        self.packed = packed
        drew = [device for device, state in before.items() if not torch.equal(state, after[device])]
        self.before, self.after = ({device: states[device] for device in drew} for states in (before, after))


class _Store(TorchDispatchMode):
    """Runs each operator of the forward, and stores the results that the policy chooses."""

    def __init__(self, policy: Policy, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy, self._results = policy, results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled code inside: it reruns as a whole."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _always_runs(func):
            return func(*args, **kwargs)
        before = _states(_devices(args, kwargs)) if torch.Tag.nondeterministic_seeded in func.tags else {}
        out = func(*args, **kwargs)
        result = {"op_output": out} if _SHOWS_RESULT else {}
        chosen = self._policy(SelectiveCheckpointContext(is_recompute=False, **result), func, *args, **kwargs)
        if not isinstance(chosen, CheckpointPolicy | bool):
            raise TypeError(
                f"the policy of selective checkpointing returned {chosen!r}, not a CheckpointPolicy or a bool"
            )
        stored = None
        if chosen in _STORED:
            if func.namespace == _COLLECTIVES:  # it may still be running, and its result does not tell
                tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, out)
            with in_place_is_seen(), unclassed():
                stored = _Result(tree_map_only(Tensor, self._packed, out), before, _states(before))
        self._results.of.setdefault(func, []).append(stored)
        return out

    def _packed(self, tensor: Tensor) -> _Packed:
        packed = self._results.pack(tensor)
        if packed[0] is tensor:  # it is about to get its node, which would then hold itself
            packed = (tensor.detach(), packed[1])
        return _Packed(packed)


class _Packed:
    """What a pack hook returned; a leaf for `tree_map_only`, unlike a tuple."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Load(TorchDispatchMode):
    """Reruns the region in backward, with stored results instead of their operators."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._counts: dict[OpOverload, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _always_runs(func):
            return func(*args, **(kwargs or {}))
        count = self._counts.get(func, 0)
        self._counts[func] = count + 1
        results = self._results.of.get(func, [])
        if count >= len(results):
            raise RuntimeError(
                f"selective checkpointing: {func} ran {len(results)} times in forward and now runs once more in "
                "backward; the region depends on something that changed between the two"
            )
        if (result := results[count]) is None:
            return func(*args, **(kwargs or {}))
        for device, state in _states(result.before).items():
            if torch.equal(state, result.before[device]):
                generator_of(device).set_state(result.after[device])
        with in_place_is_seen():
            return tree_map_only(_Packed, self._loaded, result.packed)

    def _loaded(self, packed: _Packed) -> Tensor:
        return self._results.unpack(packed.value).detach()


def _always_runs(func: Any) -> bool:
    """Whether an operator's result is never stored: it shares memory with an argument, or is no operator's result."""
    if not isinstance(func, OpOverload) or func in checkpoint.SAC_IGNORED_OPS:
        return True
    return any(each.alias_info is not None for each in func._schema.returns)


def _is_one_of(operators: frozenset[OpOverload], _: Any, func: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return func in operators


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _give(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise edited_in_place(f"{tensor.type()} {list(sizes(tensor))}", tensor._version, version)
    return tensor


# An operator that draws random numbers and does not rerun leaves the generators where it would have left them.
def _states(devices: Iterable[torch.device]) -> States:
    return {device: generator_of(device).get_state() for device in devices}


def _devices(args: Any, kwargs: Any) -> list[torch.device]:
    """The devices whose default generators an operator with these arguments may draw from."""
    tensors = [each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    found = dict.fromkeys(tensors or [torch.device(kwargs.get("device") or "cpu")])
    return [device for device in found if has_generator(device)]
