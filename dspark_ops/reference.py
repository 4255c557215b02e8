"""The sampling contract in plain torch, for any device, shape and option: the fallback of the op and, with FP64 products, the tests' oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from .guards import Call
from .noise import MIN_TEMPERATURE, block_log_argument, target_ids

_NO_TOKEN = torch.iinfo(torch.int64).max


def _rounded(x: Tensor) -> Tensor:
    """`x`, whose rounding to bf16 or fp16 every compiler must carry out.

    Inductor computes chains of 16-bit operations in FP32 without the roundings between, and merges a product and an addition into one addmm.
    It does neither across arithmetic on the bits; a bare reinterpretation and its inverse it would cancel.
    """
    runs_op_by_op = type(x) is Tensor and not torch.compiler.is_compiling()
    if runs_op_by_op or x.dtype == torch.float32:
        return x
    return (x.view(torch.int16) | 0).view(x.dtype)


def _scaled_bias(bias: Tensor, call: Call) -> Tensor:
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


class _Sampler:
    """Divisors and noise of all rows and steps: what the keys need besides the logits."""

    def __init__(self, call: Call, slots: Tensor, live: Tensor, token_ids: Tensor) -> None:
        assert call.temperature is not None
        temperature = call.temperature[slots]
        sampled = live & (temperature >= MIN_TEMPERATURE)  # False for NaN
        # Greedy rows divide by one and add zero, which leaves their keys the logits.
        self.divisor = torch.where(sampled, temperature, 1.0)[..., None]
        argument = call.noise
        if argument is None:
            assert call.seeds is not None and call.sample_pos is not None and call.idx_mapping is not None
            argument = block_log_argument(call.seeds, call.sample_pos, call.idx_mapping, token_ids, call.use_fp64)
        noise = -torch.log(argument[..., : call.num_columns])
        self.noise = torch.where(sampled[..., None], noise, 0.0)

    def keys(self, logits: Tensor, step: int) -> Tensor:
        # The divisor is FP32 and so the quotient, whatever the dtype of the logits; the sum has the precision of the noise.
        return logits / self.divisor[:, step] + self.noise[:, step]


class _Cache:
    """Writes a step's logits to `draft_logits`, and nothing for inert rows, without a data-dependent shape.

    Where row b must write nothing it repeats the write of another row, the same values at the same place; where no row writes, row 0's place
    keeps what it holds.
    """

    def __init__(self, call: Call, slots: Tensor, live: Tensor, token_ids: Tensor) -> None:
        assert call.draft_logits is not None
        self.cache = call.draft_logits
        rows, written = slots, live
        if call.cache_rows is not None:
            rows = call.cache_rows[slots]
            written = live & (rows >= 0) & (rows < self.cache.shape[0])
        stand_in = written.to(torch.int32).argmax(dim=0, keepdim=True)  # first row that writes, of each step
        every_row = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.source = torch.where(written, every_row, stand_in)
        self.rows = rows.gather(0, self.source).clamp(0, self.cache.shape[0] - 1).to(torch.int64)
        self.any_written = written.any(dim=0)
        self.columns = token_ids[None, :]

    def write(self, logits: Tensor, step: int) -> None:
        place = (self.rows[:, step, None], torch.full_like(self.rows[:, step, None], step), self.columns)
        kept = self.cache[self.rows[:1, step, None], step, self.columns]
        values = torch.where(self.any_written[step], logits.index_select(0, self.source[:, step]), kept)
        self.cache.index_put_(place, values)


def _winner(keys: Tensor, token_ids: Tensor | None) -> Tensor:
    """The lowest target id of the largest key of each row; NaN never wins."""
    keys = torch.where(keys == keys, keys, float("-inf"))
    if token_ids is None:
        return keys.argmax(dim=-1)  # the first of equal keys
    best = keys.amax(dim=-1, keepdim=True)
    return torch.where(keys == best, token_ids, _NO_TOKEN).amin(dim=-1)


@torch.no_grad()
def sample(call: Call, *, exact_products: bool = False) -> Tensor:
    """Samples the block of a valid call, [R, K] int64, and writes its `draft_logits`.

    With `exact_products` the bias is summed in FP64 (the oracle), otherwise by the library in the weights' dtype, with FP32 accumulation.
    """
    # Autocast would cast the products; a fallback must not depend on it.
    with torch.autocast(call.base_logits.device.type, enabled=False):
        return _sample(call, exact_products)


def _sample(call: Call, exact_products: bool) -> Tensor:
    base = call.base_logits[..., : call.num_columns]
    num_requests, num_steps, vocab = base.shape
    if num_requests == 0 or num_steps == 0:
        return base.new_empty((num_requests, num_steps), dtype=torch.int64)
    dtype = base.dtype
    w1, w2 = call.markov_w1, call.markov_w2[:vocab]
    # The library's product serves where it rounds its FP32 sum to the dtype of the logits. FP32 goes through FP64, which no TF32 or
    # reduced-precision switch of the process can change.
    if exact_products or w2.dtype != dtype or dtype == torch.float32:
        w2 = w2.double()
    token_ids = target_ids(vocab, call.draft_to_target, base.device)
    sampler = cache = None
    num_slots = _num_slots(call)
    if call.idx_mapping is not None and num_slots > 0:
        slots = call.idx_mapping
        slots = (slots[:, None] if slots.dim() == 1 else slots).expand(num_requests, num_steps).to(torch.int64)
        live = (slots >= 0) & (slots < num_slots)
        slots = slots.clamp(0, num_slots - 1)
        if call.temperature is not None:
            sampler = _Sampler(call, slots, live, token_ids)
        if call.draft_logits is not None:
            cache = _Cache(call, slots, live, token_ids)

    known = (call.anchor_ids >= 0) & (call.anchor_ids < w1.shape[0])
    embedding = w1[call.anchor_ids.clamp(0, w1.shape[0] - 1)]
    embedding = torch.where(known[:, None], embedding, 0.0)
    tokens = []
    for step in range(num_steps):
        bias = embedding.to(w2.dtype) @ w2.t()
        if w2.dtype == torch.float64:
            bias = bias.float().to(dtype)  # by way of FP32, which is what an accumulator holds
        bias = _rounded(bias)
        logits = _transformed(_rounded(base[:, step] + _scaled_bias(bias, call)), call)
        if cache is not None:
            cache.write(logits, step)
        keys = logits if sampler is None else sampler.keys(logits, step)
        tokens.append(_winner(keys, None if call.draft_to_target is None else token_ids))
        embedding = w1[tokens[-1]]
    return torch.stack(tokens, dim=1)


def _num_slots(call: Call) -> int:
    for per_slot in (call.temperature, call.seeds, call.cache_rows):
        if per_slot is not None:
            return per_slot.shape[0]
    return 0 if call.draft_logits is None else call.draft_logits.shape[0]
