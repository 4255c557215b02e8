"""The options that only the reference serves, each against its formula, and the rounding that a compiler must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import COMPILED, GPU_COMPILED, GPU_REFERENCE, HALF, REFERENCE, Arguments, Path, case, gpu, needs_interpreter, oracle, same_bits, to

import dspark_ops
from dspark_ops import ops, reference
from dspark_ops.guards import Call

# The compiled fallback is the same code for every option, and each option one more compilation.
every_path = pytest.mark.parametrize(
    "path", [REFERENCE, GPU_REFERENCE, pytest.param(*COMPILED.values, id="compiled", marks=[*COMPILED.marks, pytest.mark.slow]), GPU_COMPILED]
)


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    """Each option compiles anew, and torch.compile gives up after eight graphs of one function."""
    torch._dynamo.reset()


def _reduced(args: Arguments, target_vocab: int = 2000, seed: int = 0) -> Arguments:
    """The case with a target vocabulary that the 200 draft entries are scattered over, in ascending order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target_vocab, generator=generator)[:200].sort().values
    slots, steps, _ = args["draft_logits"].shape
    w1 = (torch.randint(-8, 9, (target_vocab, args["markov_w1"].shape[1]), generator=generator) / 8).to(args["markov_w1"].dtype)
    cache = dspark_ops.new_draft_logits(slots, steps, target_vocab + 8, dtype=args["base_logits"].dtype)
    return {**args, "markov_w1": w1, "draft_to_target": ids - torch.arange(200), "draft_logits": cache, "anchor_ids": ids[args["anchor_ids"]]}


@every_path
def test_reduced_vocabulary_gives_and_takes_target_ids(path: Path) -> None:
    args = _reduced(case())
    ids = torch.arange(200) + args["draft_to_target"]
    assert (ids != torch.arange(200)).float().mean() > 0.9, "the offsets must differ to show it"
    tokens, cache = path(args)
    assert torch.isin(tokens, ids).all() and (tokens >= 200).any()
    assert cache is not None
    slots = args["idx_mapping"].long()
    unmapped = torch.ones(2008, dtype=torch.bool)
    unmapped[ids] = False
    assert (cache[..., unmapped] == -torch.inf).all() and cache[slots][..., ids].isfinite().all()
    # Step 1 of row b takes the embedding of target id tokens[b, 0].
    bias = (args["markov_w1"][tokens[:, 0]].double() @ args["markov_w2"].double().t()).float().to(args["base_logits"].dtype)
    assert same_bits(cache[slots, 1][:, ids], args["base_logits"][:, 1] + bias)
    # And the noise is that of the target ids.
    sampled = args["temperature"][slots] > 0
    noise = dspark_ops.gumbel_noise(args["seeds"][slots], args["sample_pos"][:, 0], ids, step=0)
    keys = cache[slots, 0][:, ids].float() / torch.where(sampled, args["temperature"][slots], 1.0)[:, None] + noise
    assert torch.equal(tokens[sampled, 0], ids[keys.argmax(-1)][sampled])
    path.agrees_with_oracle(args)


@every_path
def test_a_map_out_of_order_ties_to_the_lowest_target_id(path: Path) -> None:
    args = case()
    args["draft_to_target"] = 199 - 2 * torch.arange(200)  # draft entry v is target id 199 - v
    args["temperature"] = torch.zeros(7)
    args["markov_w1"] = torch.zeros_like(args["markov_w1"])
    args["base_logits"][:] = 0.0
    args["base_logits"][:, :, [10, 20, 30]] = 1.0
    assert path(args)[0].tolist() == [[169] * 3] * 5
    args["base_logits"][:] = float("nan")
    assert path(args)[0].tolist() == [[0] * 3] * 5


@every_path
def test_reduced_and_padded_vocabulary(path: Path) -> None:
    args = _reduced(case())
    args["base_logits"][..., 150:] = 100.0
    padded = {**args, "vocab_size": 150}
    tokens, _ = path(padded)
    assert torch.isin(tokens, (torch.arange(200) + args["draft_to_target"])[:150]).all()
    path.agrees_with_oracle(padded)


def _oracle_like(args: Arguments) -> None:
    assert args["base_logits"].dtype == HALF, "16-bit roundings must be there to be kept"


@every_path
@pytest.mark.parametrize("options", [{"bias_scale": 0.37}, {"bias_soft_cap": 1.7}, {"bias_scale": 0.37, "bias_soft_cap": 1.7}])
def test_bias_is_capped_then_scaled_with_a_rounding_each(path: Path, options: dict[str, float]) -> None:
    args = case()
    _oracle_like(args)
    args["temperature"] = torch.zeros(7)
    _, cache = path({**args, **options})
    bias = (args["markov_w1"][args["anchor_ids"]].double() @ args["markov_w2"].double().t()).float().to(HALF)
    plain = bias
    if "bias_soft_cap" in options:
        bias = torch.tanh(bias / options["bias_soft_cap"]) * options["bias_soft_cap"]  # eager bf16: each operation rounds
    bias = bias * options.get("bias_scale", 1.0)
    assert not torch.equal(bias, plain)
    expected = args["base_logits"][:, 0] + bias
    assert cache is not None
    got = cache[args["idx_mapping"].long(), 0]
    # Devices and compilers have their own tanh, an ulp apart; a missing rounding would show on many more entries than that.
    assert (got != expected).float().mean() < (0.02 if "bias_soft_cap" in options else 1e-9)
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6)


@every_path
@pytest.mark.parametrize("options", [{"output_scale": 0.3}, {"output_soft_cap": 2.0}, {"output_scale": 0.3, "output_soft_cap": 2.0}])
def test_output_transform_is_fp32_and_so_is_its_cache(path: Path, options: dict[str, float]) -> None:
    args = case()
    plain_tokens, plain = path(args)
    args["draft_logits"] = dspark_ops.new_draft_logits(7, 3, 200, dtype=HALF, **options)
    assert args["draft_logits"].dtype == torch.float32
    tokens, cache = path({**args, **options})
    assert cache is not None and plain is not None
    slots = args["idx_mapping"].long()
    expected = plain[slots, 0].float() * options.get("output_scale", 1.0)  # step 0 has the same token before
    if "output_soft_cap" in options:
        expected = 2.0 * torch.tanh(expected / 2.0)
    torch.testing.assert_close(cache[slots, 0], expected, rtol=1e-6, atol=1e-6)  # devices have their own tanh
    assert not torch.equal(tokens, plain_tokens)
    if "output_soft_cap" not in options:
        assert same_bits(cache[slots, 0], expected)


def test_two_roundings_differ_from_one() -> None:
    """Arms the bit-for-bit tests above and elsewhere: a fused addmm would show on such cases."""
    args = case(rank=256)
    bias = args["markov_w1"][args["anchor_ids"]].double() @ args["markov_w2"].double().t()
    once = (args["base_logits"][:, 0].double() + bias).float().to(HALF)
    _, cache = oracle(args)
    assert cache is not None
    assert (cache[args["idx_mapping"].long(), 0] != once).float().mean() > 0.005


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPILED, GPU_COMPILED])
def test_compiled_fallback_keeps_its_roundings_at_a_real_vocabulary(path: Path) -> None:
    fallback = path._replace(function=lambda **args: path.function(**args, plan="reference"))
    fallback.agrees_with_oracle(case(rows=4, steps=2, vocab=151936, rank=256))


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPILED, GPU_COMPILED])
@pytest.mark.parametrize("weights", [HALF, torch.float32])
def test_what_the_graph_computed_before_is_rounded_too(path: Path, weights: torch.dtype) -> None:
    """Logits and weights that come from 16-bit operations in the same graph, which a compiler would fuse with the sampling."""

    def scaled(**args: Any) -> torch.Tensor:
        for name, scale in (("base_logits", 0.7), ("markov_w1", 1.5), ("markov_w2", 0.75)):
            args[name] = args[name] * scale
        return dspark_ops.markov_sample_sequential(**args, plan="reference")

    args = case(steps=2, weights=weights, logits=HALF)
    args["markov_w2"] = args["markov_w2"].to(HALF).to(weights)
    eager = path._replace(function=scaled)
    compiled = path._replace(function=torch.compile(scaled, fullgraph=True))
    assert not torch.equal((args["base_logits"] * 0.7).float(), args["base_logits"].float() * 0.7), "the product must round"
    tokens, cache = compiled(args)
    expected, expected_cache = eager(args)
    assert torch.equal(tokens, expected)
    assert cache is not None and expected_cache is not None and same_bits(cache, expected_cache)


def test_the_library_product_of_the_reference_is_fp32_accurate() -> None:
    """bf16 products on the CPU accumulate in FP32 and round once: equal to the FP64 sum rounded, but for near ties of the rounding."""
    args = case(rows=16, vocab=4096, rank=256, random_weights=True)
    args["temperature"] = None
    fast = {**args, "draft_logits": args["draft_logits"].clone()}
    reference.sample(reference.Call(**fast))
    _, exact = oracle(args)
    assert exact is not None
    assert (fast["draft_logits"][:, 0] != exact[:, 0]).float().mean() < 0.01


def test_new_draft_logits_names_its_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"^dtype must be"):
        dspark_ops.new_draft_logits(1, 1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^num_slots must be at least 0, got -1"):
        dspark_ops.new_draft_logits(-1, 1, 1, dtype=torch.float32)
    for sizes in ((2.0, 1, 1), (True, 1, 1), ("2", 1, 1), (None, 1, 1)):
        with pytest.raises(TypeError, match=r"^num_slots must be an int, got "):
            dspark_ops.new_draft_logits(*sizes, dtype=torch.float32)  # type: ignore[arg-type]  # what is tested
    for options in ({"output_scale": "2"}, {"output_scale": None}, {"output_soft_cap": True}):
        with pytest.raises(TypeError, match=rf"^{next(iter(options))} must be a number, got "):
            dspark_ops.new_draft_logits(1, 1, 1, dtype=torch.float32, **options)
    for options in ({"output_scale": float("nan")}, {"output_soft_cap": 0.0}):
        with pytest.raises(ValueError, match=rf"^{next(iter(options))} must be a finite number"):
            dspark_ops.new_draft_logits(1, 1, 1, dtype=torch.float32, **options)


@pytest.mark.parametrize("device", [pytest.param("cpu", id="interpreted", marks=needs_interpreter), pytest.param("cuda", id="gpu", marks=gpu)])
@pytest.mark.parametrize("layout", ["plain", "wide", "reduced", "compact", "by step"])
def test_the_cache_kernel_writes_what_the_operations_write(device: str, layout: str) -> None:
    args = case()
    if layout == "wide":
        args["draft_logits"] = torch.full((7, 4, 710), -7.0, dtype=HALF)[:, :3, 5:]
    if layout == "reduced":
        args = _reduced(args)
    if layout == "compact":
        args |= {"cache_rows": torch.tensor([3, -1, 0, 4, 9, 1, 2]), "draft_logits": torch.full((5, 3, 200), -7.0, dtype=HALF)}
    args["idx_mapping"] = torch.tensor([4, -1, 0, 7, 2], dtype=torch.int32)
    if layout == "by step":
        args["idx_mapping"] = torch.tensor([[4, 4, -1], [-1, 3, 3], [0, 0, 0], [7, -2, 1], [2, 2, 2]])
    args = to(device, args)
    logits = args["base_logits"] + 1
    caches = []
    for write in (ops._write_cache, reference.write_cache):
        cache = args["draft_logits"].clone(memory_format=torch.preserve_format)
        ids = None if layout != "reduced" else torch.arange(200, device=device) + args["draft_to_target"]
        write(Call(**{**args, "draft_logits": cache}), 7, ids, logits)
        caches.append(cache)
    assert same_bits(*caches)
    assert not same_bits(caches[0], args["draft_logits"].contiguous())
