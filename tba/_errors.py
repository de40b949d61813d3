"""Errors and the warning of tba: one tree, by who must act.

::

    RuntimeError
    └── OffloadError               root: catch this for everything tba raises of its own
        ├── ConfigError            you asked for something that is unknown, malformed or not available (also ValueError)
        ├── BudgetError            no plan keeps saved tensors within `memory_budget`
        ├── ClosedError            you used it after `close()`, or in a forked child
        ├── EditedError            you edited a tensor where PyTorch does not see it, and others follow from that tensor
        ├── StorageError           a storage path cannot be used: missing, read-only, full, in RAM
        └── TransferError          the bytes of a tensor could not be restored; names the tensor and the cause
            └── StalledError       no byte moved for `io_timeout` seconds
    UserWarning
    └── OffloadWarning             training continues, but not as asked

An in-place edit of a saved tensor raises PyTorch's own RuntimeError, and so does a lack of memory for a tensor that is
being restored: they are not in this tree.
"""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Root of all errors that tba raises of its own. `__cause__` holds the store's or the system's error, if any."""


class ConfigError(OffloadError, ValueError):
    """A setting, argument or `TBA_` variable is unknown or malformed, or settings contradict."""


class BudgetError(OffloadError):
    """No plan keeps saved tensors within `memory_budget`. The message says what the best one needs, and where."""


class ClosedError(OffloadError):
    """Use after `close()`, or in a forked child of the process that made it."""


class EditedError(OffloadError):
    """A tensor made again in backward is not the one that was let go: PyTorch did not see an edit.

    The message names the tensor, the operators that make it again, and the settings that avoid it.
    """


class StorageError(OffloadError):
    """A storage path cannot be used: missing, not a directory, read-only, full, or in RAM."""


class TransferError(OffloadError):
    """The bytes of a tensor could not be restored. The message names the tensor, `__cause__` is what failed."""


class StalledError(TransferError):
    """A transfer moved no byte for `io_timeout` seconds."""


class OffloadWarning(UserWarning):
    """Training continues, but not as asked: the message says what happens instead."""


def edited_in_place(name: str, version: int, expected: int) -> RuntimeError:
    """Make PyTorch's own error in its own words, which users know and search for."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name}] is at version {version}; expected version {expected} instead. Hint: enable anomaly detection to "
        "find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
