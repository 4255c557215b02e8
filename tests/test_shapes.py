"""Sizes, dtypes, strides and modes: bit for bit the oracle on grid weights, within the contract's bound on random ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from cases import COMPILED, EAGER_PATHS, GPU_COMPILED, INTERPRETED, KERNEL_PATHS, Arguments, Path, case, keys_of, oracle, same_bits, to

import dspark_ops
from dspark_ops import gumbel_noise, ops

eager_path = pytest.mark.parametrize("path", EAGER_PATHS)
kernel_path = pytest.mark.parametrize("path", KERNEL_PATHS)
FLOATS = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]


@eager_path
@pytest.mark.parametrize("steps", [*range(1, 9)])
def test_steps(path: Path, steps: int) -> None:
    path.agrees_with_oracle(case(rows=3, steps=steps, vocab=97))


@eager_path
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 64])
def test_rows(path: Path, rows: int) -> None:
    path.agrees_with_oracle(case(rows=rows, steps=2, vocab=97))


@eager_path
@pytest.mark.parametrize("vocab", [1, 17, 64, 127, 128, 129, 515, 1024, 2049])
def test_vocabularies(path: Path, vocab: int) -> None:
    path.agrees_with_oracle(case(rows=2, steps=2, vocab=vocab))


@eager_path
@pytest.mark.parametrize("rank", [16, 48, 256, 320, 512])
def test_ranks(path: Path, rank: int) -> None:
    path.agrees_with_oracle(case(rows=3, steps=2, vocab=300, rank=rank))


@eager_path
@pytest.mark.parametrize("weights", FLOATS)
@pytest.mark.parametrize("logits", FLOATS)
@pytest.mark.parametrize("use_fp64", [False, True])
def test_dtypes(path: Path, logits: torch.dtype, weights: torch.dtype, use_fp64: bool) -> None:
    args = case(logits=logits, weights=weights, rank=32, vocab=200)
    path.agrees_with_oracle({**args, "use_fp64": use_fp64})
    path.agrees_with_oracle({**args, "use_fp64": use_fp64, "temperature": None, "seeds": None, "sample_pos": None})


@eager_path
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_index_dtypes_and_a_slot_for_each_step(path: Path, ids: torch.dtype) -> None:
    args = case()
    for name in ("anchor_ids", "sample_pos", "idx_mapping"):
        args[name] = args[name].to(ids)
    path.agrees_with_oracle(args)
    slots = args["idx_mapping"][:, None].repeat(1, 3)
    path.agrees_with_oracle({**args, "idx_mapping": slots})
    slots[1, 1:] = -1  # a request that leaves in the middle of the block
    slots[2] = slots[2].flip(0)
    slots[3, 0] = 99
    path.agrees_with_oracle({**args, "idx_mapping": slots})


@eager_path
def test_greedy_without_slots_and_without_a_cache(path: Path) -> None:
    args = case(cached=False)
    nothing = dict.fromkeys(("temperature", "seeds", "sample_pos", "idx_mapping"))
    path.agrees_with_oracle({**args, **nothing})
    path.agrees_with_oracle(args)
    assert torch.equal(path(args)[0], path(case())[0]), "the cache must not change the tokens"


@eager_path
def test_positions_near_the_ends_of_their_type(path: Path) -> None:
    args = case()
    args["sample_pos"] = torch.tensor([[0, 1, 2], [2**31 - 3, 2**31 - 2, 2**31 - 1], [5, 5, 5], [1, 0, -1], [7, 2**30, 2**30 + 1]])
    path.agrees_with_oracle(args)
    path.agrees_with_oracle({**args, "sample_pos": args["sample_pos"].to(torch.int32)})


def _step_major(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


@eager_path
def test_strides_are_the_tensors_own(path: Path) -> None:
    args = case()
    _, steps, vocab = args["base_logits"].shape
    slots = args["draft_logits"].shape[0]
    wide = torch.full((slots, steps + 2, vocab + 56), -7.0, dtype=args["base_logits"].dtype)
    every_other = torch.full((2 * slots, steps, vocab), -7.0, dtype=wide.dtype)[::2]
    padded_w1 = torch.full((vocab, 40), 9.0, dtype=args["markov_w1"].dtype)
    padded_w1[:, :16] = args["markov_w1"]
    positions = torch.stack([args["sample_pos"], args["sample_pos"] + 1], -1)[..., 0]
    strided: list[Arguments] = [
        {"base_logits": _step_major(args["base_logits"])},
        {"draft_logits": wide},
        {"draft_logits": wide[:, 1:, :vocab]},
        {"draft_logits": every_other},
        {"markov_w1": padded_w1[:, :16]},
        {"sample_pos": positions, "seeds": args["seeds"].repeat_interleave(2)[::2]},
        {"temperature": args["temperature"].repeat_interleave(3)[::3], "anchor_ids": args["anchor_ids"].repeat_interleave(2)[::2]},
    ]
    for change in strided:
        changed = {**args, **change}
        assert not all(x.is_contiguous() for x in change.values()) or change["draft_logits"] is wide, "the layout must differ to show it"
        path.agrees_with_oracle(changed)


@eager_path
def test_a_cache_inside_a_larger_tensor_leaves_its_surroundings_alone(path: Path) -> None:
    args = to(path.device, case())
    slots, steps, vocab = args["draft_logits"].shape
    around = torch.full((slots + 2, steps + 2, vocab + 64), -7.0, dtype=args["draft_logits"].dtype, device=path.device)
    args["draft_logits"] = around[1:-1, 1:-1, 24:]
    path.function(**args)
    inside = torch.zeros_like(around, dtype=torch.bool)
    inside[1:-1, 1:-1, 24 : 24 + vocab] = True
    assert (around[~inside] == -7.0).all() and not (around[inside] == -7.0).all()


@eager_path
def test_cache_rows_place_the_slots(path: Path) -> None:
    args = case()
    compact = torch.full((4, 3, 200), -7.0, dtype=args["base_logits"].dtype)
    for ids in (torch.int32, torch.int64):
        rows = torch.tensor([3, -1, 0, 99, 2, 1, -5], dtype=ids)  # slots 1, 3 and 6 have none
        path.agrees_with_oracle({**args, "draft_logits": compact, "cache_rows": rows})
    _, cache = path({**args, "draft_logits": compact, "cache_rows": torch.full((7,), -1)})
    assert cache is not None and (cache == -7.0).all()


@eager_path
def test_padded_vocabulary_never_wins_and_is_not_written(path: Path) -> None:
    args = case()
    args["base_logits"][..., 190:] = 100.0  # padding that would win
    for temperature in (args["temperature"], torch.zeros(7)):
        padded = {**args, "vocab_size": 190, "temperature": temperature}
        tokens, cache = path(padded)
        assert (tokens < 190).all() and (path({**padded, "vocab_size": None})[0] >= 190).all()
        assert cache is not None and (cache[..., 190:] == -7.0).all()
        path.agrees_with_oracle(padded)
        path.agrees_with_oracle({**padded, "markov_w1": args["markov_w1"][:190], "draft_logits": args["draft_logits"][..., :190]})


@eager_path
def test_noise_ahead_gives_the_same(path: Path) -> None:
    for use_fp64 in (False, True):
        args = case()
        args["idx_mapping"][1] = -1
        slots = args["seeds"], args["sample_pos"], args["idx_mapping"]
        noise = dspark_ops.markov_noise(*(t.to(path.device) for t in slots), 200, use_fp64=use_fp64)
        ahead = {**args, "use_fp64": use_fp64, "noise": noise, "seeds": None, "sample_pos": None}
        path.agrees_with_oracle({**args, "use_fp64": use_fp64})
        for change in (ahead, {**ahead, "noise": torch.nn.functional.pad(noise, (0, 5))[..., :200]}):
            tokens, cache = path(change)
            expected, expected_cache = path({**args, "use_fp64": use_fp64})
            assert torch.equal(tokens, expected)
            assert cache is not None and expected_cache is not None and same_bits(cache, expected_cache)


@contextlib.contextmanager
def _tf32() -> Any:
    precision = torch.get_float32_matmul_precision()
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


@eager_path
@pytest.mark.parametrize(
    "mode", ["inference", "autocast", "default dtype", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("grad", "tf32"))]
)
def test_global_state_changes_nothing(path: Path, mode: str) -> None:
    weights = torch.float32
    args = case(weights=weights, logits=torch.float32, rank=64, random_weights=mode != "grad")
    if mode == "grad":
        args["markov_w1"] = torch.nn.Parameter(args["markov_w1"])
        args["markov_w2"] = torch.nn.Parameter(args["markov_w2"])
    before, cache_before = path({**args, "markov_w1": args["markov_w1"].detach(), "markov_w2": args["markov_w2"].detach()})
    state = torch.random.get_rng_state()
    with contextlib.ExitStack() as stack:
        if mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "autocast":
            stack.enter_context(torch.autocast(path.device, dtype=torch.bfloat16))
        elif mode == "tf32":
            stack.enter_context(_tf32())
        elif mode == "default dtype":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, torch.float32)
        tokens, cache = path(args)
    assert torch.equal(tokens, before)
    assert cache is not None and cache_before is not None and same_bits(cache.detach(), cache_before)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is not used"


@eager_path
@pytest.mark.parametrize("weights", FLOATS)
def test_random_weights_stay_within_the_bound(path: Path, weights: torch.dtype) -> None:
    _stays_within_the_bound(path, weights)


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPILED, GPU_COMPILED])
@pytest.mark.parametrize("weights", FLOATS)
def test_random_weights_stay_within_the_bound_compiled(path: Path, weights: torch.dtype) -> None:
    _stays_within_the_bound(path, weights)


def _stays_within_the_bound(path: Path, weights: torch.dtype) -> None:
    """|bias - exact| <= r 2^-23 sum |e w| before rounding: seen through FP32 logits, whose cache shows the bias, and through the tokens."""
    rank, vocab, excused = 64, 200 if INTERPRETED else 1000, 0
    for seed in range(4):
        args = case(rows=8, vocab=vocab, rank=rank, logits=torch.float32, weights=weights, random_weights=True, seed=seed)
        args["base_logits"].zero_()
        args["idx_mapping"] = torch.arange(8, dtype=torch.int32)
        tokens, cache = path(args)
        expected, _ = oracle(args)
        assert cache is not None
        previous = torch.cat([args["anchor_ids"][:, None], tokens[:, :-1]], 1)  # each step judged on the tokens that this path chose
        e, w = args["markov_w1"].double()[previous], args["markov_w2"].double()
        exact = e @ w.t()
        bound = rank * 2.0**-23 * (e.abs() @ w.t().abs())
        rounding = exact.abs() * 2.0**-24 + bound * 2.0**-24  # of the FP32 result itself
        assert ((cache[:8].double() - exact).abs() <= bound + rounding).all()
        for row in (tokens != expected).any(1).nonzero()[:, 0].tolist():
            step = int((tokens[row] != expected[row]).nonzero()[0])  # the tokens before agree
            keys, slack = exact[row, step], 2 * bound[row, step].max()
            temperature = float(args["temperature"][row])
            if temperature > 0:
                noise = gumbel_noise(args["seeds"][row], args["sample_pos"][row, step], torch.arange(vocab), step=step)
                keys, slack = keys / temperature + noise, slack / temperature
            gap = keys.max() - keys[tokens[row, step]]
            assert gap <= slack + 8 * torch.finfo(torch.float32).eps * keys.max().abs(), (row, step)
            excused += 1
    print(f"{path.name}, {weights}: {excused} of 32 rows excused by their margin")


@kernel_path
def test_every_kernel_computes_the_same_keys(path: Path) -> None:
    """Whole rows of keys: at every shape of program, with the noise in place and ahead, for rows alone and in a batch."""
    args = to(path.device, case(rows=20, steps=2, vocab=200, rank=48, slots=20, random_weights=not INTERPRETED))
    args["idx_mapping"] = torch.arange(20, device=path.device)
    noise = torch.empty(20, 2, 200, device=path.device)
    ops.launch_noise(args["seeds"], args["sample_pos"], args["idx_mapping"], 200, None, noise)
    batch = keys_of(args)
    assert torch.equal(batch, keys_of({**args, "noise": noise}))
    for rows in ([3], [5, 2], [7, 1, 0], list(range(11, 0, -1)), list(range(17))):
        part = {**args}
        for name in ("base_logits", "anchor_ids", "sample_pos", "idx_mapping"):
            part[name] = args[name][rows]
        assert same_bits(keys_of(part), batch[:, rows]), rows
