"""Settings: one immutable, checked value made of arguments, `TBA_` environment variables and defaults."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from compact import PRESETS, Preset

from ._errors import ConfigError

_PREFIX = "TBA_"
# Not a setting of a training: `allow` turns off the warning about an untested torch at import.
UNTESTED_TORCH = "TBA_UNTESTED_TORCH"
# Set by `tba run` for the processes under it: whether they attach, and where they write their report.
ATTACH, REPORT = "TBA_ATTACH", "TBA_REPORT"


def _number(value: Any) -> Any:
    """Refuse True and False, which Python counts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


def _size(value: Any) -> Any:
    """Refuse what ByteSize would truncate: it parses the beginning of a text, and takes "1,5GiB" for one byte."""
    if isinstance(value, str) and not re.fullmatch(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*", value):
        raise ValueError("neither a number nor a number and a unit")
    return int(value) if isinstance(value, float) and value.is_integer() else _number(value)


def _rate(value: Any) -> Any:
    """Accept a size with or without a trailing "/s"."""
    return _size(re.sub(r"\s*/\s*s\s*$", "", value) if isinstance(value, str) else value)


def _seconds(value: Any) -> Any:
    """Accept "60", "60s" and "60 s" as well as numbers."""
    return value.strip().removesuffix("s") if isinstance(value, str) else _number(value)


def _preset(value: Any) -> Any:
    """Accept a preset, or the name of one."""
    name = value.strip().lower() if isinstance(value, str) else value
    if name == "none":
        return None
    if not isinstance(name, Preset | None) and (not isinstance(name, str) or name not in PRESETS):
        raise ValueError("there is no such preset")
    return name


def _rank(value: Any) -> Any:
    """Accept a number of columns or a share of the width, as a number or as text."""
    if isinstance(value, str):
        value = float(value) if re.search(r"[.eE]", value) else int(value)
    if isinstance(value, bool) or not (value is None or (value >= 1 if isinstance(value, int) else 0 < value < 1)):
        raise ValueError("neither a count nor a share")
    return value


def _blocks(value: Any) -> Any:
    """Accept a name, several joined by `,`, a class, or a list of both; returns a tuple of names."""
    parts: Any = [value]
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    names = tuple(f"{part.__module__}.{part.__qualname__}" if isinstance(part, type) else part for part in parts)
    if value is None:
        return None
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("it names nothing; only offload_context(model, blocks=...) takes modules themselves")
    return names


def _directories(value: Any) -> Any:
    """Accept one path, several joined by `:`, or a sequence of paths; returns a tuple of absolute ones."""
    if value is None:
        return None
    parts: Any = [value]
    if isinstance(value, str):
        parts = [part for part in value.split(os.pathsep) if part.strip()]
    elif isinstance(value, list | tuple):
        parts = value
    try:
        paths = tuple(Path(part).expanduser().absolute() for part in parts)
    except (TypeError, RuntimeError, OSError) as error:  # not a path, or the home or working directory does not exist
        raise ValueError(str(error)) from None
    if not paths or any("\0" in str(path) for path in paths):
        raise ValueError("it names no directory")
    if twice := [str(path) for place, path in enumerate(paths) if path in paths[:place]]:
        raise ValueError(f"{twice[0]} is named twice")
    return paths


# No address space and no file is larger than the bound.
Size = Annotated[ByteSize, BeforeValidator(_size), Field(ge=0, lt=2**63)]
Rate = Annotated[ByteSize, BeforeValidator(_rate), Field(gt=0, lt=2**63)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=threading.TIMEOUT_MAX)]

Tier = Literal["keep", "cpu", "nvme", "auto"]
Backend = Literal["auto", "posix", "kvikio"]
Policy = Literal["budget", "tba"]
_NAMES = {"tier": get_args(Tier), "io_backend": get_args(Backend), "policy": get_args(Policy)}
_CHOICES = {**_NAMES, "compress": tuple(PRESETS)}
_A_SIZE = "a size: a number of bytes, or text such as 512MB (10^6) or 8GiB (2^30)"
_A_RATE = "a rate: a number of bytes per second above 0, or text such as 512MB (10^6) or 8GiB/s (2^30)"
# What a field accepts, for messages.
_ACCEPTS = {
    **{name: f"one of {', '.join(map(repr, choices))}" for name, choices in _NAMES.items()},
    "compress": f"None, a compact.Preset or one of {', '.join(map(repr, PRESETS))}",
    "rank": "a whole number above 0, or a share of the width above 0 and below 1; only with compress='compact'",
    "seed": "a whole number",
    "storage_paths": "a directory, as a str or a Path, or several, joined by ':' or in a list",
    "blocks": "a class of modules or its name, the path of a module such as 'model.layers', or several, in a list or "
    "joined by ','",
    "io_threads": "a whole number from 1 to 256",
    "checksum": "True or False, or text such as on, off, yes, no, 1, 0",
    "io_timeout": "a number of seconds above 0, such as 60 or '60s'",
    "max_write_rate": _A_RATE,
    "max_read_rate": _A_RATE,
}

# Attribute that holds which settings were given, and how. Not a field, so that equality ignores it.
_ORIGINS = "_origins"


class Setting(NamedTuple):
    """One setting in force. `origin` is "argument", the name of the environment variable, or "default"."""

    name: str
    value: Any
    origin: str


class OffloadConfig(BaseModel):
    """Immutable settings, equal and hashable by value: arguments > `TBA_` environment variables > defaults.

    The variable of a field is `TBA_` and its name in capitals; an empty variable counts as not set. The environment is
    read when the object is made.

    Raises:
        ConfigError: an unknown argument or `TBA_` variable, a value that does not parse, settings that contradict.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tier: Tier = "auto"
    """Where saved tensors go: "nvme" to a scratch file, "cpu" to pinned host memory, "keep" nowhere, "auto" to the file
    if they do not fit in memory."""
    compress: Annotated[Any, BeforeValidator(_preset)] = None
    """Compression of saved tensors: a preset of `compact` by name ("exact", "safe8", "balanced", "max", "compact"), or
    a `compact.Preset`. None: no compression. All but "exact" are lossy."""
    rank: Annotated[int | float | None, BeforeValidator(_rank)] = None
    """Rank of the projection, for compress="compact": columns kept, or a share of the width. None: a quarter of it."""
    seed: int = 0
    """Seed of stochastic rounding and random projections, which never use the default generators."""
    storage_paths: Annotated[tuple[Path, ...] | None, BeforeValidator(_directories)] = None
    """Directories for scratch files; several are used as one, and are joined by `:` in the variable. None: a per-user
    directory below the system's cache or temp directory."""
    io_backend: Backend = "auto"
    """How bytes reach the file: "posix" is O_DIRECT from host memory, "kvikio" GPUDirect Storage (extra `gds`), "auto"
    chooses."""
    min_tensor_bytes: Size = ByteSize(1 << 20)
    """Storages of fewer bytes than this stay in memory."""
    memory_budget: Size | None = None
    """Bytes that saved tensors may hold under tier "auto". None: free memory less a margin."""
    policy: Policy = "budget"
    """How tier "auto" plans: "budget" moves and recomputes just enough for `memory_budget`, in minimum time; "tba" is
    the rule of the TBA/SSDTrain paper, a baseline: the first blocks move, as many as the link can carry."""
    blocks: Annotated[tuple[str, ...] | None, BeforeValidator(_blocks)] = None
    """Modules that tier "auto" may recompute, by class or by path: `Block`, "Block", "model.layers", or several. A
    ModuleList or ModuleDict stands for its children, and so does a single Sequential. None: found by what they save."""
    cpu_budget: Size | None = None
    """Cap of host memory in bytes, divided by LOCAL_WORLD_SIZE among the ranks of a node. None: half of the memory."""
    nvme_budget: Size | None = None
    """Cap of the scratch files in bytes, divided among ranks like `cpu_budget`. None: 80% of the free disk space."""
    staging_bytes: Size | None = None
    """Cap of writes in flight, in bytes. None: 40 MiB, 1 GiB for GPU tensors, less if there is little memory."""
    prefetch_bytes: Size | None = None
    """Cap of tensors held back from writing or prefetched, in bytes. None: three of the largest tensors, but at least
    24 MiB and at most the default of `staging_bytes`."""
    io_threads: Annotated[int, BeforeValidator(_number), Field(ge=1, le=256)] | None = None
    """Number of I/O workers per storage path. None: 2, but 1 for tensors on a CPU with fewer than 8 cores."""
    checksum: bool = False
    """Hash every byte that is written, not only a sample of each page, and verify it when it is read."""
    io_timeout: Seconds = 60.0
    """Seconds without progress after which a transfer has failed."""
    max_write_rate: Rate | None = None
    """Throttle of writes, in bytes per second of this process."""
    max_read_rate: Rate | None = None
    """Throttle of reads, in bytes per second of this process."""
    max_write_bytes_per_day: Size | None = None
    """Endurance allowance, in bytes per day (UTC), of all processes of this user on this machine together."""

    def __init__(self, **settings: Any) -> None:
        variables = _from_environment(os.environ)
        for name in settings:
            if name not in _FIELDS:
                raise ConfigError(f"unknown setting {name!r}{_nearest(name, _FIELDS)}. Settings: {', '.join(_FIELDS)}")
        origins = {name: _variable(name) for name in variables} | dict.fromkeys(settings, "argument")
        given = variables | settings
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError("\n".join(_problems(error, given, origins))) from None
        if self.rank is not None and self.compress != "compact":
            raise ConfigError(
                f"rank={self.rank!r} was given with compress={self.compress!r}, which projects nothing; use "
                "compress='compact', or leave rank unset"
            )
        other = self.tier != "auto" or self.memory_budget is not None or self.compress is not None
        if self.policy == "tba" and other:
            raise ConfigError(
                f"policy='tba' was given with tier={self.tier!r}, memory_budget={self.memory_budget} and "
                f"compress={self.compress!r}: it is a rule for tier 'auto' that knows no budget and no codec; leave "
                "them unset, or use policy='budget'"
            )
        if self.memory_budget is not None and self.tier != "auto":
            raise ConfigError(
                f"memory_budget={self.memory_budget} was given with tier={self.tier!r}, which moves or keeps tensors "
                "whatever they take; use tier 'auto', or leave memory_budget unset"
            )
        if self.blocks is not None and self.tier != "auto":
            raise ConfigError(
                f"blocks={self.blocks!r} was given with tier={self.tier!r}, under which nothing recomputes; use tier "
                "'auto', or leave blocks unset"
            )
        self.__dict__[_ORIGINS] = origins

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"cannot change {name!r}: settings are immutable; make others with OffloadConfig({name}=...)")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return these settings with `update`, which is checked; the others keep their origin."""
        changes = dict(update or {})
        made = type(self)(**{name: getattr(self, name) for name in _FIELDS} | changes)
        made.__dict__[_ORIGINS] = self.__dict__[_ORIGINS] | dict.fromkeys(changes, "argument")
        return made


_FIELDS = tuple(OffloadConfig.model_fields)


def describe(config: OffloadConfig) -> list[Setting]:
    """List every setting in force and where it came from, in the order of the fields."""
    origins: Mapping[str, str] = config.__dict__[_ORIGINS]
    return [Setting(name, getattr(config, name), origins.get(name, "default")) for name in _FIELDS]


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the settings from the environment, in any case of letters. Raises ConfigError for unknown ones."""
    found = {}
    for variable, value in environment.items():
        if variable[: len(_PREFIX)].upper() != _PREFIX:
            continue
        name = variable[len(_PREFIX) :].lower()
        if variable in (UNTESTED_TORCH, ATTACH, REPORT):
            continue
        if name not in _FIELDS:
            known = [_variable(name) for name in _FIELDS]
            raise ConfigError(
                f"unknown environment variable {variable}{_nearest(variable.upper(), known)}; correct or unset it. "
                f"Variables: {', '.join(known)}"
            )
        if value:
            found[name] = value
    return found


def _problems(error: ValidationError, given: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each wrong field: its value, where it came from, and what is accepted."""
    first = {str(problem["loc"][0]): problem["msg"] for problem in reversed(error.errors(include_url=False))}
    for name in sorted(first, key=_FIELDS.index):
        asked = f"{name if origins[name] == 'argument' else origins[name]}={given[name]!r}"
        if name in _CHOICES:
            yield f"{asked} is not {_ACCEPTS[name]}{_nearest(str(given[name]).lower(), _CHOICES[name])}"
        else:
            yield f"{asked} is not {_ACCEPTS.get(name, _A_SIZE)}: {first[name].removeprefix('Value error, ')}"


def _nearest(asked: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _variable(name: str) -> str:
    return _PREFIX + name.upper()
