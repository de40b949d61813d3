"""Backend: compiles graphs with PyTorch's own compiler, and has what they save for backward move by a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Any

from io_backends import Store, interrupts

from .._config import OffloadConfig
from .._errors import ConfigError
from .._memory import free_memory
from .._memory.limits import hold_budget_bytes
from .._stats import Counters, OffloadStats
from .._torch.user_frames import Notices, warn
from . import inductor
from .candidate import Candidate
from .carrier import Carrier
from .graph_plan import GraphPlan
from .operators import Item
from .order import arrange
from .placement import place
from .prices import prices_of
from .saved import Ends
from .split import Split

# What PyTorch's `activation_memory_budget` is tried at beside the program's own, which is 1 unless it was set. Just
# below 1 only what costs nothing is computed again, as pointwise operators fused with what reads them; then ever more.
_SHARES = (0.99, 0.6, 0.4, 0.2)


class CompileBackend:
    """Backend for `torch.compile`, made by `compile_backend`.

    Args:
        config: the settings.
        store: where bytes go, instead of the settings' store. The backend closes it.
        engine: the lock and the counters of an engine, which hooks bring what graphs do not move, and which counts it.

    Attributes:
        config: the settings.
    """

    def __init__(
        self, config: OffloadConfig, *, store: Store | None = None, engine: tuple[RLock, Counters] | None = None
    ) -> None:
        for name, given in (("compress", config.compress), ("blocks", config.blocks), ("policy", config.policy)):
            if given not in (None, "budget"):
                raise ConfigError(
                    f"compile_backend: {name}={given!r} has no effect inside a compiled graph; leave it unset"
                )
        self.config = config
        self._carrier = Carrier(config, store, engine)
        self._alone = engine is None
        self._notices = Notices()
        self._items: list[Item] = []
        self._plans: list[GraphPlan] = []

    @interrupts.lets_through  # compiling takes long
    def __call__(self, model: Any, inputs: Sequence[Any], *, mode: str | None = None, options: Any = None) -> Any:
        """Compile one graph: what `torch.compile` calls."""
        if missing := inductor.missing():
            self._notices.say(
                "missing",
                f"compile_backend: this torch lacks {', '.join(missing)}, so what compiled graphs save stays in memory",
            )
        patches = dict(options or {})
        if mode is not None and mode != "default":
            import torch._inductor

            patches = torch._inductor.list_mode_options(mode) | patches
        if patches.get("triton.cudagraphs"):
            raise ConfigError(
                "compile_backend: CUDA graphs replay fixed memory, which nothing can leave; compile without "
                "mode='reduce-overhead', or with mode='max-autotune-no-cudagraphs'"
            )
        compile_fx = inductor.take("compile_fx")
        if missing or self.config.tier == "keep":
            return compile_fx(model, inputs, config_patches=patches)
        settings = inductor.config()
        split = patches.get("custom_partitioner_fn", settings.custom_partitioner_fn)
        ordered = patches.get("_post_fusion_custom_pass", settings._post_fusion_custom_pass)
        patches |= {
            "custom_partitioner_fn": _partitioner()(self, split),
            "_post_fusion_custom_pass": _scheduler_pass()(ordered),
            "reorder_for_peak_memory": False,  # the pass does so, and then places the operators
            # Compiled code names items of this process.
            "fx_graph_cache": False,
            "fx_graph_remote_cache": False,
        }
        with inductor.config("_functorch").patch(enable_autograd_cache=False):
            compiled = compile_fx(model, inputs, config_patches=patches)
        with suppress(AttributeError):
            compiled.tba_keeps = self if self._alone else self._items  # its operators need the items
        return compiled

    @property
    def moves(self) -> bool:
        """Whether anything moves in a graph that it has compiled."""
        return bool(self._items)

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """What becomes of what each graph saves that it has compiled for training, in the order of compilation."""
        return tuple(self._plans)

    def partition(self, split: Callable[[], tuple[Any, Any]], ends: Ends) -> tuple[Any, Any]:
        """Split a graph into forward and backward, and place the operators that move what it saves.

        Args:
            split: PyTorch's partitioner.
            ends: of the forward graph.
        """
        budget_bytes = self._budget_bytes()
        chosen, whole_bytes = self._chosen(split, ends, budget_bytes)
        best, choice = chosen.split, chosen.choice
        moved = [best.saved[number] for number in choice.moved]
        moved_bytes = sum(each.nbytes for each in moved)
        self._plans.append(
            GraphPlan(
                budget_bytes=budget_bytes,
                whole_bytes=whole_bytes,
                saved_bytes=best.saved_bytes,
                moved_bytes=moved_bytes,
                peak_bytes=choice.peak_bytes,
                share=best.share,
            )
        )
        if (why := self._plans[-1].why_not_met()) is not None:
            warn(why)
        if moved:
            beside_bytes = best.saved_bytes - moved_bytes if self._alone else 0
            self._items += place(
                best.forward.graph, best.backward.graph, moved, self._carrier, choice.windows, beside_bytes
            )
            for module in (best.forward, best.backward):
                module.graph.lint()
                module.recompile()
        return best.forward, best.backward

    def _chosen(
        self,
        split: Callable[[], tuple[Any, Any]],
        ends: Ends,
        budget_bytes: int | None,
    ) -> tuple[Candidate, int]:
        """Find the way to split a graph that costs the step least within the budget; and what it saves without one."""
        settings, prices = inductor.config("_functorch"), prices_of(self.config)
        program = float(settings.activation_memory_budget)
        may_recompute = self.config.derive and budget_bytes is not None
        best: Candidate | None = None
        whole_bytes = 0
        for share in (program, *(each for each in _SHARES if each < program and may_recompute)):
            with settings.patch(activation_memory_budget=share):
                modules = split()
            found = Split.of(
                modules,
                share,
                ends,
                self.config.min_tensor_bytes,
                from_hosts=self.config.tier != "cpu",
            )
            candidate = Candidate.of(found, budget_bytes, self._carrier.mover.limits, prices)
            whole_bytes = whole_bytes or found.saved_bytes
            if best is None or candidate.rank < best.rank:
                best = candidate
            if found.communicates or (best.fits and candidate.computing_s >= best.step_s):
                break  # other ranks would have to choose alike; or those to come compute more
        assert best is not None
        return best, whole_bytes

    def _budget_bytes(self) -> int | None:
        """Bytes that a graph's saved tensors may hold; None where all moves that is worth it."""
        if self.config.tier != "auto":
            return None
        if self.config.memory_budget is not None:
            return int(self.config.memory_budget)
        return hold_budget_bytes(0, free_memory.free_bytes(), self._carrier.mover.limits.reserve_bytes)

    def stats(self) -> OffloadStats:
        """Take a snapshot of what has moved since the start."""
        return self._carrier.stats()

    def added_to(self, stats: OffloadStats) -> OffloadStats:
        """Add to the engine's statistics what graphs hold beside it."""
        return self._carrier.added_to(stats)

    def close(self) -> None:
        """End threads, free files and buffers. Idempotent. Graphs compiled by it go on, and nothing moves any more."""
        self._carrier.close()


def compile_backend(
    tier: str | None = None,
    *,
    memory_budget: int | str | None = None,
    config: OffloadConfig | None = None,
    **overrides: Any,
) -> CompileBackend:
    """Make a backend for `torch.compile` that moves what whole compiled models save for backward.

    `torch.compile(model, backend=tba.compile_backend(memory_budget="8GiB"))` compiles with PyTorch's own compiler, and
    has saved tensors leave by operators inside of the graphs. Gradients are bit-identical to the same graphs' without.

    Args:
        tier: as of `offload_context`.
        memory_budget: memory that what each graph saves may hold under tier "auto", such as "8GiB".
        config: settings to start from; `overrides` are single fields of `OffloadConfig`.

    Raises:
        ConfigError: a setting is unknown or malformed, or has no effect inside a compiled graph.
        StorageError: the storage path cannot be used.
    """
    given = {name: value for name, value in (("tier", tier), ("memory_budget", memory_budget)) if value is not None}
    given |= overrides
    return CompileBackend(config.model_copy(update=given) if config is not None else OffloadConfig(**given))


def _partitioner() -> Any:
    class Partitioner(inductor.take("CustomPartitionerFn")):  # type: ignore[misc]
        """Hands a graph to the backend, with the partitioner that the program has set, or PyTorch's own.

        The compiler keeps its settings, and so this, beyond the compiled code: it must not keep the backend.
        """

        def __init__(self, backend: CompileBackend, other: Any) -> None:
            self._backend = weakref.ref(backend)
            self._split = other or inductor.take("min_cut_rematerialization_partition")

        def __call__(self, module: Any, inputs: Any, **settings: Any) -> tuple[Any, Any]:
            split = partial(self._split, module, inputs, **settings)
            backend = self._backend()
            ends = Ends(settings["num_fwd_outputs"], settings.get("static_lifetime_input_indices"))
            return split() if backend is None else backend.partition(split, ends)

        def uuid(self) -> None:
            return None  # nothing is cached

        def __deepcopy__(self, memo: object) -> Any:
            return self  # the compiler copies its settings

    return Partitioner


def _scheduler_pass() -> Any:
    class Pass(inductor.take("CustomSchedulerPass")):  # type: ignore[misc]
        """Orders kernels as PyTorch does, after the pass that the program has set, and puts operators among them."""

        def __init__(self, other: Any) -> None:
            self._other = other

        def __call__(self, nodes: list[Any]) -> list[Any]:
            nodes = nodes if self._other is None else self._other(nodes)
            graph, ordered = inductor.take("V").graph, inductor.take("OrderedSet")
            scheduler = graph.scheduler
            nodes = inductor.take("reorder_for_peak_memory")(
                nodes,
                scheduler.name_to_buf,
                scheduler.name_to_fused_node,
                ordered(graph.graph_inputs.keys()),
                ordered(graph.get_output_names()),
            )
            return arrange(nodes)

        def uuid(self) -> None:
            return None

        def __deepcopy__(self, memo: object) -> Any:
            return self

    return Pass
