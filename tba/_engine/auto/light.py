"""Light hooks: where a budget was set and a step has fitted it, those that follow are only counted.

A record costs some 60 microseconds, a count some 3. Under a budget the hooks must stay on, as nothing else can hold it;
but while forwards are called as one was that fitted (`Rest`), nothing is to move, and so nothing needs a record.

Guarantees:

1. A step that saves more than the one that fitted is found in its middle, at the tensor that is too many. From there on
   the full hooks take over, with so much less room as has been let pass: the budget holds.
2. What is let pass is the tensor that autograd saves, or an alias that shares its version counter: an edit in place is
   found as it always is.

What is counted is memory by its address, which an operator's views share and parameters have elsewhere. That is no
exact measure of what stays (buffers and overlapping slices count), but one that grows with it; a step is compared with
another by one and the other's count.

Wants the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..._torch.weights import is_parameter


class Light:
    """Count of what a step saves, and the decision whether that is all its hooks need to do.

    Args:
        learns: whether there may be steps that only count, so that full ones are counted as well.
        min_tensor_bytes: what is smaller is no part of any budget.
        reserve: gets the bytes that were let pass in this step when the full hooks take over.

    Attributes:
        on: the step under way only counts.
        turned: it did, and does no more.
        nbytes: counted in this step.
        passed_bytes: of them, let pass.
        fitted_bytes: counted in the largest step that has fitted.
    """

    def __init__(self, learns: bool, min_tensor_bytes: int, reserve: Callable[[int], None]) -> None:
        self.learns = learns
        self.on = False
        self.turned = False
        self.nbytes = self.passed_bytes = 0
        self.fitted_bytes = 0
        self._min_tensor_bytes = min_tensor_bytes
        self._reserve = reserve
        self._by_address: dict[int, int] = {}

    def begin(self) -> None:
        """Only count from here on."""
        self.on = self.learns and not self.turned

    def turn(self) -> None:
        """Have the full hooks take over, for the rest of the step."""
        if self.on:
            self.on, self.turned = False, True
            self._reserve(self.passed_bytes)

    def passes(self, tensor: Tensor) -> bool:
        """Count a tensor, and tell whether it may pass. If not, the full hooks have taken over."""
        before_bytes = self.nbytes
        if not self.count(tensor) or self.nbytes > self.fitted_bytes:
            self.turn()
            return False
        self.passed_bytes += self.nbytes - before_bytes
        return True

    def count(self, tensor: Tensor) -> bool:
        """Count a tensor that is saved; False if it cannot be: after it no step only counts any more."""
        kind = type(tensor)
        if kind is nn.Parameter:
            return True
        if kind is not Tensor:
            self.learns = False
            return False
        base = tensor._base
        if base is not None and is_parameter(base):
            return True
        try:
            nbytes, address = tensor.nbytes, tensor.data_ptr()
        except RuntimeError:  # sparse, functorch wrappers: no memory of their own
            self.learns = False
            return False
        if nbytes >= self._min_tensor_bytes:
            known_bytes = self._by_address.get(address, 0)
            if nbytes > known_bytes:
                self._by_address[address] = nbytes
                self.nbytes += nbytes - known_bytes
        return True

    def end_step(self, *, fitted: bool) -> None:
        """End a step; `fitted`: it is one of those that fit."""
        self.fitted_bytes = max(self.fitted_bytes, self.nbytes) if fitted else 0
        self.on = self.turned = False
        self.nbytes = self.passed_bytes = 0
        self._by_address.clear()
