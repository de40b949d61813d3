"""Framework: loads the library that an integration is for, and says what to install where it is missing."""

from __future__ import annotations

import importlib
from typing import Any


def framework(name: str, *, extra: str) -> Any:
    """Import a framework by name.

    Raises:
        ImportError: it is not installed. The message has the line that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise  # the framework is there, and something that it needs itself is not
        raise ImportError(
            f"tba.integrations.{name.partition('.')[0]} needs {name}, which is not installed here; run: "
            f"pip install 'tba-offload[{extra}]'",
            name=name,
        ) from error
