"""`FusedMarkov`: the results of the function, eager and captured, with noise that was forked and without."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cases import Arguments, case, gpu, needs_compiler, oracle, same_bits, to

from dspark_ops import FusedMarkov
from dspark_ops.fused import NOISE_ROWS

pytestmark = needs_compiler
every_device = pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)])


def _fork(fused: FusedMarkov, args: Arguments) -> None:
    fused.fork_noise(args["seeds"], args["sample_pos"], args["idx_mapping"])


@every_device
@pytest.mark.parametrize("use_fp64", [False, True])
def test_results_are_those_of_the_function(device: str, use_fp64: bool) -> None:
    fused = FusedMarkov(200, 16, 17, device, use_fp64)
    for rows in (5, 17, 1):
        for fork in (True, False):
            args = to(device, {**case(rows=rows), "use_fp64": use_fp64})
            expected, expected_cache = oracle(args)
            if fork:
                _fork(fused, args)
            assert torch.equal(fused.run(**args).cpu(), expected)
            assert same_bits(args["draft_logits"].cpu(), expected_cache)


@every_device
def test_unfused_options_work_too(device: str) -> None:
    fused = FusedMarkov(200, 16, 5, device)
    args = to(device, case())
    scaled = {**args, "bias_scale": 0.5}
    expected, _ = oracle(scaled)
    _fork(fused, args)
    assert torch.equal(fused.run(**scaled).cpu(), expected)
    args["draft_to_target"] = torch.zeros(200, dtype=torch.int64, device=device)
    _fork(fused, args)
    assert torch.equal(fused.run(**args).cpu(), oracle(args)[0])


@every_device
def test_noise_serves_one_block(device: str) -> None:
    """A block that was not forked for must not get the noise of the one before."""
    fused = FusedMarkov(200, 16, 5, device)
    first, second = to(device, case(seed=1)), to(device, case(seed=2))
    expected = oracle(second)[0]
    _fork(fused, first)
    fused.join()
    fused.run(**first)
    assert torch.equal(fused.run(**second).cpu(), expected)


@every_device
def test_noise_that_met_no_block_is_forgotten(device: str) -> None:
    """By a block that is too large for noise ahead, and by a fork that was refused."""
    fused = FusedMarkov(200, 16, 22, device)
    _fork(fused, to(device, case(rows=21)))
    args = to(device, case(rows=21, steps=4))
    assert fused.noise_rows(21, 4) == 0
    _fork(fused, args)
    assert torch.equal(fused.run(**args).cpu(), oracle(args)[0])
    _fork(fused, args | {name: args[name][:2] for name in ("sample_pos", "idx_mapping")})
    with pytest.raises(TypeError, match=r"^seeds must be"):
        fused.fork_noise(args["seeds"].int(), args["sample_pos"], args["idx_mapping"])
    assert torch.equal(fused.run(**args).cpu(), oracle(args)[0])


@every_device
@pytest.mark.parametrize("inference", [False, True])
def test_noise_of_arguments_that_were_written_since_is_refused(device: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        args = to(device, case())
        fused = FusedMarkov(200, 16, 5, device)
        for name in ("seeds", "sample_pos", "idx_mapping"):
            _fork(fused, args)
            if not inference:  # where writes are not counted
                args[name][:1] += 1
                with pytest.raises(ValueError, match=rf"^{name} must be .* got one that was written since"):
                    fused.run(**args)
            assert torch.equal(fused.run(**args).cpu(), oracle(args)[0]), "by its own noise"


def test_another_device_is_refused() -> None:
    fused = FusedMarkov(200, 16, 5, "cpu")
    args = to("meta", case())
    with pytest.raises(ValueError, match=r"^seeds must be on the device of this FusedMarkov, cpu, got meta"):
        _fork(fused, args)
    with pytest.raises(ValueError, match=r"^base_logits must be on the device of this FusedMarkov, cpu, got meta"):
        fused.run(**args)


def test_noise_rows() -> None:
    fused = FusedMarkov(8, 16, 64, "cpu")
    assert fused.noise_rows(9, 7) == 63 and fused.noise_rows(64, 1) == NOISE_ROWS and fused.noise_rows(5, 13) == 0
    assert FusedMarkov(8, 16, 64, "cpu", use_fp64=True).noise_rows(1, 7) == 0
    args = case(rows=22)
    big = FusedMarkov(200, 16, 22, "cpu")
    assert big.noise_rows(22, 3) == 0
    _fork(big, args)  # nothing is launched
    expected = oracle(args)[0]
    assert torch.equal(big.run(**args), expected)


def test_one_object_a_speculator() -> None:
    class Speculator:
        pass

    one, other = Speculator(), Speculator()
    first = FusedMarkov.of(one, 8, 16, 4, "cpu")
    assert FusedMarkov.of(one, 8, 16, 3, "cpu") is first
    assert FusedMarkov.of(other, 8, 16, 4, "cpu") is not first, "two speculators never share scratch"
    assert FusedMarkov.of(one, 9, 16, 4, "cpu") is not first
    larger = FusedMarkov.of(one, 8, 16, 5, "cpu")
    assert larger is not first and FusedMarkov.of(one, 8, 16, 4, "cpu") is larger
    sampler = weakref.ref(larger)
    del one, first, larger
    gc.collect()
    assert sampler() is None, "the scratch goes with its speculator"


def test_wrong_arguments_name_themselves() -> None:
    with pytest.raises(ValueError, match=r"^max_rows must be at least 1, got 0"):
        FusedMarkov(8, 16, 0, "cpu")
    with pytest.raises(TypeError, match=r"^use_fp64 must be a bool, got int"):
        FusedMarkov(8, 16, 4, "cpu", 1)  # type: ignore[arg-type]  # what is tested
    fused = FusedMarkov(200, 16, 4, "cpu")
    with pytest.raises(ValueError, match=r"requests in base_logits must fit this FusedMarkov .* got 5"):
        fused.run(**case())
    with pytest.raises(ValueError, match="rank of markov_w1 must fit"):
        fused.run(**case(rows=2, rank=32))
    with pytest.raises(TypeError, match=r"^seeds must be"):
        fused.fork_noise(torch.arange(3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int64), torch.arange(2))
    _fork(fused, case(rows=3))
    with pytest.raises(ValueError, match="R and K of fork_noise"):
        fused.run(**case(rows=2))


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_captured_blocks_replay_with_rewritten_inputs(device: str, fork: bool) -> None:
    rows, steps, vocab, hidden = 5, 3, 200, 64
    fused = FusedMarkov(vocab, 16, 8, device)
    static = to(device, case(rows=rows, steps=steps, vocab=vocab))
    states = torch.randint(-4, 5, (rows, steps, hidden), device=device).bfloat16()
    lm_head = torch.randint(-4, 5, (vocab, hidden), device=device).bfloat16() / 8

    def block() -> torch.Tensor:
        if fork:
            _fork(fused, static)
        args = {**static, "base_logits": states @ lm_head.t()}
        return fused.run(**args)

    for _ in range(2):
        block()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = block()
    for seed in range(20):
        fresh = to(device, case(rows=rows, steps=steps, vocab=vocab, seed=seed))
        for name in ("anchor_ids", "temperature", "seeds", "sample_pos", "idx_mapping", "draft_logits", "markov_w1", "markov_w2"):
            static[name].copy_(fresh[name])
        states.copy_(torch.randint(-4, 5, states.shape, device=device))
        junk = torch.full((rows, steps, vocab), 9.0, device=device)  # allocations between replays must not matter
        graph.replay()
        expected, expected_cache = oracle({**fresh, "base_logits": states @ lm_head.t()})
        assert torch.equal(tokens.cpu(), expected), seed
        assert same_bits(static["draft_logits"].cpu(), expected_cache), seed
        del junk


@every_device
def test_noise_of_other_requests_is_refused(device: str) -> None:
    fused = FusedMarkov(200, 16, 5, device)
    args = to(device, case())
    for name in ("seeds", "sample_pos", "idx_mapping"):
        _fork(fused, args)
        with pytest.raises(ValueError, match=rf"^{name} must be the tensor that fork_noise got"):
            fused.run(**{**args, name: args[name].clone()})
    assert torch.equal(fused.run(**args).cpu(), oracle(args)[0]), "a refused block leaves no noise behind"
    assert fused.noise_rows(6, 3) == 0, "more requests than announced"
    with pytest.raises(TypeError, match=r"^max_rows must be an int"):
        FusedMarkov(200, 16, 2.5, device)  # type: ignore[arg-type]  # what is tested


def test_owners_that_are_equal_have_samplers_of_their_own() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # type: ignore[assignment]  # nor need an owner have one

    owners = Equal(), Equal()
    first, second = (FusedMarkov.of(owner, 8, 16, 4, "cpu") for owner in owners)
    assert first is not second and FusedMarkov.of(owners[0], 8, 16, 4, "cpu") is first
