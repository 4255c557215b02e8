"""Murmur3, uniforms and Gumbel noise of the sampling contract, in plain torch.

The noise of a token is a function of (seed of the request slot, position, draft step, *target* token id) and of nothing else: no generator
is advanced, so a row draws the same noise in any batch, in any order and in any kernel. `dspark_ops.kernels.gumbel` is the same arithmetic
in Triton.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .guards import flag_error

# Proposal and verification of one position must not share noise: verification hashes the position without this salt.
DRAFT_SALT = 1 << 30

# Rows with a lower temperature are greedy, so that no division by a zero or subnormal temperature ever reaches a key.
MIN_TEMPERATURE = 2.0**-64

# Start of the second hash, which supplies the high word of the FP64 uniform.
HIGH_WORD_START = 0x9E3779B9

# -log(1 - u) = u (1 + u/2 + u^2/3 + ... + u^7/8) below u = 1/4: the coefficients from the highest power down, as FP32 numbers.
SERIES = tuple(struct.unpack("f", struct.pack("f", 1 / n))[0] for n in range(8, 0, -1))


def _word(x: Tensor) -> Tensor:
    """The low 32 bits, in int64: torch lacks much of uint32, and int32 would overflow, which is undefined in the C++ that Inductor makes."""
    return x.to(torch.int64) & 0xFFFFFFFF


def _times(x: Tensor, factor: int) -> Tensor:
    """The product of two words. The signed number with the factor's bits keeps it above -2^63."""
    return _word(x * (factor - (1 << 32) if factor >> 31 else factor))


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return _word(x << bits) | (x >> (32 - bits))


def _absorb(h: Tensor | int, word: Tensor) -> Tensor:
    mixed = _times(_rotate_left(_times(word, 0xCC9E2D51), 15), 0x1B873593)
    return _word(_rotate_left(mixed ^ h, 13) * 5 + 0xE6546B64)


def _finalize(h: Tensor) -> Tensor:
    h = h ^ 16  # the length in bytes of four words
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)


def murmur3(seeds: Tensor, positions: Tensor, token_ids: Tensor, step: Tensor | int, start: int = 0) -> Tensor:
    """Murmur3 x86_32 of (low seed, high seed ^ step, low salted position, low token id), as int64 below 2^32 [*rows, *token_ids.shape]."""
    h = _absorb(start, _word(seeds))
    h = _absorb(h, _word((seeds >> 32) ^ step))
    h = _absorb(h, _word(_word(positions) + (DRAFT_SALT - 1)))
    h = h.reshape(h.shape + (1,) * token_ids.dim())
    return _finalize(_absorb(h, _word(token_ids)))


def _fma(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Fused multiply-add of FP32 tensors: the product is exact in FP64, which leaves the conversion back as the rounding that counts."""
    return (a.double() * b.double() + c).float()


def uniform_log(h: Tensor) -> Tensor:
    """`-log(1 - u)` in FP32 of the uniform u in (0, 1] that the hash bits `h` stand for."""
    # Both halves are exact in FP32, so their sum is the only rounding; 128 hashes round to u = 1, and the bound 2^-24 takes care of them.
    u = (h >> 16).float() * 2.0**-16 + ((h & 0xFFFF).float() + 0.5) * 2.0**-32
    series = torch.full_like(u, SERIES[0])
    for coefficient in SERIES[1:]:
        series = _fma(series, u, coefficient)
    return torch.where(u < 0.25, u * series, -torch.log((1 - u).clamp(min=2.0**-24)))


def uniform_log_fp64(low: Tensor, high: Tensor) -> Tensor:
    """`-log(u)` in FP64 of the uniform u in (0, 1) that the top 53 bits of the two hashes stand for."""
    u = (((high << 21) | (low >> 11)).double() + 0.5) * 2.0**-53
    return -torch.log(u.clamp(max=1 - 2.0**-53))


def log_argument(seeds: Tensor, positions: Tensor, token_ids: Tensor, step: Tensor | int, use_fp64: bool = False) -> Tensor:
    """The argument of the outer logarithm, positive and finite: Gumbel noise is `-log` of it.

    Args: those of `gumbel_noise`. Returns: FP32 (FP64 with `use_fp64`), [*rows, *token_ids.shape].
    """
    low = murmur3(seeds, positions, token_ids, step)
    if use_fp64:
        return uniform_log_fp64(low, murmur3(seeds, positions, token_ids, step, HIGH_WORD_START))
    return uniform_log(low)


def target_ids(vocab_size: int, draft_to_target: Tensor | None, device: torch.device) -> Tensor:
    """The target id of each draft column, int64 [V]: its index, plus its offset where the draft vocabulary is a reduced one."""
    ids = torch.arange(vocab_size, device=device)
    return ids if draft_to_target is None else ids + draft_to_target[:vocab_size]


def block_log_argument(seeds: Tensor, sample_pos: Tensor, idx_mapping: Tensor, token_ids: Tensor, use_fp64: bool) -> Tensor:
    """`log_argument` of all rows and steps of a block, [R, K, V]; inert rows get 1, whose noise is 0."""
    num_slots = seeds.shape[0]
    slots = (idx_mapping[:, None] if idx_mapping.dim() == 1 else idx_mapping).expand(sample_pos.shape)
    live = (slots >= 0) & (slots < num_slots)
    # One slot more than there are, so that a block of inert rows has one to read even where there is none.
    slot_seeds = torch.nn.functional.pad(seeds, (0, 1))[torch.where(live, slots, num_slots)]
    steps = torch.arange(sample_pos.shape[1], dtype=torch.int32, device=seeds.device)
    return torch.where(live[..., None], log_argument(slot_seeds, sample_pos, token_ids, steps, use_fp64), 1.0)


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    return all(m == 1 or n in (1, m) for m, n in zip(reversed(a), reversed(b), strict=False))


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor, *, step: Tensor | int, use_fp64: bool = False) -> Tensor:
    """Gumbel noise of the draft at one step, in plain torch: add it to `logits / temperature` and take the argmax.

    The formula is Gumbel-max sampling with the counter-based noise of vLLM's DSpark speculator (release 0.33): Murmur3 x86_32 over seed,
    draft step, salted position and token id, then `-log(-log(1 - u))`.

    Args:
        seeds: int64 [*rows], seed of each row's request slot; all 64 bits count.
        positions: int32 or int64 [*rows], position of the token that is sampled (`sample_pos`).
        token_ids: int32 or int64 [*ids], **target** ids of the columns, usually `torch.arange(vocab_size)`.
        step: index of the draft step within its block, a number or an int tensor that broadcasts with `seeds`.
        use_fp64: 53-bit uniforms and FP64 logarithms.

    Returns:
        FP32 (FP64 with `use_fp64`) [*rows, *ids], finite for every input.

    Raises:
        TypeError: an argument has another type or dtype than listed.
        ValueError: `positions` or `step` does not broadcast with `seeds`.

    >>> import torch
    >>> seeds, positions = torch.tensor([7, 8]), torch.tensor([100, 100])
    >>> gumbel_noise(seeds, positions, torch.arange(5), step=0).shape
    torch.Size([2, 5])
    """
    for name, x in (("seeds", seeds), ("positions", positions), ("token_ids", token_ids)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if seeds.dtype != torch.int64:
        raise TypeError(f"seeds must be int64 (all 64 bits count), got {seeds.dtype}")
    for name, ids in (("positions", positions), ("token_ids", token_ids), ("step", step)):
        if isinstance(ids, Tensor) and ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    if not isinstance(step, (int, torch.SymInt, Tensor)) or isinstance(step, bool):
        raise TypeError(f"step must be an int or an int tensor, got {type(step).__name__}")
    wrong_type = flag_error(use_fp64)
    if wrong_type is not None:
        raise wrong_type
    for name, ids in (("positions", positions), ("step", step)):
        if isinstance(ids, Tensor) and not _broadcasts(ids.shape, seeds.shape):
            raise ValueError(f"{name} must broadcast with seeds, {tuple(seeds.shape)}, got shape {tuple(ids.shape)}")
    return -torch.log(log_argument(seeds, positions, token_ids, step, use_fp64))
