"""The sampling contract in plain torch, for any device, shape and option: the fallback of the op and, with FP64 products, the tests' oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.functional import pad

from .guards import Call, nothing_to_draft, runs_now
from .noise import MIN_TEMPERATURE, block_log_argument, target_ids

_NO_TOKEN = torch.iinfo(torch.int64).max


@torch.no_grad()
def sample(
    call: Call, *, exact_products: bool = False, parts: Parts | None = None, projected: Callable[[int, Tensor], Tensor] | None = None
) -> Tensor:
    """Samples the block of a valid call, [R, K] int64, and writes its `draft_logits`.

    With `exact_products` the bias is summed in FP64 (the oracle), otherwise by the library in the weights' dtype, with FP32 accumulation.
    `parts` replaces those parts that need many operations. `projected` makes of a step and the embeddings [R, rank] of the tokens before what
    `markov_w2` projects, in their dtype, where that is not the embeddings themselves.
    """
    device_type = call.base_logits.device.type
    if torch.is_autocast_enabled(device_type):  # it would cast the products
        with torch.autocast(device_type, enabled=False):
            return _sample(call, exact_products, parts or TORCH, projected)
    return _sample(call, exact_products, parts or TORCH, projected)


def _sample(call: Call, exact_products: bool, parts: Parts, projected: Callable[[int, Tensor], Tensor] | None) -> Tensor:
    rounded = rounding(call.base_logits)
    base = rounded(call.base_logits[..., : call.num_columns])
    num_requests, num_steps, vocab = base.shape
    if nothing_to_draft(base):
        return base.new_empty((num_requests, num_steps), dtype=torch.int64)
    token_ids = None if call.draft_to_target is None else target_ids(vocab, call.draft_to_target, base.device)
    sizes = [t.shape[0] for t in (call.temperature, call.seeds, call.cache_rows, call.draft_logits) if t is not None]
    has_slots = call.idx_mapping is not None and bool(sizes) and sizes[0] > 0
    divisors = negated = None
    if has_slots:
        slots, live = _slots(call, sizes[0])
        if call.temperature is not None:
            divisors, negated = (t.unbind(1) for t in _divisor_and_negated_noise(call, slots, live, token_ids, parts.negated_noise))

    # The library's product serves where it rounds its FP32 sum to the dtype of the logits. FP32 products go through FP64, which no TF32 or
    # reduced-precision switch of the process can change.
    w1, w2 = call.markov_w1, call.markov_w2[:vocab]
    if exact_products or w2.dtype != base.dtype or base.dtype == torch.float32:
        w2 = rounded(w2).double()
    w2_t = w2.t()
    anchors = call.anchor_ids.clamp(0, w1.shape[0] - 1)
    embedding = torch.where((anchors == call.anchor_ids)[:, None], w1.index_select(0, anchors), 0.0)
    tokens: list[Tensor] = []
    sampled_from: list[Tensor] = []
    for step, base_logits in enumerate(base.unbind(1)):
        if step > 0:
            embedding = w1.index_select(0, tokens[-1])
        if projected is not None:
            embedding = projected(step, embedding)
        bias = torch.mm(rounded(embedding).to(w2.dtype), w2_t)
        if w2.dtype == torch.float64:
            bias = bias.float().to(base.dtype)  # by way of FP32, which is what an accumulator holds
        logits = _transformed(rounded(base_logits + _scaled(rounded(bias), call, rounded)), call)
        sampled_from.append(logits)
        if divisors is not None and negated is not None:
            # The divisor is FP32 and so is the quotient, whatever the dtype of the logits; the sum has the precision of the noise.
            logits = logits / divisors[step] - negated[step]
        tokens.append(_winner(logits, token_ids))
    if has_slots and call.draft_logits is not None and call.draft_logits.shape[0] > 0:
        parts.write_cache(call, sizes[0], token_ids, torch.stack(sampled_from, dim=1))
    return torch.stack(tokens, dim=1)


def rounding(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What a result of the dtype of 16 bits goes through where `x` is: nothing in eager code, which rounds it, `_rounded` in a graph."""
    return _as_is if runs_now(x) else _rounded


def _as_is(x: Tensor) -> Tensor:
    return x


def _rounded(x: Tensor) -> Tensor:
    """`x`, whose rounding to bf16 or fp16 every compiler must carry out, be it made here or by the caller in the same graph.

    Inductor computes chains of 16-bit operations in FP32 without the roundings between, and merges a product and an addition into one addmm.
    It does neither across arithmetic on the bits; a bare reinterpretation and its inverse it would cancel.
    """
    if x.dtype == torch.float32:
        return x
    return (x.view(torch.int16) | 0).view(x.dtype)


def _scaled(bias: Tensor, call: Call, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    cap = call.bias_soft_cap
    if cap is not None:
        bias = rounded(torch.tanh(rounded(bias / cap)))
        bias = rounded(bias * cap)
    return bias if call.bias_scale == 1.0 else rounded(bias * call.bias_scale)


def _transformed(logits: Tensor, call: Call) -> Tensor:
    """The logits after the model's output transform, FP32 where there is one."""
    if not call.transforms_output:
        return logits
    logits = logits.float() * call.output_scale
    cap = call.output_soft_cap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _winner(keys: Tensor, token_ids: Tensor | None) -> Tensor:
    """The lowest target id of the largest key of each row; NaN never wins."""
    keys = torch.nan_to_num(keys, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if token_ids is None:
        return keys.argmax(dim=-1)  # the first of equal keys
    best = keys.amax(dim=-1, keepdim=True)
    return torch.where(keys == best, token_ids, _NO_TOKEN).amin(dim=-1)


def _slots(call: Call, num_slots: int) -> tuple[Tensor, Tensor]:
    """Slot [R, K] of each row and step, forced into range, and whether it was there: whether the row is live."""
    assert call.idx_mapping is not None
    num_steps = call.base_logits.shape[1]
    given = call.idx_mapping if call.idx_mapping.dim() == 2 else call.idx_mapping[:, None]
    slots = given.clamp(0, num_slots - 1)
    return slots.expand(-1, num_steps), (slots == given).expand(-1, num_steps)


def _divisor_and_negated_noise(call: Call, slots: Tensor, live: Tensor, token_ids: Tensor | None, noise_of: NoiseOf) -> tuple[Tensor, Tensor]:
    """Divisor of the logits, [R, K, 1], and negated noise, [R, K, V]: 1 and 0 for greedy rows."""
    assert call.temperature is not None
    temperature = call.temperature[slots]
    sampled = live & (temperature >= MIN_TEMPERATURE)  # False for NaN
    divisor = torch.where(sampled, temperature, 1.0)[..., None]
    if call.noise is not None:
        return divisor, torch.where(sampled[..., None], torch.log(call.noise[..., : call.num_columns]), 0.0)
    assert call.seeds is not None and call.sample_pos is not None
    return divisor, noise_of(call.seeds, call.sample_pos, torch.where(sampled, slots, -1), call.num_columns, token_ids, call.use_fp64)


def write_cache(call: Call, num_slots: int, token_ids: Tensor | None, logits: Tensor) -> None:
    """Writes the logits [R, K, V] of a block to the cache, and nothing for inert rows, without a data-dependent shape.

    A row that must write nothing at a step repeats the write of a row that does, the same values at the same place; where none does,
    what its place holds is written back.
    """
    cache = call.draft_logits
    assert cache is not None and call.idx_mapping is not None
    if not guard_or_false(logits.shape[0] > 0):  # a batch that may be empty when the graph runs gets an inert row, to have a first one
        logits = pad(logits, (0, 0, 0, 0, 0, 1))
        call = call._replace(idx_mapping=pad(call.idx_mapping, (0, 0) * (call.idx_mapping.dim() - 1) + (0, 1), value=-1))
    slots, live = _slots(call, num_slots)
    rows, written = slots, live
    if call.cache_rows is not None:
        given = call.cache_rows[slots]
        rows = given.clamp(0, cache.shape[0] - 1)
        written = live & (rows == given)
    steps = torch.arange(logits.shape[1], device=logits.device)
    lead = written.int().argmax(dim=0)  # as integers: Inductor's C++ for the maximum of booleans over a size that varies does not compile
    any_written = written.gather(0, lead[None])[0]
    lead_rows = rows.gather(0, lead[None])[0]
    rows = torch.where(written, rows, lead_rows)
    # Whole rows of the cache are copied faster than chosen columns.
    columns = token_ids
    if columns is None and cache.shape[2] != logits.shape[2]:
        columns = torch.arange(logits.shape[2], device=logits.device)

    def place(rows: Tensor) -> tuple[Tensor, ...]:
        return (rows, steps.expand_as(rows)) if columns is None else (rows[..., None], steps[:, None], columns)

    repeated = torch.where(any_written[:, None], logits[lead, steps], cache[place(lead_rows)])
    cache.index_put_(place(rows), torch.where(written[..., None], logits, repeated))


class NoiseOf(Protocol):
    """Computes the negated noise of a block, [R, K, V]; slots below 0 have none. `token_ids` [V] where they are not 0, 1, 2, ..."""

    def __call__(self, seeds: Tensor, sample_pos: Tensor, slots: Tensor, vocab: int, token_ids: Tensor | None, use_fp64: bool) -> Tensor: ...


class Parts(NamedTuple):
    """What takes many operations where one kernel would do."""

    negated_noise: NoiseOf
    write_cache: Callable[[Call, int, Tensor | None, Tensor], None]


def negated_noise(seeds: Tensor, sample_pos: Tensor, slots: Tensor, vocab: int, token_ids: Tensor | None, use_fp64: bool) -> Tensor:
    every_id = torch.arange(vocab, device=seeds.device) if token_ids is None else token_ids
    return torch.log(block_log_argument(seeds, sample_pos, slots, every_id, use_fp64))


TORCH = Parts(negated_noise, write_cache)
