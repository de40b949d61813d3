"""Versions: the torch releases that the tests passed on, and what to say about others."""

from __future__ import annotations

import os
import re

# Releases that the core tests passed on; docs/versions.md has details.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def untested(version: str) -> str | None:
    """The release of a torch that is newer than any tested, such as `2.16`; None for others."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return None
    return found[0] if tuple(map(int, found.groups())) > tuple(map(int, TESTED[-1].split("."))) else None


def lacking(version: str, missing: dict[str, list[str]]) -> list[str]:
    """Say what is off with this torch.

    Args:
        version: torch's own.
        missing: what it lacks, by what that means for training.
    """
    meanings: dict[tuple[str, ...], list[str]] = {}
    for meaning, names in missing.items():
        meanings.setdefault(tuple(names), []).append(meaning)
    return [
        f"torch {version} has no {' and no '.join(names)} in the form that tba knows: {'; '.join(each)}. Everything "
        f"else works and stays exact. tba was tested with torch {TESTED[0]} to {TESTED[-1]}"
        for names, each in meanings.items()
    ]


def newer(version: str, silenced_by: str) -> list[str]:
    """Say that a torch is newer than any tested, if it is; `silenced_by`: the variable to set to `allow`."""
    release = untested(version)
    if release is None or os.environ.get(silenced_by) == "allow":
        return []
    return [
        f"torch {release} is newer than any that tba was tested with ({TESTED[0]} to {TESTED[-1]}). It will probably "
        f"work; please report what does not. {silenced_by}=allow in the environment silences this"
    ]
