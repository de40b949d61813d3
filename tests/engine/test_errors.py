"""The error tree: who is caught by whom, and that the docstring draws what there is."""

from __future__ import annotations

import re

import pytest

from tba import _errors


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (_errors.OffloadError, (RuntimeError,)),
        (_errors.ConfigError, (_errors.OffloadError, ValueError)),
        (_errors.ClosedError, (_errors.OffloadError,)),
        (_errors.StorageError, (_errors.OffloadError,)),
        (_errors.TransferError, (_errors.OffloadError,)),
        (_errors.StalledError, (_errors.TransferError,)),
        (_errors.OffloadWarning, (UserWarning,)),
    ],
)
def test_each_error_has_its_place(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    assert error.__bases__ == bases
    assert error.__doc__


def test_the_tree_drawn_is_the_tree_built() -> None:
    assert _errors.__doc__ is not None
    built = {name for name, value in vars(_errors).items() if isinstance(value, type)}
    drawn = re.findall(r"^[ │├└─]*(\w+)", _errors.__doc__.split("::", 1)[1].split("\n\nAn in-place")[0], re.MULTILINE)
    assert set(drawn) - {"RuntimeError", "UserWarning"} == built


def test_an_error_of_ours_keeps_the_cause() -> None:
    cause = OSError(5, "Input/output error")
    with pytest.raises(_errors.OffloadError) as caught:
        raise _errors.TransferError("float32[8] #3 could not be read") from cause
    assert caught.value.__cause__ is cause
