"""Seeds: the same integers everywhere, and integers that look random."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compact import _seeds
from support.samples import examples

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def _mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK32
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _word(key: int, index: int) -> int:
    """The generator again, in unbounded integers."""
    mixed = _mix64((key + 0x9E3779B97F4A7C15) & _MASK64)
    return _mix32((_mix32((index + mixed) & _MASK32) + (mixed >> 32)) & _MASK32)


def _unsigned(words: torch.Tensor) -> list[int]:
    return [word & _MASK32 for word in words.tolist()]


@settings(deadline=None, max_examples=examples(40), derandomize=True)
@given(st.integers(0, _MASK64), st.integers(0, 40))
def test_words_are_those_of_plain_integers(key: int, count: int) -> None:
    words = _seeds.uniform_bits(key, count, "cpu")
    assert words.dtype == torch.int32
    assert _unsigned(words) == [_word(key, i) for i in range(count)]


def test_chunks_and_threads_do_not_show() -> None:
    whole = _seeds.uniform_bits(11, 200_003, "cpu")
    assert _unsigned(whole[65_500:65_600]) == [_word(11, i) for i in range(65_500, 65_600)]
    assert _unsigned(whole[-9:]) == [_word(11, i) for i in range(199_994, 200_003)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(whole, _seeds.uniform_bits(11, 200_003, "cpu"))
    finally:
        torch.set_num_threads(threads)
    for make in (_seeds.signs, _seeds.bells):
        assert torch.equal(make(11, 1000, "cpu")[:223], make(11, 223, "cpu"))


# Computed once. Whoever changes these changes what every stored key means.
_HASHES = {
    "uniform_bits": "b8f0a445f6444271f2a229b453b1f8d2183a08dfe1e9d19a5f0a77aa0f06f975",
    "signs": "e62282c14477cbded4e511d8e521993eac36e739246f57d8a4b317de60f84e55",
    "bells": "7f3e4462670175d2ea72269832b473d17378a9cb6b4f0b1c9f50bec92d866162",
    "permutation": "1e60beb797b96f34f5433351f8d702531241b89cd8f73c97b3dfbf549be7bff7",
}


@pytest.mark.parametrize("name", sorted(_HASHES))
def test_stored_hashes(name: str) -> None:
    digest = hashlib.sha256()
    for key, count in ((0, 1), (_seeds.key(1, "layer", 2), 4097), (_MASK64, 70_000)):
        made = getattr(_seeds, name)(key, count, "cpu")
        digest.update(made.to(torch.int64).numpy().tobytes())
    assert digest.hexdigest() == _HASHES[name]


def test_keys_name_streams() -> None:
    assert _seeds.key(1, "a", 2) == _seeds.key(1, "a", 2)
    different = [
        (1,),
        (1, 0),
        (1, "0"),
        (1, "ab"),
        (1, "a", "b"),
        (1, "b", "a"),
        (-1,),
        (11,),
        (1, 1),
        (2**80,),
        (1, ""),
    ]
    assert len({_seeds.key(*parts) for parts in different}) == len(different)  # type: ignore[arg-type]
    assert all(0 <= _seeds.key(*parts) < 1 << 63 for parts in different)  # type: ignore[arg-type]
    for wrong in (1.5, True, None):
        with pytest.raises(TypeError, match="integers and strings"):
            _seeds.key(1, wrong)  # type: ignore[arg-type]


def test_keys_are_equal_in_another_process() -> None:
    command = "from compact import key; print(key(3, 'layers.0.mlp', 7))"
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    found = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) == _seeds.key(3, "layers.0.mlp", 7)


def test_default_generator_is_not_moved() -> None:
    before = torch.get_rng_state()
    for make in (_seeds.uniform_bits, _seeds.signs, _seeds.bells, _seeds.permutation):
        make(5, 1000, "cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_refuses_what_it_does_not_have() -> None:
    for count in (-1, (1 << 32) + 1):
        with pytest.raises(ValueError, match="another key"):
            _seeds.uniform_bits(1, count, "cpu")
    assert _seeds.uniform_bits(1, 0, "cpu").shape == (0,)
    assert _seeds.signs(1, 0, "cpu").shape == (0,)


@pytest.mark.parametrize("key", [0, 1, 2, 1 << 32, _seeds.key(0, "x")])
def test_each_bit_is_fair_and_independent_of_the_others(key: int) -> None:
    count = 1 << 17
    words = _seeds.uniform_bits(key, count, "cpu").to(torch.int64)
    bits = ((words.unsqueeze(1) >> torch.arange(32)) & 1).double() * 2 - 1
    # Correlations of n fair signs have the standard deviation 1 / sqrt(n); of 32 * 33 / 2 + 32 values, 5 is rare.
    limit = 5 / count**0.5
    assert bits.mean(0).abs().max() < limit
    cross = bits.t() @ bits / count - torch.eye(32)
    assert cross.abs().max() < limit
    following = bits[:-1].t() @ bits[1:] / (count - 1)
    assert following.abs().max() < limit


def test_neighbouring_keys_are_unrelated() -> None:
    count = 1 << 12
    streams = torch.stack([_seeds.signs(key, count, "cpu").double() for key in range(64)])
    cross = streams @ streams.t() / count - torch.eye(64)
    assert cross.abs().max() < 5 / count**0.5
    words = [set(_seeds.uniform_bits(key, count, "cpu").tolist()) for key in range(3)]
    # Of 2**24 pairs 2**-8 are equal by chance; a shifted stream would share nearly all.
    assert len(words[0] & words[1]) < 4
    assert len(words[1] & words[2]) < 4


def test_words_of_a_key_are_distinct() -> None:
    words = _seeds.uniform_bits(123, 1 << 20, "cpu")
    assert len(words.unique()) == len(words)


def test_each_element_of_a_permutation_is_equally_often_at_each_place() -> None:
    size, draws = 12, 6000
    places = torch.zeros(size, size)
    for key in range(draws):
        order = _seeds.permutation(key, size, "cpu")
        places[torch.arange(size), order] += 1
    assert torch.equal(order.sort().values, torch.arange(size))
    assert (places / draws - 1 / size).abs().max() < 5 * (1 / size / draws) ** 0.5


def test_bells_are_sums_of_twelve_bytes_and_nearly_gaussian() -> None:
    share = np.ones(1)
    for _ in range(12):
        share = np.convolve(share, np.full(256, 1 / 256))
    values = np.arange(len(share)) - _seeds.BELL_LARGEST
    assert values[-1] == _seeds.BELL_LARGEST
    # What the module states, of the distribution itself.
    variance = (share * values**2).sum()
    assert variance == pytest.approx(_seeds.BELL_VARIANCE, rel=1e-12)
    assert (share * values.astype(float) ** 4).sum() / variance**2 - 3 == pytest.approx(-0.1, abs=1e-4)
    gaussian = np.array([math.erf(v / math.sqrt(2 * variance)) for v in values + 0.5]) / 2
    assert np.abs(share.cumsum() - 0.5 - gaussian).max() < 0.0024
    # And the draws follow it: in 40 bins of about equal share.
    count = 1_000_000
    edges = np.searchsorted(share.cumsum(), np.arange(1, 40) / 40)
    expected = np.diff(np.concatenate([[0], share.cumsum()[edges], [1]])) * count
    found = _seeds.bells(4, count, "cpu")
    bins = torch.bucketize(found + _seeds.BELL_LARGEST, torch.from_numpy(edges))
    observed = bins.bincount(minlength=40).numpy()
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 39) < 5 * (2 * 39) ** 0.5
