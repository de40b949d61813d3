"""Settings: one immutable, checked value made of arguments, `TBA_` environment variables and defaults."""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Self

from pydantic import BeforeValidator, ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from compact import PRESETS, Preset

from ._errors import ConfigError

_PREFIX = "TBA_"


def _whole_number(value: Any) -> Any:
    """Python counts True as 1, and 2.0 ** 30 is a float: refuse the one, accept the other."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _size(value: Any) -> Any:
    """ByteSize looks at the beginning of a text only, and would take "1,5GiB" for one byte."""
    if isinstance(value, str) and not re.fullmatch(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*", value):
        raise ValueError("neither a number nor a number and a unit")
    return _whole_number(value)


def _rate(value: Any) -> Any:
    """A size, with or without "/s" behind it."""
    return _size(re.sub(r"\s*/\s*s\s*$", "", value) if isinstance(value, str) else value)


def _seconds(value: Any) -> Any:
    """Accept "60", "60s" and "60 s" beside numbers."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value.strip().removesuffix("s").strip() if isinstance(value, str) else value


def _preset(value: Any) -> Any:
    """A preset, or the name of one."""
    if isinstance(value, Preset) or value is None:
        return value
    name = value.strip().lower() if isinstance(value, str) else value
    if name == "none":
        return None
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError("there is no such preset")
    return name


def _rank(value: Any) -> Any:
    """A count of columns or a share of the width, as a number or as text."""
    if isinstance(value, str):
        value = float(value) if re.search(r"[.eE]", value) else int(value)
    if isinstance(value, bool) or not (value is None or (value >= 1 if isinstance(value, int) else 0 < value <= 1)):
        raise ValueError("neither a count nor a share")
    return value


def _directories(value: Any) -> Any:
    """One path, several joined by `:`, or a sequence of paths: a tuple of absolute ones."""
    if value is None:
        return None
    if isinstance(value, str):
        parts: Iterable[Any] = [part for part in value.split(os.pathsep) if part.strip()]
    elif isinstance(value, os.PathLike):
        parts = [value]
    elif isinstance(value, list | tuple) and all(isinstance(part, str | os.PathLike) for part in value):
        parts = value
    else:
        raise ValueError(f"a {type(value).__name__} is no path")
    try:
        paths = tuple(Path(os.fspath(part)).expanduser().absolute() for part in parts)
    except (RuntimeError, OSError) as error:  # a home or a working directory that does not exist
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

_A_SIZE = "a size: a number of bytes, or text such as 512MB (10^6) or 8GiB (2^30)"
_A_RATE = "a rate: a number of bytes per second above 0, or text such as 512MB (10^6) or 8GiB/s (2^30)"
# What a field accepts, for messages.
_ACCEPTS = {
    "tier": "one of 'keep', 'cpu', 'nvme', 'auto'",
    "compress": f"None, a compact.Preset or one of {', '.join(map(repr, PRESETS))}",
    "rank": "a whole number above 0, or a share of the width above 0 and up to 1; only with compress='compact'",
    "seed": "a whole number",
    "storage_paths": "a directory, as a str or a Path, or several, joined by ':' or in a list",
    "io_backend": "one of 'auto', 'posix', 'kvikio'",
    "io_threads": "a whole number from 1 to 256",
    "checksum": "True or False, or text such as on, off, yes, no, 1, 0",
    "io_timeout": "a number of seconds above 0, such as 60 or '60s'",
    "max_write_rate": _A_RATE,
    "max_read_rate": _A_RATE,
}

_DEFAULT, _ARGUMENT = "default", "argument"
# Where an object remembers which fields the environment gave. Not a field, so that it takes no part in equality.
_FROM_ENVIRONMENT = "_from_environment"


class Setting(NamedTuple):
    """One setting in force. `origin` is "argument", the name of the environment variable, or "default"."""

    name: str
    value: Any
    origin: str


class OffloadConfig(BaseSettings):
    """Immutable settings, equal and hashable by value: arguments > `TBA_` environment variables > defaults.

    The variable of a field is its name in capitals after `TBA_`; one that is set to nothing counts as not set. The
    environment is read when the object is made.

    Raises:
        ConfigError: an unknown argument or `TBA_` variable, a value that does not parse, settings that contradict.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    tier: Literal["keep", "cpu", "nvme", "auto"] = "auto"
    """Where saved tensors go: "nvme" a scratch file, "cpu" pinned host memory, "keep" nowhere, "auto" the file, for
    what does not fit in memory."""
    compress: Annotated[Any, BeforeValidator(_preset)] = None
    """What makes saved tensors smaller: a preset of `compact` by name ("exact", "safe8", "balanced", "max",
    "compact"), or a `compact.Preset`. None: nothing. All but "exact" change gradients."""
    rank: Annotated[int | float | None, BeforeValidator(_rank)] = None
    """Of the projection, for compress="compact": columns kept, or a share of the width. None: a quarter of it."""
    seed: int = 0
    """Of stochastic rounding and random projections. The default generators are never used."""
    storage_paths: Annotated[tuple[Path, ...] | None, NoDecode, BeforeValidator(_directories)] = None
    """Directories for scratch files, used as one where there are several; in the variable they are joined by `:`.
    None: a per-user directory below the system's cache or temp directory."""
    io_backend: Literal["auto", "posix", "kvikio"] = "auto"
    """How bytes reach the file: "posix" is O_DIRECT from host memory, "kvikio" GPUDirect Storage (extra `gds`), "auto"
    chooses."""
    min_tensor_bytes: Size = ByteSize(1 << 20)
    """Storages of fewer bytes than this stay in memory."""
    memory_budget: Size | None = None
    """Bytes that saved tensors may hold under tier "auto". None: free memory less a margin."""
    cpu_budget: Size | None = None
    """Cap of host memory in bytes, shared by the ranks of a node: each gets it divided by LOCAL_WORLD_SIZE where that
    variable is set. None: half of the memory."""
    nvme_budget: Size | None = None
    """Cap of the scratch files in bytes, shared by the ranks of a node like `cpu_budget`. None: 80% of what is free on
    the disks."""
    staging_bytes: Size | None = None
    """Cap of writes in flight, in bytes. None: from bandwidth x latency, bounded by memory."""
    prefetch_bytes: Size | None = None
    """Cap of read-ahead, in bytes. None: from bandwidth x latency, bounded by memory."""
    io_threads: Annotated[int, BeforeValidator(_whole_number), Field(ge=1, le=256)] | None = None
    """Count of I/O workers per storage path. None: 2, but 1 where tensors are on a CPU of fewer than 8 cores."""
    checksum: bool = False
    """Verify every read against a checksum made when it was written."""
    io_timeout: Seconds = 60.0
    """Seconds without a byte moved after which a transfer has failed."""
    max_write_rate: Rate | None = None
    """Throttle of writes, in bytes per second of this process."""
    max_read_rate: Rate | None = None
    """Throttle of reads, in bytes per second of this process."""
    max_write_bytes_per_day: Size | None = None
    """Endurance allowance, in bytes per day (UTC), of all processes of this user on this machine together."""

    def __init__(self, **settings: Any) -> None:
        _refuse_unknown(settings, os.environ)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            problems = "\n".join(_problems(error, settings))
        else:
            self.__dict__[_FROM_ENVIRONMENT] = self.model_fields_set - settings.keys()
            if self.rank is None or self.compress == "compact":
                return
            problems = (
                f"rank={self.rank!r} was given with compress={self.compress!r}, which projects nothing; use "
                "compress='compact', or leave rank unset"
            )
        raise ConfigError(problems)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_change(name)

    def __delattr__(self, name: str) -> None:
        _refuse_change(name)

    # Pydantic would wrap a ConfigError, being a ValueError, in its own error, and copy with an update unchecked.

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """`OffloadConfig(**obj)`, or `obj` itself where it is one."""
        return obj if isinstance(obj, cls) else cls(**obj)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        """`OffloadConfig` of a JSON object."""
        return cls(**json.loads(json_data))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same settings but for `update`, checked; those not updated keep their origin."""
        changes = dict(update or {})
        made = type(self)(**({name: getattr(self, name) for name in _order()} | changes))
        made.__dict__[_FROM_ENVIRONMENT] = _from_environment(self) - changes.keys()
        made.model_fields_set.intersection_update(self.model_fields_set | changes.keys())
        return made

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then environment; no files."""
        # The source looks at every field's type anew, which is most of what an object costs: only where it can matter.
        return (init_settings, env_settings) if any(_ours(os.environ)) else (init_settings,)


_FIELDS = frozenset(OffloadConfig.model_fields)


def describe(config: OffloadConfig) -> list[Setting]:
    """Every setting in force, in the order of the fields, and where it came from."""
    return [Setting(name, getattr(config, name), _origin(config, name)) for name in _order()]


def _origin(config: OffloadConfig, name: str) -> str:
    if name in _from_environment(config):
        return _variable(name)
    return _ARGUMENT if name in config.model_fields_set else _DEFAULT


def _from_environment(config: OffloadConfig) -> Set[str]:
    found: Set[str] = config.__dict__.get(_FROM_ENVIRONMENT, frozenset())
    return found


def _refuse_unknown(settings: Iterable[str], environment: Iterable[str]) -> None:
    for name in settings:
        if name not in _FIELDS:
            raise ConfigError(f"unknown setting {name!r}{_nearest(name, _FIELDS)}. Settings: {', '.join(_order())}")
    for variable in _ours(environment):
        if variable[len(_PREFIX) :].lower() not in _FIELDS:
            known = [_variable(name) for name in _order()]
            raise ConfigError(
                f"unknown environment variable {variable}{_nearest(variable.upper(), known)}; correct or unset it. "
                f"Variables: {', '.join(known)}"
            )


def _ours(environment: Iterable[str]) -> Iterator[str]:
    """The names that begin with `TBA_`, in whatever case: `tba_tier` is read too."""
    return (variable for variable in environment if variable[: len(_PREFIX)].upper() == _PREFIX)


def _problems(error: ValidationError, settings: dict[str, Any]) -> Iterator[str]:
    """One line for each field that is wrong: what was asked, by which way it came, what is accepted."""
    told: set[str] = set()
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        if name in told:
            continue
        told.add(name)
        asked = f"{name}={settings[name]!r}" if name in settings else f"{_variable(name)}={_in_environment(name)!r}"
        if choices := _choices(name):
            hint = _nearest(str(settings.get(name, _in_environment(name))).lower(), choices)
            yield f"{asked} is not {_ACCEPTS[name]}{hint}"
        else:
            found = problem["msg"].removeprefix("Value error, ")
            yield f"{asked} is not {_ACCEPTS.get(name, _A_SIZE)}: {found}"


def _choices(name: str) -> tuple[str, ...]:
    return {
        "tier": ("keep", "cpu", "nvme", "auto"),
        "io_backend": ("auto", "posix", "kvikio"),
        "compress": tuple(PRESETS),
    }.get(name, ())


def _nearest(asked: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _in_environment(name: str) -> str | None:
    wanted = _variable(name)
    return next((value for variable, value in os.environ.items() if variable.upper() == wanted), None)


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _order() -> list[str]:
    return list(OffloadConfig.model_fields)


def _refuse_change(name: str) -> NoReturn:
    raise ConfigError(f"cannot change {name!r}: settings are immutable; make others with OffloadConfig({name}=...)")
