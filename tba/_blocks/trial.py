"""Trial: runs a block's forward a second time when backward reaches it, and tells whether that gives equal bits.

A block that recomputes must give in backward what it gave in forward. Nobody can tell from outside whether it does: it
may read what a hook has left somewhere, write to a cache, update buffers or route at random. So each block is tried
once in a step that saves everything: its inputs and outputs are kept as autograd's own saved tensors are, and compared
with those of a second run, at the point where a recomputation would run. The step itself does not depend on it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from io_backends import interrupts

from .._torch.hook_stack import steps_aside
from .._torch.private import innermost
from .communication import Communication, gathers
from .recompute import again, has_switch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Attributes:
        seconds: that the second run took until it had saved the last tensor, which is where PyTorch ends a
            recomputation; None if the block must not recompute.
        why_not: why, then.
    """

    seconds: float | None
    why_not: str = ""


class Trial:
    """A call of a block's forward, to be tried again.

    Args:
        keep, give: packs a tensor as autograd's saved tensors are, and gives it back.
        apart: makes a context for what is none of the step's own.
        report: gets the verdict.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        keep: Callable[[Tensor], Any],
        give: Callable[[Any], Tensor],
        apart: Callable[[], AbstractContextManager[None]],
        report: Callable[[Verdict], None],
    ) -> None:
        self._module = module
        self._forward = forward
        self._keep = keep
        self._give = give
        self._apart = apart
        self._report: Callable[[Verdict], None] | None = report

    @interrupts.lets_through
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward for the first time, and have it tried when backward comes to what it returns."""
        state = _State()
        buffers = _versions(self._module.buffers())
        others = [*self._module.parameters(), *filter(_is_tensor, tree_leaves((args, kwargs)))]
        versions = _versions(others)
        saved: list[tuple[Any, ...]] = []
        drawn = _drawn()

        def note(tensor: Tensor) -> Any:
            saved.append(_shape(tensor))
            return self._keep(tensor)

        steps_aside(note)
        with torch.autograd.graph.saved_tensors_hooks(note, self._give), Communication() as communication:
            out = self._forward(*args, **kwargs)
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        made = (each for each in reversed(outputs) if each.requires_grad and not each.is_leaf and id(each) not in given)
        last = next(made, None)
        if last is None:
            self._tell("its output needs no gradient")
        elif communication.possible or gathers(self._module):
            self._tell("it communicates with other ranks, which may plan otherwise")
        elif any(tensor.layout is not torch.strided or tensor.is_nested for tensor in outputs):
            self._tell("it returns a sparse or nested tensor, which is not compared")
        elif (odd := self._odd(args, kwargs)) is not None:
            self._tell(f"it is given a {odd}, which may remember its calls")
        elif buffers != _versions(self._module.buffers()):
            self._tell("it changes its buffers")
        elif drawn != _drawn():
            self._tell("it draws random numbers from Python's or NumPy's generator, which nobody restores")
        elif versions != _versions(others):
            self._tell("it edits its weights or what it is given")
        else:
            leaves, form = tree_flatten((args, kwargs))
            with self._apart():
                inputs = [self._pack(leaf) for leaf in leaves]
                kept = [self._pack(tensor) for tensor in outputs]
            # After all hooks of the tensor: those of FSDP gather the weights that the second run needs.
            last.grad_fn.register_prehook(lambda _: self._try(inputs, form, kept, saved, state))  # type: ignore[union-attr]
        return out

    def _odd(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Name the type of an argument that a second call may find changed."""
        if has_switch(self._module):  # which takes care of caches
            return None
        leaves = tree_flatten((args, kwargs))[0]
        return next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))), None)

    def _pack(self, leaf: Any) -> tuple[bool, Any, bool]:
        if isinstance(leaf, Tensor):
            return True, self._keep(leaf), leaf.requires_grad
        return False, leaf, False

    def _unpack(self, packed: tuple[bool, Any, bool]) -> Any:
        is_tensor, value, requires_grad = packed
        return self._give(value).detach().requires_grad_(requires_grad) if is_tensor else value

    def _try(self, inputs: list[Any], form: Any, kept: list[Any], saved: list[Any], state: _State) -> None:
        if self._report is None:
            return  # a second backward through the graph
        with self._apart():
            self._run_again(inputs, form, kept, saved, state)

    def _run_again(self, inputs: list[Any], form: Any, kept: list[Any], saved: list[Any], state: _State) -> None:
        try:
            leaves = [self._unpack(packed) for packed in inputs]
            before = [self._unpack(packed) for packed in kept]
        except Exception:
            self._tell("what it was given or returned was edited, or could not be read back")
            return
        inputs.clear()
        kept.clear()
        buffers: list[tuple[Tensor, int, Tensor]] = []
        again_saved: list[tuple[Any, ...]] = []
        begun_s = saved_s = 0.0

        def note(tensor: Tensor) -> None:
            nonlocal saved_s
            saved_s = time.perf_counter()
            again_saved.append(_shape(tensor))

        try:
            buffers += [(buffer, buffer._version, buffer.clone()) for buffer in self._module.buffers()]
            args, kwargs = tree_unflatten(leaves, form)
            with state.restored(note), Communication() as communication:
                begun_s = saved_s = time.perf_counter()
                out = again(self._module, self._forward, args, kwargs)
            after = [leaf.detach() for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            equal = len(after) == len(before) and all(map(_equal, before, after))
        except Exception as error:
            self._tell(f"its second run raises {type(error).__name__}")
            return
        finally:
            changed = [(buffer, copy) for buffer, version, copy in buffers if buffer._version != version]
            for buffer, copy in changed:
                with torch.no_grad():
                    buffer.copy_(copy)
        if changed:
            self._tell("it changes its buffers")
        elif communication.possible:
            self._tell("its second run communicates with other ranks")
        elif saved != again_saved:
            self._tell("its second run saves other tensors")
        elif not equal:
            self._tell("its second run gives other values")
        else:
            self._tell("", saved_s - begun_s)

    def _tell(self, why_not: str, seconds: float | None = None) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(Verdict(seconds, why_not))


class _State:
    """The state of random generators and of autocast that a forward begins in."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        kinds = ("cpu", "cuda") if self._cuda else ("cpu",)
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self, note: Callable[[Tensor], None]) -> Iterator[None]:
        """Restore it for a region whose graph is never gone through: what it would save is noted and let go."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=range(len(self._cuda))))
            torch.set_rng_state(self._cpu)
            if self._cuda:
                torch.cuda.set_rng_state_all(self._cuda)
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            stack.enter_context(torch.enable_grad())
            steps_aside(note)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, _never))
            yield


def _drawn() -> tuple[Any, ...]:
    """Give the state of the generators that programs share and no recomputation restores."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *others = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *others


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, *tensor.shape


def _never(_: None) -> Tensor:
    raise AssertionError("backward through a trial")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; of DTensors the parts that this rank has, as it is alone with them."""
    parts, others = innermost(one), innermost(other)
    return one.shape == other.shape and len(parts) == len(others) and all(map(_equal_bits, parts, others))


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    one, other = (each.detach().resolve_conj().resolve_neg().contiguous().view(-1) for each in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
