"""Settings: one immutable, checked value made of arguments, `TBA_` environment variables and defaults."""

from __future__ import annotations

import difflib
import operator
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo

from compact import PRESETS, Preset

from ._errors import ConfigError
from ._text import Bytes, exact_size

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


_UNITS = {
    "b": 1,
    **{f"{prefix}{rest}": 1000**n for n, prefix in enumerate("kmgtp", 1) for rest in ("", "b")},
    **{f"{prefix}{rest}": 1024**n for n, prefix in enumerate("kmgtp", 1) for rest in ("i", "ib")},
}
_A_SIZE = "give a size such as '8GiB' (2^30) or '512MB' (10^6), or a whole number of bytes"
_A_RATE = "give a rate such as '1GiB/s' (2^30) or '512MB/s' (10^6), or a whole number of bytes per second"
# A plain number below this, as a budget, was surely meant in another unit.
_LEAST_BUDGET_BYTES = 1024


def _size(value: Any, info: ValidationInfo) -> Bytes:
    """Read a size: text with a unit, or a whole number of bytes."""
    return _bytes(value, "GiB" if "budget" in str(info.field_name) else "MiB", _A_SIZE)


def _budget(value: Any, info: ValidationInfo) -> Bytes:
    """Read a size that is no tiny number without a unit."""
    found = _size(value, info)
    if not isinstance(value, str | Bytes) and 0 < found < _LEAST_BUDGET_BYTES:
        raise ValueError(f"is {int(found)} bytes; did you mean '{int(found)}GiB'?")
    return found


def _rate(value: Any) -> Bytes:
    """Read a size with or without a trailing "/s"."""
    found = _bytes(re.sub(r"\s*/\s*s\s*$", "", value) if isinstance(value, str) else value, "MB", _A_RATE, "/s")
    if not found:
        raise ValueError(f"is not above 0; {_A_RATE}")
    return Bytes(found, f"{str(found).removesuffix('/s')}/s")


def _bytes(value: Any, usual: str, accepted: str, per: str = "") -> Bytes:
    """Read a count of bytes. Raises ValueError, which says what is wrong and the nearest right form.

    Args:
        value: what was given.
        usual: the unit that a small number without one was meant in.
        accepted: what can be given, for messages.
        per: what follows a unit, for messages.
    """
    if isinstance(value, Bytes):
        return value
    if isinstance(value, str):
        found = _parsed(value.strip(), usual, accepted, per)
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        found = Bytes(operator.index(value))  # of NumPy too
    elif isinstance(value, float) and value.is_integer():
        found = Bytes(int(value))
    elif isinstance(value, float) and 1024 <= value < float("inf"):
        raise ValueError(f"is not a whole number of bytes; did you mean {int(value)}?")
    elif isinstance(value, float) and 0 < value < 1024:
        raise ValueError(f"is not a whole number of bytes; did you mean '{value:g}{usual}{per}'?")
    else:
        raise ValueError(f"is not a number of bytes; {accepted}")
    if found < 0:
        raise ValueError(f"is negative; {accepted}")
    if found >= 2**63:  # no address space and no file is larger
        raise ValueError(f"is more than any machine has; {accepted}")
    return found


def _parsed(text: str, usual: str, accepted: str, per: str) -> Bytes:
    whole = re.fullmatch(r"(-?\d*\.?\d+)\s*([a-z]*)", text, re.IGNORECASE | re.ASCII)
    if whole is not None and (factor := _UNITS.get(whole[2].lower())) is not None:
        return Bytes(int(Decimal(whole[1]) * factor), whole[1] + whole[2])
    if whole is not None and not whole[2]:
        number = Decimal(whole[1])
        if number <= 0:
            return Bytes(-1 if number else 0)
        bytes_meant = number >= 1024 and number % 1 == 0
        meant = exact_size(int(number)) if bytes_meant else whole[1] + usual
        raise ValueError(f"has no unit; did you mean '{meant}{per}'?")
    part = re.match(r"(\d+(?:\.\d+|,\d\d?)?)\s*([a-z]+)", text, re.IGNORECASE | re.ASCII)
    if part is not None and part[2][0].lower() in "kmgtp":
        unit = part[2] if part[2].lower() in _UNITS else f"{part[2][0].upper()}iB"
        raise ValueError(f"is not a number and a unit; did you mean '{part[1].replace(',', '.')}{unit}{per}'?")
    raise ValueError(f"is not a number and a unit; {accepted}")


def _seconds(value: Any) -> Any:
    """Accept "60", "60s" and "60 s" as well as numbers."""
    return value.strip().removesuffix("s") if isinstance(value, str) else _number(value)


def _tier(value: Any) -> Any:
    """Accept a tier by its name in any case of letters, or by a word that people use for it."""
    name = value.strip().lower() if isinstance(value, str) else value
    return _TIERS.get(name, name) if isinstance(name, str) else name


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
        try:
            value = float(value) if re.search(r"[.eE]", value) else int(value)
        except ValueError:
            raise ValueError("not a number") from None
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
    except TypeError:
        raise ValueError("it holds something else") from None
    except (RuntimeError, OSError) as error:  # the home or working directory does not exist
        raise ValueError(str(error)) from None
    if not paths or any("\0" in str(path) for path in paths):
        raise ValueError("it names no directory")
    if twice := [str(path) for place, path in enumerate(paths) if path in paths[:place]]:
        raise ValueError(f"{twice[0]} is named twice")
    return paths


Size = Annotated[int, PlainValidator(_size)]
Budget = Annotated[int, PlainValidator(_budget)]
Rate = Annotated[int, PlainValidator(_rate)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=threading.TIMEOUT_MAX)]

# Words for a tier, and for a setting, beside its name.
_TIERS = {"disk": "nvme", "ssd": "nvme", "host": "cpu", "ram": "cpu"}
_ALIASES = {"budget": "memory_budget"}
Tier = Literal["keep", "cpu", "nvme", "auto"]
Backend = Literal["auto", "posix", "kvikio"]
Policy = Literal["budget", "tba"]
Verify = Literal["checksum", "full"]
_NAMES = {
    "tier": get_args(Tier),
    "io_backend": get_args(Backend),
    "policy": get_args(Policy),
    "verify": get_args(Verify),
}
_CHOICES = {**_NAMES, "compress": tuple(PRESETS)}
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
    **dict.fromkeys(("checksum", "derive"), "True or False, or text such as on, off, yes, no, 1, 0"),
    "io_timeout": "a number of seconds above 0, such as 60 or '60s'",
    "rank_timeout": "a number of seconds, such as 60 or '60s'; 0 for none",
}

_MOST_SHOWN = 80  # characters of a wrong value

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

    tier: Annotated[Tier, BeforeValidator(_tier)] = "auto"
    """Where saved tensors go: "nvme" (or "disk", "ssd") to a scratch file, "cpu" (or "host", "ram") to pinned host
    memory, "keep" nowhere, "auto" to the file if they do not fit in memory."""
    compress: Annotated[Any, BeforeValidator(_preset)] = None
    """Compression of saved tensors: a preset of `compact` by name ("exact", "safe8", "balanced", "max", "compact"), or
    a `compact.Preset`. None: no compression. All but "exact" are lossy."""
    rank: Annotated[int | float | None, BeforeValidator(_rank)] = None
    """Rank of the projection, for compress="compact": columns kept, or a share of the width. None: a quarter of it."""
    seed: Annotated[int, BeforeValidator(_number)] = 0
    """Seed of stochastic rounding and random projections, which never use the default generators."""
    derive: bool = True
    """Drop tensors that operators give again, bit for bit, from others that stay: by plan under tier "auto", and with
    `compress`."""
    verify: Verify = "checksum"
    """How those are compared with the tensors let go: "checksum" runs their operators in backward alone, and raises an
    error if the result is another, "full" also in forward, and keeps what would be another."""
    storage_paths: Annotated[tuple[Path, ...] | None, BeforeValidator(_directories)] = None
    """Directories for scratch files; several are used as one, and are joined by `:` in the variable. None: a per-user
    directory below the system's cache or temp directory."""
    io_backend: Backend = "auto"
    """How bytes reach the file: "posix" is O_DIRECT from host memory, "kvikio" GPUDirect Storage (extra `gds`), "auto"
    chooses."""
    min_tensor_bytes: Size = Bytes(1 << 20)
    """Storages of fewer bytes than this stay in memory."""
    memory_budget: Budget | None = None
    """Bytes that saved tensors may hold under tier "auto", such as "8GiB"; `budget` is another name for it. None: free
    memory less a margin."""
    policy: Policy = "budget"
    """How tier "auto" plans: "budget" moves and recomputes just enough for `memory_budget`, in minimum time; "tba" is
    the rule of the TBA/SSDTrain paper, a baseline: the first blocks move, as many as the link can carry."""
    blocks: Annotated[tuple[str, ...] | None, BeforeValidator(_blocks)] = None
    """Modules that tier "auto" may recompute, by class or by path: `Block`, "Block", "model.layers", or several. A
    ModuleList or ModuleDict stands for its children, and so does a single Sequential. None: found by what they save."""
    cpu_budget: Budget | None = None
    """Cap of host memory in bytes. The ranks of a node (LOCAL_WORLD_SIZE) share it: equally at first, and by what their
    steps need once they all know that. None: half of the memory."""
    nvme_budget: Budget | None = None
    """Cap of the scratch files in bytes, shared by ranks like `cpu_budget`. None: 80% of the free disk space."""
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
    rank_timeout: Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=threading.TIMEOUT_MAX)] = 60.0
    """Seconds to wait for ranks that exchange data in the model's forward, where they agree on a plan. 0: each rank
    plans for itself, and no block that communicates recomputes."""
    max_write_rate: Rate | None = None
    """Throttle of writes, in bytes per second of this process."""
    max_read_rate: Rate | None = None
    """Throttle of reads, in bytes per second of this process."""
    max_write_bytes_per_day: Size | None = None
    """Endurance allowance, in bytes per day (UTC), of all processes of this user on this machine together."""

    def __init__(self, **settings: Any) -> None:
        variables = _from_environment(os.environ)
        settings = _by_name(settings)
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
        changes = _by_name(update or {})
        made = type(self)(**{name: getattr(self, name) for name in _FIELDS} | changes)
        made.__dict__[_ORIGINS] = self.__dict__[_ORIGINS] | dict.fromkeys(changes, "argument")
        return made


_FIELDS = tuple(OffloadConfig.model_fields)


def describe(config: OffloadConfig) -> list[Setting]:
    """List every setting in force and where it came from, in the order of the fields."""
    origins: Mapping[str, str] = config.__dict__[_ORIGINS]
    return [Setting(name, getattr(config, name), origins.get(name, "default")) for name in _FIELDS]


def _by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases of settings by their names. Raises ConfigError if both were given."""
    for alias, name in _ALIASES.items():
        if alias in settings and name in settings:
            raise ConfigError(f"{alias} is another name for {name}, and both were given; leave {alias} out")
    return {_ALIASES.get(name, name): value for name, value in settings.items()}


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
            meant = [_variable(_ALIASES[name])] if name in _ALIASES else known
            raise ConfigError(
                f"unknown environment variable {variable}{_nearest(variable.upper(), meant)}; correct or unset it. "
                f"Variables: {', '.join(known)}"
            )
        if value:
            found[name] = value
    return found


def _problems(error: ValidationError, given: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each wrong field: its value, where it came from, and what is accepted."""
    first = {str(problem["loc"][0]): problem for problem in reversed(error.errors(include_url=False))}
    for name in sorted(first, key=_FIELDS.index):
        asked = f"{name if origins[name] == 'argument' else origins[name]}={shown(given[name])}"
        # Other messages than our own are in pydantic's words.
        ours = first[name]["msg"].removeprefix("Value error, ") if first[name]["type"] == "value_error" else ""
        if name in _CHOICES:
            yield f"{asked} is not {_ACCEPTS[name]}{_nearest(str(given[name]).lower(), _CHOICES[name])}"
        elif name in _ACCEPTS:
            yield f"{asked} is not {_ACCEPTS[name]}{': ' * bool(ours)}{ours}"
        else:
            yield f"{asked} {ours}"


def shown(value: Any) -> str:
    """Write a value that was given, on one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _nearest(asked: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _variable(name: str) -> str:
    return _PREFIX + name.upper()
