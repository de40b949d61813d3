"""Codecs and projections that shrink saved tensors, exactly or with a stated error.

    codec = Quantized("int4", rounding="stochastic", rotate=True)
    packed = codec.encode(tensor, key(run_seed, layer, step))       # packed.buffers, packed.nbytes
    codec.decode(packed)

To write your own codec, follow the contract of `Codec` and test it with `compact.testing.check_codec`.
"""

from ._codecs.codec import Codec, Packed, Pending, Properties
from ._codecs.exact import DisguisedBf16, Exact, Mask, Narrow, Verbatim
from ._codecs.projected import Projected
from ._codecs.quantized import Quantized
from ._codecs.sampled import Sampled
from ._codecs.strided import Spec
from ._errors import (
    CheckpointError,
    CodecError,
    ConvertError,
    GroupError,
    PackedError,
    PresetError,
    RankError,
    UnsupportedTensor,
)
from ._measures import Bias, bias, cosine, relative_error
from ._presets import FLOORS, PRESETS, Floor, Preset, Saved, preset
from ._projection.projection import Projection
from ._projection.shared_input import SharedInput
from ._projection.subspace import Subspace
from ._seeds import key
from ._training.convert import PAPER_SKIP, convert, revert
from ._training.linear import compact_linear
from ._training.optimizer import CompActAdamW, clip_grad_norm_

__all__ = [
    "FLOORS",
    "PAPER_SKIP",
    "PRESETS",
    "Bias",
    "CheckpointError",
    "Codec",
    "CodecError",
    "CompActAdamW",
    "ConvertError",
    "DisguisedBf16",
    "Exact",
    "Floor",
    "GroupError",
    "Mask",
    "Narrow",
    "Packed",
    "PackedError",
    "Pending",
    "Preset",
    "PresetError",
    "Projected",
    "Projection",
    "Properties",
    "Quantized",
    "RankError",
    "Sampled",
    "Saved",
    "SharedInput",
    "Spec",
    "Subspace",
    "UnsupportedTensor",
    "Verbatim",
    "bias",
    "clip_grad_norm_",
    "compact_linear",
    "convert",
    "cosine",
    "key",
    "preset",
    "relative_error",
    "revert",
]
