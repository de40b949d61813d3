"""Errors of the codecs.

::

    CodecError              root: a codec was asked for what it cannot do
    ├── UnsupportedTensor   this tensor's dtype or layout: use another codec (`Exact` takes every plain tensor)
    ├── GroupError          a group that does not divide the dimension it runs along
    ├── PackedError         packed bytes that do not belong to this codec, or were cut
    ├── PresetError         a preset that does not exist, or a table that breaks a floor
    ├── RankError           a rank above the width (`Projection`, `convert`)
    ├── ConvertError        a model that cannot be converted, or back (`convert`)
    └── CheckpointError     a state of another rank, kind or model (`CompActAdamW`)

All are ValueErrors too: each is about an argument.
"""

from __future__ import annotations


class CodecError(ValueError):
    """Root of all errors raised by a codec."""


class UnsupportedTensor(CodecError):
    """The codec does not take tensors of this dtype or layout."""


class GroupError(CodecError):
    """A group does not divide the dimension it runs along."""


class PackedError(CodecError):
    """Packed bytes that are not what this codec made."""


class PresetError(CodecError):
    """An unknown preset, or a table with a codec that its class of tensors must not have."""
