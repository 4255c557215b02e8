"""What shows on a GPU alone: batches, captures, launch options, the frozen baseline, long offsets and other devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines import two_launches
from cases import Arguments, case, gpu, keys_of, oracle, same_bits, to

import dspark_ops
from dspark_ops import bench, ops

pytestmark = gpu
PER_ROW = ("base_logits", "anchor_ids", "sample_pos", "idx_mapping")


def _rows(args: Arguments, rows: list[int]) -> Arguments:
    return {**args, "draft_logits": args["draft_logits"].clone()} | {name: args[name][rows] for name in PER_ROW}


@pytest.mark.parametrize(("weights", "rank"), [(torch.bfloat16, 256), (torch.float16, 512), (torch.float32, 256)])
def test_a_row_has_the_same_bits_in_every_batch_eager_compiled_and_captured(weights: torch.dtype, rank: int) -> None:
    """Random weights, so that another order of summation would show."""
    args = to("cuda", case(rows=64, steps=4, vocab=3001, rank=rank, weights=weights, random_weights=True))
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True)
    sample = dspark_ops.markov_sample_sequential
    torch._dynamo.reset()
    expected = sample(**(whole := _rows(args, list(range(64)))))
    for rows in ([7], [40, 7, 3], list(range(8)), list(range(63, -1, -1)), list(range(20))):
        for function in (sample, compiled):
            part = _rows(args, rows)
            assert torch.equal(function(**part), expected[rows]), (rows, function)
            slots = part["idx_mapping"].long()
            assert same_bits(part["draft_logits"][slots], whole["draft_logits"][slots])
        part = _rows(args, rows)
        sample(**part)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = sample(**part)
        order = torch.randperm(64)[: len(rows)].tolist()  # other rows, written into the captured inputs
        for name in PER_ROW:
            part[name].copy_(args[name][order])
        graph.replay()
        assert torch.equal(tokens, expected[order])


@pytest.mark.parametrize("use_fp64", [False, True])
def test_keys_do_not_depend_on_floating_point_fusion(use_fp64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = to("cuda", {**case(rows=20, vocab=5000, rank=64, random_weights=True), "use_fp64": use_fp64})
    args["temperature"] = torch.full((22,), 0.7, device="cuda")
    fused = keys_of(args)
    noise = dspark_ops.markov_noise(args["seeds"], args["sample_pos"], args["idx_mapping"], 5000, use_fp64=use_fp64)

    launched = []

    def without_fusion(kernel: Any) -> Any:
        class Launcher:
            def __getitem__(self, grid: Any) -> Any:
                launched.append(kernel)
                return lambda *a, **k: kernel[grid](*a, **k, enable_fp_fusion=False)

        return Launcher()

    for kernel in ("step_kernel", "select_kernel", "noise_kernel"):
        monkeypatch.setattr(ops, kernel, without_fusion(getattr(ops, kernel)))
    assert same_bits(keys_of(args), fused)
    assert same_bits(keys_of({**args, "noise": noise}), fused)
    again = torch.empty_like(noise)
    ops.launch_noise(args["seeds"], args["sample_pos"], args["idx_mapping"], 5000, None, again)
    assert same_bits(again, noise)
    assert len(set(launched)) == 3, "the kernels ran through the launcher"


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_the_frozen_two_launch_design_agrees(rows: int) -> None:
    args = bench.inputs(rows, 7, 32000, 256)
    tokens = dspark_ops.markov_sample_sequential(**args, plan="step")
    cache = args["draft_logits"].clone()
    positional = ("base_logits", "anchor_ids", "markov_w1", "markov_w2", "temperature", "seeds", "sample_pos", "idx_mapping", "draft_logits")
    assert torch.equal(two_launches(*(args[name] for name in positional)), tokens)
    assert same_bits(args["draft_logits"], cache)


def test_offsets_beyond_31_bits() -> None:
    """A cache, base logits and noise whose last rows lie beyond 2^31 elements."""
    steps, vocab = 2, 4096
    slots = 2**31 // (steps * vocab) + 3
    args = to("cuda", case(rows=3, steps=steps, vocab=vocab, slots=3))
    expected, expected_cache = oracle(args)
    assert expected_cache is not None
    last = slots - 1
    for name, fill in (("temperature", 0.0), ("seeds", 0)):
        wide = torch.full((slots,), fill, dtype=args[name].dtype, device="cuda")
        wide[-3:] = args[name]
        args[name] = wide
    order = args["idx_mapping"].long()
    args["idx_mapping"] = order + last - 2
    base = torch.empty(slots, steps, vocab, dtype=torch.bfloat16, device="cuda")
    stride = (slots - 1) // 2  # row 2 begins beyond 2^31 elements
    strided = base[::stride][:3]
    strided.copy_(args["base_logits"])
    assert 2 * strided.stride(0) > 2**31 - steps * vocab
    args["draft_logits"] = torch.full((slots, steps, vocab), -7.0, dtype=torch.bfloat16, device="cuda")
    assert last * args["draft_logits"].stride(0) > 2**31
    for plan in ("auto", "step", "reference"):
        args["draft_logits"].fill_(-7.0)
        tokens = dspark_ops.markov_sample_sequential(**{**args, "base_logits": strided}, plan=plan)
        assert torch.equal(tokens.cpu(), expected)
        assert same_bits(args["draft_logits"][-3:].cpu(), expected_cache)
        assert (args["draft_logits"][:-3] == -7.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    args = to("cuda:1", case())
    expected, expected_cache = oracle(args)
    fused = dspark_ops.FusedMarkov(200, 16, 5, "cuda:1")
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True)
    with torch.cuda.device(0):
        for function in (dspark_ops.markov_sample_sequential, fused.run, compiled):
            args["draft_logits"].fill_(-7.0)
            assert torch.equal(function(**args).cpu(), expected)
            assert same_bits(args["draft_logits"].cpu(), expected_cache)
        fused.fork_noise(args["seeds"], args["sample_pos"], args["idx_mapping"])
        assert torch.equal(fused.run(**args).cpu(), expected)
        assert torch.cuda.current_device() == 0


def test_capture_without_a_warm_up_works() -> None:
    """The kernels of this shape were never launched: Triton compiles and loads them inside the capture."""
    args = to("cuda", case(rows=3, steps=2, vocab=90, rank=112))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = dspark_ops.markov_sample_sequential(**args)
    graph.replay()
    assert torch.equal(tokens.cpu(), oracle({**args, "draft_logits": torch.full_like(args["draft_logits"], -7.0)})[0])


def test_mismatched_devices_name_the_argument() -> None:
    args = to("cuda", case())
    for name in ("markov_w2", "seeds", "draft_logits", "idx_mapping"):
        for function in (dspark_ops.markov_sample_sequential, torch.ops.dspark.markov_sample_sequential):
            with pytest.raises(ValueError, match=f"^{name} must be on the device"):
                function(**{**args, name: args[name].cpu()})
