"""A whole block in one launch, in Gluon for NVIDIA Hopper: a warp streams markov_w2 through shared memory while the others sample."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .gumbel import NO_TOKEN, draws_noise, greedy_key, hash_prefix, log_argument, sampled_key

# The name changed after Triton 3.6.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _tile(turn, step, first, count):
    """The program's tile at a turn. Odd steps walk backwards, so that they begin with what the L2 cache still holds of markov_w2."""
    return first + gl.where(step % 2 == 0, turn, count - 1 - turn)


@gluon.jit
def _stream_weights(w2_desc, ring, full, empty, first, count, num_steps, BLOCK_V: gl.constexpr, RANK: gl.constexpr, SLOTS: gl.constexpr):
    """The producer's warp: tile after tile into the ring, as its slots come free; it never waits for a token."""
    done = 0
    for step in range(num_steps):
        for turn in range(count):
            slot = done % SLOTS
            mbarrier.wait(empty.index(slot), ((done // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), BLOCK_V * RANK * 2)
            tma.async_copy_global_to_shared(w2_desc, [_tile(turn, step, first, count) * BLOCK_V, 0], full.index(slot), ring.index(slot))
            done += 1


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
def _sample(
    ring, full, empty, embeddings, first, count, base_logits_ptr, anchor_ids_ptr, w1_ptr, temperature_ptr, seeds_ptr, sample_pos_ptr,
    idx_mapping_ptr, draft_logits_ptr, cache_rows_ptr, noise_ptr, tokens_ptr, best_ptr, arrived_ptr, keys_ptr, num_requests, num_steps,
    vocab_size, target_vocab_size, num_slots, num_cache_rows, base_stride_r, base_stride_k, anchor_stride, w1_stride, temperature_stride,
    seeds_stride, pos_stride_r, pos_stride_k, idx_stride_r, idx_stride_k, draft_stride_row, draft_stride_k, cache_rows_stride, noise_stride_r,
    noise_stride_k, RANK: gl.constexpr, PADDED_RANK: gl.constexpr, SAMPLED: gl.constexpr, NOISE_AHEAD: gl.constexpr, CACHED: gl.constexpr,
    COMPACT: gl.constexpr, WRITE_KEYS: gl.constexpr, BLOCK_R: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_V: gl.constexpr, SLOTS: gl.constexpr,
    PRODUCT: gl.constexpr, LOGITS: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The consumers: gather the embeddings, multiply each tile that arrives, write the logits, keep the best keys, agree on the tokens."""
    logit_dtype: gl.constexpr = base_logits_ptr.dtype.element_ty
    programs = gl.num_programs(0)
    entries = gl.arange(0, BLOCK_V, gl.SliceLayout(1, LOGITS))
    rows = gl.arange(0, BLOCK_R, gl.SliceLayout(0, LOGITS))
    row_ok = rows < num_requests
    long_rows = rows.to(gl.int64)
    gathered = gl.arange(0, COLUMNS, gl.SliceLayout(1, GATHER))
    gathered_ok = gathered < gl.minimum(num_requests, BLOCK_R)
    k = gl.arange(0, PADDED_RANK, gl.SliceLayout(0, GATHER))
    previous = gl.load(anchor_ids_ptr + gathered.to(gl.int64) * anchor_stride, mask=gathered_ok, other=-1).to(gl.int64)

    # Base logits are loaded a tile ahead of their use, across steps too: they depend on no token.
    v = _tile(0, 0, first, count) * BLOCK_V + entries
    next_base = gl.load(
        base_logits_ptr + long_rows[None, :] * base_stride_r + v[:, None],
        mask=(v < vocab_size)[:, None] & row_ok[None, :] & (count > 0),
        other=0.0,
    )
    done = 0
    for step in range(num_steps):
        long_step = gl.to_tensor(step).to(gl.int64)
        known = (previous >= 0) & (previous < target_vocab_size)
        embedding = gl.load(w1_ptr + previous[:, None] * w1_stride + k[None, :], mask=known[:, None] & (k < RANK)[None, :], other=0.0)
        if SAMPLED or CACHED:
            slots = gl.load(idx_mapping_ptr + long_rows * idx_stride_r + step * idx_stride_k, mask=row_ok, other=-1).to(gl.int64)
            live = (slots >= 0) & (slots < num_slots)
        if SAMPLED:
            temperature = gl.load(temperature_ptr + slots * temperature_stride, mask=live, other=0.0)
            sampled = draws_noise(temperature)
            divisor = gl.where(sampled, temperature, 1.0)
            if not NOISE_AHEAD:
                seeds = gl.load(seeds_ptr + slots * seeds_stride, mask=sampled, other=0)
                positions = gl.load(sample_pos_ptr + long_rows * pos_stride_r + step * pos_stride_k, mask=sampled, other=0)
                prefix = hash_prefix(seeds, positions, step, 0)
        if CACHED:
            cache_rows = slots
            written = live
            if COMPACT:
                cache_rows = gl.load(cache_rows_ptr + slots * cache_rows_stride, mask=live, other=-1).to(gl.int64)
                written = live & (cache_rows >= 0) & (cache_rows < num_cache_rows)
        embeddings.store(embedding)
        fence_async_shared()
        _barrier()

        best = gl.full([BLOCK_V, BLOCK_R], float("-inf"), gl.float32, LOGITS)
        best_token = gl.full([BLOCK_V, BLOCK_R], NO_TOKEN, gl.int32, LOGITS)
        for turn in range(count):
            v = _tile(turn, step, first, count) * BLOCK_V + entries
            base = next_base
            last = turn + 1 == count
            next_step = gl.where(last, gl.minimum(step + 1, num_steps - 1), step)
            next_v = _tile(gl.where(last, 0, turn + 1), next_step, first, count) * BLOCK_V + entries
            next_base = gl.load(
                base_logits_ptr + long_rows[None, :] * base_stride_r + next_step.to(gl.int64) * base_stride_k + next_v[:, None],
                mask=(next_v < vocab_size)[:, None] & row_ok[None, :],
                other=0.0,
            )
            slot = done % SLOTS
            mbarrier.wait(full.index(slot), (done // SLOTS) & 1)
            zero = gl.full([BLOCK_V, COLUMNS], 0.0, gl.float32, PRODUCT)
            dot = warpgroup_mma(ring.index(slot), embeddings.permute((1, 0)), zero, use_acc=False, is_async=True)
            dot = warpgroup_mma_wait(0, deps=[dot])
            _barrier()  # all warpgroups have read the slot
            mbarrier.arrive(empty.index(slot), count=1)
            done += 1

            if BLOCK_R == 1:
                column = gl.arange(0, COLUMNS, gl.SliceLayout(0, PRODUCT))
                only = gl.sum(gl.where(column[None, :] == 0, dot, 0.0), axis=1)
                bias = gl.convert_layout(only.to(logit_dtype), gl.SliceLayout(1, LOGITS))[:, None]
            else:
                bias = gl.convert_layout(dot.to(logit_dtype), LOGITS)
            logit = (base.to(gl.float32) + bias.to(gl.float32)).to(logit_dtype)
            inside = (v < vocab_size)[:, None] & row_ok[None, :]
            if CACHED:
                gl.store(
                    draft_logits_ptr + cache_rows[None, :] * draft_stride_row + long_step * draft_stride_k + v[:, None],
                    logit,
                    mask=inside & written[None, :],
                )
            key = greedy_key(logit.to(gl.float32))
            if SAMPLED:
                if NOISE_AHEAD:
                    argument = gl.load(
                        noise_ptr + long_rows[None, :] * noise_stride_r + long_step * noise_stride_k + v[:, None],
                        mask=inside & sampled[None, :],
                        other=1.0,
                    )
                else:
                    argument = log_argument(prefix[None, :], prefix[None, :], v[:, None], False)
                key = gl.where(sampled[None, :], sampled_key(logit.to(gl.float32), divisor[None, :], argument), key)
            if WRITE_KEYS:
                gl.store(keys_ptr + (long_step * num_requests + long_rows)[None, :] * vocab_size + v[:, None], key, mask=inside)
            better = inside & ((key > best) | ((key == best) & (v[:, None] < best_token)))
            best = gl.where(better, key, best)
            best_token = gl.where(better, v[:, None], best_token)

        gl.atomic_max(best_ptr + step * BLOCK_R + rows, gl.max(_packed(best, best_token), axis=0), mask=row_ok, sem="relaxed", scope="gpu")
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
    SLOTS: gl.constexpr,  # tiles of markov_w2 in shared memory
    num_warps: gl.constexpr,
):
    """Program p owns a contiguous range of tiles of 16 x num_warps vocabulary entries, for all rows and steps; all programs must run at once.

    Arithmetic: that of `step_kernel`, with products by wgmma. Per step the programs' best keys meet in 64-bit atomic maxima (`_packed`), and
    a counter tells that all have arrived: writes before a program's release are seen by who acquires the full count, so the maxima are final.
    The counter only grows within a launch; the last program to arrive at the last step sets scratch back to zero.
    """
    BLOCK_V: gl.constexpr = 16 * num_warps
    COLUMNS: gl.constexpr = 8 if BLOCK_R == 1 else BLOCK_R  # wgmma multiplies 8 at least
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, COLUMNS, 16])
    # Entries of a row lie together, up to 8 a thread: base logits and cache are read and written 16 bytes at a time.
    EACH: gl.constexpr = 1 if BLOCK_R == 1 else min(8, BLOCK_V * BLOCK_R // (32 * num_warps))
    ACROSS: gl.constexpr = min(32, BLOCK_V // EACH)
    LOGITS: gl.constexpr = gl.BlockedLayout(
        [EACH, 1],
        [ACROSS, 32 // ACROSS],
        [num_warps, 1] if BLOCK_R == 1 else [BLOCK_V // (EACH * ACROSS), num_warps * EACH * ACROSS // BLOCK_V],
        [0, 1],
    )
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [256 // min(256, PADDED_RANK), min(32, PADDED_RANK // 8)], [num_warps, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weight_dtype: gl.constexpr = w1_ptr.dtype.element_ty

    tiles = (vocab_size + BLOCK_V - 1) // BLOCK_V
    program = gl.program_id(0)
    first = tiles * program // gl.num_programs(0)
    count = tiles * (program + 1) // gl.num_programs(0) - first

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
                    ring, full, empty, embeddings, first, count, base_logits_ptr, anchor_ids_ptr, w1_ptr, temperature_ptr, seeds_ptr,
                    sample_pos_ptr, idx_mapping_ptr, draft_logits_ptr, cache_rows_ptr, noise_ptr, tokens_ptr, best_ptr, arrived_ptr, keys_ptr,
                    num_requests, num_steps, vocab_size, target_vocab_size, num_slots, num_cache_rows, base_stride_r, base_stride_k,
                    anchor_stride, w1_stride, temperature_stride, seeds_stride, pos_stride_r, pos_stride_k, idx_stride_r, idx_stride_k,
                    draft_stride_row, draft_stride_k, cache_rows_stride, noise_stride_r, noise_stride_k, RANK, PADDED_RANK, SAMPLED,
                    NOISE_AHEAD, CACHED, COMPACT, WRITE_KEYS, BLOCK_R, COLUMNS, BLOCK_V, SLOTS, PRODUCT, LOGITS, GATHER,
                ),
            ),
            (_stream_weights, (w2_desc, ring, full, empty, first, count, num_steps, BLOCK_V, PADDED_RANK, SLOTS)),
        ],
        [1],
        [24],
    )  # fmt: skip
