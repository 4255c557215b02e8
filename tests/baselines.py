"""What the package is measured against: the loop in plain torch, vLLM's, and the two-launch design frozen as it was when the project began.

`two_launches` shares no code with the package on purpose: a yardstick must not move with what it measures, and its tokens are a second opinion.
It serves contiguous bf16 arguments, a rank that is a power of two, one slot a row, and FP32 noise.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


def plain_loop(base_logits: Tensor, anchor_ids: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    """Gumbel-max sampling as a drafter's author writes it: noise from the global generator, R rows with their slots in `rows`."""
    token = anchor_ids
    tokens = []
    for step in range(base_logits.shape[1]):
        logits = base_logits[:, step] + w1[token] @ w2.t()
        cache[rows, step] = logits
        noise = -torch.log(-torch.log(torch.rand(logits.shape, device=logits.device)))
        token = (logits / temperature[rows, None] + noise).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, 1)


def _vllm_sampler() -> Callable[..., Tensor]:
    return importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample


def vllm_reason() -> str | None:
    """Why `vllm_loop` does not run here, in one line, or None."""
    try:
        parameters = inspect.signature(_vllm_sampler()).parameters
    except Exception as error:  # one built for another torch fails in ways of its own
        return f"vLLM's sampler cannot be imported ({str(error).partition(chr(10))[0]})"
    return None if {"is_drafting", "logits_cache"} <= set(parameters) else "its sampler takes other arguments than that of release 0.33"


def vllm_loop(
    base_logits: Tensor, anchor_ids: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, seeds: Tensor, sample_pos: Tensor, rows: Tensor,
    cache: Tensor,
) -> Callable[[], Tensor]:  # fmt: skip
    """The block as the speculator of vLLM 0.33 runs it, with its sampler; what the speculator keeps between blocks is made here."""
    sample = _vllm_sampler()
    num_requests, num_steps, _ = base_logits.shape
    slots = rows[:, None].repeat(1, num_steps)
    columns = torch.arange(num_steps, dtype=torch.int32, device=rows.device)
    tokens = torch.empty(num_requests, num_steps, dtype=torch.int64, device=rows.device)

    def block() -> Tensor:
        token = anchor_ids
        for step in range(num_steps):
            logits = base_logits[:, step] + F.linear(F.embedding(token, w1), w2)
            cached = {"logits_cache": cache, "logits_cache_col": columns[step]}
            where = logits, slots[:, step], temperature, seeds, sample_pos[:, step] - 1
            token = sample(*where, apply_temperature=True, is_drafting=True, **cached)
            tokens[:, step] = token
        return tokens

    return block


@triton.jit
def _mix(word):
    word = word.to(tl.uint32) * 0xCC9E2D51
    return ((word << 15) | (word >> 17)) * 0x1B873593


@triton.jit
def _absorb(h, word):
    h = h ^ _mix(word)
    return ((h << 13) | (h >> 19)) * 5 + 0xE6546B64


@triton.jit
def _gumbel(seed, position, step, token):
    seed = seed ^ (step.to(tl.int64) << 32)
    h = _absorb(_absorb(seed.to(tl.uint32) & 0, seed), seed >> 32)
    h = _absorb(_absorb(h, position.to(tl.int64) - 1 + (1 << 30))[None, :], token[:, None]) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    u = (h >> 16).to(tl.float32) * (2.0**-16) + ((h & 0xFFFF).to(tl.float32) + 0.5) * (2.0**-32)
    series = 1.0 / 8
    for n in tl.static_range(7, 0, -1):
        series = tl.fma(u * 0.0 + series, u, u * 0.0 + 1.0 / n)
    return -tl.log(tl.where(u < 0.25, u * series, -tl.log(tl.maximum(1.0 - u, 2.0**-24))))


@triton.jit(do_not_specialize=["step"])
def _step(
    base_ptr, previous_ptr, w1_ptr, w2_ptr, temperature_ptr, seeds_ptr, pos_ptr, rows_ptr, cache_ptr, key_ptr, token_ptr,
    R, V, S, K, step, RANK: tl.constexpr,
):  # fmt: skip
    """256 vocabulary entries x 16 rows: one tensor-core product a 64-entry tile, bias, cache, noise, the program's best key of each row."""
    r = tl.program_id(0) * 16 + tl.arange(0, 16)
    r_ok = r < R
    k = tl.arange(0, RANK)
    previous = tl.load(previous_ptr + r, mask=r_ok, other=-1)
    known = (previous >= 0) & (previous < V)
    embedding = tl.load(w1_ptr + previous[None, :] * RANK + k[:, None], mask=known[None, :], other=0.0)
    slot = tl.load(rows_ptr + r, mask=r_ok, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < S)
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    seed = tl.load(seeds_ptr + slot, mask=live, other=0)
    position = tl.load(pos_ptr + r * K + step, mask=live, other=0)
    greedy = (temperature == 0.0)[None, :]
    best = tl.full([16], float("-inf"), tl.float32)
    best_token = tl.full([16], 0x7FFFFFFF, tl.int32)
    for tile in range(4):
        v = tl.program_id(1) * 256 + tile * 64 + tl.arange(0, 64)
        v_ok = v < V
        w2 = tl.load(w2_ptr + v[:, None] * RANK + k[None, :], mask=v_ok[:, None], other=0.0)
        inside = v_ok[:, None] & r_ok[None, :]
        base = tl.load(base_ptr + (r[None, :].to(tl.int64) * K + step) * V + v[:, None], mask=inside, other=0.0)
        bias = tl.dot(w2, embedding).to(tl.bfloat16)
        logit = (base.to(tl.float32) + bias.to(tl.float32)).to(tl.bfloat16)
        tl.store(cache_ptr + (slot[None, :] * K + step) * V + v[:, None], logit, mask=inside & live[None, :])
        noisy = logit.to(tl.float32) / tl.where(greedy, 1.0, temperature[None, :]) + _gumbel(seed, position, step, v)
        key = tl.where(inside, tl.where(greedy, logit.to(tl.float32), noisy), float("-inf"))
        tile_best = tl.max(key, axis=0)
        tile_token = tl.min(tl.where((key == tile_best[None, :]) & inside, v[:, None], 0x7FFFFFFF), axis=0)
        best_token = tl.where(tile_best > best, tile_token, best_token)
        best = tl.maximum(best, tile_best)
    tl.store(key_ptr + r * tl.num_programs(1) + tl.program_id(1), best, mask=r_ok)
    tl.store(token_ptr + r * tl.num_programs(1) + tl.program_id(1), best_token, mask=r_ok)


@triton.jit(do_not_specialize=["step"])
def _select(key_ptr, token_ptr, previous_ptr, tokens_ptr, P, K, step, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    key = tl.load(key_ptr + r * P + p, mask=p < P, other=float("-inf"))
    token = tl.load(token_ptr + r * P + p, mask=p < P, other=0x7FFFFFFF)
    chosen = tl.min(tl.where(key == tl.max(key, axis=0), token, 0x7FFFFFFF), axis=0).to(tl.int64)
    tl.store(previous_ptr + r, chosen)
    tl.store(tokens_ptr + r * K + step, chosen)


def two_launches(
    base_logits: Tensor, anchor_ids: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, seeds: Tensor, sample_pos: Tensor, rows: Tensor,
    cache: Tensor,
) -> Tensor:  # fmt: skip
    """The block in 2 K launches; `cache` [S, K, V]."""
    num_requests, num_steps, vocab = base_logits.shape
    programs = triton.cdiv(vocab, 256)
    key = base_logits.new_empty((num_requests, programs), dtype=torch.float32)
    token = base_logits.new_empty((num_requests, programs), dtype=torch.int32)
    tokens = base_logits.new_empty((num_requests, num_steps), dtype=torch.int64)
    previous = anchor_ids.clone()
    for step in range(num_steps):
        _step[(triton.cdiv(num_requests, 16), programs)](
            base_logits, previous, w1, w2, temperature, seeds, sample_pos, rows, cache, key, token,
            num_requests, vocab, temperature.shape[0], num_steps, step, RANK=w1.shape[1], num_warps=4, num_stages=2,
        )  # fmt: skip
        _select[(num_requests,)](key, token, previous, tokens, programs, num_steps, step, BLOCK=triton.next_power_of_2(programs))
    return tokens
