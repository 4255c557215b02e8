"""The loop-fusing pass: which loops it fuses, with which result, and which it leaves as they are and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases import grid, needs_compiler, same_bits
from functorch.compile import make_boxed_func
from naive_loops import GREEDY, REFUSED, Naive
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from dspark_ops.inductor.fuse_loop import Found, FuseLoops, record

pytestmark = needs_compiler
FUSED = "dspark.markov_sample_loop.default"


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


class Outcome(NamedTuple):
    """What a loop gives with the pass, what the pass said, and the operations of each graph after it."""

    values: tuple[Tensor, ...]
    found: list[Found]
    graphs: list[Counter[str]]


class Compiled:
    """A loop, compiled up to the pass and no further: the graph that Inductor would generate code from is run as it is."""

    def __init__(self, loop: Naive, **options: Any) -> None:
        self.graphs: list[Counter[str]] = []
        backend = aot_autograd(fw_compiler=self._after_the_pass, decompositions=select_decomp_table, keep_inference_input_mutations=True)
        self.function = torch.compile(loop, backend=backend, fullgraph=True, **options)

    def _after_the_pass(self, module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        joint_graph_passes(module)
        FuseLoops()(module.graph)
        module.graph.lint()
        module.recompile()
        for node in module.graph.nodes:
            assert node.op != "call_function" or "val" in node.meta
        self.graphs.append(Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function"))
        return make_boxed_func(module.forward)

    @torch.no_grad()
    def __call__(self, *args: Tensor) -> Outcome:
        with record() as found:
            values = self.function(*args)
        return Outcome(_tuple(values), found, self.graphs)


def _tuple(values: Any) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


def _inputs(rows: int = 3, steps: int = 3, vocab: int = 97, rank: int = 16, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """Base logits, anchors and both weights on a grid where every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    base, w1, w2 = (grid(*shape, generator=generator, dtype=dtype) for shape in ((rows, steps, vocab), (vocab, rank), (vocab, rank)))
    return [base, torch.randint(vocab, (rows,), generator=generator), w1, w2]


def _agrees(loop: Naive, compiled: Callable[..., Outcome], args: list[Tensor]) -> Outcome:
    """Asserts that values and arguments after the call are those of eager code, bit for bit."""
    expected_args, given = [x.clone() for x in args], [x.clone() for x in args]
    expected = _tuple(loop(*expected_args))
    outcome = compiled(*given)
    for a, b in zip([*outcome.values, *given], [*expected, *expected_args], strict=True):
        assert torch.equal(a, b) if not a.is_floating_point() else same_bits(a, b)
    tokens = expected[0]
    assert tokens.numel() < 4 or len(tokens.unique()) > 2, "tokens that are all the same would show little"
    return outcome


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", GREEDY)
def test_every_form_of_the_greedy_loop_is_fused_and_exact(name: str, rows: int) -> None:
    outcome = _agrees(GREEDY[name], Compiled(GREEDY[name]), _inputs(rows))
    blocks = 2 if name == "two_blocks" else 1
    steps = 2 if name in ("prefix", "anchor_inside") else 3
    assert outcome.found == [Found(steps, None)] * blocks
    (graph,) = outcome.graphs
    assert graph[FUSED] == blocks
    assert not {"aten.mm.default", "aten.embedding.default", "aten.index.Tensor", "aten.select_scatter.default"} & graph.keys()
    assert graph["aten.argmax.default"] == (name == "anchor_inside")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_fused_and_exact(dtype: torch.dtype) -> None:
    for name in ("indexed", "deepspec"):
        outcome = _agrees(GREEDY[name], Compiled(GREEDY[name]), _inputs(dtype=dtype))
        assert outcome.found == [Found(3, None)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_a_bit_is_refused_with_the_reason(name: str) -> None:
    loop, reason = REFUSED[name]
    outcome = _agrees(loop, Compiled(loop), _inputs())
    ((_, said),) = outcome.found
    assert said is not None and said.startswith(reason)
    assert FUSED not in outcome.graphs[0]


def test_what_is_no_loop_is_passed_over_in_silence() -> None:
    def plain(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return (base + (w1[anchors] @ w2.t())[:, None]).argmax(-1)

    assert _agrees(plain, Compiled(plain), _inputs()).found == []
