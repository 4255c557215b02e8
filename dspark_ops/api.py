"""The functions users call: arguments checked, plan chosen, reason noted, op called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import guards, ops
from .guards import Call

P = ParamSpec("P")
T = TypeVar("T")


def markov_sample_sequential(
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    *,
    temperature: Tensor | None,
    seeds: Tensor | None,
    sample_pos: Tensor | None,
    idx_mapping: Tensor | None,
    draft_logits: Tensor | None = None,
    cache_rows: Tensor | None = None,
    noise: Tensor | None = None,
    use_fp64: bool = False,
    vocab_size: int | None = None,
    draft_to_target: Tensor | None = None,
    bias_scale: float = 1.0,
    bias_soft_cap: float | None = None,
    output_scale: float = 1.0,
    output_soft_cap: float | None = None,
    plan: str = "auto",
) -> Tensor:
    """Samples a DSpark draft block left to right: low-rank Markov bias on the base logits, then Gumbel-max or argmax, step by step.

    At step i of row b, with the token before (`anchor_ids[b]` at i = 0): `bias = w1[token] @ w2.T`, summed in FP32 and rounded to the dtype of
    the logits; `logit = base_logits[b, i] + bias`, rounded again; the logits go to `draft_logits`; the token is the lowest id of the largest
    `logit / temperature + gumbel_noise`, or of the largest logit where the row is greedy. This is the arithmetic of vLLM's DSpark speculator
    (release 0.33). Fused kernels serve it where they can (`why_not` says where not), otherwise it decomposes into plain torch operations.
    Tokens and cached logits carry no gradient.

    Sizes: R requests, K steps, V draft vocabulary, V_target target vocabulary (V unless `draft_to_target` is given), S request slots.

    Args:
        base_logits: [R, K, V] bf16, fp16 or fp32; logits of the K positions.
        anchor_ids: [R] int32 or int64; token before the first position, a target id. One outside [0, V_target) has no bias.
        markov_w1: [V_target, rank] bf16, fp16 or fp32; embedding of the token before.
        markov_w2: [V, rank], dtype of `markov_w1`; projection to the bias.
        temperature: [S] fp32; a row below 2^-64 (or NaN) is greedy. None: all rows are, and the next three may be None as well.
        seeds: [S] int64; all 64 bits count. May be None where `noise` is given.
        sample_pos: [R, K] int32 or int64; position of the token that is sampled. May be None where `noise` is given.
        idx_mapping: [R] or [R, K] int32 or int64; the row's slot. One outside [0, S) marks the row inert: nothing is written for it and it is
            sampled greedily. Two live rows must not share a slot. Needed with `temperature` and with `draft_logits`.
        draft_logits: [S, >= K, >= V_target], dtype of `base_logits` (fp32 with an output transform); written: the logits sampled from, by
            slot, step and target id. `new_draft_logits` makes one. It must not share memory with another argument, which is not checked.
        cache_rows: [S] int32 or int64; row of `draft_logits` for a slot, where the cache is compacted; then its first size is free, and a slot
            without a row (one outside it) is not written.
        noise: [R, K, V] from `markov_noise`, computed ahead; the result is the same. Not Gumbel noise itself, which rounds differently.
        use_fp64: noise and keys in FP64.
        vocab_size: columns from this one on are padding: they never win and are not written.
        draft_to_target: [V] int64; offsets of a reduced draft vocabulary, target id = v + draft_to_target[v], which must be in [0, V_target).
        bias_scale, bias_soft_cap: the bias becomes `cap * tanh(bias / cap)` and is then multiplied by the scale.
        output_scale, output_soft_cap: the logits after the addition become FP32, are multiplied by the scale, then `cap * tanh(logit / cap)`.
        plan: "auto"; or "block" (one launch), "step" (launches for each step) or "reference", for experiments and tests.

    Returns:
        [R, K] int64, the draft tokens as target ids.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong shape, device or value, one that the others need is None, or the plan cannot serve the call.

    >>> import torch
    >>> base_logits = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    >>> w1, w2 = torch.eye(3), 2 * torch.eye(3)  # the bias favours the token before
    >>> markov_sample_sequential(
    ...     base_logits, torch.tensor([0]), w1, w2, temperature=None, seeds=None, sample_pos=None, idx_mapping=None
    ... )
    tensor([[0, 0]])
    """
    call = Call(
        base_logits,
        anchor_ids,
        markov_w1,
        markov_w2,
        temperature,
        seeds,
        sample_pos,
        idx_mapping,
        draft_logits,
        cache_rows,
        noise,
        use_fp64,
        vocab_size,
        draft_to_target,
        bias_scale,
        bias_soft_cap,
        output_scale,
        output_soft_cap,
    )
    # Eager calls are checked and planned in the op. While a graph is made, the plan is chosen here, where Dynamo turns what the choice reads
    # into guards and the plan into an argument of the op; an exported program carries "auto", since it may run on another device. The checks
    # stay in the op, as Dynamo would take 60 ms to trace them; the graph of a wrong call raises its error when it runs, see
    # `ops._define_refusal`.
    if torch.compiler.is_compiling():
        wrong_type = guards.type_error(call, plan)
        if wrong_type is not None:
            return torch.ops.dspark.refuse_type(base_logits, base_logits.shape[:2], torch.int64, str(wrong_type))
        if not guards.exporting() and guards.has_layouts(call):
            chosen, reason = guards.choose(call, plan)
            if plan == "auto":
                plan = chosen
            if reason is not None and plan == chosen:
                guards.note(plan, reason)
        return torch.ops.dspark.markov_sample_sequential(*call, plan)
    try:
        if guards.runs_directly(call):
            ops.tell_autograd(call)
            return ops.sample(call, plan)
        wrong_type = guards.type_error(call, plan)
        if wrong_type is not None:
            raise wrong_type
        return torch.ops.dspark.markov_sample_sequential(*call, plan)
    except RuntimeError as failure:
        # What is no tensor or no number fails at the schema, before the op could say so in its own words.
        error = guards.error(call, plan)
        raise failure if error is None else error from None


def _with_arguments_of(function: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Gives a function the signature of another, for readers, `help` and type checkers."""

    def decorate(f: Callable[..., T]) -> Callable[P, T]:
        returns = f.__annotations__["return"]
        f.__signature__ = inspect.signature(function).replace(return_annotation=returns)  # type: ignore[attr-defined]
        return f

    return decorate


@_with_arguments_of(markov_sample_sequential)
def why_not(*args: Any, **kwargs: Any) -> str | None:
    """Why the fused kernels do not serve a call of `markov_sample_sequential`, or None where they do.

    Args: those of `markov_sample_sequential`. Only metadata is read: shapes, dtypes, strides, devices and options.
    Returns: a text for the author of the call. Raises: what the call would raise.

    >>> import torch
    >>> logits, ids, weights = torch.zeros(1, 1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(4, 16)
    >>> why_not(logits, ids, weights, weights, temperature=None, seeds=None, sample_pos=None, idx_mapping=None)
    'the tensors are on a cpu device; the fused kernels need a GPU'
    """
    plan = kwargs.pop("plan", "auto")
    call = Call(*args, **kwargs)
    error = guards.error(call, plan)
    if error is not None:
        raise error
    chosen, reason = guards.choose(call, plan)
    return reason if chosen == "reference" else None


def markov_noise(
    seeds: Tensor,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    vocab_size: int,
    *,
    draft_to_target: Tensor | None = None,
    use_fp64: bool = False,
) -> Tensor:
    """The noise of a whole block, ahead of the logits: it depends on seeds, positions and ids alone, so it can run beside the lm_head.

    This function runs in order on the current stream. In a compiled graph, a fork before the lm_head and a join after it would be two
    operations whose places the compiler chooses, along with when it reuses the memory between them; `lm_head_beside_noise` is one operation
    that does both. `FusedMarkov.fork_noise` serves any lm_head in eager code and captures.

    What is stored is the argument of the outer logarithm, `-log(1 - u)`, for `markov_sample_sequential(noise=...)`: a stored logarithm would
    round differently from one that is computed in the step.

    Args:
        seeds: [S] int64.
        sample_pos: [R, K] int32 or int64.
        idx_mapping: [R] or [R, K] int32 or int64; inert rows get 1, whose logarithm is 0.
        vocab_size: number of draft columns, V.
        draft_to_target: [V] int64; offsets of a reduced draft vocabulary: noise belongs to the target id.
        use_fp64: FP64 noise.

    Returns:
        [R, K, V] fp32, or fp64 with `use_fp64`; R K V elements are much memory: 4.6 MB a row at K = 7, V = 163,840.

    Raises:
        TypeError, ValueError: as `markov_sample_sequential`.

    >>> import torch
    >>> from dspark_ops import gumbel_noise
    >>> noise = markov_noise(torch.tensor([5]), torch.tensor([[10, 11]]), torch.tensor([0]), 4)
    >>> torch.equal(-noise.log(), gumbel_noise(torch.tensor([5]), torch.tensor([[10, 11]]), torch.arange(4), step=torch.arange(2)))
    True
    """
    wrong_type = guards.flag_error(use_fp64)
    if wrong_type is not None:
        if torch.compiler.is_compiling():
            return torch.ops.dspark.refuse_type(seeds, (*sample_pos.shape, vocab_size), torch.float32, str(wrong_type))
        raise wrong_type
    try:
        return torch.ops.dspark.markov_noise(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target, use_fp64)
    except RuntimeError as failure:
        error = guards.noise_error(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target)
        raise failure if error is None else error from None


def lm_head_beside_noise(
    hidden: Tensor,
    weight: Tensor,
    seeds: Tensor,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    *,
    bias: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor]:
    """The base logits, `torch.nn.functional.linear(hidden, weight, bias)`, and on a second stream meanwhile the noise of the block.

    Both streams are joined within the operation, so there is nothing to wait for, in eager code, `torch.compile` and CUDA graphs. Where there
    is no GPU, in exported programs, under autocast and where a gradient is to flow, it is `linear` and `markov_noise` in order, with the same
    result.

    Args:
        hidden: [R, K, d]; hidden states of the K positions.
        weight: [V, d], dtype of `hidden`; the lm_head.
        seeds, sample_pos, idx_mapping, draft_to_target, use_fp64: as `markov_noise`.
        bias: [V], dtype of `hidden`.

    Returns:
        base_logits [R, K, V] and noise [R, K, V], for `markov_sample_sequential(base_logits, ..., noise=noise)`. The noise is much memory,
        see `markov_noise`; it pays for small batches, where the lm_head waits for memory and leaves room on the GPU.

    Raises:
        TypeError, ValueError: as `markov_noise`. What is wrong with hidden, weight and bias is raised by `linear`.

    >>> import torch
    >>> slots = torch.tensor([5]), torch.tensor([[10, 11]]), torch.tensor([0])
    >>> base_logits, noise = lm_head_beside_noise(torch.ones(1, 2, 8), torch.ones(4, 8), *slots)
    >>> base_logits.shape, torch.equal(noise, markov_noise(*slots, 4))
    (torch.Size([1, 2, 4]), True)
    """
    if (
        guards.device_reason(weight.device) is None
        and guards.flag_error(use_fp64) is None
        and not guards.exporting()
        and not torch.is_autocast_enabled(weight.device.type)
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)))
    ):
        return torch.ops.dspark.linear_beside_noise(hidden, weight, bias, seeds, sample_pos, idx_mapping, draft_to_target, use_fp64)
    noise = markov_noise(seeds, sample_pos, idx_mapping, weight.shape[0], draft_to_target=draft_to_target, use_fp64=use_fp64)
    return F.linear(hidden, weight, bias), noise


def new_draft_logits(
    num_slots: int,
    num_steps: int,
    target_vocab_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    output_scale: float = 1.0,
    output_soft_cap: float | None = None,
) -> Tensor:
    """A cache of draft logits that is right for every option of `markov_sample_sequential`.

    It holds -inf, so that target ids outside a reduced or padded draft vocabulary, which no step writes, have probability 0.

    Args:
        num_slots: S, or the number of cache rows where `cache_rows` maps slots to them.
        num_steps: K.
        target_vocab_size: V_target.
        dtype: dtype of the base logits; an output transform makes the cache FP32.
        device: where the base logits are.
        output_scale, output_soft_cap: as given to `markov_sample_sequential`.

    Returns:
        [num_slots, num_steps, target_vocab_size].

    Raises:
        TypeError: `dtype` is not bf16, fp16 or fp32, a size is no int, or an option of the transform no number.
        ValueError: a size is negative, or an option of the transform not finite, a cap not above 0.

    >>> import torch
    >>> new_draft_logits(2, 3, 8, dtype=torch.bfloat16).shape
    torch.Size([2, 3, 8])
    """
    if dtype not in guards.FLOATS:
        raise TypeError(f"dtype must be {' or '.join(str(d) for d in guards.FLOATS)}, got {dtype}")
    for name, size in (("num_slots", num_slots), ("num_steps", num_steps), ("target_vocab_size", target_vocab_size)):
        guards.check_size(name, size, 0)
    error = guards.output_error(output_scale, output_soft_cap)
    if error is not None:
        raise error.error()
    if output_scale != 1.0 or output_soft_cap is not None:
        dtype = torch.float32
    return torch.full((num_slots, num_steps, target_vocab_size), float("-inf"), dtype=dtype, device=device)
