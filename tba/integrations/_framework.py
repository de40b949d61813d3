"""Framework: loads the library of an integration, and refuses that library's own activation offloading."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from .. import ConfigError, OffloadConfig


def framework(name: str, *, extra: str) -> Any:
    """Import a framework by name.

    Raises:
        ImportError: it is not installed. The message has the line that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise  # something that the framework needs is missing
        raise ImportError(
            f"tba.integrations.{name.partition('.')[0]} needs {name}, which is not installed here; run: "
            f"pip install 'tba-offload[{extra}]'",
            name=name,
        ) from error


def checked(settings: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Check settings when the user writes them, before training begins; returns them with what else was given.

    Args:
        settings: those of `tba.attach`.
        given: those that an integration names itself; None: not given.

    Raises:
        ConfigError: a setting is unknown or malformed, or settings contradict.
    """
    both = {name: value for name, value in given.items() if value is not None} | dict(settings)
    OffloadConfig(**{name: value for name, value in both.items() if name != "config"})
    return both


def refuse(found: Iterable[tuple[str, str]]) -> None:
    """Raise if another offloader is on, because both would act on the same tensors.

    Args:
        found: the name of each that is on, and the setting to delete.

    Raises:
        ConfigError: there is one.
    """
    lines = [f"{name} is on too: delete {setting}" for name, setting in found]
    if lines:
        raise ConfigError(
            f"two offloaders on one model, and only the inner one would get its tensors. {'; '.join(lines)}; or delete "
            "the line that attaches tba"
        )


def of_accelerate(state: Any, setting: str) -> Iterable[tuple[str, str]]:
    """Yield what plugins of accelerate move, given its state; `setting`: how the caller writes FSDP's."""
    if getattr(getattr(state, "fsdp_plugin", None), "activation_checkpointing_offload", False):
        yield "accelerate's activation_checkpointing_offload", setting
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is not None:
        yield from of_deepspeed(plugin.deepspeed_config)


def of_deepspeed(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield what a DeepSpeed configuration moves by itself."""
    for section, setting in (("activation_checkpointing", "cpu_checkpointing"), ("compile", "offload_activation")):
        given = config.get(section)
        if isinstance(given, Mapping) and given.get(setting) is True:
            yield f"DeepSpeed's {setting}", f'"{setting}": true from "{section}" in the DeepSpeed configuration'
