"""The matcher on traced graphs, without a compiler: what it takes for a loop, and the reason it gives where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import grid, needs_compiler
from naive_loops import REFUSED, REFUSED_SAMPLED, Naive
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from dspark_ops.inductor.match import NearMiss, find

pytestmark = needs_compiler
ROWS, STEPS, VOCAB, RANK = 3, 2, 97, 16


def _trace(loop: Naive, *args: Tensor) -> torch.fx.Graph:
    """The functional graph of a loop, in the decompositions of Inductor."""
    functional = torch.func.functionalize(loop, remove="mutations")
    graph = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args).graph
    graph.eliminate_dead_code()
    return graph


def _inputs(sampled: bool, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    base, w1, w2 = (grid(*shape, generator=generator, dtype=torch.bfloat16) for shape in ((ROWS, steps, VOCAB), (VOCAB, RANK), (VOCAB, RANK)))
    slots = [torch.tensor([0.8, 1.3, 0.5]), torch.tensor([1, -2, 3]), torch.arange(ROWS * steps).view(ROWS, steps)]
    return [base, torch.tensor([5, 6, 7]), w1, w2, *(slots if sampled else [])]


def _found(loop: Naive, sampled: bool, steps: int = STEPS) -> list[Any]:
    return list(find(_trace(loop, *_inputs(sampled, steps))))


@pytest.mark.parametrize("name", REFUSED | REFUSED_SAMPLED)
def test_what_would_change_a_bit_is_refused_with_the_reason(name: str) -> None:
    loop, reason = (REFUSED | REFUSED_SAMPLED)[name]
    (miss,) = _found(loop, name in REFUSED_SAMPLED, steps=3)
    assert isinstance(miss, NearMiss) and miss.reason.startswith(reason)
