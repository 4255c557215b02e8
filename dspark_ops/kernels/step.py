"""One draft step in two launches: `step_kernel` corrects the logits and keeps each program's best key, `select_kernel` picks the tokens."""

import triton
import triton.language as tl

from .gumbel import NO_TOKEN, SECOND_HASH, draws_noise, greedy_key, hash_prefix, log_argument, sampled_key


@triton.jit
def _embedding(w1_ptr, w1_stride, previous, known, k):
    """[BLOCK_K, BLOCK_R] columns of embeddings; zero where the previous token is not one of the vocabulary."""
    return tl.load(w1_ptr + previous[None, :] * w1_stride + k[:, None], mask=known[None, :], other=0.0)


@triton.jit(do_not_specialize=["step", "num_requests"])
def step_kernel(
    base_logits_ptr,  # [R, K, >= V], last stride 1
    anchor_ids_ptr,  # [R]
    w1_ptr,  # [V_target, RANK], last stride 1
    w2_ptr,  # [>= V, RANK], last stride 1
    temperature_ptr,  # [S] fp32
    seeds_ptr,  # [S] int64
    sample_pos_ptr,  # [R, K]
    idx_mapping_ptr,  # [R, K], the second stride 0 where a row has one slot
    draft_logits_ptr,  # [rows, >= K, >= V], last stride 1, written
    cache_rows_ptr,  # [S]
    noise_ptr,  # [R, K, >= V] argument of the outer logarithm, last stride 1
    tokens_ptr,  # [R, K] int64, contiguous; column step - 1 is read
    best_key_ptr,  # [R, programs], written
    best_token_ptr,  # [R, programs] int32, written
    keys_ptr,  # [R, V], written with WRITE_KEYS
    num_requests,
    num_steps,
    step,
    vocab_size,
    target_vocab_size,
    num_slots,
    num_cache_rows,
    base_stride_r,
    base_stride_k,
    anchor_stride,
    w1_stride,
    w2_stride,
    temperature_stride,
    seeds_stride,
    pos_stride_r,
    pos_stride_k,
    idx_stride_r,
    idx_stride_k,
    draft_stride_row,
    draft_stride_k,
    cache_rows_stride,
    noise_stride_r,
    noise_stride_k,
    RANK: tl.constexpr,
    SAMPLED: tl.constexpr,  # rows may have a temperature
    NOISE_AHEAD: tl.constexpr,  # noise_ptr holds the noise, else it is hashed here
    CACHED: tl.constexpr,  # draft_logits_ptr is written
    COMPACT: tl.constexpr,  # cache_rows_ptr maps slots to rows of the cache
    FP64: tl.constexpr,
    WRITE_KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a divisor of RANK
    TILES: tl.constexpr,  # tiles of BLOCK_V entries a program owns
):
    """Program (rows, entries) of one step: BLOCK_R rows by TILES x BLOCK_V vocabulary entries.

    Arithmetic: the dot product on tensor cores with FP32 accumulation (FP32 weights: full FP32 products), rounded once to the dtype of the
    logits; one FP32 add with the base logit, rounded to that dtype; that value is stored and enters the key (`gumbel.sampled_key`). NaN keys
    count as -inf. Ties keep the lowest token id: a program visits its entries in ascending order and compares strictly.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < num_requests
    rows = rows.to(tl.int64)
    # Odd steps walk the vocabulary backwards, so that they begin with the part of markov_w2 that is still in the L2 cache.
    program = tl.program_id(1)
    if step % 2 == 1:
        program = tl.num_programs(1) - 1 - program

    if step == 0:
        previous = tl.load(anchor_ids_ptr + rows * anchor_stride, mask=row_ok, other=-1).to(tl.int64)
    else:
        previous = tl.load(tokens_ptr + rows * num_steps + step - 1, mask=row_ok, other=-1)
    known = (previous >= 0) & (previous < target_vocab_size)

    if SAMPLED or CACHED:
        slots = tl.load(idx_mapping_ptr + rows * idx_stride_r + step * idx_stride_k, mask=row_ok, other=-1).to(tl.int64)
        live = (slots >= 0) & (slots < num_slots)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + slots * temperature_stride, mask=live, other=0.0)
        sampled = draws_noise(temperature)
        if not NOISE_AHEAD:
            seeds = tl.load(seeds_ptr + slots * seeds_stride, mask=sampled, other=0)
            positions = tl.load(sample_pos_ptr + rows * pos_stride_r + step * pos_stride_k, mask=sampled, other=0)
            low_prefix = hash_prefix(seeds, positions, step, 0)[None, :]
            high_prefix = low_prefix
            if FP64:
                high_prefix = hash_prefix(seeds, positions, step, SECOND_HASH)[None, :]
    if CACHED:
        cache_rows = slots
        written = live
        if COMPACT:
            cache_rows = tl.load(cache_rows_ptr + slots * cache_rows_stride, mask=live, other=-1).to(tl.int64)
            written = live & (cache_rows >= 0) & (cache_rows < num_cache_rows)

    k = tl.arange(0, BLOCK_K)
    if BLOCK_K == RANK:
        embedding = _embedding(w1_ptr, w1_stride, previous, known, k)
    key_dtype: tl.constexpr = best_key_ptr.dtype.element_ty
    logit_dtype: tl.constexpr = base_logits_ptr.dtype.element_ty
    first = program * (TILES * BLOCK_V) + tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V, BLOCK_R], float("-inf"), key_dtype)
    best_token = tl.where(first < vocab_size, first, NO_TOKEN)[:, None] + tl.zeros([BLOCK_V, BLOCK_R], tl.int32)
    for tile in range(TILES):
        v = first + tile * BLOCK_V
        v_ok = v < vocab_size
        w2_ptrs = w2_ptr + v.to(tl.int64)[:, None] * w2_stride + k[None, :]
        if BLOCK_K == RANK:
            w2 = tl.load(w2_ptrs, mask=v_ok[:, None], other=0.0)
            dot = tl.dot(w2, embedding, input_precision="ieee")
        else:
            dot = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
            for k0 in range(0, RANK, BLOCK_K):
                w2 = tl.load(w2_ptrs + k0, mask=v_ok[:, None], other=0.0)
                dot = tl.dot(w2, _embedding(w1_ptr, w1_stride, previous, known, k0 + k), dot, input_precision="ieee")
        inside = v_ok[:, None] & row_ok[None, :]
        base = tl.load(
            base_logits_ptr + rows[None, :] * base_stride_r + tl.cast(step, tl.int64) * base_stride_k + v[:, None],
            mask=inside,
            other=0.0,
        )
        bias = dot.to(logit_dtype)
        # A plain addition would be merged into the product where nothing is rounded between; times one it is the same addition.
        logit = tl.fma(bias.to(tl.float32), tl.full(bias.shape, 1.0, tl.float32), base.to(tl.float32)).to(logit_dtype)
        if CACHED:
            tl.store(
                draft_logits_ptr + cache_rows[None, :] * draft_stride_row + tl.cast(step, tl.int64) * draft_stride_k + v[:, None],
                logit,
                mask=inside & written[None, :],
            )
        key = greedy_key(logit.to(tl.float32)).to(key_dtype)
        if SAMPLED:
            if NOISE_AHEAD:
                argument = tl.load(
                    noise_ptr + rows[None, :] * noise_stride_r + tl.cast(step, tl.int64) * noise_stride_k + v[:, None],
                    mask=inside & sampled[None, :],
                    other=1.0,
                )
            else:
                argument = log_argument(low_prefix, high_prefix, v[:, None], FP64)
            divisor = tl.where(sampled, temperature, 1.0)[None, :]
            key = tl.where(sampled[None, :], sampled_key(logit.to(tl.float32), divisor, argument), key)
        if WRITE_KEYS:
            tl.store(keys_ptr + rows[None, :] * vocab_size + v[:, None], key, mask=inside)
        better = inside & (key > best)
        best = tl.where(better, key, best)
        best_token = tl.where(better, v[:, None], best_token)

    row_best = tl.max(best, axis=0)
    row_token = tl.min(tl.where(best == row_best[None, :], best_token, NO_TOKEN), axis=0)
    slot = rows * tl.num_programs(1) + program
    tl.store(best_key_ptr + slot, row_best, mask=row_ok)
    tl.store(best_token_ptr + slot, row_token, mask=row_ok)


@triton.jit(do_not_specialize=["step"])
def select_kernel(
    best_key_ptr,  # [R, programs]
    best_token_ptr,  # [R, programs] int32
    tokens_ptr,  # [R, K] int64, contiguous; column step is written
    num_programs,
    num_steps,
    step,
    BLOCK: tl.constexpr,
):
    """Program r takes the largest of row r's program maxima; equal keys give the lowest token id. No arithmetic."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), best_key_ptr.dtype.element_ty)
    best_token = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for start in range(0, num_programs, BLOCK):
        program = start + tl.arange(0, BLOCK)
        ok = program < num_programs
        key = tl.load(best_key_ptr + row * num_programs + program, mask=ok, other=float("-inf"))
        token = tl.load(best_token_ptr + row * num_programs + program, mask=ok, other=NO_TOKEN)
        better = (key > best) | ((key == best) & (token < best_token))
        best = tl.where(better, key, best)
        best_token = tl.where(better, token, best_token)
    row_best = tl.max(best, axis=0)
    token = tl.min(tl.where(best == row_best, best_token, NO_TOKEN), axis=0)
    tl.store(tokens_ptr + row * num_steps + step, token.to(tl.int64))
