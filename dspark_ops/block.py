"""The block launch: which shape a call gets, its scratch, and the opaque op that launches it.

The grid barrier needs a cooperative launch, which compilers drop from kernels that they see into; hence an op of its own, under the op that
users call. It has no optional mutated argument, which compilers stumble over: an empty tensor stands for no cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import optional_pointers, optional_strides, table_sizes
from .guards import Call, has_gluon, runs_now, weights_aligned

if has_gluon():
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.block import block_kernel

# Shared memory of a program on compute capability 9.0, less what the kernel needs beside weights and embeddings (measured: 5 KB).
_SHARED_BYTES = 227 * 1024 - 5 * 1024
# Rows of a launch; larger batches take several, which read markov_w2 anew.
MAX_ROWS = 64


class Shape(NamedTuple):
    """Shape of the block kernel's programs."""

    block_r: int  # rows of a launch: 1, or a power of two of at least 8
    block_v: int  # vocabulary entries of a tile
    num_warps: int  # that multiply and sample
    held: int  # tiles of markov_w2 that stay in registers
    screened: bool  # logarithms only for keys that may win
    padded_rank: int
    slots: int  # tiles of markov_w2 in shared memory


# Measured at each number of rows on an H200 (V = 163,840, rank 256, K = 7, bf16): warps, tiles held, screened. Others took longer: a tile
# held at 32 rows 275 us instead of 258, screened keys at 16 rows 198 instead of 188, 8 warps there the same within 2, and 8 warps at 64 rows
# 411 instead of 364.
_MEASURED = {1: (8, 2, False), 8: (8, 1, False), 16: (16, 0, False), 32: (8, 0, True), 64: (16, 0, True)}


def shape_for(num_requests: int, rank: int) -> Shape:
    """The shape for a batch: the fewest rows that hold it, and as many tiles of markov_w2 ahead as fit."""
    block_r = 1 if num_requests == 1 else min(MAX_ROWS, max(8, 1 << (num_requests - 1).bit_length()))
    num_warps, held, screened = _MEASURED[block_r]
    padded_rank = max(64, 1 << (rank - 1).bit_length())
    block_v = 128
    if padded_rank > 256:  # tiles of half the height, so that two fit
        block_v, num_warps = 64, num_warps // 2
    if padded_rank != 256:
        held = 0
    left = _SHARED_BYTES - max(8, block_r) * padded_rank * 2
    return Shape(block_r, block_v, num_warps, held, screened, padded_rank, min(8, left // (block_v * padded_rank * 2)))


def weights_descriptor(w2: Tensor, vocab_size: int, shape: Shape) -> TensorDescriptor:
    """The first `vocab_size` rows of markov_w2 for copies by tile; what lies outside is read as zero."""
    tile = [shape.block_v, shape.padded_rank]
    return TensorDescriptor(w2, [vocab_size, w2.shape[1]], list(w2.stride()), tile, NVMMASharedLayout(128, 16, 2))


def new_scratch(num_steps: int, device: torch.device) -> Tensor:
    """Zeroed scratch of a launch, which leaves it zeroed: the best keys of each step and row, and the count of programs that arrived."""
    return torch.zeros(num_steps * MAX_ROWS + 1, dtype=torch.int64, device=device)


@functools.cache
def _programs(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def launch_block(call: Call, scratch: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
    """Launches the kernel for a call that it serves; `keys` [K, R, V] receives all keys of a batch of one launch."""
    base, w2 = call.base_logits, call.markov_w2
    num_requests, num_steps, _ = base.shape
    tokens = base.new_empty((num_requests, num_steps), dtype=torch.int64)
    if scratch is None or scratch.shape[0] <= num_steps * MAX_ROWS:
        scratch = new_scratch(num_steps, base.device)
    best = scratch.view(torch.uint64)
    arrived = scratch[-1:].view(torch.uint32)
    rank = call.markov_w1.shape[1]
    vocab_size = call.num_columns
    shape = shape_for(num_requests, rank)
    weights = weights_descriptor(w2, vocab_size, shape)
    screened = shape.screened and call.temperature is not None and call.noise is None and keys is None  # it hashes, and skips keys
    by_row = ("base_logits", "anchor_ids", "sample_pos", "idx_mapping", "noise")
    with torch.cuda.device(base.device):
        for start in range(0, num_requests, MAX_ROWS):
            rows = slice(start, start + MAX_ROWS)
            part = call._replace(**{name: t[rows] for name in by_row if (t := getattr(call, name)) is not None})
            block_kernel[(_programs(base.device.index),)](
                weights,
                part.base_logits,
                part.anchor_ids,
                call.markov_w1,
                *optional_pointers(part),
                tokens[rows],
                best,
                arrived,
                part.base_logits if keys is None else keys,
                part.base_logits.shape[0],
                num_steps,
                vocab_size,
                *table_sizes(call),
                base.stride(0),
                base.stride(1),
                call.anchor_ids.stride(0),
                call.markov_w1.stride(0),
                *optional_strides(call),
                RANK=rank,
                PADDED_RANK=shape.padded_rank,
                SAMPLED=call.temperature is not None,
                NOISE_AHEAD=call.noise is not None,
                CACHED=call.draft_logits is not None,
                COMPACT=call.cache_rows is not None,
                WRITE_KEYS=keys is not None,
                BLOCK_R=shape.block_r,
                BLOCK_V=shape.block_v,
                SCREENED=screened,
                SLOTS=shape.slots,
                HELD=shape.held,
                num_warps=shape.num_warps,
                launch_cooperative_grid=True,
            )
    return tokens


def sample_block(call: Call) -> Tensor:
    """Samples by the block launch: at once in eager code, as one node in a graph."""
    if runs_now(call.base_logits):
        return launch_block(call)
    cache = call.base_logits.new_empty(0) if call.draft_logits is None else call.draft_logits
    return torch.ops.dspark.sample_block(*call[:8], cache, call.cache_rows, call.noise, call.vocab_size)


def _sample_block(
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    temperature: Tensor | None,
    seeds: Tensor | None,
    sample_pos: Tensor | None,
    idx_mapping: Tensor | None,
    draft_logits: Tensor,
    cache_rows: Tensor | None,
    noise: Tensor | None,
    vocab_size: int | None,
) -> Tensor:
    cache = draft_logits if draft_logits.dim() == 3 else None
    call = Call(
        base_logits, anchor_ids, markov_w1, markov_w2, temperature, seeds, sample_pos, idx_mapping, cache, cache_rows, noise,
        vocab_size=vocab_size,
    )  # fmt: skip
    if not weights_aligned(markov_w2):  # addresses are not known when a graph is made; step launches give the same bits
        return torch.ops.dspark.markov_sample_sequential(*call, "step")
    return launch_block(call)


def _fake(base_logits: Tensor, *args: object) -> Tensor:
    return base_logits.new_empty(base_logits.shape[:2], dtype=torch.int64)


_library = torch.library.Library("dspark", "FRAGMENT")
_library.define(
    "sample_block" + torch.library.infer_schema(_sample_block, mutates_args=("draft_logits",)),
    tags=(torch.Tag.needs_exact_strides,),  # the strides of the fake tensors are checked and planned with
)
_library.impl("sample_block", _sample_block, "CompositeExplicitAutograd")
torch.library.register_fake("dspark::sample_block", _fake, lib=_library)
