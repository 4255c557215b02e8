"""The pass on traced graphs, without a compiler: it leaves a graph as it is where fusing would change a bit, and says why."""

from __future__ import annotations

import logging

import pytest
import torch
from cases import grid, needs_compiler
from naive_loops import GREEDY, REFUSED, REFUSED_SAMPLED, SAMPLED, Naive
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.fx.experimental.proxy_tensor import make_fx

from dspark_ops.inductor.fuse_loop import Found, FuseLoops, record

pytestmark = needs_compiler
ROWS, STEPS, VOCAB, RANK = 3, 3, 97, 16


def _trace(loop: Naive, *args: Tensor) -> torch.fx.Graph:
    """The functional graph of a loop, in the decompositions of Inductor, without what is removed of any graph."""
    functional = torch.func.functionalize(loop, remove="mutations")
    graph = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args).graph
    graph.eliminate_dead_code()
    remove_noop_ops(graph)
    return graph


def _inputs(sampled: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    base, w1, w2 = (grid(*shape, generator=generator, dtype=torch.bfloat16) for shape in ((ROWS, STEPS, VOCAB), (VOCAB, RANK), (VOCAB, RANK)))
    slots = [torch.tensor([0.8, 1.3, 0.5]), torch.tensor([1, -2, 3]), torch.arange(ROWS * STEPS).view(ROWS, STEPS)]
    return [base, torch.tensor([5, 6, 7]), w1, w2, *(slots if sampled else [])]


def _operations(graph: torch.fx.Graph) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


@pytest.mark.parametrize("name", REFUSED | REFUSED_SAMPLED)
def test_what_would_change_a_bit_is_left_alone_and_the_reason_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loop, reason = (REFUSED | REFUSED_SAMPLED)[name]
    graph = _trace(loop, *_inputs(sampled=name in REFUSED_SAMPLED))
    before = _operations(graph)
    with caplog.at_level(logging.INFO, logger="dspark_ops"), record() as found:
        FuseLoops()(graph)
    assert _operations(graph) == before
    ((steps, said),) = found
    assert steps == (1 if name == "single_step" else STEPS) and said is not None and said.startswith(reason)
    assert [each.getMessage() for each in caplog.records if each.name == "dspark_ops"] == [f"a loop of {steps} steps is not fused: {said}"]


@pytest.mark.parametrize("name", GREEDY | SAMPLED)
def test_what_differs_in_nothing_from_the_op_is_fused(name: str) -> None:
    """The loops above are each one change away from one of these."""
    graph = _trace((GREEDY | SAMPLED)[name], *_inputs(sampled=name in SAMPLED))
    with record() as found:
        FuseLoops()(graph)
    steps = {"prefix": 2, "anchor_inside": 2}.get(name, STEPS)
    assert found == [Found(steps, None)] * (2 if name == "two_blocks" else 1)
    graph.lint()
