"""Batches of every size share graphs through Inductor, and CUDA graphs replay what the op writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Arguments, case, needs_compiler, oracle, same_bits, to
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import dspark_ops
from dspark_ops.inductor import compile_options

pytestmark = needs_compiler
PER_ROW = ("base_logits", "anchor_ids", "sample_pos", "idx_mapping")
BATCHES = (1, 2, 3, 7, 16, 64)


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()
    counters.clear()


def _batch(rows: int, *, greedy: bool = False) -> Arguments:
    """A batch of one drafter: what does not depend on R is the same."""
    args = case(rows=64, steps=2, vocab=97, slots=70)
    args |= {name: args[name][:rows] for name in PER_ROW}
    return args | dict.fromkeys(("temperature", "seeds", "sample_pos")) if greedy else args


def _runs_in_at_most_two_graphs(mode: str | None, batches: tuple[int, ...], *, mark: bool, greedy: bool) -> None:
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True, options=compile_options(mode))
    for rows in batches:
        args = _batch(rows, greedy=greedy)
        for name in PER_ROW:
            if mark and rows > 1 and args[name] is not None:
                torch._dynamo.mark_dynamic(args[name], 0)
        expected, expected_cache = oracle(args)
        assert torch.equal(compiled(**args), expected) and same_bits(args["draft_logits"], expected_cache), rows
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "greedy"), [(None, True), ("default", False), ("max-autotune-no-cudagraphs", False)])
@pytest.mark.parametrize("mark", [True, False], ids=["marked", "one-first"])
def test_two_graphs_serve_every_batch_in_each_mode(mode: str | None, greedy: bool, mark: bool) -> None:
    _runs_in_at_most_two_graphs(mode, tuple(reversed(BATCHES)) if mark else BATCHES, mark=mark, greedy=greedy)


def test_every_grad_mode_has_a_graph_of_its_own() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dspark_ops.markov_sample_sequential, backend=counter, fullgraph=True)
    for graphs, mode in enumerate((torch.enable_grad, torch.no_grad, torch.inference_mode), start=1):
        for _ in range(2):
            with mode():
                compiled(**_batch(3, greedy=True))
        assert counter.frame_count == graphs


class Drafter(torch.nn.Module):
    def __init__(self, draft_logits: Tensor) -> None:
        super().__init__()
        self.register_buffer("draft_logits", draft_logits)

    def forward(self, **rest: Any) -> Tensor:
        return dspark_ops.markov_sample_sequential(draft_logits=self.draft_logits, **rest)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_is", ["a buffer", "an argument with a static address", "an argument"])
@pytest.mark.parametrize("plan", ["auto", "step", "reference"])
@torch.inference_mode()
@torch._inductor.config.patch(force_disable_caches=True)  # a cached graph keeps what the first caller said of its arguments
def test_cuda_graphs_need_a_cache_that_stays_where_it_is(cache_is: str, plan: str) -> None:
    """And replays read the inputs as they are by then: each call has other rows in the same tensors."""
    counters.clear()
    for rows in (1, 3, 7):
        whole = to("cuda", case(rows=64, steps=2, vocab=97, slots=70))
        args = {**whole, "plan": plan} | {name: whole[name][:rows].clone() for name in PER_ROW}
        cache = args["draft_logits"]
        if cache_is == "a buffer":
            del args["draft_logits"]
            function: Any = Drafter(cache)
        else:
            function = dspark_ops.markov_sample_sequential
            if cache_is == "an argument with a static address":
                torch._dynamo.mark_static_address(cache)
        compiled = torch.compile(function, fullgraph=True, options=compile_options("reduce-overhead"))
        for call in range(6):  # a warm-up, a recording, and replays
            rows_now = [(rows * call + row) % 64 for row in range(rows)]
            for name in PER_ROW:
                args[name].copy_(whole[name][rows_now])
            cache.fill_(-7.0)
            expected, expected_cache = oracle({**whole} | {name: whole[name][rows_now] for name in PER_ROW})
            torch.compiler.cudagraph_mark_step_begin()
            tokens = compiled(**args)
            assert torch.equal(tokens.cpu(), expected), (rows, call)
            assert expected_cache is not None and same_bits(cache.cpu(), expected_cache), (rows, call)
    skips = counters["inductor"]["cudagraph_skips"]
    # One for each compilation, since a graph would write to where the cache of the first call lay.
    assert skips == (3 if cache_is == "an argument" else 0)
