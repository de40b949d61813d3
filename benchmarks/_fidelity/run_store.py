"""Run store: finished runs in a folder, a file each, so that what ends early can go on where it was.

A file appears whole or not at all: it is written under another name and renamed. It is named by the hash of what the
run's outcome depends on and holds that too, so that no run stands for another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SUFFIX = ".json"


class RunStore:
    """The runs in `folder`, which is made when the first is put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(list(self.folder.glob("*" + _SUFFIX)))

    def get(self, definition: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the figures of a finished run; None if it has not been finished."""
        path = self._path(definition, _SUFFIX)
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        if found["definition"] != _plain(definition):
            raise RuntimeError(f"{path.name} holds another run than its name says: remove it")
        figures: dict[str, Any] = found["figures"]
        return figures

    def put(self, definition: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Store the figures of a finished run."""
        text = json.dumps({"definition": _plain(definition), "figures": figures}, indent=1)
        self._write(self._path(definition, _SUFFIX), text.encode())

    def weights(self, definition: Mapping[str, Any]) -> Path:
        """The file of a run's weights, which may not be there."""
        return self._path(definition, ".pt")

    def put_weights(self, definition: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Store a run's weights."""
        path = self.weights(definition)
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._part(path)
        torch.save(dict(weights), part)
        part.replace(path)

    def _path(self, definition: Mapping[str, Any], suffix: str) -> Path:
        text = json.dumps(_plain(definition), sort_keys=True)
        return self.folder / (hashlib.sha256(text.encode()).hexdigest()[:24] + suffix)

    def _write(self, path: Path, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._part(path)
        part.write_bytes(data)
        part.replace(path)

    def _part(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{os.getpid()}.part")


def _plain(definition: Mapping[str, Any]) -> Any:
    """Return the definition as JSON gives it back."""
    return json.loads(json.dumps(definition, sort_keys=True))
