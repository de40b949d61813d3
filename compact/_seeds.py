"""Seeds: random integers from a key and a counter, with the same bits on every device.

Guarantees:

1. Word i of a key depends only on (key, i). It takes 32-bit integer sums, products modulo 2**32, shifts and xors, which
   every device computes exactly. There is no state, and torch's generators are neither read nor advanced.
2. The 2**32 words of a key are a permutation: none occurs twice, so sorting them has no ties. (2**17 truly random words
   would have two repeats. Sums of words do not show the difference.)
3. Signs, permutations and bells are made from these words by integer arithmetic.

The mixer is two rounds of the finalizer `lowbias32` (https://github.com/skeeto/hash-prospector: bias 0.17 on the scale
where MurmurHash3's has 0.26), with half of the mixed key added before each. It is not cryptographic. Philox would need
ten rounds of 32 x 32 -> 64 bit products: about 120 tensor operations on int64, versus 25 on int32 here.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORD_COUNT = 1 << 32
# Words at a time on a CPU: 512 KiB with scratch memory, which fits a core's L2 cache.
_CHUNK = 1 << 16
_MASK = (1 << 32) - 1
# Variance of the sum of twelve uniform bytes: 12 * (2**16 - 1) / 12.
BELL_VARIANCE = (1 << 16) - 1
BELL_LARGEST = 1530


def key(seed: int, *parts: int | str) -> int:
    """Derive the key of the stream named by `parts`, for example (run seed, layer name, refresh).

    Equal arguments give equal keys in every process, different ones unrelated keys (BLAKE2b, 63 bits). 3 differs from
    "3", and ("a", "b") from ("ab",).

    Args:
        seed: any integer; the run's seed, or another key.
        parts: integers and strings.

    Returns:
        0 <= key < 2**63, which fits a signed 64-bit integer.

    Raises:
        TypeError: a part that is neither.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *parts):
        if isinstance(part, str):
            data = b"s" + part.encode()
        elif isinstance(part, int) and not isinstance(part, bool):
            data = b"i" + str(part).encode()
        else:
            raise TypeError(f"a key is made of integers and strings, but got {part!r} of {type(part).__name__}")
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def uniform_bits(key: int, count: int, device: torch.device | str) -> Tensor:
    """Make the first `count` words of a key: int32 [count], all 32 bits uniform.

    Raises:
        ValueError: a negative count, or one beyond 2**32.
    """
    if not 0 <= count <= WORD_COUNT:
        raise ValueError(f"a key has {WORD_COUNT} words, but {count} were requested: use another key for more")
    mixed = _child(key, 0)  # adjacent keys would otherwise give one stream, shifted
    low, high = _signed(mixed), _signed(mixed >> 32)
    words = torch.empty(count, dtype=torch.int32, device=device)
    chunk = _CHUNK if words.device.type == "cpu" else max(count, 1)
    scratch = torch.empty(min(chunk, count), dtype=torch.int32, device=device)
    for offset in range(0, count, chunk):
        x = words[offset : offset + chunk]
        t, length = scratch[: len(x)], len(x)
        # The counter may pass 2**31, so its offset is added as a wrapped scalar.
        torch.arange(length, dtype=torch.int32, device=device, out=x)
        x.add_(_signed(offset + low))
        _mix(x, t)
        x.add_(high)
        _mix(x, t)
    return words


def stir(words: Tensor, other: Tensor) -> Tensor:
    """Mix other integers, int32, into words in place. Words that were uniform stay uniform, whatever the others are."""
    _mix(words.bitwise_xor_(other), torch.empty_like(words))
    return words


def signs(key: int, count: int, device: torch.device | str) -> Tensor:
    """Make random signs: int8 [count] of -1 and 1, one bit of the stream each. Raises as `uniform_bits`."""
    words = uniform_bits(key, -(-count // 32), device)
    bits = (words.unsqueeze(1) >> torch.arange(32, dtype=torch.int32, device=device)).to(torch.int8).bitwise_and_(1)
    return bits.view(-1)[:count].mul_(-2).add_(1)


def permutation(key: int, count: int, device: torch.device | str) -> Tensor:
    """Make a random order of 0 ... count - 1, int64 [count], by sorting distinct words. Raises as `uniform_bits`."""
    return uniform_bits(key, count, device).argsort()


def bells(key: int, count: int, device: torch.device | str) -> Tensor:
    """Make nearly Gaussian integers: int32 [count], sums of twelve uniform bytes minus their mean.

    Mean exactly 0, variance exactly 65535 (`BELL_VARIANCE`), symmetric, within -1530 and 1530. Divided by 256 they are
    standard Gaussian except for an excess kurtosis of -0.1000 and tails that end at 5.98 (the distribution functions
    differ by less than 0.0024). Integer sums give the same bits on every device; logarithms and cosines would not.
    Raises as `uniform_bits`.
    """
    total = torch.zeros(count, dtype=torch.int32, device=device)
    bytes_of_pairs = 0x00FF00FF
    for part in range(3):
        words = uniform_bits(_child(key, part + 1), count, device)
        total += words & bytes_of_pairs  # bytes 0 and 2, in half words that six bytes cannot overflow
        total += (words >> 8) & bytes_of_pairs  # bytes 1 and 3
    return (total & 0xFFFF).add_(total >> 16).sub_(BELL_LARGEST)


def _child(key: int, part: int) -> int:
    """Derive a key from a key by SplitMix64's step and finalizer (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    x = (key + (part + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _mix(x: Tensor, scratch: Tensor) -> None:
    """Apply `lowbias32` in place; a mask makes right shifts logical."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(_MASK >> shift))
        if factor is not None:
            x.mul_(_signed(factor))


def _signed(word: int) -> int:
    """The low 32 bits as a signed integer."""
    word &= _MASK
    return word - (word >> 31 << 32)
