"""Device functions of the sampling contract: hash, uniform, noise and key. `dspark_ops.noise` is the same arithmetic in plain torch.

Triton and Gluon kernels share them, so nothing here asks for a layout.
"""

import triton
import triton.language as tl

from ..noise import DRAFT_SALT, HIGH_WORD_START, MIN_TEMPERATURE, SERIES

_SALT = tl.constexpr(DRAFT_SALT)
SECOND_HASH = tl.constexpr(HIGH_WORD_START)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_C8, _C7, _C6, _C5, _C4, _C3, _C2, _C1 = (tl.constexpr(c) for c in SERIES)

# Stands for "no token": it loses every comparison for the lowest id.
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _everywhere(x, value: tl.constexpr):
    """`value` in the shape of integers or finite numbers `x`."""
    return tl.where(x == x, value, value)


@triton.jit
def rotate_left(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def premix(word):
    """Murmur3's treatment of a word (its low 32 bits) before the hash absorbs it."""
    return rotate_left(word.to(tl.uint32) * 0xCC9E2D51, 15) * 0x1B873593


@triton.jit
def absorb(h, mixed):
    return rotate_left(h ^ mixed, 13) * 5 + 0xE6546B64


@triton.jit
def finalize(h):
    h ^= 16  # the length in bytes of four words
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def hash_prefix(seed, position, step, START: tl.constexpr):
    """The hash after the three words that all tokens of a row and step share: int64 seed XOR (step << 32), then the salted position."""
    keyed = seed ^ (tl.cast(step, tl.int64) << 32)
    h = absorb(_everywhere(seed, START).to(tl.uint32), premix(keyed))
    h = absorb(h, premix(keyed >> 32))
    return absorb(h, premix(position.to(tl.int64) - 1 + _SALT))


@triton.jit
def uniform_log(low):
    """`-log(1 - u)` in FP32, u = (low >> 16) 2^-16 + ((low & 0xFFFF) + 0.5) 2^-32, whose products are exact.

    Below u = 1/4 a series of fused multiply-adds, else `-log(max(1 - u, 2^-24))`.
    """
    u = (low >> 16).to(tl.float32) * (2.0**-16) + ((low & 0xFFFF).to(tl.float32) + 0.5) * (2.0**-32)
    series = _everywhere(u, _C8)
    series = tl.fma(series, u, _everywhere(u, _C7))
    series = tl.fma(series, u, _everywhere(u, _C6))
    series = tl.fma(series, u, _everywhere(u, _C5))
    series = tl.fma(series, u, _everywhere(u, _C4))
    series = tl.fma(series, u, _everywhere(u, _C3))
    series = tl.fma(series, u, _everywhere(u, _C2))
    series = tl.fma(series, u, _everywhere(u, _C1))
    return tl.where(u < 0.25, u * series, -tl.log(tl.maximum(1.0 - u, 2.0**-24)))


@triton.jit
def uniform_log_fp64(low, high):
    """`-log(u)` in FP64, u = (n + 0.5) 2^-53 of the top 53 bits n of the two hashes, at most 1 - 2^-53."""
    bits = (high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)
    u = (bits.to(tl.float64) + 0.5) * (2.0**-53)
    return -tl.log(tl.minimum(u, 1.0 - 2.0**-53))


@triton.jit
def token_hash(prefix, token):
    return finalize(absorb(prefix, premix(token)))


@triton.jit
def log_argument(low_prefix, high_prefix, token, FP64: tl.constexpr):
    """The argument of the outer logarithm for prefixes and tokens that broadcast; `high_prefix` counts with FP64 only."""
    low = token_hash(low_prefix, token)
    if FP64:
        return uniform_log_fp64(low, token_hash(high_prefix, token))
    else:
        return uniform_log(low)


@triton.jit
def draws_noise(temperature):
    """Whether a row of this temperature is sampled; a lower one or NaN makes it greedy."""
    return temperature >= _MIN_TEMPERATURE


@triton.jit
def greedy_key(logit):
    """The FP32 logit, or -inf for NaN, which must never win."""
    return tl.where(logit == logit, logit, float("-inf"))


@triton.jit
def sampled_key(logit, temperature, argument):
    """`logit / temperature - log(argument)`: the division in FP32 and approximate as Triton's is, the sum in the precision of `argument`.

    The select stands between the division and the sum, and `log` ends in a fused multiply-add, so no compiler can contract the sum: keys do
    not depend on floating-point fusion, nor on whether the argument was computed here or loaded.
    """
    scaled = greedy_key(logit / temperature)
    return scaled.to(argument.dtype) - tl.log(argument)
