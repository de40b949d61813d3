"""Registry: all peers by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from . import moving, recompute
from .peer import Peer

CHECKPOINT, HALF, SELECTIVE = "checkpoint", "checkpoint, every other block", "selective checkpoint"
REMAT = "torch_remat"
NVME, CHECKED = "tba nvme", "tba nvme, checksum"
OURS = (NVME, CHECKED)

PEERS: Mapping[str, Peer] = {
    CHECKPOINT: Peer(make=recompute.checkpointed, scope="block"),
    HALF: Peer(make=recompute.checkpointed, scope="block", every=2),
    SELECTIVE: Peer(make=recompute.selective, scope="block"),
    REMAT: Peer(make=recompute.remat, scope="block", package="torch_remat", install="pip install torch_remat"),
    "save_on_cpu": Peer(make=moving.host_memory),
    "tutorial's files": Peer(make=moving.files, files=True),
    "torchtune": Peer(
        make=moving.torchtune,
        package="torchtune",
        install="pip install torchtune torchao",
        cuda="OffloadActivations makes CUDA streams when it is constructed",
    ),
    "TRL": Peer(
        make=moving.trl,
        package="trl",
        install="pip install trl",
        cuda="OffloadActivations needs an accelerator when it is constructed",
    ),
    "transformers offload": Peer(
        make=recompute.transformers_offload,
        scope="block",
        package="transformers",
        install="pip install transformers",
        cuda="with offload=True its checkpoints need pinned memory",
    ),
    "DeepSpeed": Peer(make=recompute.deepspeed, scope="block", package="deepspeed", install="pip install deepspeed"),
    NVME: Peer(make=moving.ours(tier="nvme"), files=True),
    CHECKED: Peer(make=moving.ours(tier="nvme", checksum=True), files=True),
}


def put_under(name: str, model: nn.Module, scratch: Path) -> None:
    """Train a model under a peer from now on."""
    PEERS[name].put_under(model, scratch)
