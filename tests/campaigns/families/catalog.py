"""Catalog: the architectures that transformers has, each as a small model with random weights and its batches."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .shrink import small_config
from .special import SPECIAL

BATCH, LENGTH = 2, 16
MOST_PARAMETERS = 20_000_000  # a model with more is not small
_TABLES = {
    "causal": ("CAUSAL_LM",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "masked": ("MASKED_LM",),
    "image": ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION"),
    "audio": ("CTC", "AUDIO_CLASSIFICATION"),
    "multimodal": ("IMAGE_TEXT_TO_TEXT",),
}
_BASE = "base"  # what no other table has: models without a head
TASKS = (*_TABLES, _BASE)


class NotSmallError(RuntimeError):
    """An architecture that cannot be built small, or runs on nothing that we know to make; the message says why."""


@dataclass(frozen=True)
class Family:
    """An architecture for a task.

    Attributes:
        name: task and kind of model, such as "causal/gptj".
        model: the name of its class in transformers.
    """

    name: str
    model: str

    @property
    def task(self) -> str:
        """What it is trained for."""
        return self.name.partition("/")[0]

    def make_model(self) -> nn.Module:
        """A small one in training mode, with weights from the default generator. Raises NotSmallError."""
        kind = getattr(transformers, self.model, None)
        if kind is None:
            raise NotSmallError(f"transformers has no {self.model}")
        try:
            config = self._config(kind)
            with torch.device("meta"):
                count = sum(weight.numel() for weight in kind(config).parameters())
        except Exception as error:
            raise NotSmallError(_words("configuration", error)) from error
        if count > MOST_PARAMETERS:
            raise NotSmallError(f"{count:,} parameters where the configuration is shrunk")
        try:
            model: nn.Module = kind(self._config(kind)).train()
        except Exception as error:
            raise NotSmallError(_words("construction", error)) from error
        return model

    def _config(self, kind: Any) -> Any:
        of_name = self.name.partition("/")[2]
        own = kind.config_class if isinstance(kind.config_class, type) else CONFIG_MAPPING[of_name]
        special = {**SPECIAL.get(of_name, {}), **SPECIAL.get(self.name, {})}
        return small_config(own, special)


def families() -> list[Family]:
    """Every architecture in transformers' tables, once for each task and class."""
    found: dict[str, Family] = {}
    classes: set[str] = set()
    kinds: set[str] = set()
    for task, name, model in _entries():
        if model in classes or (task in (_BASE, "multimodal") and name in kinds):
            continue
        classes.add(model)
        kinds.add(name)
        found.setdefault(f"{task}/{name}", Family(f"{task}/{name}", model))
    return list(found.values())


def family_of(name: str) -> Family:
    """The family of a name. Raises KeyError."""
    return {f"{task}/{kind}": Family(f"{task}/{kind}", model) for task, kind, model in reversed([*_entries()])}[name]


def _entries() -> Iterator[tuple[str, str, str]]:
    """Task, kind of model and class; of the kinds that share a class, the one that it is named after comes first."""
    tables = [(task, f"MODEL_FOR_{each}_MAPPING_NAMES") for task, names in _TABLES.items() for each in names]
    for task, table in [*tables, (_BASE, "MODEL_MAPPING_NAMES")]:
        mapping: Mapping[str, Any] = getattr(auto, table)
        models = {name: model if isinstance(model, str) else model[0] for name, model in mapping.items()}
        for name, model in sorted(models.items(), key=lambda entry: (not _is_namesake(*entry), entry[0])):
            yield task, name, model


def _is_namesake(name: str, model: str) -> bool:
    head = re.split("For|LMHead|Model", model)[0]
    return head.lower() == name.replace("_", "").replace("-", "").lower()


def make_batch(family: Family, model: nn.Module) -> dict[str, Tensor]:
    """Arguments of a model's forward, from the default generator."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    batch: dict[str, Tensor] = {}
    vision, audio = _part(config, "vision_config"), _part(config, "audio_config")
    words = "input_ids" in takes and family.name != "seq2seq/whisper"
    if words:
        batch["input_ids"] = torch.randint(8, _vocabulary(config), (BATCH, LENGTH))
    wanted = takes["pixel_values"].default is inspect.Parameter.empty if "pixel_values" in takes else False
    if "pixel_values" in takes and (not words or wanted or family.name.endswith(("/git", "/kosmos-2"))):
        shape = [BATCH, _number(vision, "num_channels", 3), *_image(vision)]
        if family.model.endswith("ForVideoClassification"):
            shape.insert(1, _number(config, "num_frames", 8))
        batch["pixel_values"] = torch.randn(shape)
    if "pixel_values_videos" in takes and not words:
        batch["pixel_values_videos"] = torch.randn(BATCH, _number(config, "num_frames", 8), 3, *_image(vision))
    if "input_values" in takes and not words and "input_features" not in takes:
        length = (_number(audio, "max_length", 0), _number(audio, "num_mel_bins", 0))
        batch["input_values"] = torch.randn(BATCH, *length) if all(length) else torch.randn(BATCH, 4000)
    if "input_features" in takes and not words:
        bins = _number(audio, "num_mel_bins", 0) or _number(audio, "input_feat_per_channel", 0)
        frames = 2 * _number(audio, "max_source_positions", LENGTH)
        batch["input_features"] = torch.randn(
            (BATCH, bins, frames)
            if "Whisper" in family.model or "Voxtral" in family.model
            else (BATCH, frames, bins or 80)
        )
    if "decoder_input_ids" in takes and (family.task == "base" or not words):
        batch["decoder_input_ids"] = torch.randint(8, _vocabulary(config), (BATCH, LENGTH))
    if "labels" in takes and family.task != "base":
        batch["labels"] = _labels(family, config, batch)
    return batch


def _labels(family: Family, config: Any, batch: dict[str, Tensor]) -> Tensor:
    if family.task == "image" or family.model.endswith("Classification"):
        return torch.randint(0, config.num_labels, (BATCH,))
    if family.task == "audio":
        return torch.randint(1, 20, (BATCH, 3))
    if "input_ids" in batch:
        return batch["input_ids"]
    return torch.randint(8, _vocabulary(config), (BATCH, LENGTH))


def loss_of(out: Any) -> Tensor:
    """A model's own loss, or the mean squares of what it returns."""
    if getattr(out, "loss", None) is not None:
        loss: Tensor = out.loss
        return loss if loss.ndim == 0 else loss.mean()
    values = [value for value in torch.utils._pytree.tree_leaves(out.to_tuple()) if isinstance(value, Tensor)]
    terms = [value.float().square().mean() for value in values if value.requires_grad and value.is_floating_point()]
    if not terms:
        raise NotSmallError("nothing that it returns needs a gradient")
    return torch.stack(terms).sum()


def check(family: Family) -> None:
    """Run a family's forward and backward once. Raises NotSmallError."""
    model = family.make_model()
    try:
        loss_of(model(**make_batch(family, model))).backward()
    except NotSmallError:
        raise
    except Exception as error:
        raise NotSmallError(_words("first step", error)) from error


def _part(config: Any, name: str) -> Any:
    part = getattr(config, name, None)
    return config if part is None else part


def _number(config: Any, name: str, other: int) -> int:
    value = getattr(config, name, None)
    return value if type(value) is int else other


def _image(config: Any) -> tuple[int, int]:
    size: Any = getattr(config, "image_size", None) or 32
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _vocabulary(config: Any) -> int:
    text: Any = config.get_text_config(decoder=True)
    return min(100, _number(text, "vocab_size", 100), _number(config, "vocab_size", 100))


def _words(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
