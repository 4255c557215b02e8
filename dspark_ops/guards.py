"""Which calls are valid, and which the fused kernels serve: predicates on metadata alone, shared by the functions and the ops.

Everything here runs in three places: in eager calls, while Dynamo traces the public functions (so that shapes, dtypes and flags become guards
of the graph), and in the bodies of the ops. Hence the style: plain comparisons, and reasons without numbers, since a symbolic size has none
to print. `R`, `K`, `V` and `S` are the requests, draft steps, draft vocabulary and request slots.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

logger = logging.getLogger("dspark_ops")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)
PLANS = ("auto", "block", "step", "reference")
MAX_FUSED_RANK = 512


class Call(NamedTuple):
    """The arguments of `markov_sample_sequential` but for the plan, in the order of the op's schema; see there for shapes and meaning."""

    base_logits: Tensor
    anchor_ids: Tensor
    markov_w1: Tensor
    markov_w2: Tensor
    temperature: Tensor | None = None
    seeds: Tensor | None = None
    sample_pos: Tensor | None = None
    idx_mapping: Tensor | None = None
    draft_logits: Tensor | None = None
    cache_rows: Tensor | None = None
    noise: Tensor | None = None
    use_fp64: bool = False
    vocab_size: int | None = None
    draft_to_target: Tensor | None = None
    bias_scale: float = 1.0
    bias_soft_cap: float | None = None
    output_scale: float = 1.0
    output_soft_cap: float | None = None

    @property
    def num_columns(self) -> int:
        """The columns that can win: the draft vocabulary without its padding."""
        return self.base_logits.shape[2] if self.vocab_size is None else self.vocab_size

    @property
    def transforms_bias(self) -> bool:
        return self.bias_scale != 1.0 or self.bias_soft_cap is not None

    @property
    def transforms_output(self) -> bool:
        """Whether the logits become FP32 after the bias is added."""
        return self.output_scale != 1.0 or self.output_soft_cap is not None


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor is none of the stand-ins that tracers pass around, nor of another class of its own."""
    return type(t) in (Tensor, torch.nn.Parameter)


def runs_now(t: Tensor) -> bool:
    """Whether operations on a tensor run one by one as they are called."""
    return _is_plain(t) and not torch.compiler.is_compiling()


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Whether a program is being exported, by what was set: Dynamo of torch 2.11 answers True in every compilation."""
    return torch.compiler.is_exporting()


def runs_directly(call: Call) -> bool:
    """Whether an eager call may skip the dispatcher, which costs more than the checks: no mode, transform, trace, profile or gradient is to
    see the op, so all that the dispatcher would do is to run its body.
    """
    tensors = [x for x in call if isinstance(x, Tensor)]
    return (
        all(map(_is_plain, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def _differs(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes differ; a size that is known at run time only is taken to fit."""
    return guard_or_false(a != b)


def _below(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    return guard_or_false(a < b)


class Wrong(NamedTuple):
    """An error to be. As an exception it could not be an operand of `or`: Dynamo of torch 2.11 does not know whether one is true."""

    kind: type[Exception]
    text: str

    def error(self) -> Exception:
        return self.kind(self.text)


def _shown(x: object) -> object:
    """A number for an error message. Dynamo has no text for a symbolic one, nor needs it: the error is raised when the graph runs."""
    return "?" if torch.compiler.is_compiling() else x


def _tensor(name: str, t: object, device: torch.device, dtypes: tuple[torch.dtype, ...], layouts: str, dims: tuple[int, ...]) -> Wrong | None:
    """What is wrong with the type, dtype, number of dimensions or device of an argument."""
    if not isinstance(t, Tensor):
        return Wrong(TypeError, f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        return Wrong(TypeError, f"{name} must be a strided tensor, got layout {t.layout}; call .to_dense() first")
    if t.dtype not in dtypes:
        return Wrong(
            TypeError,
            f"{name} must be {' or '.join([str(d) for d in dtypes])}, got {t.dtype}; convert it first (packed or quantised data is never "
            "read as numbers)",
        )
    if t.dim() not in dims:
        return Wrong(ValueError, f"{name} must be {layouts}, got shape {tuple(t.shape)}")
    if t.device != device:
        return Wrong(ValueError, f"{name} must be on the device of the other tensors, {device}, got {t.device}")
    return None


def _size(name: str, t: Tensor, dim: int, layout: str, size: int | torch.SymInt, source: str) -> Wrong | None:
    """What is wrong with one size of an argument, where `source` says what the size comes from."""
    if _differs(t.shape[dim], size):
        return Wrong(ValueError, f"{name} must be {layout} with {source} = {_shown(size)}, got shape {tuple(t.shape)}")
    return None


def _reach(name: str, t: Tensor, dim: int, layout: str, size: int | torch.SymInt, source: str) -> Wrong | None:
    if _below(t.shape[dim], size):
        return Wrong(ValueError, f"{name} must be {layout}, at least {_shown(size)} ({source}) in dimension {dim}, got shape {tuple(t.shape)}")
    return None


def _number_type(name: str, x: object) -> Wrong | None:
    if not isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(x, bool):
        return Wrong(TypeError, f"{name} must be a number, got {type(x).__name__}")
    return None


def _number(name: str, x: float, positive: bool) -> Wrong | None:
    wrong_type = _number_type(name, x)
    if wrong_type is not None:
        return wrong_type
    # Comparisons instead of math.isfinite: the number is symbolic under dynamic=True.
    if not -sys.float_info.max <= x <= sys.float_info.max or (positive and x <= 0):
        return Wrong(ValueError, f"{name} must be a finite number{' above 0' if positive else ''}, got {_shown(x)}")
    return None


def output_error(scale: float, soft_cap: float | None) -> Wrong | None:
    """What is wrong with the output transform."""
    return _number("output_scale", scale, positive=False) or (None if soft_cap is None else _number("output_soft_cap", soft_cap, positive=True))


def size_error(name: str, size: object, least: int) -> Wrong | None:
    """What is wrong with a size that is given as a number."""
    if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
        return Wrong(TypeError, f"{name} must be an int, got {type(size).__name__}")
    if _below(size, least):
        return Wrong(ValueError, f"{name} must be at least {least}, got {_shown(size)}")
    return None


def check_size(name: str, size: object, least: int) -> None:
    """Raises what `size_error` finds."""
    error = size_error(name, size, least)
    if error is not None:
        raise error.error()


def flag_error(use_fp64: object) -> TypeError | None:
    return None if isinstance(use_fp64, bool) else TypeError(f"use_fp64 must be a bool, got {type(use_fp64).__name__}")


def type_error(call: Call, plan: object) -> TypeError | None:
    """What is wrong with the type of an option. The schema of an op would convert or refuse it before a body could tell."""
    size = call.vocab_size
    if size is not None and (not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool)):
        return TypeError(f"vocab_size must be an int or None, got {type(size).__name__}")
    for name in ("bias_scale", "bias_soft_cap", "output_scale", "output_soft_cap"):
        x = getattr(call, name)
        wrong = None if type(x) is float or (x is None and name.endswith("cap")) else _number_type(name, x)
        if wrong is not None:
            return TypeError(wrong.text)
    if not isinstance(plan, str):
        return TypeError(f"plan must be a str, got {type(plan).__name__}")
    return flag_error(call.use_fp64)


def _weights_error(call: Call) -> Wrong | None:
    """What is wrong with the logits, the weights and the options that say how the two meet."""
    base, w1, w2 = call.base_logits, call.markov_w1, call.markov_w2
    if not isinstance(base, Tensor):
        return Wrong(TypeError, f"base_logits must be a torch.Tensor, got {type(base).__name__}")
    device = base.device
    error = (
        _tensor("base_logits", base, device, FLOATS, "[R, K, V]", (3,))
        or _tensor("anchor_ids", call.anchor_ids, device, INTS, "[R]", (1,))
        or _size("anchor_ids", call.anchor_ids, 0, "[R]", base.shape[0], "R of base_logits")
        or _tensor("markov_w1", w1, device, FLOATS, "[V_target, rank]", (2,))
        or _tensor("markov_w2", w2, device, FLOATS, "[V, rank]", (2,))
    )
    if error is not None:
        return error
    if w2.dtype != w1.dtype:
        return Wrong(TypeError, f"markov_w2 must have the dtype of markov_w1, {w1.dtype}, got {w2.dtype}")
    if _below(w1.shape[1], 1):
        return Wrong(
            ValueError, "markov_w1 must have a Markov rank of at least 1, got rank 0: a drafter without a Markov head needs plain sampling"
        )
    if _below(base.shape[2], 1):
        return Wrong(ValueError, f"base_logits must have at least one vocabulary column, got shape {tuple(base.shape)}")
    error = _size("markov_w2", w2, 1, "[V, rank]", w1.shape[1], "rank of markov_w1")
    if error is not None:
        return error
    if call.draft_to_target is not None:
        error = _tensor("draft_to_target", call.draft_to_target, device, (torch.int64,), "[V]", (1,))
        if error is not None:
            return error
    if call.vocab_size is None:
        error = _size("markov_w2", w2, 0, "[V, rank]", base.shape[2], "V of base_logits")
        if error is None and call.draft_to_target is not None:
            error = _size("draft_to_target", call.draft_to_target, 0, "[V]", base.shape[2], "V of base_logits")
        elif error is None and _differs(w1.shape[0], w2.shape[0]):
            error = Wrong(
                ValueError,
                f"markov_w1 must have as many rows as markov_w2 ({_shown(w2.shape[0])}), got {_shown(w1.shape[0])}; pass "
                "draft_to_target where the draft vocabulary is a reduced one, or vocab_size where it is padded",
            )
        return error
    if _below(call.vocab_size, 1) or _below(base.shape[2], call.vocab_size):
        return Wrong(ValueError, f"vocab_size must be from 1 to V of base_logits ({_shown(base.shape[2])}), got {_shown(call.vocab_size)}")
    error = _reach("markov_w1", w1, 0, "[V_target, rank]", call.vocab_size, "vocab_size") or _reach(
        "markov_w2", w2, 0, "[V, rank]", call.vocab_size, "vocab_size"
    )
    if error is None and call.draft_to_target is not None:
        error = _reach("draft_to_target", call.draft_to_target, 0, "[V]", call.vocab_size, "vocab_size")
    return error


def _slots_error(call: Call) -> Wrong | None:
    """What is wrong with the arguments of the request slots: temperature, seeds, positions, mapping and precomputed noise."""
    base = call.base_logits
    device = base.device
    needed: tuple[str, ...] = ()
    if call.temperature is not None:
        needed = ("idx_mapping",) if call.noise is not None else ("idx_mapping", "seeds", "sample_pos")
    elif call.draft_logits is not None:
        needed = ("idx_mapping",)
    for name in needed:
        if getattr(call, name) is None:
            return Wrong(
                ValueError, f"{name} must be a tensor where {'draft_logits' if call.temperature is None else 'temperature'} is given, got None"
            )
    slots: tuple[int, str] | None = None  # S and the argument that it comes from
    per_slot: tuple[tuple[str, Tensor | None, tuple[torch.dtype, ...]], ...] = (
        ("temperature", call.temperature, (torch.float32,)),
        ("seeds", call.seeds, (torch.int64,)),
        ("cache_rows", call.cache_rows, INTS),
    )
    for name, t, dtypes in per_slot:
        if t is None:
            continue
        error = _tensor(name, t, device, dtypes, "[S]", (1,))
        if error is None and slots is not None:
            error = _size(name, t, 0, "[S]", slots[0], f"S of {slots[1]}")
        if error is not None:
            return error
        slots = (t.shape[0], name)
    per_row: tuple[tuple[str, Tensor | None, str, tuple[int, ...]], ...] = (
        ("sample_pos", call.sample_pos, "[R, K]", (2,)),
        ("idx_mapping", call.idx_mapping, "[R] or [R, K]", (1, 2)),
    )
    for name, t, layouts, dims in per_row:
        if t is None:
            continue
        error = _tensor(name, t, device, INTS, layouts, dims) or _size(name, t, 0, layouts, base.shape[0], "R of base_logits")
        if error is None and t.dim() == 2:
            error = _size(name, t, 1, layouts, base.shape[1], "K of base_logits")
        if error is not None:
            return error
    if call.noise is not None:
        dtype = torch.float64 if call.use_fp64 else torch.float32
        layout = "[R, K, V]"
        return (
            _tensor("noise", call.noise, device, (dtype,), layout, (3,))
            or _size("noise", call.noise, 0, layout, base.shape[0], "R of base_logits")
            or _size("noise", call.noise, 1, layout, base.shape[1], "K of base_logits")
            or _reach("noise", call.noise, 2, layout, call.num_columns, "the vocabulary")
        )
    return None


def _overlaps(t: Tensor) -> bool:
    """Whether the strides let two elements share memory. Those that interleave without a collision are taken for overlapping ones: it would
    take a search to tell them apart, and neither slices nor permutations have them. A size that is known at run time only is taken to fit.
    """
    if runs_now(t) and t.is_contiguous():  # spares eager calls the arithmetic
        return False
    dims = [(stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if guard_or_false(size > 1)]
    for i, (stride, _) in enumerate(dims):
        reach = sum([(size - 1) * other for j, (other, size) in enumerate(dims) if j != i and guard_or_false(other <= stride)])
        if guard_or_false(stride <= reach):
            return True
    return False


def _cache_error(call: Call) -> Wrong | None:
    """What is wrong with the cache of draft logits."""
    cache = call.draft_logits
    if cache is None:
        return None if call.cache_rows is None else Wrong(ValueError, "cache_rows must be None where draft_logits is None, got a tensor")
    layout = "[S, K, >= V_target]"
    dtype = torch.float32 if call.transforms_output else call.base_logits.dtype
    error = _tensor("draft_logits", cache, call.base_logits.device, FLOATS, layout, (3,))
    if error is not None:
        return error
    if cache.dtype != dtype:
        what = "torch.float32 with output_scale or output_soft_cap" if call.transforms_output else f"the dtype of base_logits, {dtype}"
        return Wrong(TypeError, f"draft_logits must have {what}, got {cache.dtype}: it holds just what was sampled from")
    if _overlaps(cache):
        return Wrong(
            ValueError,
            "draft_logits must not overlap itself, so each stride must be beyond the reach of the smaller ones, got shape "
            f"{tuple(cache.shape)} and strides {cache.stride()}; make it with new_draft_logits",
        )
    error = _reach("draft_logits", cache, 1, layout, call.base_logits.shape[1], "K of base_logits")
    if error is None and call.cache_rows is None:
        for name, t in (("temperature", call.temperature), ("seeds", call.seeds)):
            if t is not None and error is None:
                error = _size("draft_logits", cache, 0, layout, t.shape[0], f"S of {name}")
    if error is None:
        width = call.markov_w1.shape[0] if call.draft_to_target is not None else call.num_columns
        error = _reach("draft_logits", cache, 2, layout, width, "the target vocabulary")
    return error


def error(call: Call, plan: str) -> Exception | None:
    """The TypeError or ValueError that a call deserves, naming the argument, what it must be and what it is; None for a valid call."""
    wrong_type = type_error(call, plan)
    if wrong_type is not None:
        return wrong_type
    found = _weights_error(call) or _slots_error(call)
    if found is not None:
        return found.error()
    found = (
        _number("bias_scale", call.bias_scale, positive=False)
        or (None if call.bias_soft_cap is None else _number("bias_soft_cap", call.bias_soft_cap, positive=True))
        or output_error(call.output_scale, call.output_soft_cap)
        or _cache_error(call)
    )
    if found is not None:
        return found.error()
    if plan not in PLANS:
        return ValueError(f"plan must be one of {', '.join(PLANS)}, got {plan!r}")
    reason = reference_reason(call) if plan in ("block", "step") else None
    if reason is None and plan == "block":
        reason = block_reason(call)
    if reason is not None and not nothing_to_draft(call.base_logits):  # an empty batch is no fault of the plan
        return ValueError(f"plan must be 'auto' or one that serves this call, got '{plan}', which cannot: {reason}")
    return None


def noise_error(seeds: object, sample_pos: object, idx_mapping: object, vocab_size: Any, draft_to_target: object) -> Exception | None:
    """The TypeError or ValueError that a call of `markov_noise` deserves, or None."""
    if not isinstance(seeds, Tensor):
        return TypeError(f"seeds must be a torch.Tensor, got {type(seeds).__name__}")
    device = seeds.device
    found = (
        _tensor("seeds", seeds, device, (torch.int64,), "[S]", (1,))
        or _tensor("sample_pos", sample_pos, device, INTS, "[R, K]", (2,))
        or _tensor("idx_mapping", idx_mapping, device, INTS, "[R] or [R, K]", (1, 2))
    )
    if found is not None:
        return found.error()
    assert isinstance(sample_pos, Tensor) and isinstance(idx_mapping, Tensor)
    found = _size("idx_mapping", idx_mapping, 0, "[R] or [R, K]", sample_pos.shape[0], "R of sample_pos")
    if found is None and idx_mapping.dim() == 2:
        found = _size("idx_mapping", idx_mapping, 1, "[R, K]", sample_pos.shape[1], "K of sample_pos")
    if found is not None:
        return found.error()
    found = size_error("vocab_size", vocab_size, 1)
    if found is not None:
        return found.error()
    if draft_to_target is not None:
        found = _tensor("draft_to_target", draft_to_target, device, (torch.int64,), "[V]", (1,))
        if found is None and isinstance(draft_to_target, Tensor):
            found = _reach("draft_to_target", draft_to_target, 0, "[V]", vocab_size, "vocab_size")
    return None if found is None else found.error()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_gluon() -> bool:
    return has_triton() and importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def _gpu_reason(index: int) -> str | None:
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return None if arch == "gfx942" else f"the GPU is {arch}; the fused kernels are made for gfx942"
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}; the fused kernels need 8.0"


@torch.compiler.assume_constant_result
def device_reason(device: torch.device) -> str | None:
    """Why the fused kernels do not run on a device, or None."""
    if device.type != "cuda":
        return f"the tensors are on a {device.type} device; the fused kernels need a GPU"
    if not has_triton():
        return "Triton is not installed"
    return _gpu_reason(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _block_gpu_reason(index: int) -> str | None:
    if torch.version.hip is not None:
        return "one launch a block is made for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(index)
    return None if (major, minor) == (9, 0) else f"the GPU has compute capability {major}.{minor}; one launch a block needs 9.0"


@torch.compiler.assume_constant_result
def block_device_reason(device: torch.device) -> str | None:
    """Why the block launch does not run on a device, or None."""
    reason = device_reason(device)
    if reason is None and not has_gluon():
        reason = "this Triton has no Gluon"
    return reason or _block_gpu_reason(torch.cuda.current_device() if device.index is None else device.index)


def nothing_to_draft(t: Tensor) -> bool:
    """Whether an [R, K, ...] argument has no requests or no steps."""
    return guard_or_false(t.shape[0] == 0) or guard_or_false(t.shape[1] == 0)


def _has_layout(t: object, dims: int) -> bool:
    return isinstance(t, Tensor) and t.layout == torch.strided and t.dim() == dims


def has_layouts(call: Call) -> bool:
    """Whether `choose` can read a call that nothing has checked."""
    return (
        _has_layout(call.base_logits, 3)
        and _has_layout(call.markov_w1, 2)
        and _has_layout(call.markov_w2, 2)
        and (call.draft_logits is None or _has_layout(call.draft_logits, 3))
        and (call.noise is None or _has_layout(call.noise, 3))
    )


def reference_reason(call: Call) -> str | None:
    """Why the fused kernels do not serve a valid call, as a text for its author, or None where they do."""
    base, w1, w2 = call.base_logits, call.markov_w1, call.markov_w2
    if nothing_to_draft(base):
        return "there is nothing to draft: no requests or no steps"
    reason = device_reason(base.device)
    if reason is not None:
        return reason
    if call.draft_to_target is not None:
        return "the draft vocabulary is reduced (draft_to_target)"
    if call.transforms_bias:
        return "the bias is scaled or capped (bias_scale, bias_soft_cap)"
    if call.transforms_output:
        return "the logits are transformed after the bias (output_scale, output_soft_cap)"
    if w1.shape[1] % 16 != 0 or w1.shape[1] > MAX_FUSED_RANK:
        return "the Markov rank is not a multiple of 16 up to 512"
    if w1.stride(1) != 1 or w2.stride(1) != 1:
        return "the rank is not the contiguous dimension of markov_w1 and markov_w2"
    if base.stride(2) != 1:
        return "the vocabulary is not the contiguous dimension of base_logits"
    if call.draft_logits is not None and call.draft_logits.stride(2) != 1:
        return "the vocabulary is not the contiguous dimension of draft_logits"
    if call.noise is not None and call.noise.stride(2) != 1:
        return "the vocabulary is not the contiguous dimension of noise"
    return None


def weights_aligned(w2: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, as the copies of tiles need; for tracers, as far as the strides tell."""
    return w2.stride(0) * w2.element_size() % 16 == 0 and not (runs_now(w2) and w2.data_ptr() % 16 != 0)


def block_reason(call: Call) -> str | None:
    """Why step launches serve a call that the fused kernels serve and not one launch a block, or None."""
    reason = block_device_reason(call.base_logits.device)
    if reason is not None:
        return reason
    if call.use_fp64 and call.temperature is not None:
        return "the noise is FP64"
    if call.markov_w2.dtype == torch.float32:
        return "the weights are FP32"
    if not weights_aligned(call.markov_w2):
        return "the rows of markov_w2 do not begin at multiples of 16 bytes"
    return None


@torch.compiler.assume_constant_result
def note(plan: str, reason: str) -> None:
    """Logs why no better plan serves a call; under Dynamo it runs while the graph is made, once a compilation, and breaks no graph."""
    logger.info("markov_sample_sequential is served by %s: %s", "the reference" if plan == "reference" else "step launches", reason)


note_once = functools.cache(note)


def choose(call: Call, plan: str) -> tuple[str, str | None]:
    """The plan that serves a valid call ("block", "step" or "reference"), and why it is not a better one. It reads no more than `has_layouts`
    asks for."""
    if plan == "reference":
        return "reference", "plan='reference' was asked for"
    reason = reference_reason(call)
    if reason is not None:
        return "reference", reason
    if plan == "step":
        return "step", "plan='step' was asked for"
    reason = block_reason(call)
    return ("block", None) if reason is None else ("step", reason)
