"""Write caps: the tighter of the file's room and what is left of the day, in words and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from io_backends import HostStore, PosixStore, StripedStore, TwoLevelStore
from tba._auto.write_cap import write_cap
from tba._transfer.daily_allowance import Allowance

MIB = 1 << 20


def test_nothing_limits_what_nobody_limited() -> None:
    assert write_cap(None, Allowance(None), 10) is None


@pytest.mark.parametrize(("capacity", "words"), [(MIB, "1.0 MiB (nvme_budget)"), (9 * MIB, "3.0 MiB are left")])
def test_the_tighter_limit_is_named(tmp_path: Path, capacity: int, words: str) -> None:
    allowance = Allowance(8 * MIB, tmp_path / "state" / "written.sqlite3", ranks=2)
    assert allowance.take(2 * MIB)
    cap = write_cap(capacity, allowance, 10)
    assert cap is not None
    assert words in cap.why
    assert cap.nbytes == min(capacity - 10 * 8192, 3 * MIB)
    allowance.resize(0.5)
    assert allowance.left_bytes == 3 * MIB // 2
    allowance.close()


def test_stores_know_their_capacity(tmp_path: Path) -> None:
    def file(nbytes: int | None) -> PosixStore:
        return PosixStore(tmp_path, capacity_bytes=nbytes)

    host, small, endless = HostStore(budget_bytes=5 * MIB), file(2 * MIB), file(None)
    two = TwoLevelStore(HostStore(), file(2 * MIB), 3 * MIB)
    striped = StripedStore([small, file(MIB)]), StripedStore([file(MIB), endless])
    assert [store.capacity_bytes for store in (host, small, endless, two, *striped)] == [
        5 * MIB,
        2 * MIB,
        None,
        5 * MIB,
        3 * MIB,
        None,
    ]
    for store in (host, two, *striped):
        store.close()
