"""One launch a block, on a GPU: the bits of step launches, whatever the logits, the batch, and what else runs."""

from __future__ import annotations

import pytest
import torch
from cases import Arguments, case, gpu, keys_of, keys_of_block, oracle, same_bits, to
from torch._inductor.utils import run_and_get_code

import dspark_ops
from dspark_ops import block, guards
from dspark_ops.guards import Call

needs_block = pytest.mark.skipif(
    not torch.cuda.is_available() or guards.block_device_reason(torch.device("cuda")) is not None, reason="needs compute capability 9.0"
)
pytestmark = [*gpu, needs_block]


def _both(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of both plans, after a check that they left the same cache."""
    caches = [args["draft_logits"].clone() for _ in range(2)]
    by_block, by_step = (
        dspark_ops.markov_sample_sequential(**{**args, "draft_logits": cache}, plan=plan)
        for plan, cache in zip(("block", "step"), caches, strict=True)
    )
    assert same_bits(*caches)
    return by_block, by_step


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 31, 64, 65, 130])
def test_both_plans_give_the_same_bits_at_every_batch(rows: int) -> None:
    """Random weights, so that another order of summation would show."""
    args = to("cuda", case(rows=rows, steps=5, vocab=20000, rank=256, random_weights=True))
    by_block, by_step = _both(args)
    assert torch.equal(by_block, by_step)


@pytest.mark.parametrize("rows", [1, 9, 33, 64])
@pytest.mark.parametrize("noise", ["ahead", "none"])
def test_both_plans_agree_without_noise_of_their_own(rows: int, noise: str) -> None:
    args = to("cuda", case(rows=rows, steps=4, vocab=5003, rank=256, random_weights=True))
    if noise == "none":
        args["temperature"] = None
    else:
        args["noise"] = dspark_ops.markov_noise(args["seeds"], args["sample_pos"], args["idx_mapping"], 5003)
    by_block, by_step = _both(args)
    assert torch.equal(by_block, by_step)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("noise", ["hashed", "ahead", "none"])
def test_whole_rows_of_keys_are_equal(rows: int, noise: str) -> None:
    args = to("cuda", case(rows=rows, steps=3, vocab=5003, rank=256, random_weights=True))
    if noise == "none":
        args["temperature"] = None
    if noise == "ahead":
        args["noise"] = dspark_ops.markov_noise(args["seeds"], args["sample_pos"], args["idx_mapping"], 5003)
    assert same_bits(keys_of_block(args), keys_of(args))


@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("kind", ["peaked", "flat", "holes", "odd", "huge"])
def test_screened_noise_is_exact_on_any_logits(rows: int, kind: str) -> None:
    """Logarithms are left out for keys that cannot win: never for one that does."""
    assert block.shape_for(rows, 256).screened
    args = to("cuda", case(rows=rows, steps=4, vocab=30011, rank=256, random_weights=True))
    base = args["base_logits"]
    if kind == "peaked":
        base[..., ::1000] += 20
    if kind == "flat":
        base.zero_()
        args["markov_w2"].zero_()
    if kind == "holes":
        base[..., torch.rand(30011, device="cuda") < 0.99] = -torch.inf
        base[3] = -torch.inf
    if kind == "odd":
        base[..., 5::700] = torch.nan
        base[2, 1] = torch.nan
        base[5, :, 77] = torch.inf
    if kind == "huge":
        base *= 1e4
        args["temperature"] = torch.tensor([0.01, 1e-6, 100.0, 0.0, 1e30], device="cuda").repeat(rows)[: args["seeds"].shape[0]].contiguous()
    by_block, by_step = _both(args)
    assert torch.equal(by_block, by_step)


def test_scratch_is_left_as_it_was_found() -> None:
    args = to("cuda", case(rows=9, steps=4, vocab=9000, rank=64))
    scratch = block.new_scratch(4, torch.device("cuda", 0))
    expected = oracle(args)[0]
    for _ in range(3):
        assert torch.equal(block.launch_block(Call(**args), scratch).cpu(), expected)
        assert (scratch == 0).all()


def test_replays_with_rewritten_inputs() -> None:
    """A race between programs would show as a token that differs now and then."""
    cases = [to("cuda", case(rows=7, steps=7, vocab=20000, rank=256, seed=seed)) for seed in range(6)]
    expected = [dspark_ops.markov_sample_sequential(**args, plan="step") for args in cases]
    static = {name: x.clone() for name, x in cases[0].items()}
    dspark_ops.markov_sample_sequential(**static, plan="block")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = dspark_ops.markov_sample_sequential(**static, plan="block")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(3000):
        for name, x in cases[turn % 6].items():
            static[name].copy_(x)
        graph.replay()
        wrong += (tokens != expected[turn % 6]).sum()
    assert wrong.item() == 0


def test_two_samplers_on_two_streams_and_a_kernel_that_holds_the_gpu() -> None:
    """Each launch needs all of the GPU at once: they run one after the other, and none waits for what cannot come."""
    args = [to("cuda", case(rows=4, steps=5, vocab=20000, rank=256, seed=seed)) for seed in range(2)]
    expected = [dspark_ops.markov_sample_sequential(**each, plan="step") for each in args]
    samplers = [dspark_ops.FusedMarkov(20000, 256, 4, "cuda") for _ in args]
    streams = [torch.cuda.Stream() for _ in args]
    noise = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    tokens: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        noise @ noise  # holds the SMs for a while, on the current stream
        for sampler, stream, each, drafted in zip(samplers, streams, args, tokens, strict=True):
            with torch.cuda.stream(stream):
                drafted.append(sampler.run(**each))
    torch.cuda.synchronize()
    for drafted, right in zip(tokens, expected, strict=True):
        assert all(torch.equal(each, right) for each in drafted)


def test_weights_at_an_odd_address_take_step_launches_in_a_compiled_graph() -> None:
    args = to("cuda", case(rows=3, steps=2, vocab=700, rank=16))
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True)
    expected = oracle(args)[0]
    assert torch.equal(compiled(**args).cpu(), expected)
    odd = torch.empty(700 * 16 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(700, 16)
    assert odd.data_ptr() % 16
    args["markov_w2"] = odd.copy_(args["markov_w2"])
    assert torch.equal(compiled(**args).cpu(), expected)
    assert torch.equal(dspark_ops.markov_sample_sequential(**args).cpu(), expected)


def test_the_graph_holds_one_launch_a_block_and_copies_nothing() -> None:
    args = to("cuda", case(rows=3, steps=5, vocab=700, rank=16))
    tokens, code = run_and_get_code(torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True), **args)
    assert torch.equal(tokens.cpu(), oracle(args)[0])
    text = "\n".join(code)
    assert text.count("torch.ops.dspark.sample_block.default(") == 1
    assert "clone" not in text
