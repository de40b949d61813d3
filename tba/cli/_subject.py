"""Subject of a command: the model and batch that MODEL names, from the user's code or from a config."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tba._errors import ConfigError
from tba._memory.free_memory import free_bytes
from tba._text import size

ABOUT_MODEL = (
    "A config.json of transformers, its directory, a model type (llama, gpt2, ...), or a name on the hub whose config "
    "was fetched; or `module:callable`, imported from the working directory, which returns a model and a batch."
)
# Options of the commands that take a MODEL.
BatchOption = Annotated[
    int | None, typer.Option(min=1, help="For a config, or a callable that takes it: sequences in a batch. Default: 2.")
]
SequenceOption = Annotated[
    int | None,
    typer.Option(min=2, help="For a config, or a callable that takes it: tokens in a sequence. Default: 128."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="For a config: float32, bfloat16 (bf16) or float16 (fp16) weights. Default: the config's own."),
]

ChangesOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a field of the config; may be repeated.", metavar="FIELD=VALUE"),
]

_BATCH, _SEQUENCE = 2, 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
# Heads with one label per token.
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def subject(
    name: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Any]:
    """Make the model that `name` names, and a batch for it.

    Args:
        name: a config.json of transformers or a directory with one; a model type of transformers; a name on the hub
            whose config was fetched before; or `module:callable`.
        batch: sequences in the batch; this argument and those below are for a config, or a callable that takes them.
        sequence: tokens in each sequence.
        dtype: type of the weights; only for a config.
        changes: fields of the config.

    Raises:
        ConfigError: there is no such model, or it cannot be used.
    """
    path = Path(name)
    if name.partition(":")[0].endswith(".py"):
        raise ConfigError(f"MODEL {name!r} names a file, but a module is imported by its name: {_by_name(name)}")
    if path.exists() or re.fullmatch(r"\w[\w-]*", name):
        return from_config(path if path.exists() else name, batch or _BATCH, sequence, dtype, changes)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not path.parent.exists():
        return from_config(_fetched(name, ""), batch or _BATCH, sequence, dtype, changes)
    if not is_callable(name):
        raise ConfigError(
            f"MODEL {name!r} is no file or directory here, and no `module:callable`: give a config.json of "
            "transformers, its directory, a model type such as llama or gpt2, or `module:callable`; nothing is "
            "downloaded"
        )
    for option, value in (("dtype", dtype), ("set", changes)):
        if value:
            raise ConfigError(
                f"--{option} was given with {name!r}, which makes its own model and batch: it is for a config of "
                "transformers alone"
            )
    sizes = {"batch": batch, "sequence": sequence}
    return from_callable(name, {option: value for option, value in sizes.items() if value is not None})


def check_room(name: str, **given: Any) -> None:
    """Raise ConfigError if the weights and gradients of a config's model are more than free memory: nothing is made."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            model, _ = subject(name, **given)
        except ConfigError:
            raise
        except Exception:  # it looks at values as it is made, or its own code is wrong, which the audit will show
            return
        count, nbytes = sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    if 2 * nbytes > (free := free_bytes()):
        raise ConfigError(
            f"MODEL {name!r} has {count:,} parameters, with gradients {size(2 * nbytes)}, and {size(free)} are free: a "
            "step of it cannot run here; make it smaller, as by --set num_hidden_layers=2, or use tba plan, which "
            "computes nothing"
        )


def is_callable(name: str) -> bool:
    """Whether a name is of the form `module:callable`."""
    return re.fullmatch(r"\w[\w.]*:\w[\w.]*", name) is not None


def _fetched(name: str, what: str) -> Path:
    """Find the config of a model of the hub among what was downloaded before.

    Raises:
        ConfigError: it was not, and so the name is not `what` else it may be.
    """
    hub = importlib.import_module("huggingface_hub") if importlib.util.find_spec("huggingface_hub") else None
    found = hub.try_to_load_from_cache(name, "config.json") if hub is not None else None
    if not isinstance(found, str):
        raise ConfigError(
            f"MODEL {name!r} is no file or directory here{what}, and nothing is downloaded; if it is a model of the "
            f"hub, fetch its config first: hf download {name} config.json"
        )
    return Path(found)


def fields_of(changes: Sequence[str]) -> dict[str, Any]:
    """Parse field=value; values are JSON, or else text. Raises ConfigError."""
    found: dict[str, Any] = {}
    for change in changes:
        name, given, value = change.partition("=")
        if not given or not name:
            raise ConfigError(f"--set {change!r} is not of the form field=value, such as num_hidden_layers=40")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def dtype_named(option: str, name: str) -> torch.dtype:
    """Look up a dtype by its name or a short one. Raises ConfigError."""
    found = DTYPES.get(_SHORT.get(name.lower(), name.lower()))
    if found is None:
        raise ConfigError(f"{option} {name!r} is not known: choose of {', '.join(DTYPES)}")
    return found


def _by_name(name: str) -> str:
    """Suggest a name to give instead of `directory/module.py:callable`."""
    file, _, attribute = name.partition(":")
    path, attribute = Path(file).with_suffix(""), attribute or "callable"
    if path.is_absolute() or ".." in path.parts:
        return f"give `{path.name}:{attribute}` in the directory {path.parent}"
    return f"give `{'.'.join(path.parts)}:{attribute}`"


def from_callable(name: str, sizes: Mapping[str, int] | None = None) -> tuple[nn.Module, Any]:
    """Import `module:callable`, looking in the working directory first, and call it.

    Args:
        name: of it.
        sizes: `batch` and `sequence`, if the user set them; it must have such parameters then.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import of the module itself failed
        raise ConfigError(
            f"MODEL {name!r}: there is no module {error.name!r} in {here} or installed; call this command where it is"
        ) from None
    try:
        found = attrgetter(attribute)(found)
    except AttributeError as error:
        raise ConfigError(f"MODEL {name!r}: {error}; give `module:callable`") from None
    if not callable(found):
        raise ConfigError(
            f"MODEL {name!r}: {attribute} is a {type(found).__name__}, but it must be callable without arguments and "
            "return a model and a batch"
        )
    for option in sizes or {}:
        if option not in inspect.signature(found).parameters:
            raise ConfigError(
                f"--{option} was given with {name!r}, which makes its own model and batch: write "
                f"`def {attribute}({option}=...)`, so that it can be set"
            )
    made = found(**sizes or {})
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(
            f"MODEL {name!r}: {attribute}() returned {kinds}, but this needs (model, batch): a torch.nn.Module, "
            "and a tensor, a tuple of positional arguments or a mapping of keyword arguments"
        )
    return made


def from_config(
    what: Path | str, batch: int, sequence: int | None, dtype: str | None, changes: Mapping[str, Any] | None = None
) -> tuple[nn.Module, Any]:
    """Make a language model of transformers with random weights, and random tokens [batch, sequence] with labels.

    The class is the config's first architecture, else the choice of `AutoModelForCausalLM`.

    Args:
        what: a config.json, a directory with one, or a model type, whose default config is taken.
        batch, sequence, dtype, changes: as in `subject`.
    """
    transformers = _transformers(what)
    if isinstance(what, str):
        if what in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(what)
        else:
            version = transformers.__version__
            what = _fetched(what, f", no model type of transformers {version} such as llama or gpt2")
    if isinstance(what, Path):
        file = what / "config.json" if what.is_dir() else what
        if not file.is_file():
            raise ConfigError(f"there is no config.json in {what}; give a directory that has one, or `module:callable`")
        what = file
        try:
            config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(_unreadable(transformers, file, error)) from error
    if changes:
        config = _changed(transformers, config, changes, what)
    return _language_model(transformers, config, what, batch, sequence, dtype)


def _transformers(what: object) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ConfigError(
            f"{what} is read by transformers, which is not installed; pip install transformers, or give "
            "`module:callable`"
        ) from None


def _unreadable(transformers: Any, file: Path, error: Exception) -> str:
    """Say in a line why a file is no model's config."""
    try:
        kind = json.loads(file.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return f"transformers cannot read {file}: it is no JSON object; give a config.json of transformers"
    if kind not in transformers.CONFIG_MAPPING:
        has = "names no model_type" if kind is None else f"has the model type {kind!r}"
        return (
            f"transformers cannot read {file}: it {has}, and transformers {transformers.__version__} knows "
            f"{len(transformers.CONFIG_MAPPING)} others; give another config, upgrade transformers, or give "
            "`module:callable`"
        )
    return f"transformers cannot read {file} as a model's config: {str(error).strip().splitlines()[-1]}"


def _changed(transformers: Any, config: Any, changes: Mapping[str, Any], what: object) -> Any:
    """Make a config again with other fields, so that derived fields follow. Raises ConfigError."""
    fields = config.to_dict()
    if unknown := [name for name in changes if name not in fields]:
        raise ConfigError(f"--set {unknown[0]}: the config of {what} has no such field; it has {', '.join(fields)}")
    default = type(config)().to_dict()
    kept = {name: value for name, value in config.to_diff_dict().items() if value != default.get(name)}
    kept |= {"architectures": config.architectures, **changes}
    kept.pop("model_type", None)
    try:
        return transformers.AutoConfig.for_model(config.model_type, **kept)
    except Exception as error:  # transformers checks fields by validators of its own, whose errors have no common base
        why = str(error).strip().splitlines()[-1].strip().removeprefix("TypeError: ")
        raise ConfigError(
            f"transformers refuses {dict(changes)} in the config of {what}: {why}; give other values with --set"
        ) from error


def _language_model(
    transformers: Any, config: Any, file: object, batch: int, sequence: int | None, dtype: str | None
) -> tuple[nn.Module, Any]:
    make = _maker(transformers, config, file)
    length = _length(config, file, sequence)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ConfigError(f"{file} has no vocab_size, so it is no language model: give `module:callable` with a batch")
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # any token works: weights are random
    kind = _dtype(config, dtype)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)  # the same weights and tokens in every run
        model = make(config, dtype=kind)
        tokens = torch.randint(0, vocabulary, (batch, length))
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{type(model).__name__} of {file} takes no labels: give `module:callable` with a batch and a loss"
        )
    return model, {"input_ids": tokens, "labels": tokens}


def _maker(transformers: Any, config: Any, file: object) -> Any:
    """Find the function that makes the model from the config and dtype. Raises ConfigError if none fits."""
    named = (getattr(config, "architectures", None) or [None])[0]
    if named is None:
        if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
            raise ConfigError(
                f"{file} names no architecture, and its type {config.model_type!r} has no causal language model: add "
                '"architectures" to it, or give `module:callable`'
            )
        return transformers.AutoModelForCausalLM.from_config
    kind = getattr(transformers, named, None)
    if kind is None or not named.endswith(_TOKEN_HEADS):
        known = "is not a class of this transformers" if kind is None else "has no loss over tokens"
        raise ConfigError(
            f"{file} names the architecture {named}, which {known}: give one that ends in {', '.join(_TOKEN_HEADS)}, "
            "or `module:callable`"
        )
    return kind._from_config


def _length(config: Any, file: object, sequence: int | None) -> int:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = longest if isinstance(longest, int) and longest > 0 else sequence or _SEQUENCE
    if sequence is not None and sequence > limit:
        raise ConfigError(f"--sequence {sequence} is more than the {limit} positions of {file}: give at most that")
    return sequence or min(_SEQUENCE, limit)


def _dtype(config: Any, asked: str | None) -> torch.dtype:
    found = getattr(config, "dtype", None) if asked is None else dtype_named("--dtype", asked)
    return found if isinstance(found, torch.dtype) and found in DTYPES.values() else torch.float32
