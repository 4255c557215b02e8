"""A whole block in one launch, in Gluon for NVIDIA Hopper: a warp streams markov_w2 through shared memory while the others sample."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .gumbel import NO_TOKEN, draws_noise, greedy_key, hash_prefix, log_argument, sampled_key, token_hash, uniform_log

# These names changed after Triton 3.6.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _tile(turn, step, first, streamed, HELD: gl.constexpr):
    """The program's tile at a turn: first those that are streamed, then those held in registers, which begin its range.

    Odd steps stream backwards, so that they begin with what the L2 cache still holds of markov_w2.
    """
    streaming = first + HELD + gl.where(step % 2 == 0, turn, streamed - 1 - turn)
    return gl.where(turn < streamed, streaming, first + turn - streamed)


@gluon.jit
def _stream_weights(
    w2_desc, ring, full, empty, first, streamed, num_steps, BLOCK_V: gl.constexpr, RANK: gl.constexpr, SLOTS: gl.constexpr, HELD: gl.constexpr
):  # fmt: skip
    """The producer's warp: tile after tile into the ring, as its slots come free; it never waits for a token."""
    done = 0
    for held in range(HELD):
        done = _stream_tile(w2_desc, ring, full, empty, first + held, done, BLOCK_V, RANK, SLOTS)
    for step in range(num_steps):
        for turn in range(streamed):
            done = _stream_tile(w2_desc, ring, full, empty, _tile(turn, step, first, streamed, HELD), done, BLOCK_V, RANK, SLOTS)


@gluon.jit
def _stream_tile(w2_desc, ring, full, empty, tile, done, BLOCK_V: gl.constexpr, RANK: gl.constexpr, SLOTS: gl.constexpr):
    slot = done % SLOTS
    mbarrier.wait(empty.index(slot), ((done // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BLOCK_V * RANK * 2)
    _load_tile(w2_desc, [tile * BLOCK_V, 0], full.index(slot), ring.index(slot))
    return done + 1


@gluon.jit
def _release(empty, done, SLOTS: gl.constexpr):
    """Gives the slot of a tile that all consumers have read back to the producer."""
    _barrier()
    mbarrier.arrive(empty.index(done % SLOTS), count=1)
    return done + 1


@gluon.jit
def _wait_until(counter_ptr, target):
    """The first thread of the consumers polls until `target` programs have arrived; a barrier must follow."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 x;
        mov.u32 x, %tid.x;
        setp.ne.u32 p, x, 0;
        @p bra done;
        again:
        ld.acquire.gpu.global.u32 x, [$1];
        setp.lt.u32 p, x, $2;
        @p bra again;
        done:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter_ptr, target],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _packed(key, token):
    """A key and a token in one word: the larger word is the larger key, of equal keys the lower token; 0 is below all."""
    bits = (key + 0.0).to(gl.uint32, bitcast=True)  # -0.0 becomes 0.0
    ordered = gl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)
    return (ordered.to(gl.uint64) << 32) | (NO_TOKEN - token).to(gl.uint64)


@gluon.jit
def _token(packed):
    return NO_TOKEN - (packed & 0xFFFFFFFF).to(gl.int32)


@gluon.jit
def _best_key(packed):
    """The key of a packed word, -inf of 0."""
    ordered = (packed >> 32).to(gl.uint32)
    bits = gl.where(ordered >> 31 == 1, ordered & 0x7FFFFFFF, ~ordered)
    return gl.where(packed == 0, float("-inf"), bits.to(gl.float32, bitcast=True))


@gluon.jit
def _with(best, token, key, v, limit):
    """The better of two keys and its token, of equal keys the lower token; entries from `limit` on are none."""
    better = (v < limit) & ((key > best) | ((key == best) & (v < token)))
    return gl.where(better, key, best), gl.where(better, v, token)


@gluon.jit
def _key(hash_bits, logit, divisor, sampled):
    return gl.where(sampled != 0, sampled_key(logit, divisor, uniform_log(hash_bits)), greedy_key(logit))


@gluon.jit
def _with_eight(
    h0, h1, h2, h3, h4, h5, h6, h7, l0, l1, l2, l3, l4, l5, l6, l7, v0, v1, v2, v3, v4, v5, v6, v7,
    d0, d1, d2, d3, d4, d5, d6, d7, s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, n4, n5, n6, n7,
    m0, m1, m2, m3, m4, m5, m6, m7, b0, b1, b2, b3, b4, b5, b6, b7, t0, t1, t2, t3, t4, t5, t6, t7,
):  # fmt: skip
    """Eight entries of a row: if one of them may win, the better of theirs and what was best, in all eight places.

    The arguments are hashes, logits and ids; then, the same in all places, divisor, whether the row is sampled, the end of the vocabulary,
    whether one may win, and the best key with its token.
    """
    if m0:
        b0, t0 = _with(b0, t0, _key(h0, l0, d0, s0), v0, n0)
        b0, t0 = _with(b0, t0, _key(h1, l1, d0, s0), v1, n0)
        b0, t0 = _with(b0, t0, _key(h2, l2, d0, s0), v2, n0)
        b0, t0 = _with(b0, t0, _key(h3, l3, d0, s0), v3, n0)
        b0, t0 = _with(b0, t0, _key(h4, l4, d0, s0), v4, n0)
        b0, t0 = _with(b0, t0, _key(h5, l5, d0, s0), v5, n0)
        b0, t0 = _with(b0, t0, _key(h6, l6, d0, s0), v6, n0)
        b0, t0 = _with(b0, t0, _key(h7, l7, d0, s0), v7, n0)
    return b0, b0, b0, b0, b0, b0, b0, b0, t0, t0, t0, t0, t0, t0, t0, t0


@gluon.jit
def _eights(x):
    return x.reshape([x.shape[0] // 8, 8, x.shape[1]])


@gluon.jit
def _to_entries(x, like, LOGITS: gl.constexpr):
    """A value for eight entries in the places of all of them."""
    return gl.convert_layout((x[:, None, :] + _eights(like)).reshape(like.shape), LOGITS)


@gluon.jit
def _screened(
    logit, prefix, v, divisor, inverse, sampled, row_ok, vocab_size, row_best, best, best_token, LOGITS: gl.constexpr, EIGHTS: gl.constexpr
):
    """Updates the best keys, [BLOCK_V / 8, BLOCK_R], by the entries of a tile that may win: for the others no logarithm is computed.

    A key is at most logit / T - log(hash 2^-32): the argument of the outer logarithm is at least u, and u at least hash 2^-32. So eight entries
    cannot win where their largest logit with their smallest hash stays below a key of the row that is known, be it this program's or another's.
    The slack covers all rounding, that of the exact key and of this bound: 2^-20 of the terms, and 0.01, many units in the last place of
    logarithms of at most 32. A bound that is NaN lets the keys be computed. Greedy rows compare logits.
    """
    row: gl.constexpr = gl.SliceLayout(0, EIGHTS)
    known = gl.maximum(best, gl.convert_layout(_best_key(row_best), row)[None, :])
    hashes = token_hash(prefix[None, :], v[:, None])
    largest = gl.convert_layout(gl.max(_eights(logit), axis=1), EIGHTS)
    smallest = gl.convert_layout(gl.min(_eights(hashes), axis=1), EIGHTS).to(gl.float32)
    scaled = largest * gl.convert_layout(inverse, row)[None, :]
    slack = (gl.abs(scaled) + gl.abs(known)) * (2.0**-20) + 0.01
    below = gl.where(
        gl.convert_layout(sampled, row)[None, :],
        smallest > gl.exp2((scaled - known + slack) * 1.4426950408889634 + 32.0),
        largest < known,
    )
    may_win = gl.convert_layout(row_ok, row)[None, :] & (below == 0)
    none = gl.zeros_like(logit)
    no_token = none.to(gl.int32)
    best, best_token = gl.map_elementwise(
        _with_eight,
        hashes,
        logit,
        v[:, None] + no_token,
        divisor[None, :] + none,
        sampled.to(gl.int32)[None, :] + no_token,
        vocab_size + no_token,
        _to_entries(may_win.to(gl.int32), no_token, LOGITS),
        _to_entries(best, none, LOGITS),
        _to_entries(best_token, no_token, LOGITS),
        pack=8,
    )
    return (
        gl.convert_layout(gl.max(_eights(best), axis=1), EIGHTS),
        gl.convert_layout(gl.min(_eights(best_token), axis=1), EIGHTS),
    )


@gluon.jit
def _finish_tile(
    dot, empty, done, base, v, step, vocab_size, rows, row_ok, cache_ptr, cache_rows, written, cache_stride_row, cache_stride_k, sampled,
    divisor, inverse, prefix, row_best, noise_ptr, noise_stride_r, noise_stride_k, keys_ptr, num_requests, best, best_token,
    SAMPLED: gl.constexpr, NOISE_AHEAD: gl.constexpr, CACHED: gl.constexpr, WRITE_KEYS: gl.constexpr, SCREENED: gl.constexpr,
    BLOCK_R: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr, RELEASE: gl.constexpr, PRODUCT: gl.constexpr, LOGITS: gl.constexpr,
    EIGHTS: gl.constexpr,
):  # fmt: skip
    """From the products of a tile to its logits in the cache and its keys, of which the best of each element is kept."""
    logit_dtype: gl.constexpr = base.dtype
    if BLOCK_R == 1:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, PRODUCT))
        only = gl.sum(gl.where(column[None, :] == 0, dot, 0.0), axis=1)
        bias = gl.convert_layout(only.to(logit_dtype), gl.SliceLayout(1, LOGITS))[:, None]
    else:
        bias = gl.convert_layout(dot.to(logit_dtype), LOGITS)
    if RELEASE:
        _release(empty, done, SLOTS)
    logit = (base.to(gl.float32) + bias.to(gl.float32)).to(logit_dtype)
    inside = (v < vocab_size)[:, None] & row_ok[None, :]
    if CACHED:
        gl.store(
            cache_ptr + cache_rows[None, :] * cache_stride_row + step * cache_stride_k + v[:, None],
            logit,
            mask=inside & written[None, :],
            cache_modifier=".cs",  # nobody reads it before the L2 cache is needed for markov_w2
        )
    if SCREENED:
        best, best_token = _screened(
            logit.to(gl.float32), prefix, v, divisor, inverse, sampled, row_ok, vocab_size, row_best, best, best_token, LOGITS, EIGHTS
        )  # fmt: skip
    else:
        key = greedy_key(logit.to(gl.float32))
        if SAMPLED:
            if NOISE_AHEAD:
                argument = gl.load(
                    noise_ptr + rows[None, :] * noise_stride_r + step * noise_stride_k + v[:, None],
                    mask=inside & sampled[None, :],
                    other=1.0,
                    eviction_policy="evict_first",
                )
                noisy = sampled_key(logit.to(gl.float32), divisor[None, :], argument)
            else:
                noisy = sampled_key(logit.to(gl.float32), divisor[None, :], log_argument(prefix[None, :], prefix[None, :], v[:, None], False))
            key = gl.where(sampled[None, :], noisy, key)
        if WRITE_KEYS:
            gl.store(keys_ptr + (step * num_requests + rows)[None, :] * vocab_size + v[:, None], key, mask=inside)
        better = inside & ((key > best) | ((key == best) & (v[:, None] < best_token)))
        best = gl.where(better, key, best)
        best_token = gl.where(better, v[:, None], best_token)
    return best, best_token


@gluon.jit
def _load_base(base_logits_ptr, tile, step, rows, row_ok, vocab_size, stride_r, stride_k, BLOCK_V: gl.constexpr, LOGITS: gl.constexpr):
    v = tile * BLOCK_V + gl.arange(0, BLOCK_V, gl.SliceLayout(1, LOGITS))
    return gl.load(
        base_logits_ptr + rows[None, :] * stride_r + gl.to_tensor(step).to(gl.int64) * stride_k + v[:, None],
        mask=(v < vocab_size)[:, None] & row_ok[None, :],
        other=0.0,
        eviction_policy="evict_first",  # it is read once; the L2 cache is needed for markov_w2
    )


@gluon.jit
def _products(weights, embeddings, BLOCK_V: gl.constexpr, COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):
    """Products of a tile of weights, in shared memory or registers, with all embeddings."""
    zero = gl.full([BLOCK_V, COLUMNS], 0.0, gl.float32, PRODUCT)
    dot = warpgroup_mma(weights, embeddings.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[dot])


@gluon.jit
def _sample(
    ring, full, empty, embeddings, first, streamed, base_logits_ptr, anchor_ids_ptr, w1_ptr, temperature_ptr, seeds_ptr, sample_pos_ptr,
    idx_mapping_ptr, draft_logits_ptr, cache_rows_ptr, noise_ptr, tokens_ptr, best_ptr, arrived_ptr, keys_ptr, num_requests, num_steps,
    vocab_size, target_vocab_size, num_slots, num_cache_rows, base_stride_r, base_stride_k, anchor_stride, w1_stride, temperature_stride,
    seeds_stride, pos_stride_r, pos_stride_k, idx_stride_r, idx_stride_k, draft_stride_row, draft_stride_k, cache_rows_stride, noise_stride_r,
    noise_stride_k, RANK: gl.constexpr, PADDED_RANK: gl.constexpr, SAMPLED: gl.constexpr, NOISE_AHEAD: gl.constexpr, CACHED: gl.constexpr,
    COMPACT: gl.constexpr, WRITE_KEYS: gl.constexpr, SCREENED: gl.constexpr, BLOCK_R: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_V: gl.constexpr, SLOTS: gl.constexpr, HELD: gl.constexpr, PRODUCT: gl.constexpr, LOGITS: gl.constexpr, EIGHTS: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    """The consumers: gather the embeddings, multiply each tile that arrives, write the logits, keep the best keys, agree on the tokens."""
    EACH: gl.constexpr = 8 if SCREENED else 1
    BEST: gl.constexpr = EIGHTS if SCREENED else LOGITS
    programs = gl.num_programs(0)
    entries = gl.arange(0, BLOCK_V, gl.SliceLayout(1, LOGITS))
    short_rows = gl.arange(0, BLOCK_R, gl.SliceLayout(0, LOGITS))
    row_ok = short_rows < num_requests
    rows = short_rows.to(gl.int64)
    gathered = gl.arange(0, COLUMNS, gl.SliceLayout(1, GATHER))
    gathered_ok = gathered < gl.minimum(num_requests, BLOCK_R)
    k = gl.arange(0, PADDED_RANK, gl.SliceLayout(0, GATHER))
    previous = gl.load(anchor_ids_ptr + gathered.to(gl.int64) * anchor_stride, mask=gathered_ok, other=-1).to(gl.int64)

    done = 0
    held = ()
    for i in gl.static_range(HELD):
        mbarrier.wait(full.index(i % SLOTS), i // SLOTS)
        held = held + (ring.index(i % SLOTS).load(gl.DotOperandLayout(0, PRODUCT, 2)),)  # noqa: RUF005  # Triton has no such unpacking
        done = _release(empty, done, SLOTS)

    # Base logits are loaded a tile ahead of their use, across steps too: they depend on no token.
    turns = streamed + HELD
    tile = _tile(0, 0, first, streamed, HELD)
    next_base = _load_base(base_logits_ptr, tile, 0, rows, row_ok, vocab_size, base_stride_r, base_stride_k, BLOCK_V, LOGITS)
    for step in range(num_steps):
        long_step = gl.to_tensor(step).to(gl.int64)
        known = (previous >= 0) & (previous < target_vocab_size)
        embedding = gl.load(w1_ptr + previous[:, None] * w1_stride + k[None, :], mask=known[:, None] & (k < RANK)[None, :], other=0.0)
        slots = rows
        sampled = row_ok
        divisor = (short_rows * 0 + 1).to(gl.float32)
        inverse = divisor
        prefix = short_rows.to(gl.uint32)
        if SAMPLED or CACHED:
            slots = gl.load(idx_mapping_ptr + rows * idx_stride_r + step * idx_stride_k, mask=row_ok, other=-1).to(gl.int64)
        live = (slots >= 0) & (slots < num_slots)
        if SAMPLED:
            temperature = gl.load(temperature_ptr + slots * temperature_stride, mask=live, other=0.0)
            sampled = draws_noise(temperature)
            divisor = gl.where(sampled, temperature, 1.0)
            inverse = 1.0 / divisor
            if not NOISE_AHEAD:
                seeds = gl.load(seeds_ptr + slots * seeds_stride, mask=sampled, other=0)
                positions = gl.load(sample_pos_ptr + rows * pos_stride_r + step * pos_stride_k, mask=sampled, other=0)
                prefix = hash_prefix(seeds, positions, step, 0)
        cache_rows = slots
        written = live
        if COMPACT:
            cache_rows = gl.load(cache_rows_ptr + slots * cache_rows_stride, mask=live, other=-1).to(gl.int64)
            written = live & (cache_rows >= 0) & (cache_rows < num_cache_rows)
        embeddings.store(embedding)
        fence_async_shared()
        _barrier()

        best = gl.full([BLOCK_V // EACH, BLOCK_R], float("-inf"), gl.float32, BEST)
        best_token = gl.full([BLOCK_V // EACH, BLOCK_R], NO_TOKEN, gl.int32, BEST)
        row_best = gl.full([BLOCK_R], 0, gl.uint64, gl.SliceLayout(0, LOGITS))
        for turn in range(streamed):
            base = next_base
            v = tile * BLOCK_V + entries
            last = turn + 1 == turns
            next_step = gl.where(last, gl.minimum(step + 1, num_steps - 1), step)
            tile = _tile(gl.where(last, 0, turn + 1), next_step, first, streamed, HELD)
            next_base = _load_base(base_logits_ptr, tile, next_step, rows, row_ok, vocab_size, base_stride_r, base_stride_k, BLOCK_V, LOGITS)
            mbarrier.wait(full.index(done % SLOTS), (done // SLOTS) & 1)
            dot = _products(ring.index(done % SLOTS), embeddings, BLOCK_V, COLUMNS, PRODUCT)
            best, best_token = _finish_tile(
                dot, empty, done, base, v, long_step, vocab_size, rows, row_ok, draft_logits_ptr, cache_rows, written, draft_stride_row,
                draft_stride_k, sampled, divisor, inverse, prefix, row_best, noise_ptr, noise_stride_r, noise_stride_k, keys_ptr, num_requests,
                best, best_token, SAMPLED, NOISE_AHEAD, CACHED, WRITE_KEYS, SCREENED, BLOCK_R, COLUMNS, SLOTS, True, PRODUCT, LOGITS, EIGHTS,
            )  # fmt: skip
            done += 1
            if SCREENED:
                # What other programs have found screens better than what this one has. It arrives while the next tile is multiplied.
                if turn == 0:
                    packed = gl.convert_layout(gl.max(_packed(best, best_token), axis=0), gl.SliceLayout(0, LOGITS))
                    gl.atomic_max(best_ptr + step * BLOCK_R + short_rows, packed, mask=row_ok, sem="relaxed", scope="gpu")
                if turn < 4:
                    row_best = gl.load(best_ptr + step * BLOCK_R + short_rows, mask=row_ok, other=0, volatile=True)
        for i in gl.static_range(HELD):
            base = next_base
            v = tile * BLOCK_V + entries
            if i + 1 < HELD:
                next_step = step
                tile = first + i + 1
            else:
                next_step = gl.minimum(step + 1, num_steps - 1)
                tile = _tile(0, next_step, first, streamed, HELD)
            next_base = _load_base(base_logits_ptr, tile, next_step, rows, row_ok, vocab_size, base_stride_r, base_stride_k, BLOCK_V, LOGITS)
            dot = _products(held[i], embeddings, BLOCK_V, COLUMNS, PRODUCT)
            best, best_token = _finish_tile(
                dot, empty, done, base, v, long_step, vocab_size, rows, row_ok, draft_logits_ptr, cache_rows, written, draft_stride_row,
                draft_stride_k, sampled, divisor, inverse, prefix, row_best, noise_ptr, noise_stride_r, noise_stride_k, keys_ptr, num_requests,
                best, best_token, SAMPLED, NOISE_AHEAD, CACHED, WRITE_KEYS, SCREENED, BLOCK_R, COLUMNS, SLOTS, False, PRODUCT, LOGITS, EIGHTS,
            )  # fmt: skip

        packed = gl.convert_layout(gl.max(_packed(best, best_token), axis=0), gl.SliceLayout(0, LOGITS))
        gl.atomic_max(best_ptr + step * BLOCK_R + short_rows, packed, mask=row_ok, sem="relaxed", scope="gpu")
        _barrier()
        if step + 1 < num_steps:
            gl.atomic_add(arrived_ptr, 1, sem="release", scope="gpu")
            _wait_until(arrived_ptr, programs * (step + 1))
            _barrier()
            previous = _token(gl.load(best_ptr + step * BLOCK_R + gathered, mask=gathered_ok, other=0, volatile=True)).to(gl.int64)
            if gl.program_id(0) == 0:
                gl.store(tokens_ptr + gathered * num_steps + step, previous, mask=gathered_ok)
        elif gl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == programs * num_steps - 1:
            # The last of all programs: nobody reads the scratch any more, so it can be made ready for the next launch.
            _barrier()
            previous = _token(gl.load(best_ptr + step * BLOCK_R + gathered, mask=gathered_ok, other=0, volatile=True)).to(gl.int64)
            gl.store(tokens_ptr + gathered * num_steps + step, previous, mask=gathered_ok)
            _barrier()
            for done_step in range(num_steps):
                gl.store(best_ptr + done_step * BLOCK_R + gathered, gl.zeros_like(gathered).to(gl.uint64), mask=gathered_ok)
            gl.store(arrived_ptr, 0)


@gluon.jit(do_not_specialize=["num_requests", "num_steps"])
def block_kernel(
    w2_desc,  # [V, RANK], tiles of [BLOCK_V, PADDED_RANK]; what lies outside is read as zero
    base_logits_ptr,  # [R, K, >= V], last stride 1
    anchor_ids_ptr,  # [R]
    w1_ptr,  # [V_target, RANK], last stride 1
    temperature_ptr,  # [S] fp32
    seeds_ptr,  # [S] int64
    sample_pos_ptr,  # [R, K]
    idx_mapping_ptr,  # [R, K], the second stride 0 where a row has one slot
    draft_logits_ptr,  # [rows, >= K, >= V], last stride 1, written
    cache_rows_ptr,  # [S]
    noise_ptr,  # [R, K, >= V] argument of the outer logarithm, last stride 1
    tokens_ptr,  # [R, K] int64, contiguous, written
    best_ptr,  # [K, BLOCK_R] uint64, zero before and after
    arrived_ptr,  # uint32, zero before and after
    keys_ptr,  # [K, R, V], written with WRITE_KEYS
    num_requests,  # at most BLOCK_R
    num_steps,
    vocab_size,
    target_vocab_size,
    num_slots,
    num_cache_rows,
    base_stride_r,
    base_stride_k,
    anchor_stride,
    w1_stride,
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
    RANK: gl.constexpr,
    PADDED_RANK: gl.constexpr,  # a power of two of at least 64
    SAMPLED: gl.constexpr,  # rows may have a temperature
    NOISE_AHEAD: gl.constexpr,  # noise_ptr holds the noise, else it is hashed here
    CACHED: gl.constexpr,  # draft_logits_ptr is written
    COMPACT: gl.constexpr,  # cache_rows_ptr maps slots to rows of the cache
    WRITE_KEYS: gl.constexpr,
    BLOCK_R: gl.constexpr,  # 1 or a power of two of at least 8
    BLOCK_V: gl.constexpr,  # vocabulary entries of a tile
    SCREENED: gl.constexpr,  # logarithms only for keys that may win
    SLOTS: gl.constexpr,  # tiles of markov_w2 in shared memory
    HELD: gl.constexpr,  # tiles that stay in registers from step to step
    num_warps: gl.constexpr,
):
    """Program p owns a contiguous range of tiles of BLOCK_V vocabulary entries, for all rows and steps; all programs must run at once.

    Arithmetic: that of `step_kernel`, with products by wgmma. Per step the programs' best keys meet in 64-bit atomic maxima (`_packed`), and
    a counter tells that all have arrived: writes before a program's release are seen by who acquires the full count, so the maxima are final.
    The counter only grows within a launch; the last program to arrive at the last step sets scratch back to zero.
    """
    COLUMNS: gl.constexpr = 8 if BLOCK_R == 1 else BLOCK_R  # wgmma multiplies 8 at least
    ACROSS_R: gl.constexpr = num_warps * 16 // BLOCK_V
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[BLOCK_V // 16, ACROSS_R], instr_shape=[16, COLUMNS // ACROSS_R, 16]
    )
    # Entries of a row lie together, up to 8 a thread: base logits and cache are read and written 16 bytes at a time.
    EACH: gl.constexpr = 1 if BLOCK_R == 1 else min(8, BLOCK_V * BLOCK_R // (32 * num_warps))
    ACROSS: gl.constexpr = min(32, BLOCK_V // EACH)
    DOWN: gl.constexpr = num_warps if BLOCK_R == 1 else BLOCK_V // (EACH * ACROSS)
    LOGITS: gl.constexpr = gl.BlockedLayout([EACH, 1], [ACROSS, 32 // ACROSS], [DOWN, num_warps // DOWN], [0, 1])
    EIGHTS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8, 1], [ACROSS, 1, 32 // ACROSS], [DOWN, 1, num_warps // DOWN], [1, 0, 2]))
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [256 // min(256, PADDED_RANK), min(32, PADDED_RANK // 8)], [num_warps, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weight_dtype: gl.constexpr = w1_ptr.dtype.element_ty

    tiles = (vocab_size + BLOCK_V - 1) // BLOCK_V
    program = gl.program_id(0)
    first = tiles * program // gl.num_programs(0)
    # A range shorter than what is held reaches into the next program's, which then computes the same.
    streamed = gl.maximum(tiles * (program + 1) // gl.num_programs(0) - first - HELD, 0)

    ring = gl.allocate_shared_memory(weight_dtype, [SLOTS, BLOCK_V, PADDED_RANK], w2_desc.layout)
    embeddings = gl.allocate_shared_memory(weight_dtype, [COLUMNS, PADDED_RANK], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (
                _sample,
                (
                    ring, full, empty, embeddings, first, streamed, base_logits_ptr, anchor_ids_ptr, w1_ptr, temperature_ptr, seeds_ptr,
                    sample_pos_ptr, idx_mapping_ptr, draft_logits_ptr, cache_rows_ptr, noise_ptr, tokens_ptr, best_ptr, arrived_ptr, keys_ptr,
                    num_requests, num_steps, vocab_size, target_vocab_size, num_slots, num_cache_rows, base_stride_r, base_stride_k,
                    anchor_stride, w1_stride, temperature_stride, seeds_stride, pos_stride_r, pos_stride_k, idx_stride_r, idx_stride_k,
                    draft_stride_row, draft_stride_k, cache_rows_stride, noise_stride_r, noise_stride_k, RANK, PADDED_RANK, SAMPLED,
                    NOISE_AHEAD, CACHED, COMPACT, WRITE_KEYS, SCREENED, BLOCK_R, COLUMNS, BLOCK_V, SLOTS, HELD, PRODUCT, LOGITS,
                    EIGHTS, GATHER,
                ),
            ),
            (_stream_weights, (w2_desc, ring, full, empty, first, streamed, num_steps, BLOCK_V, PADDED_RANK, SLOTS, HELD)),
        ],
        [1],
        [24],
    )  # fmt: skip
