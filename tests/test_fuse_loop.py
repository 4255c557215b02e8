"""The loop-fusing pass: which loops it fuses, with which result, and which it leaves as they are and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import gpu, grid, needs_compiler, same_bits
from functorch.compile import make_boxed_func
from naive_loops import GREEDY, REFUSED, REFUSED_SAMPLED, SAMPLED, MarkovHead, Naive, deepspec, in_the_argument
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.utils import run_and_get_code

import dspark_ops
from dspark_ops.inductor import compile_options
from dspark_ops.inductor.fuse_loop import Found, FuseLoops, record
from dspark_ops.inductor.options import SLOT

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
    """A loop, compiled up to the stage of Inductor that the pass is in and no further: the graph is run as it is then."""

    def __init__(self, loop: Naive, **options: Any) -> None:
        self.graphs: list[Counter[str]] = []
        backend = aot_autograd(fw_compiler=self._after_the_pass, decompositions=select_decomp_table, keep_inference_input_mutations=True)
        self.function = torch.compile(loop, backend=backend, fullgraph=True, **options)

    def _after_the_pass(self, module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        with torch._inductor.config.patch({SLOT: FuseLoops()}):
            joint_graph_passes(module)
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


def _sampled_inputs(rows: int = 3, steps: int = 3, vocab: int = 97) -> list[Tensor]:
    """The same, and temperature, seeds and positions."""
    generator = torch.Generator().manual_seed(1)
    temperature = torch.tensor([0.8, 1.3, 0.5, 5.0]).repeat(rows)[:rows]
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return [*_inputs(rows, steps, vocab), temperature, seeds, torch.randint(1000, (rows, steps), generator=generator)]


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


@pytest.mark.parametrize("name", GREEDY)
def test_every_form_of_the_greedy_loop_is_fused_and_exact(name: str) -> None:
    outcome = _agrees(GREEDY[name], Compiled(GREEDY[name]), _inputs())
    blocks = 2 if name == "two_blocks" else 1
    steps = 2 if name in ("prefix", "anchor_inside") else 3
    assert outcome.found == [Found(steps, None)] * blocks
    (graph,) = outcome.graphs
    assert graph[FUSED] == blocks
    assert not {"aten.mm.default", "aten.embedding.default", "aten.index.Tensor", "aten.select_scatter.default"} & graph.keys()
    assert graph["aten.argmax.default"] == (name == "anchor_inside")


@pytest.mark.parametrize("name", ["sampled", "sampled_deepspec", "fp64", "counted_positions", "constant", "int32"])
def test_a_sampled_loop_is_fused_and_exact(name: str) -> None:
    outcome = _agrees(SAMPLED[name], Compiled(SAMPLED[name]), _sampled_inputs())
    assert outcome.found == [Found(3, None)]
    (graph,) = outcome.graphs
    assert graph[FUSED] == 1
    assert not {"aten.mm.default", "aten.log.default", "aten.bitwise_xor.Tensor", "aten.argmax.default"} & graph.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_fused_and_exact(dtype: torch.dtype) -> None:
    outcome = _agrees(deepspec, Compiled(deepspec), _inputs(dtype=dtype))
    assert outcome.found == [Found(3, None)]


@pytest.mark.parametrize("name", ["masked_at_one_step", "bias_used", "smallest", "recurrent"])
def test_what_is_refused_stays_as_it_is(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every refusal has its case in test_match.py; these show that tokens stay those of eager code."""
    loop, reason = REFUSED[name]
    with caplog.at_level(logging.INFO, logger="dspark_ops"):
        outcome = _agrees(loop, Compiled(loop), _inputs())
    ((steps, said),) = outcome.found
    assert steps == 3 and said is not None and said.startswith(reason)
    assert [record.getMessage() for record in caplog.records] == [f"a loop of 3 steps is not fused: {said}"]
    assert FUSED not in outcome.graphs[0] and outcome.graphs[0]["aten.mm.default"] == 3


def test_other_noise_is_refused() -> None:
    loop, _ = REFUSED_SAMPLED["doubled_noise"]
    outcome = _agrees(loop, Compiled(loop), _sampled_inputs(steps=2))
    assert not outcome.found[0].fused and FUSED not in outcome.graphs[0]


@pytest.mark.parametrize("loop", [deepspec, in_the_argument])
def test_a_marked_batch_takes_two_graphs_at_most(loop: Naive) -> None:
    compiled = Compiled(loop)

    def marked(*args: Tensor) -> Outcome:
        for x in args[:2]:
            if len(x) > 1:
                torch._dynamo.mark_dynamic(x, 0)
        return compiled(*args)

    for rows in (5, 2, 9, 1, 64):
        _agrees(loop, marked, _inputs(rows))
    assert len(compiled.graphs) == 2
    assert all(graph[FUSED] == 1 and not graph["aten.mm.default"] for graph in compiled.graphs)


def test_a_sampled_loop_of_a_marked_batch_is_fused() -> None:
    compiled = Compiled(SAMPLED["counted_positions"])

    def marked(*args: Tensor) -> Outcome:
        for x in (*args[:2], *args[4:]):
            torch._dynamo.mark_dynamic(x, 0)
        return compiled(*args)

    for rows in (5, 2):
        _agrees(SAMPLED["counted_positions"], marked, _sampled_inputs(rows, steps=2))
    assert [graph[FUSED] for graph in compiled.graphs] == [1]


def test_a_module_with_symbolic_inputs_is_fused() -> None:
    _, _, w1, w2 = _inputs()
    head = MarkovHead(w1, w2)
    compiled = Compiled(head, dynamic=True)
    for rows in (5, 4):
        _agrees(head, compiled, _inputs(rows)[:2])
    assert [graph[FUSED] for graph in compiled.graphs] == [1]


def test_the_packages_own_reference_stays_what_was_asked_for() -> None:
    def reference(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return dspark_ops.markov_sample_sequential(
            base, anchors, w1, w2, temperature=None, seeds=None, sample_pos=None, idx_mapping=None, plan="reference"
        )

    for dtype in (torch.bfloat16, torch.float32):
        outcome = _agrees(reference, Compiled(reference), _inputs(dtype=dtype))
        assert not any(found.fused for found in outcome.found) and FUSED not in outcome.graphs[0]


# ---- The whole of Inductor -------------------------------------------------------------------------------------------------------------------

every_device = pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)])


@every_device
def test_a_module_compiled_with_the_options_calls_the_op_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    base, anchors, w1, w2 = (x.to(device) for x in _inputs(vocab=512))
    wide = torch.empty(3, 3, 520, dtype=base.dtype, device=device)[..., :512].copy_(base)
    head = MarkovHead(w1, w2)
    compiled = torch.compile(head, fullgraph=True, options=compile_options())
    with caplog.at_level(logging.INFO, logger="dspark_ops"), torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        tokens, (code,) = run_and_get_code(compiled, wide, anchors)
        assert torch.equal(tokens, head(wide, anchors))
    assert code.count("torch.ops.dspark.markov_sample_loop.default(") == 1
    assert "extern_kernels.mm" not in code and "argmax" not in code
    assert not any("empty_strided" in line and "512" in line for line in code.splitlines()), "strided base logits are not copied"
    assert "a loop of 3 steps is fused to dspark::markov_sample_loop" in caplog.text


@every_device
def test_a_sampled_loop_behind_an_lm_head_is_exact_compiled(device: str) -> None:
    def drafter(hidden: Tensor, lm_head: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return SAMPLED["sampled_deepspec"](hidden @ lm_head.t(), *rest)

    generator = torch.Generator().manual_seed(0)
    hidden, lm_head = (grid(*shape, generator=generator, dtype=torch.bfloat16).to(device) for shape in ((3, 2, 16), (512, 16)))
    args = [hidden, lm_head, *(x.to(device) for x in _sampled_inputs(steps=2, vocab=512)[1:])]
    with record() as found, torch._inductor.config.patch(force_disable_caches=True):
        values = torch.compile(drafter, fullgraph=True, options=compile_options())(*args)
    assert found == [Found(2, None)]
    for a, b in zip(values, drafter(*args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_loop_stays_in_a_package_of_aotinductor(tmp_path: Path) -> None:
    base, anchors, w1, w2 = _inputs()
    head = MarkovHead(w1, w2)
    program = torch.export.export(head, (base, anchors))
    with record() as found:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "head.pt2"), inductor_configs=compile_options())
    ((steps, reason),) = found
    assert steps == 3 and reason is not None and reason.startswith("a package of AOTInductor holds no Python op")
    assert torch.equal(torch._inductor.aoti_load_package(path)(base, anchors), head(base, anchors))


def test_a_graph_from_the_cache_is_the_fused_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    args = _inputs(steps=2)
    for hits, found_in_pass in ((0, [Found(2, None)]), (1, [])):
        torch._dynamo.reset()
        counters.clear()
        with record() as found:
            tokens = torch.compile(GREEDY["indexed"], fullgraph=True, options=compile_options())(*args)
        assert torch.equal(tokens, GREEDY["indexed"](*args))
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert found == found_in_pass


def test_a_loop_in_training_is_fused_and_its_gradients_are_those_of_the_loop() -> None:
    """The corrected logits carry gradients to the base logits; those of the weights need the embeddings, and the loop stays."""

    def run(function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        base, *rest = _inputs(dtype=torch.float32)
        base.requires_grad_()
        tokens, logits = function(base, *rest)
        logits.logsumexp(-1).sum().backward()
        assert base.grad is not None
        return [tokens, logits.detach(), base.grad]

    def loop(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        before, tokens, logits = anchors, [], []
        for step in range(base.shape[1]):
            logits.append(base[:, step] + w1[before] @ w2.t())
            before = logits[-1].argmax(-1)
            tokens.append(before)
        return torch.stack(tokens, 1), torch.stack(logits, 1)

    with record() as found, torch._inductor.config.patch(force_disable_caches=True):
        fused = run(torch.compile(loop, fullgraph=True, options=compile_options()))
    assert found == [Found(3, None)]
    expected = run(loop)
    assert torch.equal(fused[0], expected[0]) and torch.equal(fused[1], expected[1])
    torch.testing.assert_close(fused[2], expected[2])  # Inductor computes the softmax of the gradient in its own order


# ---- CUDA alone ------------------------------------------------------------------------------------------------------------------------------


def _to_cuda(args: list[Tensor]) -> list[Tensor]:
    return [x.cuda() for x in args]


def _kernels(function: Callable[..., Any], args: list[Tensor]) -> Counter[str]:
    """The kernels that a call launches, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(*args)
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fused_loop_runs_the_kernels_of_the_package(dynamic: bool) -> None:
    compiled = torch.compile(GREEDY["indexed"], fullgraph=True, options=compile_options())
    with record() as found, torch._inductor.config.patch(force_disable_caches=True), torch.inference_mode():
        for rows in (5, 2, 9) if dynamic else (5,):
            args = _to_cuda(_inputs(rows, vocab=1024))
            if dynamic:
                for x in args[:2]:
                    torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(compiled(*args), GREEDY["indexed"](*args))
        launched = _kernels(compiled, args)
    assert found == [Found(3, None)]
    # One launch a block, or two a step.
    assert launched["block_kernel"] == 1 or launched["step_kernel"] == launched["select_kernel"] == 3, launched
    assert not any("argmax" in name or "gemm" in name for name in launched), launched


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["indexed", "sampled"])
def test_a_fused_loop_is_captured_and_replayed_with_other_inputs(name: str) -> None:
    loop = (GREEDY | SAMPLED)[name]
    first, second = (_to_cuda((_sampled_inputs if name == "sampled" else _inputs)(vocab=1024)) for _ in range(2))
    second[:2] = [x.flip(0) for x in second[:2]]
    expected = [loop(*args) for args in (first, second)]
    assert not torch.equal(*expected), "the replay has something to show"
    compiled = torch.compile(loop, fullgraph=True, options=compile_options())
    with torch.inference_mode():
        assert torch.equal(compiled(*first), expected[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = compiled(*first)
        for x, new in zip(first, second, strict=True):
            x.copy_(new)
        graph.replay()
    assert torch.equal(tokens, expected[1])


@pytest.mark.gpu
def test_a_fused_loop_becomes_a_cuda_graph_in_mode_reduce_overhead() -> None:
    compiled = torch.compile(GREEDY["indexed"], fullgraph=True, options=compile_options("reduce-overhead"))
    counters.clear()
    with record() as found, torch._inductor.config.patch(force_disable_caches=True), torch.inference_mode():
        for seed in range(4):  # a warm-up, a recording and replays
            args = _to_cuda(_inputs(vocab=1024, seed=seed))
            assert torch.equal(compiled(*args).clone(), GREEDY["indexed"](*args))
    assert found == [Found(3, None)]
    assert counters["inductor"]["cudagraph_skips"] == 0


# ---- Random weights --------------------------------------------------------------------------------------------------------------------------


def _possible(base: Tensor, embedding: Tensor, w2: Tensor) -> Tensor:
    """Which tokens may win at a step where the sum of products is only known up to the bound of its rounding errors, bool [..., V]."""
    e, w = embedding.double(), w2.double()
    exact, bound = e @ w.t(), w2.shape[1] * 2.0**-23 * (e.abs() @ w.abs().t())
    low, high = (base + bias.float().to(base.dtype) for bias in (exact - bound, exact + bound))  # rounding keeps the order
    return high >= low.amax(-1, keepdim=True)


def _agrees_within_the_bound(run: Callable[..., Tensor], vocab: int, rank: int, device: str) -> None:
    excused = rows = 0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        base = 2 * torch.randn(64, 7, vocab, generator=generator)
        w1, w2 = torch.randn(vocab, rank, generator=generator), torch.randn(vocab, rank, generator=generator) * rank**-0.5
        base, w1, w2 = (x.to(device, torch.bfloat16) for x in (base, w1, w2))
        anchors = torch.randint(vocab, (64,), generator=generator).to(device)
        tokens, expected = run(base, anchors, w1, w2), GREEDY["indexed"](base, anchors, w1, w2)
        for row in (tokens != expected).any(1).nonzero()[:, 0].tolist():
            step = int((tokens[row] != expected[row]).nonzero()[0])  # the tokens before agree
            before = anchors[row] if step == 0 else expected[row, step - 1]
            possible = _possible(base[row, step], w1[before], w2)
            assert possible[tokens[row, step]] and possible[expected[row, step]], (seed, row, step)
            excused += 1
        rows += len(tokens)
    print(f"{device}, V = {vocab}, rank {rank}: {excused} of {rows} rows excused by their margin")
    assert excused <= rows // 8, "an excuse for many would show little"


def test_random_weights_give_the_same_tokens_within_the_bound() -> None:
    compiled = Compiled(GREEDY["indexed"])
    _agrees_within_the_bound(lambda *args: compiled(*args).values[0], vocab=2000, rank=64, device="cpu")


@pytest.mark.slow
@pytest.mark.gpu
def test_random_weights_of_a_real_vocabulary_give_the_same_tokens_within_the_bound() -> None:
    compiled = torch.compile(GREEDY["indexed"], fullgraph=True, options=compile_options())
    with record() as found, torch._inductor.config.patch(force_disable_caches=True):
        _agrees_within_the_bound(compiled, vocab=151936, rank=256, device="cuda")
    assert found == [Found(7, None)]


def test_only_tokens_within_the_bound_are_possible() -> None:
    """The excuse of the tests above is a narrow one."""
    base, embedding, w2 = torch.zeros(3), torch.ones(1), torch.tensor([[1.0], [1.0 + 2.0**-23], [1.0 + 2.0**-20]])
    assert _possible(base, embedding, w2).tolist() == [False, False, True]
    assert _possible(base.bfloat16(), embedding, w2).tolist() == [True, True, True]  # equal once rounded
