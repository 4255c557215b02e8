"""The sampling contract in plain torch, for any device, shape and option: the fallback of the op and, with FP64 products, the tests' oracle."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .guards import Call, nothing_to_draft, runs_now
from .noise import MIN_TEMPERATURE, block_log_argument, target_ids

_NO_TOKEN = torch.iinfo(torch.int64).max


class NoiseOf(Protocol):
    """Computes the negated noise of a block, [R, K, V]; slots below 0 have none."""

    def __call__(self, seeds: Tensor, sample_pos: Tensor, slots: Tensor, token_ids: Tensor, use_fp64: bool) -> Tensor: ...


def negated_noise(seeds: Tensor, sample_pos: Tensor, slots: Tensor, token_ids: Tensor, use_fp64: bool) -> Tensor:
    return torch.log(block_log_argument(seeds, sample_pos, slots, token_ids, use_fp64))


@torch.no_grad()
def sample(call: Call, *, exact_products: bool = False, noise_of: NoiseOf = negated_noise) -> Tensor:
    """Samples the block of a valid call, [R, K] int64, and writes its `draft_logits`.

    With `exact_products` the bias is summed in FP64 (the oracle), otherwise by the library in the weights' dtype, with FP32 accumulation.
    """
    device_type = call.base_logits.device.type
    if torch.is_autocast_enabled(device_type):  # it would cast the products
        with torch.autocast(device_type, enabled=False):
            return _sample(call, exact_products, noise_of)
    return _sample(call, exact_products, noise_of)


def _sample(call: Call, exact_products: bool, noise_of: NoiseOf) -> Tensor:
    base = _rounded(call.base_logits[..., : call.num_columns])
    num_requests, num_steps, vocab = base.shape
    if nothing_to_draft(base):
        return base.new_empty((num_requests, num_steps), dtype=torch.int64)
    token_ids = target_ids(vocab, call.draft_to_target, base.device)
    sizes = [t.shape[0] for t in (call.temperature, call.seeds, call.cache_rows, call.draft_logits) if t is not None]
    has_slots = call.idx_mapping is not None and bool(sizes) and sizes[0] > 0
    divisors = negated = None
    if has_slots:
        slots, live = _slots(call, sizes[0])
        if call.temperature is not None:
            divisors, negated = (t.unbind(1) for t in _divisor_and_negated_noise(call, slots, live, token_ids, noise_of))

    # The library's product serves where it rounds its FP32 sum to the dtype of the logits. FP32 products go through FP64, which no TF32 or
    # reduced-precision switch of the process can change.
    w1, w2 = call.markov_w1, call.markov_w2[:vocab]
    if exact_products or w2.dtype != base.dtype or base.dtype == torch.float32:
        w2 = _rounded(w2).double()
    w2_t = w2.t()
    anchors = call.anchor_ids.clamp(0, w1.shape[0] - 1)
    embedding = w1.index_select(0, anchors).masked_fill((anchors != call.anchor_ids)[:, None], 0.0)
    tokens: list[Tensor] = []
    sampled_from: list[Tensor] = []
    for step, base_logits in enumerate(base.unbind(1)):
        if step > 0:
            embedding = w1.index_select(0, tokens[-1])
        bias = torch.mm(_rounded(embedding).to(w2.dtype), w2_t)
        if w2.dtype == torch.float64:
            bias = bias.float().to(base.dtype)  # by way of FP32, which is what an accumulator holds
        logits = _transformed(_rounded(base_logits + _scaled(_rounded(bias), call)), call)
        sampled_from.append(logits)
        if divisors is not None and negated is not None:
            # The divisor is FP32 and so is the quotient, whatever the dtype of the logits; the sum has the precision of the noise.
            logits = logits / divisors[step] - negated[step]
        tokens.append(_winner(logits, None if call.draft_to_target is None else token_ids))
    if has_slots and call.draft_logits is not None and call.draft_logits.shape[0] > 0:
        _write_cache(call, call.draft_logits, slots, live, token_ids, torch.stack(sampled_from, dim=1))
    return torch.stack(tokens, dim=1)


def _rounded(x: Tensor) -> Tensor:
    """`x`, whose rounding to bf16 or fp16 every compiler must carry out, be it made here or by the caller in the same graph.

    Inductor computes chains of 16-bit operations in FP32 without the roundings between, and merges a product and an addition into one addmm.
    It does neither across arithmetic on the bits; a bare reinterpretation and its inverse it would cancel.
    """
    if runs_now(x) or x.dtype == torch.float32:
        return x
    return (x.view(torch.int16) | 0).view(x.dtype)


def _scaled(bias: Tensor, call: Call) -> Tensor:
    cap = call.bias_soft_cap
    if cap is not None:
        bias = _rounded(torch.tanh(_rounded(bias / cap)))
        bias = _rounded(bias * cap)
    return bias if call.bias_scale == 1.0 else _rounded(bias * call.bias_scale)


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
    num_requests, num_steps, _ = call.base_logits.shape
    given = call.idx_mapping if call.idx_mapping.dim() == 2 else call.idx_mapping[:, None]
    slots = given.clamp(0, num_slots - 1)
    return slots.expand(num_requests, num_steps), (slots == given).expand(num_requests, num_steps)


def _divisor_and_negated_noise(call: Call, slots: Tensor, live: Tensor, token_ids: Tensor, noise_of: NoiseOf) -> tuple[Tensor, Tensor]:
    """Divisor of the logits, [R, K, 1], and negated noise, [R, K, V]: 1 and 0 for greedy rows."""
    assert call.temperature is not None
    temperature = call.temperature[slots]
    greedy = ~(live & (temperature >= MIN_TEMPERATURE))  # True for NaN
    divisor = temperature.masked_fill(greedy, 1.0)[..., None]
    if call.noise is not None:
        return divisor, torch.log(call.noise[..., : call.num_columns]).masked_fill(greedy[..., None], 0.0)
    assert call.seeds is not None and call.sample_pos is not None
    return divisor, noise_of(call.seeds, call.sample_pos, slots.masked_fill(greedy, -1), token_ids, call.use_fp64)


def _write_cache(call: Call, cache: Tensor, slots: Tensor, live: Tensor, token_ids: Tensor, logits: Tensor) -> None:
    """Writes the logits [R, K, V] of a block to the cache, and nothing for inert rows, without a data-dependent shape.

    A row that must write nothing at a step repeats the write of the first row that does, the same values at the same place; where none does,
    what its place holds is written back.
    """
    rows, written = slots, live
    if call.cache_rows is not None:
        given = call.cache_rows[slots]
        rows = given.clamp(0, cache.shape[0] - 1)
        written = live & (rows == given)
    steps = torch.arange(logits.shape[1], device=logits.device)
    lead = written.to(torch.int32).argmax(dim=0)
    lead_rows = rows[lead, steps]
    rows = torch.where(written, rows, lead_rows)
    # Whole rows of the cache are copied faster than chosen columns.
    columns = () if call.draft_to_target is None and cache.shape[2] == logits.shape[2] else (token_ids,)

    def place(rows: Tensor) -> tuple[Tensor, ...]:
        return (rows[..., None], steps[:, None], *columns) if columns else (rows, steps.expand_as(rows))

    repeated = torch.where(written.any(dim=0)[:, None], logits[lead, steps], cache[place(lead_rows)])
    cache.index_put_(place(rows), torch.where(written[..., None], logits, repeated))
