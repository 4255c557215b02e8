"""What the step kernel and the block kernel take of a call, in the order of their parameters."""

from __future__ import annotations

from torch import Tensor

from .guards import Call


def strides2(t: Tensor | None) -> tuple[int, int]:
    """The first two strides of an argument by row and step; an [R] one serves every step, one left out is never read."""
    if t is None:
        return 0, 0
    return t.stride(0), (t.stride(1) if t.dim() > 1 else 0)


def stride(t: Tensor | None) -> int:
    """The stride of an argument by slot; one left out is never read."""
    return 0 if t is None else t.stride(0)


def optional_pointers(call: Call) -> list[Tensor]:
    """From temperature to noise. One left out is a pointer that the kernels' flags keep them from using."""
    given = (call.temperature, call.seeds, call.sample_pos, call.idx_mapping, call.draft_logits, call.cache_rows, call.noise)
    return [call.anchor_ids if t is None else t for t in given]


def table_sizes(call: Call) -> tuple[int, int, int]:
    """The target vocabulary, the request slots and the rows of the cache."""
    slots = [t.shape[0] for t in (call.temperature, call.seeds, call.cache_rows, call.draft_logits) if t is not None]
    return call.markov_w1.shape[0], slots[0] if slots else 0, 0 if call.draft_logits is None else call.draft_logits.shape[0]


def optional_strides(call: Call) -> tuple[int, ...]:
    """From temperature to noise."""
    return (
        stride(call.temperature),
        stride(call.seeds),
        *strides2(call.sample_pos),
        *strides2(call.idx_mapping),
        *strides2(call.draft_logits),
        stride(call.cache_rows),
        *strides2(call.noise),
    )
