"""The error tree: the docstring draws who is caught by whom."""

from __future__ import annotations

import re

from tba import _errors


def test_the_tree_drawn_is_the_tree_built() -> None:
    assert _errors.__doc__ is not None
    drawn = _errors.__doc__.split("::", 1)[1].split("\n\nAn in-place")[0]
    above: list[str] = []  # the class at each depth of the tree
    for indent, name in re.findall(r"^([ │├└─]*)(\w+)", drawn, re.MULTILINE):
        depth = len(indent) // 4
        above[depth - 1 :] = [name]
        if name not in ("RuntimeError", "UserWarning"):
            assert above[depth - 2] in [base.__name__ for base in getattr(_errors, name).__bases__]
            assert getattr(_errors, name).__doc__
    assert issubclass(_errors.ConfigError, ValueError)
    built = {name for name, value in vars(_errors).items() if isinstance(value, type)}
    assert set(re.findall(r"\w+(?:Error|Warning)", drawn)) >= built
