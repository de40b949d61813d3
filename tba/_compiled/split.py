"""Split: one way to split a traced graph into forward and backward, and what it saves and computes.

PyTorch's min-cut partition makes each: the smaller its `activation_memory_budget`, the more backward computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .choice import TOKEN_BYTES, Lifetimes
from .flops import flops_of
from .recomputed import recomputed_bytes
from .saved import Ends, Saved, find_saved

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")  # namespaces of operators


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to split a graph.

    Attributes:
        forward, backward: the modules.
        share: PyTorch's `activation_memory_budget` for it.
        saved: what can move, in the order it is made.
        kept_bytes: of the saved tensors that cannot, those that the graph was given among them.
        again: bytes of what backward computes again that are held at each node of the backward graph.
        forward_flops, backward_flops: floating-point operations of matrix products, convolutions and attention.
        communicates: ranks exchange data in forward.
    """

    forward: Any
    backward: Any
    share: float
    saved: Sequence[Saved]
    kept_bytes: int
    again: Sequence[int] = ()
    forward_flops: int
    backward_flops: int
    communicates: bool = False

    @staticmethod
    def of(
        modules: tuple[Any, Any],
        share: float,
        ends: Ends,
        least_bytes: int,
        *,
        from_hosts: bool,
    ) -> Split:
        """Look at a pair of modules.

        Args:
            least_bytes: smaller tensors stay.
            from_hosts: whether what is on a host moves.
        """
        forward, backward = modules
        found, kept_bytes = find_saved(forward.graph, backward.graph, ends)
        kept_bytes += sum(each.nbytes for each in found if each.nbytes < least_bytes)
        saved = [each for each in found if each.nbytes >= least_bytes]
        if not from_hosts:
            saved = [each for each in saved if each.root.meta["val"].device.type != "cpu"]
        return Split(
            forward=forward,
            backward=backward,
            share=share,
            saved=saved,
            kept_bytes=kept_bytes,
            again=recomputed_bytes(forward.graph, backward.graph),
            forward_flops=flops_of(forward.graph),
            backward_flops=flops_of(backward.graph),
            communicates=_communicates(forward),
        )

    @property
    def saved_bytes(self) -> int:
        """What the graph saves, without weights and buffers."""
        return self.kept_bytes + sum(each.nbytes for each in self.saved)

    @property
    def lifetimes(self) -> Lifetimes:
        """What the choice of what moves is made from."""
        return Lifetimes(
            nbytes=[each.nbytes for each in self.saved],
            wanted=[each.wanted for each in self.saved],
            released=[each.released for each in self.saved],
            kept_bytes=self.kept_bytes,
            again=self.again,
            token_bytes=TOKEN_BYTES,
        )


def _communicates(module: Any) -> bool:
    """Whether ranks exchange data in a module's graph, or in one within it."""
    graphs = (each.graph for each in module.modules() if hasattr(each, "graph"))
    return any(getattr(node.target, "namespace", "") in _COLLECTIVES for graph in graphs for node in graph.nodes)
