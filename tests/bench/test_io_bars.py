"""The io benchmark's arithmetic: what counts, and what the measurements must reach."""

from __future__ import annotations

import pytest

from benchmarks._io.arms import together
from benchmarks._io.rounds import FIO, MODES, STORE, TWO_PATHS, Series
from benchmarks._report.ratios import doubt, spread
from benchmarks.io import make_bars, parts


def series(rates: list[float], cpu_s_per_gib: float = 0.0) -> Series:
    """Rounds at these rates, in each mode."""
    return Series(
        bytes_per_s={mode: list(rates) for mode in MODES},
        cpu_s_per_gib={mode: [cpu_s_per_gib] * len(rates) for mode in MODES},
        submit_cpu_s=[1e-5],
        submit_wall_s=[2e-5],
    )


def test_spread_and_doubt() -> None:
    assert spread([1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
    assert doubt([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3.14 / 5**0.5)
    assert doubt([1.0, 2.0, 3.0, 4.0, 5.0] * 100) == pytest.approx(3.14 / 500**0.5)


def test_two_paths_are_compared_over_the_rounds_of_all_sizes() -> None:
    def met(*shares: list[float]) -> bool | None:
        found = {
            (4 << number) << 20: {
                STORE: series([1.0] * len(rates)),
                TWO_PATHS: series(rates),
            }
            for number, rates in enumerate(shares)
        }
        bars = {bar.what: bar for bar in make_bars(found)}
        return bars["both, all sizes: two paths on this disk / one"].met

    # At one size slower, at the other faster: noise, or a wash. Slower in most rounds of both: slower.
    assert met([0.9, 0.95, 0.97, 0.99] * 4, [1.01, 1.03, 1.05, 1.1] * 4)
    assert not met([0.9, 0.92, 0.94, 0.95] * 4, [0.93, 0.95, 0.96, 1.02] * 4)


def test_rounds_are_spread_over_sessions() -> None:
    assert [parts(rounds) for rounds in (2, 3, 7, 15)] == [[1, 1], [1, 1, 1], [3, 2, 2], [5, 5, 5]]


def test_both_counts_while_both_are_under_way() -> None:
    reads = [(0.0, 1.0, 100), (1.0, 2.0, 100)]
    writes = [(0.5, 1.5, 100), (1.5, 3.5, 400), (3.5, 4.0, 100)]
    assert together(0.0, [reads, writes]) == pytest.approx((200 + 100 + 400 / 4) / 2)
    assert together(0.0, [writes, reads]) == together(0.0, [reads, writes])


def test_bars_compare_within_a_round() -> None:
    # The disk is three times as fast in the second round: only the ratios tell.
    found = {
        4 << 20: {
            STORE: series([2.0, 6.0], 0.045),
            FIO: series([1.0, 3.0]),
            TWO_PATHS: series([1.0, 3.0]),
        }
    }
    bars = {bar.what: bar for bar in make_bars(found)}
    assert bars["read, 4 MiB: store / fio"].measured == 2.0
    assert bars["read, 4 MiB: two paths on this disk / one"].measured == 0.5
    assert bars["read, 4 MiB: two paths on this disk / one"].met is None
    assert bars["read, all sizes: two paths on this disk / one"].measured == 0.5
    assert bars["read, all sizes: two paths on this disk / one"].met is False
    assert bars["CPU seconds per GiB, write, 4 MiB"].met is False
    assert bars["CPU seconds per GiB, read, 4 MiB"].met is True
    assert bars["submitting a transfer, 4 MiB, CPU"].measured == pytest.approx(10.0)
