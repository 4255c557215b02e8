"""Sequential Markov loops as people write them: `loop(base_logits, anchor_ids, w1, w2)` gives the tokens, and whatever else it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ops import gumbel_noise

Naive = Callable[..., Any]


class MarkovHead(torch.nn.Module):
    """The loop as a module; its gradients are not wanted, as in a drafter that serves."""

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding.from_pretrained(w1)
        self.project = torch.nn.Linear(w2.shape[1], w2.shape[0], bias=False)
        self.project.weight = torch.nn.Parameter(w2)

    def forward(self, base: Tensor, anchors: Tensor) -> Tensor:
        tokens, token = [], anchors
        for i in range(base.shape[1]):
            token = (base[:, i] + self.project(self.embed(token))).argmax(dim=-1)
            tokens.append(token)
        return torch.stack(tokens, dim=1)


def indexed(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors
    for i in range(base.shape[1]):
        token = torch.argmax(w1[token] @ w2.t() + base[:, i], dim=-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def preallocated(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    out = torch.empty(base.shape[:2], dtype=torch.int64, device=base.device)
    for i in range(base.shape[1]):
        token = anchors if i == 0 else out[:, i - 1]
        out[:, i] = (base[:, i] + F.linear(F.embedding(token, w1), w2)).argmax(-1)
    return out


def kept_dimensions(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors[:, None]
    for i in range(base.shape[1]):
        token = (base[:, i] + F.linear(F.embedding(token[:, 0], w1), w2)).argmax(-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def deepspec(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    tokens, logits, token = [], [], anchors
    for i in range(base.shape[1]):
        logits.append(base[:, i : i + 1] + F.linear(F.embedding(token.unsqueeze(1), w1), w2))
        token = logits[-1].argmax(dim=-1).squeeze(1)
        tokens.append(token)
    return torch.stack(tokens, dim=1), torch.cat(logits, dim=1)


def first_logits_kept(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    tokens, logits = deepspec(base, anchors, w1, w2)
    return tokens, logits[:, :1].float() * 2


def in_place(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    tokens, token = [], anchors
    logits = base.clone()
    for i in range(base.shape[1]):
        logits[:, i] += w1[token] @ w2.t()
        token = logits[:, i].argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1), logits


def in_the_argument(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    token, tokens = anchors, []
    for i in range(base.shape[1]):
        base[:, i] += w1[token] @ w2.t()
        token = base[:, i].argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def maximum(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors
    for logits in base.unbind(1):
        token = (logits + w1.index_select(0, token) @ w2.t()).max(dim=-1).indices
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def einsum(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors
    for logits in base.split(1, dim=1):
        token = (logits[:, 0] + torch.einsum("br,vr->bv", w1[token], w2)).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens)


def batched_product(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors[:, None]
    for i in range(base.shape[1]):
        bias = torch.bmm(w1[token], w2.t().expand(len(base), -1, -1))
        token = (base.narrow(1, i, 1) + bias).argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def steps_first(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors
    for logits in base.transpose(0, 1):
        token = (logits + w1[token] @ w2.t()).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def lm_head_inside(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return indexed(F.linear(base[..., : w2.shape[1]], w1), anchors, w1, w2)


def anchor_inside(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    anchors = base[:, 0].argmax(-1)
    return anchors, indexed(base[:, 1:], anchors, w1, w2)


def prefix(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return indexed(base[:, :2], anchors, w1, w2)


def two_blocks(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    first = indexed(base, anchors, w1, w2)
    return first, indexed(base * 2, first[:, -1], w1, w2)


GREEDY: dict[str, Naive] = {
    loop.__name__: loop
    for loop in (
        indexed,
        preallocated,
        kept_dimensions,
        deepspec,
        first_logits_kept,
        in_place,
        in_the_argument,
        maximum,
        einsum,
        batched_product,
        steps_first,
        lm_head_inside,
        anchor_inside,
        prefix,
        two_blocks,
    )
}


def _variant(change: Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Naive:
    """A loop whose token at step i is `change(i, base_logits, token before, w1, w2)`."""

    def loop(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        tokens, token = [], anchors
        for i in range(base.shape[1]):
            token = change(i, base, token, w1, w2)
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    return loop


def bias_used(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    tokens, biases, token = [], [], anchors
    for i in range(base.shape[1]):
        biases.append(w1[token] @ w2.t())
        token = (base[:, i] + biases[-1]).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1), torch.stack(biases, dim=1)


def embedding_used(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    tokens, total, token = [], torch.zeros_like(w1[anchors]), anchors
    for i in range(base.shape[1]):
        embedding = w1[token]
        total = total + embedding
        token = (base[:, i] + embedding @ w2.t()).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1), total


def largest_logit_used(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    tokens, total, token = [], torch.zeros_like(base[:, 0, 0]), anchors
    for i in range(base.shape[1]):
        largest, token = (base[:, i] + w1[token] @ w2.t()).max(-1)
        total = total + largest
        tokens.append(token)
    return torch.stack(tokens, dim=1), total


def masked_at_one_step(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token = [], anchors
    for i in range(base.shape[1]):
        logits = base[:, i] + w1[token] @ w2.t()
        if i == 1:
            logits = logits.masked_fill(w2[:, 0] > 0, -torch.inf)
        token = logits.argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def recurrent(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    tokens, token, state = [], anchors, w2[anchors]
    for i in range(base.shape[1]):
        state = state * 0.5 + w1[token]
        token = (base[:, i] + state @ w2.t()).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def two_before(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    before, token, tokens = anchors, anchors, []
    for i in range(base.shape[1]):
        before, token = token, (base[:, i] + w1[token] @ w2.t() + w1[before] @ w2.t()).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


# Loops that must stay as they are, with what is said of them. Each differs in one thing from a loop that is fused.
REFUSED: dict[str, tuple[Naive, str]] = {
    "logits_cast": (_variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).double().argmax(-1)), "step 0: the logits are cast to"),
    "base_cast": (_variant(lambda i, b, t, w1, w2: (b[:, i].double() + (w1[t] @ w2.t())).argmax(-1)), "step 0: the base logits are cast to"),
    "bias_cast": (_variant(lambda i, b, t, w1, w2: (b[:, i] + (w1[t] @ w2.t()).double()).argmax(-1)), "step 0: the bias is cast to"),
    "embedding_cast": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t].double() @ w2.double().t()).argmax(-1)),
        "step 0: the embedding is cast to torch.float64",
    ),
    "projection_bias": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + F.linear(w1[t], w2, w2[:, 0])).argmax(-1)),
        "step 0: the projection to the vocabulary has a bias of its own",
    ),
    "one_rounding": (
        _variant(lambda i, b, t, w1, w2: torch.addmm(b[:, i], w1[t], w2.t()).argmax(-1)),
        "step 0: aten.addmm rounds base logits + bias once",
    ),
    "scaled_bias": (_variant(lambda i, b, t, w1, w2: torch.add(b[:, i], w1[t] @ w2.t(), alpha=2).argmax(-1)), "step 0: the bias is scaled"),
    "multiplied_bias": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + 2 * (w1[t] @ w2.t())).argmax(-1)),
        "step 0: the logits are the sum of aten.select.int and aten.mul.Tensor",
    ),
    "masked": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).masked_fill(w2[:, 0] > 0, -torch.inf).argmax(-1)),
        "step 0: the logits are the result of aten.where.self",
    ),
    "capped": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).clamp(max=8).argmax(-1)),
        "step 0: the logits are the result of aten.clamp_max",
    ),
    "smallest": (_variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).argmin(-1)), "step 0: it takes the smallest logit"),
    "smallest_of_min": (_variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).min(-1).indices), "step 0: it takes the smallest logit"),
    "multinomial": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).softmax(-1).multinomial(1)[:, 0]),
        "step 0: torch.multinomial draws from the global generator",
    ),
    "topk": (_variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.t()).topk(1).indices[:, 0]), "step 0: topk leaves open"),
    "other_w1": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + (w1 if i == 0 else w2)[t] @ w2.t()).argmax(-1)),
        "step 1: its markov_w1 is not that of step 0",
    ),
    "other_w2": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ (w2 if i == 0 else w1).t()).argmax(-1)),
        "step 1: its markov_w2 is not that of step 0",
    ),
    "backwards": (
        _variant(lambda i, b, t, w1, w2: (b[:, 2 - i] + w1[t] @ w2.t()).argmax(-1)),
        "step 1: it reads position 1 of the base logits, step 0 reads 2",
    ),
    "same_position": (
        _variant(lambda i, b, t, w1, w2: (b[:, 0] + w1[t] @ w2.t()).argmax(-1)),
        "step 1: it reads position 0 of the base logits, step 0 reads 0",
    ),
    "separate_bases": (
        _variant(lambda i, b, t, w1, w2: ((b * (i + 1))[:, 0] + w1[t] @ w2.t()).argmax(-1)),
        "each step takes its base logits from another tensor",
    ),
    "no_block": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] * 2 + w1[t] @ w2.t()).argmax(-1)),
        "step 0: the base logits are not a slice of one",
    ),
    "single_step": (lambda b, t, w1, w2: (b[:, 0] + w1[t] @ w2.t()).argmax(-1), "a single step is no loop"),
    "other_vocabulary": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + torch.cat([w1, w1])[t] @ w2.t()).argmax(-1)),
        "step 0: the vocabularies of base logits, markov_w1 and markov_w2 differ",
    ),
    "clamped_token": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t.clamp(max=95)] @ w2.t()).argmax(-1)),
        "step 1: the token before goes through aten.clamp_max",
    ),
    "rank_first": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + w1[t] @ w2.reshape(w2.shape[::-1])).argmax(-1)),
        "step 0: the weights are not [V, rank]",
    ),
    "gated": (
        _variant(lambda i, b, t, w1, w2: (b[:, i] + (w2[t].sigmoid() * w1[t]) @ w2.t()).argmax(-1)),
        "step 0: what is projected is aten.mul.Tensor, not the embedding",
    ),
    "bias_used": (bias_used, "step 0: the bias of the token before is used elsewhere"),
    "embedding_used": (embedding_used, "step 0: the embedding of the token before is used elsewhere"),
    "largest_logit_used": (largest_logit_used, "step 0: the largest logit itself is used"),
    "recurrent": (recurrent, "step 0: what is projected is aten.add.Tensor, not the embedding"),
    "masked_at_one_step": (masked_at_one_step, "step 1: the logits are the result of aten.where.self"),
    "two_before": (two_before, "step 0: "),
}


def sampled(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    tokens, token, ids = [], anchors, torch.arange(base.shape[2], device=base.device)
    for i in range(base.shape[1]):
        logits = base[:, i] + w1[token] @ w2.t()
        token = (logits / temperature[:, None] + gumbel_noise(seeds, positions[:, i], ids, step=i)).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def _sampled(keys: Callable[..., Tensor], **options: Any) -> Naive:
    """A sampled loop with the keys `keys(i, logits, temperature, seeds, positions, ids)`."""

    def loop(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        tokens, token, ids = [], anchors, torch.arange(base.shape[2], device=base.device)
        for i in range(base.shape[1]):
            token = keys(i, base[:, i] + w1[token] @ w2.t(), temperature, seeds, positions, ids).argmax(-1)
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    return loop


def sampled_deepspec(
    base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, logits, token, ids = [], [], anchors, torch.arange(base.shape[2], device=base.device)
    for i in range(base.shape[1]):
        logits.append(base[:, i : i + 1] + F.linear(F.embedding(token.unsqueeze(1), w1), w2))
        noise = gumbel_noise(seeds[:, None], positions[:, i : i + 1], ids, step=i)
        token = (noise + logits[-1] / temperature[:, None, None]).argmax(dim=-1).squeeze(1)
        tokens.append(token)
    return torch.stack(tokens, dim=1), torch.cat(logits, dim=1)


def keys_used(
    base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, keys, token, ids = [], [], anchors, torch.arange(base.shape[2], device=base.device)
    for i in range(base.shape[1]):
        logits = base[:, i] + w1[token] @ w2.t()
        keys.append(logits / temperature[:, None] + gumbel_noise(seeds, positions[:, i], ids, step=i))
        token = keys[-1].argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1), torch.stack(keys, dim=1)


SAMPLED: dict[str, Naive] = {
    "sampled": sampled,
    "sampled_deepspec": sampled_deepspec,
    "cast_first": _sampled(lambda i, x, t, s, p, ids: x.float() / t[:, None] + gumbel_noise(s, p[:, i], ids, step=i)),
    "constant": _sampled(lambda i, x, t, s, p, ids: x.float() / 0.75 + gumbel_noise(s, p[:, i], ids, step=i)),
    "no_temperature": _sampled(lambda i, x, t, s, p, ids: x + gumbel_noise(s, p[:, i], ids, step=i)),
    "fp64": _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, i], ids, step=i, use_fp64=True)),
    "int32": _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, i].int(), ids.int(), step=i)),
    "counted_positions": _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, 0] + i, ids, step=i)),
}

# Sampled loops that must stay as they are, with what is said of them.
REFUSED_SAMPLED: dict[str, tuple[Naive, str]] = {
    "unknown_noise": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] - torch.log(gumbel_noise(s, p[:, i], ids, step=i).abs())),
        "step 0: the logits are the result of aten.sub.Tensor",
    ),
    "global_noise": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] - torch.log(-torch.log(torch.rand(x.shape)))),
        "step 0: the logits are the result of aten.sub.Tensor",
    ),
    "added_global_noise": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + torch.rand(x.shape)),
        "step 0: what is added to the logits is not the noise",
    ),
    "doubled_noise": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + 2 * gumbel_noise(s, p[:, i], ids, step=i)),
        "step 0: what is added to the logits is not the noise",
    ),
    "shifted_ids": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, i], ids + 1, step=i)),
        "step 0: what is added to the logits is not the noise",
    ),
    "noise_of_another_step": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, i], ids, step=i + 1)),
        "step 0: its noise is that of step 1",
    ),
    "other_seeds": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s + i, p[:, i], ids, step=i)),
        "step 1: its seeds are not those of step 0",
    ),
    "other_temperature": (
        _sampled(lambda i, x, t, s, p, ids: x / (t + i)[:, None] + gumbel_noise(s, p[:, i], ids, step=i)),
        "step 1: its temperature is not that of step 0",
    ),
    "multiplied": (
        _sampled(lambda i, x, t, s, p, ids: x * t[:, None] + gumbel_noise(s, p[:, i], ids, step=i)),
        "step 0: the logits are the result of aten.mul.Tensor",
    ),
    "divided_in_bf16": (
        _sampled(lambda i, x, t, s, p, ids: x / 0.7 + gumbel_noise(s, p[:, i], ids, step=i)),
        "step 0: the logits are divided by the temperature in torch.bfloat16",
    ),
    "bf16_temperature": (
        _sampled(lambda i, x, t, s, p, ids: x.float() / t.bfloat16()[:, None] + gumbel_noise(s, p[:, i], ids, step=i)),
        "step 0: the temperature is torch.bfloat16",
    ),
    "temperature_by_column": (
        _sampled(lambda i, x, t, s, p, ids: x / (ids + 1.0) + gumbel_noise(s, p[:, i], ids, step=i)),
        "step 0: the temperature is not a number or one for each row",
    ),
    "greedy_at_first": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, i], ids, step=i) if i else x),
        "step 1: it is sampled, unlike step 0",
    ),
    "random_positions": (
        _sampled(lambda i, x, t, s, p, ids: x / t[:, None] + gumbel_noise(s, p[:, i] + x.amax(-1).long(), ids, step=i)),
        "step 0: its positions depend on what the loop draws",
    ),
    "keys_used": (keys_used, "step 0: the keys, logits / temperature + noise, are used elsewhere"),
}
