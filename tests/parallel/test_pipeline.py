"""Pipeline schedules of torch.distributed.pipelining, over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from support.parallel import SCHEDULES, STAGES, pipeline
from support.ranks import assert_exact, process_group, start

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def _as_it_is(stage: nn.Module) -> None:
    pass


def _two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, STAGES, folder):
        for schedule in SCHEDULES:
            try:
                stats, _ = assert_exact(lambda name=schedule: pipeline(name, None, _as_it_is), Path(folder))
                assert stats.weight_bytes > 0
            except BaseException as error:
                error.add_note(schedule)
                raise


@pytest.mark.slow
def test_pipeline_schedules_are_exact(scratch: Path) -> None:
    start(_two_ranks, str(scratch), ranks=STAGES)
