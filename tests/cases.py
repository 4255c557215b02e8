"""Arguments for the tests, the oracle, and the paths by which the package samples them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dspark_ops
from dspark_ops import block, guards, ops, reference
from dspark_ops.guards import Call

Arguments = dict[str, Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter rounds bf16 toward zero and multiplies its bits as integers, so it can show nothing of bf16: FP16 stands in for it. Nor
# does it show the order of summation, the device's logarithm and division, fused multiply-adds, or anything of memory and concurrency.
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def grid(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Weights on a coarse binary grid: every dot product of them is exact in FP32, whatever the order of summation."""
    return (torch.randint(-8, 9, shape, generator=generator) / 8).to(dtype)


def case(
    rows: int = 5,
    steps: int = 3,
    vocab: int = 200,
    rank: int = 16,
    *,
    slots: int | None = None,
    logits: torch.dtype = HALF,
    weights: torch.dtype = HALF,
    cached: bool = True,
    seed: int = 0,
    random_weights: bool = False,
) -> Arguments:
    """Sampled rows with mixed temperatures (0 among them), permuted slots and a sentinel-filled cache, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    slots = rows + 2 if slots is None else slots

    def weight(*shape: int) -> Tensor:
        if random_weights:
            return torch.randn(shape, generator=generator).to(weights)
        return grid(*shape, generator=generator, dtype=weights)

    return {
        "base_logits": (2 * torch.randn(rows, steps, vocab, generator=generator)).to(logits),
        "anchor_ids": torch.randint(vocab, (rows,), generator=generator),
        "markov_w1": weight(vocab, rank),
        "markov_w2": weight(vocab, rank) * (rank**-0.5 if random_weights else 1),
        "temperature": torch.tensor([0.8, 0.0, 1.3, 0.5, 5.0]).repeat(slots)[:slots],
        "seeds": torch.randint(-(2**62), 2**62, (slots,), generator=generator),
        "sample_pos": torch.randint(1, 10**6, (rows, 1), generator=generator) + torch.arange(steps),
        "idx_mapping": torch.randperm(slots, generator=generator)[:rows].to(torch.int32),
        "draft_logits": torch.full((slots, steps, vocab), -7.0, dtype=logits) if cached else None,
    }


def to(device: str, args: Arguments) -> Arguments:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in args.items()}


def oracle(args: Arguments) -> tuple[Tensor, Tensor | None]:
    """Tokens and cache of the reference with FP64 products, on the CPU; the arguments stay as they are."""
    args = to("cpu", args)
    cache = args.get("draft_logits")
    if cache is not None:
        args["draft_logits"] = cache.clone()
    return reference.sample(Call(**args), exact_products=True), args.get("draft_logits")


class Path(NamedTuple):
    """A way to sample: where the tensors go, and the function that gets them."""

    name: str
    device: str
    function: Callable[..., Tensor]

    def __call__(self, args: Arguments) -> tuple[Tensor, Tensor | None]:
        """Tokens and cache, on the CPU; the arguments stay as they are."""
        args = to(self.device, args)
        cache = args.get("draft_logits")
        if cache is not None:
            args["draft_logits"] = same_layout(cache)
        tokens = self.function(**args)
        return tokens.cpu(), None if cache is None else args["draft_logits"].cpu()

    def agrees_with_oracle(self, args: Arguments) -> None:
        tokens, cache = self(args)
        expected, expected_cache = oracle(args)
        assert torch.equal(tokens, expected)
        if cache is not None:
            assert same_bits(cache, expected_cache)


def same_layout(t: Tensor) -> Tensor:
    """A copy with the strides of `t`, gaps included."""
    if t.numel() == 0:
        return t.clone()
    span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
    copy = torch.empty(span, dtype=t.dtype, device=t.device).as_strided(t.shape, t.stride())
    copy.copy_(t)
    return copy


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0.0 from 0.0 and knows NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _launch(**args: Any) -> Tensor:
    """The step kernels, launched whatever the device: on the CPU that is Triton's interpreter."""
    call = Call(**args)
    assert guards.error(call, "auto") is None
    return ops.launch_steps(call, *scratch(call))


def _block(**args: Any) -> Tensor:
    """One launch a block, where it serves."""
    call = Call(**args)
    reason = guards.error(call, "auto") or guards.block_reason(call)
    if isinstance(reason, str):
        pytest.skip(reason)
    return dspark_ops.markov_sample_sequential(**args, plan="block")


def scratch(call: Call) -> tuple[Tensor, Tensor]:
    maxima = call.base_logits.shape[0] * ops.MOST_PROGRAMS.programs(call.num_columns)
    key_dtype = ops.key_dtype(call.use_fp64 and call.temperature is not None)
    return call.base_logits.new_empty(maxima, dtype=key_dtype), call.base_logits.new_empty(maxima, dtype=torch.int32)


def keys_of_block(args: Arguments) -> Tensor:
    """All keys, [K, R, V], of a call by the block kernel."""
    call = Call(**args)
    rows, steps, vocab = call.base_logits.shape
    keys = torch.full((steps, rows, vocab), float("nan"), device=call.base_logits.device)
    block.launch_block(call, keys=keys)
    assert not keys.isnan().any(), "every key was written"
    return keys


def keys_of(args: Arguments) -> Tensor:
    """All keys, [K, R, V], of a call by the step kernels."""
    call = Call(**args)
    rows, steps, vocab = call.base_logits.shape
    best_key, best_token = scratch(call)
    keys = torch.full((steps, rows, vocab), float("nan"), dtype=best_key.dtype, device=best_key.device)
    ops.launch_steps(call, best_key, best_token, keys)
    assert not keys.isnan().any(), "every key was written"
    return keys


_compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True)

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="`make test` runs it with TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
gpu = [pytest.mark.gpu, needs_compiler]

REFERENCE = pytest.param(Path("reference", "cpu", dspark_ops.markov_sample_sequential), id="reference", marks=needs_compiler)
INTERPRETER = pytest.param(Path("interpreted", "cpu", _launch), id="interpreted", marks=needs_interpreter)
STEP = pytest.param(Path("step", "cuda", lambda **args: dspark_ops.markov_sample_sequential(**args, plan="step")), id="step", marks=gpu)
BLOCK = pytest.param(Path("block", "cuda", _block), id="block", marks=gpu)
GPU_REFERENCE = pytest.param(
    Path("gpu reference", "cuda", lambda **args: dspark_ops.markov_sample_sequential(**args, plan="reference")), id="gpu-reference", marks=gpu
)
COMPILED = pytest.param(Path("compiled", "cpu", _compiled), id="compiled", marks=needs_compiler)
GPU_COMPILED = pytest.param(Path("gpu compiled", "cuda", _compiled), id="gpu-compiled", marks=gpu)

# Paths that take any arguments at no cost, and those that compile once for each kind of metadata.
EAGER_PATHS = [REFERENCE, INTERPRETER, STEP, BLOCK, GPU_REFERENCE]
ALL_PATHS = [*EAGER_PATHS, COMPILED, GPU_COMPILED]
KERNEL_PATHS = [INTERPRETER, STEP, BLOCK]
