"""The operators of the namespace `dspark`: schemas, fakes, bodies that choose kernels or the reference, and the launches.

`dspark::markov_sample_sequential` and `dspark::markov_noise` are `triton_op`s, so Inductor sees the kernels, or the aten operations where the
reference serves. `dspark::linear_beside_noise` is opaque, since it holds two streams. Importing this module neither imports Triton where it is
missing nor touches a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op, wrap_triton

from . import compile_cache, guards, reference
from .arguments import optional_pointers, optional_strides, stride, strides2, table_sizes
from .block import sample_block
from .guards import Call
from .noise import block_log_argument, target_ids

if guards.has_triton() or TYPE_CHECKING:
    from .kernels.cache import cache_kernel
    from .kernels.noise import noise_kernel
    from .kernels.step import select_kernel, step_kernel

# The noise kernel's and the select kernel's block: any multiple of a warp does.
_BLOCK = 1024


class Tiles(NamedTuple):
    """Shape of a step kernel's program: BLOCK_R rows by `tiles` tiles of BLOCK_V vocabulary entries."""

    block_r: int
    block_v: int
    tiles: int
    num_warps: int
    num_stages: int

    def programs(self, vocab_size: int) -> int:
        """Programs, and so maxima a row, of one step."""
        return -(-vocab_size // (self.block_v * self.tiles))


# The fastest of those tried at each R on an H200 (V = 163,840, rank 256, K = 7, bf16). Keys do not depend on the shape: every product sums the
# rank in the same order. Narrow blocks save the noise of rows that do not exist; wide ones read markov_w2 fewer times.
TILES = {
    1: Tiles(1, 64, 2, num_warps=4, num_stages=2),
    4: Tiles(4, 64, 2, num_warps=4, num_stages=2),
    16: Tiles(16, 32, 4, num_warps=4, num_stages=3),
    32: Tiles(32, 64, 4, num_warps=8, num_stages=2),
}
# The shape with the most programs: scratch that fits it fits all.
MOST_PROGRAMS = min(TILES.values(), key=lambda tiles: tiles.block_v * tiles.tiles)


def shapes(hip: bool, *dtypes: torch.dtype) -> dict[int, Tiles]:
    """The shapes that serve logits and weights of these dtypes, by the largest batch of each: those whose registers do not spill."""
    wide = not hip and torch.float32 not in dtypes
    return {rows: tiles for rows, tiles in TILES.items() if (rows <= 16 or wide) and (rows > 1 or not hip)}


def tiles_for(call: Call) -> Tiles:
    """The shape for a call. A symbolic batch takes the one that suits most, since a choice would be a guard and so another graph."""
    num_requests = call.base_logits.shape[0]
    if not isinstance(num_requests, int):
        return TILES[16]
    fitting = shapes(torch.version.hip is not None, call.base_logits.dtype, call.markov_w1.dtype)
    return next((tiles for rows, tiles in fitting.items() if num_requests <= rows), fitting[max(fitting)])


def block_k(rank: int, dtype: torch.dtype) -> int:
    """How much of the rank one product covers: a power of two that divides it, so that no load of the weights is masked."""
    # In wider parts registers would spill; FP32 weights are multiplied from registers.
    return min(rank & -rank, 16 if dtype == torch.float32 else 256 if rank <= 256 else 128)


def num_stages(tiles: Tiles, rank: int, dtype: torch.dtype) -> int:
    """Depth of the pipeline of markov_w2's tiles: none for FP32, whose registers would spill, nor for tiles of a few hundred bytes."""
    return 1 if dtype == torch.float32 or rank < 64 else tiles.num_stages


def _device_of(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The current device for launches: the tensor's own; while a graph is traced there is nothing to launch."""
    if t.is_cuda and guards.runs_now(t):
        return torch.cuda.device(t.device)
    return contextlib.nullcontext()


def launch_steps(call: Call, best_key: Tensor, best_token: Tensor, keys: Tensor | None = None) -> Tensor:
    """Launches the 2 K kernels of a call that they serve, with flat scratch for R x programs maxima; `keys` [K, R, V] receives all keys."""
    base = call.base_logits
    num_requests, num_steps, _ = base.shape
    tokens = base.new_empty((num_requests, num_steps), dtype=torch.int64)
    vocab_size = call.num_columns
    rank = call.markov_w1.shape[1]
    tiles = tiles_for(call)
    programs = tiles.programs(vocab_size)
    pointers, strides = optional_pointers(call), optional_strides(call)
    now = guards.runs_now(base)  # then without the wrapper for tracers, which costs a millisecond a launch
    # A batch whose size is known at run time only may be empty: Triton's launchers and Inductor's skip a grid of zero.
    with _device_of(base):
        for step in range(num_steps):
            (step_kernel if now else wrap_triton(step_kernel))[(-(-num_requests // tiles.block_r), programs)](
                base,
                call.anchor_ids,
                call.markov_w1,
                call.markov_w2,
                *pointers,
                tokens,
                best_key,
                best_token,
                best_key if keys is None else keys[step],
                num_requests,
                num_steps,
                step,
                vocab_size,
                *table_sizes(call),
                base.stride(0),
                base.stride(1),
                call.anchor_ids.stride(0),
                call.markov_w1.stride(0),
                call.markov_w2.stride(0),
                *strides,
                RANK=rank,
                SAMPLED=call.temperature is not None,
                NOISE_AHEAD=call.noise is not None,
                CACHED=call.draft_logits is not None,
                COMPACT=call.cache_rows is not None,
                FP64=best_key.dtype == torch.float64,
                WRITE_KEYS=keys is not None,
                BLOCK_R=tiles.block_r,
                BLOCK_V=tiles.block_v,
                BLOCK_K=block_k(rank, call.markov_w1.dtype),
                TILES=tiles.tiles,
                num_warps=tiles.num_warps,
                num_stages=num_stages(tiles, rank, call.markov_w1.dtype),
            )
            (select_kernel if now else wrap_triton(select_kernel))[(num_requests,)](
                best_key, best_token, tokens, programs, num_steps, step, BLOCK=_BLOCK
            )
    return tokens


def launch_noise(
    seeds: Tensor,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    vocab_size: int,
    token_ids: Tensor | None,
    out: Tensor,
    logarithm: bool = False,
) -> None:
    """Launches the noise kernel, which fills `out` [R, K, V]; `token_ids` [V] where they are not 0, 1, 2, ..."""
    num_requests, num_steps = sample_pos.shape
    now = guards.runs_now(out)
    with _device_of(out):
        (noise_kernel if now else wrap_triton(noise_kernel))[(num_requests * num_steps, -(-vocab_size // _BLOCK))](
            seeds,
            sample_pos,
            idx_mapping,
            seeds if token_ids is None else token_ids,
            out,
            num_steps,
            vocab_size,
            seeds.shape[0],
            seeds.stride(0),
            *strides2(sample_pos),
            *strides2(idx_mapping),
            *strides2(out),
            MAPPED=token_ids is not None,
            FP64=out.dtype == torch.float64,
            LOGARITHM=logarithm,
            BLOCK_V=_BLOCK,
            num_warps=4,
        )


def _negated_noise(seeds: Tensor, sample_pos: Tensor, slots: Tensor, vocab: int, token_ids: Tensor | None, use_fp64: bool) -> Tensor:
    """`reference.negated_noise` by the kernel, laid out so that the noise of a step is contiguous, as the reference reads it."""
    num_requests, num_steps = sample_pos.shape
    strides = (vocab, num_requests * vocab, 1)
    out = seeds.new_empty_strided((num_requests, num_steps, vocab), strides, dtype=key_dtype(use_fp64))
    launch_noise(seeds, sample_pos, slots, vocab, token_ids, out, logarithm=True)
    return out


def _write_cache(call: Call, num_slots: int, token_ids: Tensor | None, logits: Tensor) -> None:
    """`reference.write_cache` by the kernel."""
    cache, slots = call.draft_logits, call.idx_mapping
    assert cache is not None and slots is not None
    num_requests, num_steps, vocab = logits.shape
    now = guards.runs_now(logits)
    with _device_of(logits):
        (cache_kernel if now else wrap_triton(cache_kernel))[(num_requests * num_steps, -(-vocab // _BLOCK))](
            logits,
            slots,
            slots if call.cache_rows is None else call.cache_rows,
            slots if token_ids is None else token_ids,
            cache,
            num_steps,
            vocab,
            num_slots,
            cache.shape[0],
            cache.shape[2],
            *strides2(logits),
            *strides2(slots),
            stride(call.cache_rows),
            *cache.stride(),
            COMPACT=call.cache_rows is not None,
            MAPPED=token_ids is not None,
            BLOCK_V=_BLOCK,
            num_warps=4,
        )


def key_dtype(use_fp64: bool) -> torch.dtype:
    return torch.float64 if use_fp64 else torch.float32


def _noise(
    seeds: Tensor,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    vocab_size: int,
    draft_to_target: Tensor | None = None,
    use_fp64: bool = False,
) -> Tensor:
    if guards.noise_error(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target) is not None:
        return torch.ops.dspark.refuse_noise(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target, use_fp64)
    if guards.device_reason(seeds.device) is not None or guards.nothing_to_draft(sample_pos):
        every_id = target_ids(vocab_size, draft_to_target, seeds.device)
        return block_log_argument(seeds, sample_pos, idx_mapping, every_id, use_fp64)
    return _noise_by_kernel(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target, use_fp64, contextlib.nullcontext())


def _noise_by_kernel(
    seeds: Tensor,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    vocab_size: int,
    draft_to_target: Tensor | None,
    use_fp64: bool,
    stream: contextlib.AbstractContextManager[Any],
) -> Tensor:
    """The noise by the kernel, which is launched within `stream`; all memory is the current stream's."""
    token_ids = None if draft_to_target is None else target_ids(vocab_size, draft_to_target, seeds.device)
    out = seeds.new_empty((*sample_pos.shape, vocab_size), dtype=key_dtype(use_fp64))
    with stream:
        launch_noise(seeds, sample_pos, idx_mapping, vocab_size, token_ids, out)
    return out


markov_noise = triton_op("dspark::markov_noise", _noise, mutates_args=())


@functools.cache
def _side_stream(device: torch.device, current: int) -> torch.cuda.Stream:
    """The stream beside a current one, by its handle: two that share a side stream would wait for each other, and captures would meet."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _forked(device: torch.device) -> Iterator[None]:
    """Launches go to the side stream, after what the current stream holds."""
    current = torch.cuda.current_stream(device)
    side = _side_stream(device, current.cuda_stream)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield


def _join(device: torch.device) -> None:
    """Makes the current stream wait for its side stream."""
    current = torch.cuda.current_stream(device)
    current.wait_stream(_side_stream(device, current.cuda_stream))


def _linear_beside_noise(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seeds: Tensor,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    draft_to_target: Tensor | None,
    use_fp64: bool,
) -> tuple[Tensor, Tensor]:
    given = (seeds, sample_pos, idx_mapping, weight.shape[0], draft_to_target)
    if guards.noise_error(*given) is not None or guards.nothing_to_draft(sample_pos):
        return F.linear(hidden, weight, bias), _noise(*given, use_fp64)
    # No compiler sees into this op, and it returns with the streams joined. So what is given and what is returned is in order on the current
    # stream for everyone else: a compiler may free, reuse or overwrite any buffer before or after it.
    try:
        noise = _noise_by_kernel(*given, use_fp64, _forked(weight.device))
        return F.linear(hidden, weight, bias), noise
    finally:
        _join(weight.device)  # after an error as well: the memory of the noise goes back to the current stream


def tell_autograd(call: Call) -> None:
    """Counts a write to the cache that passes the dispatcher by, which would count it: a gradient that needs the old values is an error."""
    if call.draft_logits is not None and guards.runs_now(call.draft_logits):
        torch.autograd.graph.increment_version(call.draft_logits)


def _inductor_at_work() -> Any:
    """What Inductor must know of the ops, while a graph is made that may be for it."""
    if "torch._inductor.compile_fx" not in sys.modules:
        return None
    try:
        return importlib.import_module(".inductor.lowering", __package__)  # not sooner: it needs Inductor, which takes seconds to import
    except ImportError as failure:  # the pass beside it imports private names, which a version of torch may not have
        guards.logger.warning("torch %s: compiled graphs do without what Inductor is told of the ops: %s", torch.__version__, failure)
        return None


def sample(call: Call, plan: str) -> Tensor:
    """The body of the op: checks, the plan, and kernels or the reference."""
    error = guards.error(call, plan)
    if error is not None:
        if guards.runs_now(call.base_logits):
            raise error
        return torch.ops.dspark.refuse(*call, plan)
    chosen, reason = guards.choose(call, plan)
    if reason is not None and guards.runs_now(call.base_logits):
        guards.note_once(chosen, reason)  # where a graph is made, the function that users call notes it
    if chosen in ("block", "step"):
        inductor = None if guards.runs_now(call.base_logits) else _inductor_at_work()
        if chosen == "block" and not (inductor and inductor.packaging()):
            return sample_block(call)
        call = inductor.keep_layouts(call) if inductor else call
        maxima = call.base_logits.shape[0] * tiles_for(call).programs(call.num_columns)
        best_key = call.base_logits.new_empty((maxima,), dtype=key_dtype(call.use_fp64 and call.temperature is not None))
        return launch_steps(call, best_key, call.base_logits.new_empty((maxima,), dtype=torch.int32))
    if guards.device_reason(call.base_logits.device) is not None:
        return reference.sample(call)
    # Two kernels instead of some eighty operations, for the same bits.
    return reference.sample(call, parts=reference.Parts(_negated_noise, _write_cache))


def _sample(
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    # Without defaults up to the mutated argument: torch 2.11 stumbles over one that the dispatcher leaves out (pytorch#176078).
    temperature: Tensor | None,
    seeds: Tensor | None,
    sample_pos: Tensor | None,
    idx_mapping: Tensor | None,
    draft_logits: Tensor | None,
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
    return sample(call, plan)


markov_sample_sequential = triton_op("dspark::markov_sample_sequential", _sample, mutates_args=("draft_logits",))


def _error(*args: Any, **kwargs: Any) -> Exception | None:
    """What is wrong with the arguments of the op."""
    bound = inspect.signature(_sample).bind(*args, **kwargs)
    bound.apply_defaults()  # the dispatcher leaves out trailing arguments that have their default
    *fields, plan = bound.args
    return guards.error(Call(*fields), plan)


def _noise_error(
    seeds: Tensor, sample_pos: Tensor, idx_mapping: Tensor, vocab_size: int, draft_to_target: Tensor | None = None, use_fp64: bool = False
) -> Exception | None:
    return guards.noise_error(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target)


def _fake_sample(base_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # While a graph is made, a fake must not stumble over wrong arguments, which are refused when it runs. Otherwise this serves meta tensors.
    if guards.runs_now(base_logits) and (error := _error(base_logits, *args, **kwargs)) is not None:
        raise error
    return base_logits.new_empty(base_logits.shape[:2], dtype=torch.int64)


def _fake_noise(
    seeds: Tensor, sample_pos: Tensor, idx_mapping: Tensor, vocab_size: int, draft_to_target: Tensor | None = None, use_fp64: bool = False
) -> Tensor:
    error = guards.noise_error(seeds, sample_pos, idx_mapping, vocab_size, draft_to_target)
    if error is not None:
        if guards.runs_now(seeds):
            raise error
        vocab_size = 0  # any that is a size: the graph will raise
    return seeds.new_empty((*sample_pos.shape, vocab_size), dtype=key_dtype(use_fp64))


def _fake_linear_beside_noise(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, seeds: Tensor, sample_pos: Tensor, idx_mapping: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return F.linear(hidden, weight, bias), _fake_noise(seeds, sample_pos, idx_mapping, weight.shape[0], *options)


_library = torch.library.Library("dspark", "FRAGMENT")


def _sample_loop(
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    temperature: Tensor | None,
    seeds: Tensor | None,
    sample_pos: Tensor | None,
    use_fp64: bool,
    keep_logits: bool,
) -> tuple[Tensor, Tensor]:
    """`dspark::markov_sample_loop`, what a naive loop in a graph is replaced by: functional, opaque to Inductor, all arguments by row.

    Args: as those of `markov_sample_sequential`, with a slot for each row: temperature [R], seeds [R].
    Returns: tokens [R, K] int64, and the logits sampled from [R, K, V] with `keep_logits`, empty without.

    A row whose temperature is below 2^-64 is greedy, where a loop that divides by it gets infinities and NaN.
    """
    slots = torch.arange(base_logits.shape[0], device=base_logits.device)
    logits = base_logits.new_empty(base_logits.shape if keep_logits else (0,))
    cache = logits if keep_logits else None
    call = Call(base_logits, anchor_ids, markov_w1, markov_w2, temperature, seeds, sample_pos, slots, cache, use_fp64=use_fp64)
    return sample(call, "auto"), logits


def _fake_sample_loop(base_logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    keep_logits = args[-1]
    return base_logits.new_empty(base_logits.shape[:2], dtype=torch.int64), base_logits.new_empty(base_logits.shape if keep_logits else (0,))


# Exact strides: a copy of the base logits, made to pad or to reorder them, would cost more than a step.
_library.define(
    "markov_sample_loop" + torch.library.infer_schema(_sample_loop, mutates_args=()),
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)
_library.impl("markov_sample_loop", _sample_loop, "CompositeExplicitAutograd")
torch.library.register_fake("dspark::markov_sample_loop", _fake_sample_loop, lib=_library)


def _define_refusal(name: str, op: Callable[..., Tensor], error_of: Callable[..., Exception | None], fake: Callable[..., Tensor]) -> None:
    """Defines what a graph holds in place of a call of an op with wrong arguments: it raises the error of the eager call, with actual sizes,
    when the graph runs. Tracers wrap an error that is raised while they trace into one of their own, of another type.
    """

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise error_of(*args, **kwargs) or RuntimeError(f"dspark::{name} was called with valid arguments")

    _library.define(name + torch.library.infer_schema(op, mutates_args=()))
    _library.impl(name, refuse, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dspark::{name}", fake, lib=_library)
    torch.fx.node.has_side_effect(getattr(torch.ops.dspark, name).default)


def _refuse_type(like: Tensor, shape: Sequence[int], dtype: torch.dtype, text: str) -> Tensor:
    """What a graph holds in place of a call with an option of a type that its schema would not keep; the others say what the result is."""
    raise TypeError(text)


def _fake_refuse_type(like: Tensor, shape: Sequence[int], dtype: torch.dtype, text: str) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


_library.define("refuse_type" + torch.library.infer_schema(_refuse_type, mutates_args=()))
_library.impl("refuse_type", _refuse_type, "CompositeExplicitAutograd")
torch.library.register_fake("dspark::refuse_type", _fake_refuse_type, lib=_library)
torch.fx.node.has_side_effect(torch.ops.dspark.refuse_type.default)
torch.library.register_fake("dspark::markov_sample_sequential", _fake_sample)
torch.library.register_fake("dspark::markov_noise", _fake_noise)
_library.define("linear_beside_noise" + torch.library.infer_schema(_linear_beside_noise, mutates_args=()))
_library.impl("linear_beside_noise", _linear_beside_noise, "CUDA")
torch.library.register_fake("dspark::linear_beside_noise", _fake_linear_beside_noise, lib=_library)
_define_refusal("refuse", _sample, _error, _fake_sample)
_define_refusal("refuse_noise", _noise, _noise_error, _fake_noise)

compile_cache.extend_cache_key()
