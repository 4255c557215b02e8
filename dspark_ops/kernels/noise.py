"""The noise of a whole block, ahead of the logits: it depends on seeds, positions and ids alone, so it can run beside the lm_head."""

import triton
import triton.language as tl

from .gumbel import SECOND_HASH, hash_prefix, log_argument


@triton.jit(do_not_specialize=["num_steps"])
def noise_kernel(
    seeds_ptr,  # [S] int64
    sample_pos_ptr,  # [R, K]
    idx_mapping_ptr,  # [R, K], the second stride 0 where a row has one slot
    token_ids_ptr,  # [V] int64 target ids with MAPPED
    noise_ptr,  # [R, K, V] fp32 or fp64, last stride 1, written
    num_steps,
    vocab_size,
    num_slots,
    seeds_stride,
    pos_stride_r,
    pos_stride_k,
    idx_stride_r,
    idx_stride_k,
    noise_stride_r,
    noise_stride_k,
    MAPPED: tl.constexpr,
    FP64: tl.constexpr,
    LOGARITHM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (r K + i, block) writes the arguments of the outer logarithm of row r and step i (`gumbel.log_argument`); inert rows get 1.

    With LOGARITHM it writes their logarithm, the negated noise, for keys that are summed elsewhere.
    """
    row_step = tl.program_id(0).to(tl.int64)
    row = row_step // num_steps
    step = row_step % num_steps
    slot = tl.load(idx_mapping_ptr + row * idx_stride_r + step * idx_stride_k).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    seed = tl.load(seeds_ptr + slot * seeds_stride, mask=live, other=0)
    position = tl.load(sample_pos_ptr + row * pos_stride_r + step * pos_stride_k, mask=live, other=0)
    low_prefix = hash_prefix(seed, position, step, 0)
    high_prefix = low_prefix
    if FP64:
        high_prefix = hash_prefix(seed, position, step, SECOND_HASH)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    ok = v < vocab_size
    token = v
    if MAPPED:
        token = tl.load(token_ids_ptr + v, mask=ok, other=0)
    argument = log_argument(low_prefix, high_prefix, token, FP64)
    argument = tl.where(live, argument, 1.0)
    if LOGARITHM:
        argument = tl.log(argument)
    tl.store(noise_ptr + row * noise_stride_r + step * noise_stride_k + v, argument, mask=ok)
