"""Errors of the codecs.

::

    CodecError              root: a codec was asked for something it cannot do
    ├── UnsupportedTensor   a dtype or layout that the codec does not take (`Exact` takes every plain tensor)
    ├── GroupError          a group that does not divide the dimension it runs along
    ├── PackedError         packed bytes that belong to another codec or were truncated
    ├── PresetError         an unknown preset, or a table that breaks a floor
    ├── RankError           a rank outside 1 to the width of what is projected
    ├── ConvertError        a model that cannot be converted or reverted
    └── CheckpointError     an optimizer state that does not fit the model's compact layers

All are ValueErrors too, because each is about an argument.
"""

from __future__ import annotations


class CodecError(ValueError):
    """Root of all errors raised by a codec."""


class UnsupportedTensor(CodecError):
    """A tensor whose dtype or layout the codec does not take."""


class GroupError(CodecError):
    """A group that does not divide the dimension it runs along."""


class PackedError(CodecError):
    """Packed bytes that this codec did not make."""


class PresetError(CodecError):
    """An unknown preset, or a codec below the floor of its class of tensors."""


class RankError(CodecError):
    """A rank outside 1 to the width of what is projected."""


class ConvertError(CodecError):
    """A model that cannot be converted or reverted."""


class CheckpointError(CodecError):
    """An optimizer state that does not fit the model's compact layers."""
