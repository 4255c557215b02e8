"""The write of a block's logits to the cache, for logits that were computed by other operations than `step_kernel`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_steps"])
def cache_kernel(
    logits_ptr,  # [R, K, V], last stride 1
    idx_mapping_ptr,  # [R, K], the second stride 0 where a row has one slot
    cache_rows_ptr,  # [S] with COMPACT
    token_ids_ptr,  # [V] int64 target ids with MAPPED
    draft_logits_ptr,  # [rows, >= K, target_vocab_size], written
    num_steps,
    vocab_size,
    num_slots,
    num_cache_rows,
    target_vocab_size,
    logits_stride_r,
    logits_stride_k,
    idx_stride_r,
    idx_stride_k,
    cache_rows_stride,
    draft_stride_row,
    draft_stride_k,
    draft_stride_v,
    COMPACT: tl.constexpr,  # cache_rows_ptr maps slots to rows of the cache
    MAPPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (r K + i, block) copies logits of row r and step i to the row of their slot; nothing for a slot that has none. No arithmetic."""
    row_step = tl.program_id(0).to(tl.int64)
    row = row_step // num_steps
    step = row_step % num_steps
    slot = tl.load(idx_mapping_ptr + row * idx_stride_r + step * idx_stride_k).to(tl.int64)
    written = (slot >= 0) & (slot < num_slots)
    cache_row = slot
    if COMPACT:
        cache_row = tl.load(cache_rows_ptr + slot * cache_rows_stride, mask=written, other=-1).to(tl.int64)
        written &= (cache_row >= 0) & (cache_row < num_cache_rows)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    ok = v < tl.where(written, vocab_size, 0)
    token = v.to(tl.int64)
    if MAPPED:
        token = tl.load(token_ids_ptr + v, mask=ok, other=0)
        ok &= (token >= 0) & (token < target_vocab_size)
    logits = tl.load(logits_ptr + row * logits_stride_r + step * logits_stride_k + v, mask=ok, other=0.0)
    tl.store(draft_logits_ptr + cache_row * draft_stride_row + step * draft_stride_k + token * draft_stride_v, logits, mask=ok)
