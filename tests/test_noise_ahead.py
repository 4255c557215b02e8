"""Noise before the logits, in order and beside the lm_head: the bits of a call without it, eager, compiled and captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Arguments, case, gpu, grid, needs_compiler, oracle, same_bits, to
from torch import Tensor
from torch._dynamo.utils import counters

import dspark_ops
from dspark_ops import ops

pytestmark = needs_compiler
STEPS, WIDTH = 3, 32
INPUTS = ("hidden", "anchor_ids", "temperature", "seeds", "idx_mapping", "first")
WAYS = ("ahead", "beside")
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


def _inputs(seed: int, device: str, vocab: int, rows: int = 5) -> Arguments:
    args = case(rows=rows, steps=STEPS, vocab=vocab, seed=seed)
    generator = torch.Generator().manual_seed(100 + seed)
    args["hidden"] = grid(rows, STEPS, WIDTH, generator=generator, dtype=args["base_logits"].dtype)
    args["lm_head"] = grid(vocab, WIDTH, generator=torch.Generator().manual_seed(0), dtype=args["base_logits"].dtype)
    args["first"] = args["sample_pos"][:, :1].clone()
    return to(device, {name: x for name, x in args.items() if name not in ("base_logits", "sample_pos")})


def _drafter(way: str | None, use_fp64: bool = False) -> Callable[..., Tensor]:
    def draft(hidden: Tensor, lm_head: Tensor, first: Tensor, **rest: Any) -> Tensor:
        # In a graph the positions are a buffer that can be reused as soon as no operation is known to read it.
        positions = first + torch.arange(STEPS, device=first.device)
        slots = (rest["seeds"], positions, rest["idx_mapping"])
        noise = None
        if way == "beside":
            base_logits, noise = dspark_ops.lm_head_beside_noise(hidden, lm_head, *slots, use_fp64=use_fp64)
        else:
            if way == "ahead":
                noise = dspark_ops.markov_noise(*slots, lm_head.shape[0], use_fp64=use_fp64)
            base_logits = F.linear(hidden, lm_head)
        return dspark_ops.markov_sample_sequential(base_logits, sample_pos=positions, noise=noise, use_fp64=use_fp64, **rest)

    return draft


def _expected(inputs: Arguments, use_fp64: bool = False) -> tuple[Tensor, Tensor]:
    rest = to("cpu", {name: x for name, x in inputs.items() if name not in ("hidden", "lm_head", "first")})
    base_logits = F.linear(inputs["hidden"], inputs["lm_head"]).cpu()
    args = {**rest, "base_logits": base_logits, "sample_pos": inputs["first"].cpu() + torch.arange(STEPS), "use_fp64": use_fp64}
    tokens, cache = oracle(args)
    greedy, _ = oracle({**args, "temperature": None, "seeds": None, "sample_pos": None})
    assert cache is not None and not torch.equal(tokens, greedy), "the noise must decide, or it could be anything"
    return tokens, cache


def _agrees(draft: Callable[..., Tensor], inputs: Arguments, use_fp64: bool = False) -> None:
    expected, expected_cache = _expected(inputs, use_fp64)
    assert torch.equal(draft(**inputs).cpu(), expected)
    assert same_bits(inputs["draft_logits"].cpu(), expected_cache)


@every_way
@pytest.mark.parametrize("use_fp64", [False, True])
def test_a_drafter_with_noise_ahead_is_one_graph_with_the_same_bits(way: str, use_fp64: bool) -> None:
    draft = _drafter(way, use_fp64)
    compiled = torch.compile(draft, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        _agrees(draft, _inputs(seed, "cpu", 97), use_fp64)
        _agrees(compiled, _inputs(seed, "cpu", 97), use_fp64)


@pytest.mark.slow
@every_way
def test_inductor_on_a_cpu_gives_the_same_bits(way: str) -> None:
    compiled = torch.compile(_drafter(way), fullgraph=True)
    for seed in range(2):
        _agrees(compiled, _inputs(seed, "cpu", 97))


@every_way
def test_exported_drafters_keep_the_operations_of_every_device(way: str) -> None:
    class Drafter(torch.nn.Module):
        def forward(self, inputs: Arguments) -> Tensor:
            return _drafter(way)(**inputs)

    program = torch.export.export(Drafter(), (_inputs(0, "cpu", 97),), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if "dspark" in str(node.target)]
    assert targets == ["dspark.markov_noise.default", "dspark.markov_sample_sequential.default"]
    _agrees(lambda **inputs: program.module()(inputs), _inputs(1, "cpu", 97))


def test_wrong_arguments_of_the_noise_are_named_eager_and_compiled() -> None:
    inputs = _inputs(0, "cpu", 97)
    slots = inputs["seeds"].int(), inputs["first"].expand(-1, STEPS), inputs["idx_mapping"]
    for function in (dspark_ops.lm_head_beside_noise, torch.compile(dspark_ops.lm_head_beside_noise, backend="aot_eager", fullgraph=True)):
        with pytest.raises(TypeError, match=r"^seeds must be torch.int64, got torch.int32"):
            function(inputs["hidden"], inputs["lm_head"], *slots)


@pytest.mark.parametrize("fails", [False, True])
def test_the_streams_are_forked_and_joined_within_the_operation(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for whom and what runs where, with streams that only write it down."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.cuda_stream = name, 0

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    entered = [Stream("current")]

    @contextlib.contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.pop()

    def linear(*args: Tensor) -> Tensor:
        log.append(f"linear on {entered[-1].name}")
        if fails:
            raise RuntimeError("shapes cannot be multiplied")
        return F.linear(*args)

    side = Stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: entered[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(ops, "_side_stream", lambda device, current: side)
    monkeypatch.setattr(ops, "launch_noise", lambda *args: log.append(f"noise on {entered[-1].name}"))
    monkeypatch.setattr(ops, "F", SimpleNamespace(linear=linear))
    inputs = _inputs(0, "cpu", 97)
    slots = inputs["seeds"], inputs["first"].expand(-1, STEPS), inputs["idx_mapping"]
    with pytest.raises(RuntimeError, match="multiplied") if fails else contextlib.nullcontext():
        ops._linear_beside_noise(inputs["hidden"], inputs["lm_head"], None, *slots, None, False)
    assert log == ["side waits for current", "noise on side", "linear on current", "current waits for side"]


def _late(monkeypatch: pytest.MonkeyPatch, cycles: int) -> list[torch.cuda.Stream]:
    """Holds every noise kernel back on its stream, so that who does not wait for it finds something else. Returns the streams it ran on."""
    streams: list[torch.cuda.Stream] = []
    launch = ops.launch_noise

    def late(*args: Any, **kwargs: Any) -> None:
        streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(cycles)
        launch(*args, **kwargs)

    monkeypatch.setattr(ops, "launch_noise", late)
    return streams


def _captured(draft: Callable[..., Tensor], inputs: Arguments) -> Callable[..., Tensor]:
    draft(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draft(**inputs)

    def replay(**_: Any) -> Tensor:
        graph.replay()
        return tokens

    return replay


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead", "captured", "compiled and captured"])
@every_way
def test_the_same_bits_over_many_calls_with_rewritten_inputs(device: str, mode: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 3000
    several = [_inputs(seed, device, vocab) for seed in range(8)]
    expected = [_expected(inputs) for inputs in several]
    static = _inputs(0, device, vocab)
    for name in (*INPUTS, "draft_logits"):
        torch._dynamo.mark_static_address(static[name])  # a graph that is replayed may then write the cache
    draft: Callable[..., Tensor] = _drafter(way)
    if mode in ("default", "reduce-overhead", "compiled and captured"):
        draft = torch.compile(draft, fullgraph=True, mode="reduce-overhead" if mode == "reduce-overhead" else None)
    # A kernel that Inductor sees is launched by the code it generates, on the current stream.
    streams = _late(monkeypatch, 200_000) if way == "beside" else []
    skips = counters["inductor"]["cudagraph_skips"]
    run = _captured(draft, static) if "captured" in mode else draft
    for repeat in range(200):
        fresh, (tokens, cache) = several[repeat % 8], expected[repeat % 8]
        torch.cuda._sleep(200_000)  # who does not wait for the current stream finds the inputs of the call before
        for name in INPUTS:
            static[name].copy_(fresh[name])
        static["markov_w1"].copy_(fresh["markov_w1"])
        static["markov_w2"].copy_(fresh["markov_w2"])
        static["draft_logits"].fill_(-7.0)
        found = run(**static)
        assert torch.equal(found.cpu(), tokens), repeat
        assert same_bits(static["draft_logits"].cpu(), cache), repeat
    assert counters["inductor"]["cudagraph_skips"] == skips
    if way == "beside":
        assert streams and torch.cuda.current_stream() not in streams


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_late_noise_shows_a_missing_join(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on."""
    inputs = _inputs(0, device, 3000)
    slots = inputs["seeds"], inputs["first"] + torch.arange(STEPS, device=device), inputs["idx_mapping"]
    expected = dspark_ops.markov_noise(*slots, 3000)
    torch.cuda.synchronize()
    _late(monkeypatch, 50_000_000)
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr(ops, "_join", lambda device: None)
        junk = torch.zeros_like(expected)
        del junk  # memory that the noise may get
        _, noise = dspark_ops.lm_head_beside_noise(inputs["hidden"], inputs["lm_head"], *slots)
        found = noise.clone()
        torch.cuda.synchronize()
        assert torch.equal(found, expected) == joined
        assert torch.equal(noise, expected)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_failing_lm_head_leaves_the_streams_joined(device: str) -> None:
    inputs = _inputs(0, device, 3000)
    slots = inputs["seeds"], inputs["first"] + torch.arange(STEPS, device=device), inputs["idx_mapping"]
    dspark_ops.lm_head_beside_noise(inputs["hidden"], inputs["lm_head"], *slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which ends with an error where a stream is left behind
        with pytest.raises(RuntimeError):
            dspark_ops.lm_head_beside_noise(inputs["hidden"][..., 1:], inputs["lm_head"], *slots)
        _, noise = dspark_ops.lm_head_beside_noise(inputs["hidden"], inputs["lm_head"], *slots)
    graph.replay()
    assert torch.equal(noise, dspark_ops.markov_noise(*slots, 3000))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_gradients_flow_through_the_lm_head(device: str) -> None:
    inputs = _inputs(0, device, 97)
    slots = inputs["seeds"], inputs["first"] + torch.arange(STEPS, device=device), inputs["idx_mapping"]
    weight = inputs["lm_head"].clone().requires_grad_()
    base_logits, noise = dspark_ops.lm_head_beside_noise(inputs["hidden"], weight, *slots)
    base_logits.float().sum().backward()
    assert weight.grad is not None and weight.grad.any() and not noise.requires_grad
    bias = torch.zeros(97, dtype=weight.dtype, device=device, requires_grad=True)  # the only one that wants a gradient
    base_logits, _ = dspark_ops.lm_head_beside_noise(inputs["hidden"], weight.detach(), *slots, bias=bias)
    base_logits.float().sum().backward()
    assert bias.grad is not None and bias.grad.any()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_opcheck_of_the_operation(device: str) -> None:
    inputs = _inputs(0, device, 97)
    positions = inputs["first"] + torch.arange(STEPS, device=device)
    offsets = torch.zeros(97, dtype=torch.int64, device=device)
    for bias, draft_to_target, use_fp64 in ((None, None, False), (inputs["lm_head"][:, 0].contiguous(), offsets, True)):
        args = (inputs["hidden"], inputs["lm_head"], bias, inputs["seeds"], positions, inputs["idx_mapping"], draft_to_target, use_fp64)
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.dspark.linear_beside_noise.default, args, test_utils=tests)
