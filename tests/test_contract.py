"""The contract's rules for the values of the arguments, on every path. All cases share their shapes, so a compiled path compiles once."""

from __future__ import annotations

import math

import pytest
import torch
from cases import ALL_PATHS, HALF, Path, case, oracle, same_bits

from dspark_ops.noise import MIN_TEMPERATURE, gumbel_noise

every_path = pytest.mark.parametrize("path", ALL_PATHS)
NAN, INF = math.nan, math.inf


@every_path
def test_grid_weights_agree_bit_for_bit(path: Path) -> None:
    for seed in range(4):
        path.agrees_with_oracle(case(seed=seed))


@every_path
def test_ties_keep_the_lowest_id(path: Path) -> None:
    args = case()
    args["temperature"] = torch.zeros(7)
    args["markov_w1"] = torch.zeros_like(args["markov_w1"])
    tied = [3, 4, 64, 100, 130, 180, 199]  # neighbours, other tiles, other programs, the last column
    args["base_logits"].clamp_(max=4.0)
    args["base_logits"][:, 0, tied] = 5.0
    args["base_logits"][:, 1, tied[2:]] = 5.0
    args["base_logits"][:, 2, tied[5:]] = 5.0
    assert (args["base_logits"] == 5.0).sum() == 5 * (7 + 5 + 2), "the planted ties must be the maxima"
    assert path(args)[0].tolist() == [[3, 64, 180]] * 5
    path.agrees_with_oracle(args)


@every_path
def test_negative_zero_ties_with_zero(path: Path) -> None:
    args = case()
    args["temperature"] = torch.zeros(7)
    args["markov_w1"] = torch.zeros_like(args["markov_w1"])
    args["base_logits"] = torch.full_like(args["base_logits"], -1.0)
    args["base_logits"][:, :, [100, 180]] = torch.tensor([-0.0, 0.0], dtype=HALF)
    assert path(args)[0].tolist() == [[100] * 3] * 5
    args["base_logits"][:, :, [100, 180]] = torch.tensor([0.0, -0.0], dtype=HALF)
    assert path(args)[0].tolist() == [[100] * 3] * 5


@every_path
@pytest.mark.parametrize("where", [0, 100, 199])
def test_nan_never_wins(path: Path, where: int) -> None:
    args = case()
    args["base_logits"][:, :, where] = NAN
    tokens, cache = path(args)
    assert (tokens != where).all()
    assert cache is not None and cache[args["idx_mapping"].long(), :, where].isnan().all(), "the cache holds what the logits were"
    assert torch.equal(tokens, oracle(args)[0])


@every_path
@pytest.mark.parametrize("filler", [NAN, -INF])
def test_a_row_without_a_winner_gives_id_0(path: Path, filler: float) -> None:
    args = case()
    args["base_logits"][:4] = filler
    tokens, _ = path(args)
    assert tokens[:4].tolist() == [[0] * 3] * 4
    assert torch.equal(tokens, oracle(args)[0])


@every_path
def test_infinite_logits_win_and_lose(path: Path) -> None:
    args = case()
    args["base_logits"][:, 0, 77] = INF
    args["base_logits"][:, 1, 5:] = -INF
    args["base_logits"][:, 2, [190, 50]] = INF
    tokens, _ = path(args)
    assert (tokens[:, 0] == 77).all() and (tokens[:, 1] < 5).all() and (tokens[:, 2] == 50).all()
    assert torch.equal(tokens, oracle(args)[0])


@every_path
def test_inert_rows_write_nothing_and_read_nothing(path: Path) -> None:
    args = case()
    args["idx_mapping"] = torch.tensor([0, -1, 2, 7, -(2**31)], dtype=torch.int32)  # 7 slots: 7 is outside
    tokens, cache = path(args)
    path.agrees_with_oracle(args)
    assert cache is not None
    assert (cache[[1, 3, 4, 5, 6]] == -7.0).all() and not (cache[[0, 2]] == -7.0).all()
    greedy = {**args, "temperature": torch.zeros(7)}
    assert torch.equal(tokens[[1, 3, 4]], path(greedy)[0][[1, 3, 4]]), "inert rows are greedy"
    other = {**args, "sample_pos": args["sample_pos"].clone(), "seeds": args["seeds"] + 1, "temperature": args["temperature"] + 1}
    other["sample_pos"][[1, 3, 4]] = torch.tensor([[-1], [2**62], [-(2**63)]])
    assert torch.equal(tokens[[1, 3, 4]], path(other)[0][[1, 3, 4]]), "neither position, seed nor temperature counts"


@every_path
def test_a_batch_of_inert_rows_writes_nothing(path: Path) -> None:
    args = case()
    args["idx_mapping"] = torch.full((5,), -1, dtype=torch.int32)
    tokens, cache = path(args)
    assert cache is not None and (cache == -7.0).all()
    assert torch.equal(tokens, oracle(args)[0])


@every_path
def test_anchors_outside_the_vocabulary_have_no_bias(path: Path) -> None:
    args = case()
    args["temperature"] = torch.zeros(7)
    args["anchor_ids"] = torch.tensor([-1, 200, 2**40, -(2**63), 3])
    tokens, _ = path(args)
    assert torch.equal(tokens[:4, 0], args["base_logits"][:4, 0].argmax(-1))
    without = {**args, "markov_w1": torch.zeros_like(args["markov_w1"])}
    assert not torch.equal(tokens[4:, 1:], path(without)[0][4:, 1:]), "a bias must show where there is one"
    path.agrees_with_oracle(args)


@every_path
def test_temperatures_below_the_threshold_are_greedy(path: Path) -> None:
    below = math.nextafter(MIN_TEMPERATURE, 0.0) * (1 - 2**-20)
    for temperatures in ([0.0, 1e-45, -1.0, NAN, below], [MIN_TEMPERATURE, 1e-6, 1.0, INF, 1e30]):
        args = case()
        args["idx_mapping"] = torch.arange(5, dtype=torch.int32)
        args["temperature"] = torch.tensor([*temperatures, 1.0, 1.0])
        tokens, cache = path(args)
        greedy, _ = path({**args, "temperature": torch.zeros(7)})
        assert cache is not None and not cache.isnan().any()
        if temperatures[0] == 0.0:
            assert torch.equal(tokens, greedy)
        else:
            assert not torch.equal(tokens[2:], greedy[2:])
        path.agrees_with_oracle(args)


@every_path
def test_temperature_and_seed_belong_to_the_slot(path: Path) -> None:
    args = case()
    args["idx_mapping"] = torch.tensor([2, 0, 1, 4, 3], dtype=torch.int32)
    slots = args["idx_mapping"].long()
    moved = {**args, "idx_mapping": torch.arange(5, dtype=torch.int32)}
    for name in ("temperature", "seeds"):
        moved[name] = torch.cat([args[name][slots], args[name][5:]])
    assert args["temperature"].unique().numel() > 2, "the temperatures must differ to show it"
    tokens, cache = path(args)
    moved_tokens, moved_cache = path(moved)
    assert torch.equal(tokens, moved_tokens)
    assert cache is not None and moved_cache is not None and same_bits(cache[slots], moved_cache[:5])


@every_path
def test_a_row_does_not_depend_on_its_batch(path: Path) -> None:
    args = case()
    order = torch.tensor([4, 2, 0, 3, 1])
    permuted = dict(args)
    for name in ("base_logits", "anchor_ids", "sample_pos", "idx_mapping"):
        permuted[name] = args[name][order]
    tokens, cache = path(args)
    permuted_tokens, permuted_cache = path(permuted)
    assert torch.equal(tokens[order], permuted_tokens)
    assert cache is not None and permuted_cache is not None and same_bits(cache, permuted_cache)


@every_path
def test_all_64_bits_of_a_seed_count(path: Path) -> None:
    args = case()
    args["temperature"] = torch.full((7,), 50.0)  # noise decides
    args["idx_mapping"] = torch.arange(5, dtype=torch.int32)
    args["base_logits"][:] = args["base_logits"][:1].clone()
    args["anchor_ids"][:] = 11
    args["sample_pos"][:] = args["sample_pos"][:1].clone()
    args["seeds"] = torch.tensor([-1, 2**63 - 1, -(2**63), 0, 1, 0, 0])
    tokens, _ = path(args)
    assert len({tuple(row) for row in tokens.tolist()}) == 5
    path.agrees_with_oracle(args)


@every_path
def test_the_cache_is_what_was_sampled_from(path: Path) -> None:
    args = case()
    args["temperature"] = torch.full((7,), 0.9)
    tokens, cache = path(args)
    assert cache is not None
    slots = args["idx_mapping"].long()
    for step in range(3):
        noise = gumbel_noise(args["seeds"][slots], args["sample_pos"][:, step], torch.arange(200), step=step)
        keys = cache[slots, step].float() / 0.9 + noise
        best = keys.topk(2).values
        assert (best[:, 0] - best[:, 1] > 8 * torch.finfo(torch.float32).eps * best[:, 0].abs()).all(), "margins above 8 ulps"
        assert torch.equal(tokens[:, step], keys.argmax(-1))
