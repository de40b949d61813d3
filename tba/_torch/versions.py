"""Versions: the torch releases that the tests passed on; tells once, at import, what the one found is short of."""

from __future__ import annotations

import os
import re

import torch

from .user_frames import warn

# Releases that the core tests passed on: docs/versions.md says when, and how many.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
# Set to `allow` it keeps an untested torch from being warned of.
SILENCED_BY = "TBA_UNTESTED_TORCH"


def untested(version: str) -> str | None:
    """Return the release of a torch that is newer than any tested, such as `2.16`; None for others."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return None
    return found[0] if tuple(map(int, found.groups())) > tuple(map(int, TESTED[-1].split("."))) else None


def tell(missing: dict[str, list[str]]) -> None:
    """Warn of what is to be known of the torch found; `missing`: what it lacks, by what that means for training."""
    for remark in remarks(torch.__version__, missing):
        warn(remark)


def remarks(version: str, missing: dict[str, list[str]]) -> list[str]:
    """Say what to know of this torch.

    Args:
        version: torch's own.
        missing: what it lacks, by what that means for training.
    """
    meanings: dict[tuple[str, ...], list[str]] = {}
    for meaning, names in missing.items():
        meanings.setdefault(tuple(names), []).append(meaning)
    told = [
        f"torch {version} has no {' and no '.join(names)} in the form that tba knows: {'; '.join(each)}. All else "
        f"works, and stays exact. tba was tested with torch {TESTED[0]} to {TESTED[-1]}"
        for names, each in meanings.items()
    ]
    if (release := untested(version)) is not None and os.environ.get(SILENCED_BY) != "allow":
        told.append(
            f"torch {release} is newer than any that tba was tested with ({TESTED[0]} to {TESTED[-1]}). It may well "
            f"work; please report what does not. {SILENCED_BY}=allow in the environment silences this"
        )
    return told
