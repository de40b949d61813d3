"""Smaller saved tensors, exact ones for free and lossy ones for a known price: codecs, projections, their error.

    codec = Quantized("int4", rounding="stochastic", rotate=True)
    packed = codec.encode(tensor, key(run_seed, layer, step))       # packed.buffers, packed.nbytes
    codec.decode(packed)

Whoever writes a codec reads `Codec`'s contract; `compact.testing.check_codec` holds it to it.
"""

from ._codec import Codec, Packed, Pending, Properties
from ._convert import PAPER_SKIP, ConvertError, convert, revert
from ._errors import CodecError, GroupError, PackedError, PresetError, UnsupportedTensor
from ._exact import DisguisedBf16, Exact, Mask, Narrow, Verbatim
from ._layout import Spec
from ._linear import compact_linear
from ._measures import Bias, bias, cosine, relative_error
from ._optimizer import CheckpointError, CompActAdamW, clip_grad_norm_
from ._presets import FLOORS, PRESETS, Floor, Preset, Saved, preset
from ._projected import Projected
from ._projection import Projection, RankError
from ._quantize import Quantized
from ._seeds import key
from ._shared import SharedInput
from ._subspace import Subspace

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
