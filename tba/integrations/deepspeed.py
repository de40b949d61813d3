"""DeepSpeed: `initialize` that reads a section "tba" from the configuration.

from tba.integrations.deepspeed import initialize

config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "tba": {"tier": "nvme"}}
engine, optimizer, loader, scheduler = initialize(model=model, config=config)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import ConfigError, OffloadConfig, attach
from ._figures import figures
from ._framework import framework, of_deepspeed, refuse

__all__ = ["figures", "initialize"]

_library = framework("deepspeed", extra="deepspeed")


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize`, and attach to the engine with the settings in the section "tba".

    Args:
        args, kwargs: those of `deepspeed.initialize`. Pass the configuration, a dictionary or the path of a JSON file,
            as `config=`. Its section "tba" has the settings of `tba.attach`; without it nothing is offloaded.

    Returns:
        What `deepspeed.initialize` returns. The Offloader is `engine.offload`, or None; `close()` on it ends it.

    Raises:
        ConfigError: the section is malformed, or DeepSpeed offloads activations itself.
    """
    config = _read(kwargs.get("config"))
    section = config.pop("tba", None)
    if section is None:
        made = _library.initialize(*args, **kwargs)
        made[0].offload = None
        return made
    if not isinstance(section, dict):
        raise ConfigError(f'the section "tba" must hold settings, such as {{"tier": "nvme"}}, got {section!r}')
    OffloadConfig(**section)  # so that a mistake shows before DeepSpeed begins
    refuse(of_deepspeed(config))
    made = _library.initialize(*args, **kwargs | {"config": config})
    made[0].offload = attach(made[0], **section)
    return made


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str | Path) and Path(given).is_file():
        return dict(json.loads(Path(given).read_text()))
    raise ConfigError(
        f"config={given!r} is neither a dictionary nor the path of a JSON file; write initialize(model=model, "
        'config={..., "tba": {"tier": "nvme"}})'
    )
