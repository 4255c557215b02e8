"""Markov and confidence heads: DeepSpec's formulas, written here once more with plain matrices, and blocks that are loops of single steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from cases import HALF, needs_compiler
from torch import Tensor

import dspark_ops
from dspark_ops.heads import KINDS, ConfidenceHead, MarkovHead

ROWS, STEPS, VOCAB, RANK, HIDDEN = 4, 3, 97, 16, 12
every_kind = pytest.mark.parametrize("kind", KINDS)


def _head(kind: str, dtype: torch.dtype = torch.float32) -> MarkovHead:
    torch.manual_seed(0)
    return MarkovHead(VOCAB, RANK, kind=kind, hidden_size=None if kind == "vanilla" else HIDDEN).to(dtype)


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits, anchors and hidden states."""
    generator = torch.Generator().manual_seed(1)
    base, hidden = (torch.randn(ROWS, STEPS, size, generator=generator).to(dtype) for size in (VOCAB, HIDDEN))
    return base, torch.randint(VOCAB, (ROWS,), generator=generator), hidden


def _sampling() -> dict[str, Any]:
    return {
        "temperature": torch.tensor([0.7, 0.0, 1.3, 0.9, 1.0]),
        "seeds": torch.tensor([3, -5, 7, 11, 13]),
        "sample_pos": torch.arange(ROWS * STEPS).view(ROWS, STEPS),
        "idx_mapping": torch.tensor([4, 1, 0, 2]),
    }


def _formula(head: MarkovHead, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The bias in FP64 by the formulas of the published heads."""
    weights = {name: x.double() for name, x in head.state_dict().items()}
    e, h = weights["markov_w1.weight"][previous], hidden.double()
    if head.kind == "gated":
        gate, shift = weights["gate_proj.weight"], weights["gate_proj.bias"]
        e = e / (1 + torch.exp(-(h @ gate[:, :HIDDEN].T + e @ gate[:, HIDDEN:].T + shift)))
    if head.kind == "rnn":
        state = torch.zeros_like(e) if state is None else state.double()
        joint, shift = weights["joint_proj.weight"], weights["joint_proj.bias"]
        z = state @ joint[:, :RANK].T + e @ joint[:, RANK : 2 * RANK].T + h @ joint[:, 2 * RANK :].T + shift
        keep = 1 / (1 + torch.exp(-z[:, :RANK]))
        state = keep * state + (1 - keep) * torch.tanh(z[:, RANK : 2 * RANK])
        e = torch.tanh(z[:, 2 * RANK :])
    return e @ weights["markov_w2.weight"].T, state


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_bias_of_a_step_is_the_published_formula(kind: str, dtype: torch.dtype) -> None:
    head, (_, anchors, hidden) = _head(kind, dtype), _inputs(dtype)
    state = expected_state = None
    for step in range(STEPS):
        bias, state = head.bias((anchors + step) % VOCAB, None if kind == "vanilla" else hidden[:, step], state)
        expected, expected_state = _formula(head, (anchors + step) % VOCAB, hidden[:, step], expected_state)
        # FP32: sums of at most 44 terms of about 1. 16 bits: a rounding of 2^-9 at each of fewer than ten operations, in sums of RANK terms.
        tolerance = 1e-5 if dtype == torch.float32 else 10 * 2.0**-9 * RANK**0.5
        torch.testing.assert_close(bias.double(), expected, rtol=0, atol=tolerance)
        assert bias.dtype == dtype and bias.shape == (ROWS, VOCAB) and bias.abs().max() > 4 * tolerance
        assert (state is None) == (kind != "rnn")
        if state is not None:
            torch.testing.assert_close(state.double(), expected_state, rtol=0, atol=tolerance)


@every_kind
@pytest.mark.parametrize("sampled", [True, False])
def test_a_block_is_the_loop_of_its_steps(kind: str, sampled: bool) -> None:
    head, (base, anchors, hidden) = _head(kind), _inputs()
    cache = dspark_ops.new_draft_logits(5, STEPS, VOCAB, dtype=torch.float32)
    options = _sampling() if sampled else {"idx_mapping": _sampling()["idx_mapping"]}
    tokens = head.sample(base, anchors, hidden_states=hidden, draft_logits=cache, **options)
    before, state = anchors, None
    for step in range(STEPS):
        bias, state = head.bias(before, None if kind == "vanilla" else hidden[:, step], state)
        logits = base[:, step] + bias
        slots = _sampling()["idx_mapping"]
        torch.testing.assert_close(cache[slots, step], logits, rtol=0, atol=1e-5)  # the bias is summed in another order
        keys = logits
        if sampled:
            temperature = _sampling()["temperature"][slots]
            noise = dspark_ops.gumbel_noise(_sampling()["seeds"][slots], _sampling()["sample_pos"][:, step], torch.arange(VOCAB), step=step)
            keys = torch.where(temperature[:, None] > 0, logits / temperature.clamp_min(1e-6)[:, None] + noise, logits)
        before = keys.argmax(-1)
        assert torch.equal(tokens[:, step], before), step
    assert not torch.equal(tokens, base.argmax(-1)), "the head has something to say"


def test_a_vanilla_head_is_the_function() -> None:
    head, (base, anchors, _) = _head("vanilla", HALF), _inputs(HALF)
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    assert torch.equal(head.sample(base, anchors, **_sampling()), dspark_ops.markov_sample_sequential(base, anchors, w1, w2, **_sampling()))


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "dtype", "backend"),
    [
        *((kind, dtype, "eager") for kind in ("vanilla", "gated", "rnn") for dtype in (torch.float32, HALF)),
        *(pytest.param(*each, "inductor", marks=pytest.mark.slow) for each in (("gated", torch.float32), ("gated", HALF), ("rnn", HALF))),
    ],
)
def test_a_compiled_block_is_the_eager_one(kind: str, backend: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    head, (base, anchors, hidden) = _head(kind, dtype), _inputs(dtype)
    compiled = torch.compile(head.sample, fullgraph=True, backend=backend)
    caches = [dspark_ops.new_draft_logits(5, STEPS, VOCAB, dtype=dtype) for _ in range(2)]
    tokens, expected = (
        sample(base, anchors, hidden_states=hidden, draft_logits=cache, **_sampling())
        for sample, cache in zip((compiled, head.sample), caches, strict=True)
    )
    assert torch.equal(tokens, expected)
    if dtype == HALF:
        assert torch.equal(*caches), "every operation is rounded as in eager code"
    else:
        torch.testing.assert_close(*caches, rtol=0, atol=1e-5)  # Inductor's tanh and sigmoid are its own


@needs_compiler
@every_kind
def test_a_compiled_bias_has_the_gradients_of_the_eager_one(kind: str) -> None:
    torch._dynamo.reset()
    head, (_, anchors, hidden) = _head(kind, HALF), _inputs(HALF)
    gradients = []
    for bias in (head.bias, torch.compile(head.bias, fullgraph=True, backend="aot_eager")):
        inputs = None if kind == "vanilla" else hidden[:, 0].clone().requires_grad_()
        bias(anchors, inputs)[0].float().square().sum().backward()
        given = [] if inputs is None else [inputs]
        gradients.append([x.grad for x in (*given, *head.parameters())])
        assert all(x is not None and x.any() for x in gradients[-1])
        head.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_reason_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    dspark_ops.guards.note_once.cache_clear()
    head, (base, anchors, hidden) = _head(kind), _inputs()
    with caplog.at_level(logging.INFO, logger="dspark_ops"):
        for _ in range(2):
            head.sample(base, anchors, hidden_states=hidden)
    one = {"gated": "a gated one", "rnn": "an rnn one"}[kind]
    assert [f"the Markov head is {one}" in each.getMessage() for each in caplog.records] == [True]
    with pytest.raises(ValueError, match=rf"^plan='step' cannot serve this call: the Markov head is {one}"):
        head.sample(base, anchors, hidden_states=hidden, plan="step")


@every_kind
def test_an_anchor_outside_the_vocabulary_has_an_embedding_of_zeros(kind: str) -> None:
    head, (base, anchors, hidden) = _head(kind), _inputs()
    anchors[1], anchors[2] = -1, VOCAB
    tokens = head.sample(base, anchors, hidden_states=hidden)
    rows = head.embeddings_before(anchors, tokens)
    assert not rows[1:3, 0].any() and torch.equal(rows[:, 1:], head.markov_w1.weight[tokens[:, :-1]])
    assert torch.equal(rows[[0, 3], 0], head.markov_w1.weight[anchors[[0, 3]]])
    assert not head.embeddings_before(anchors.new_tensor([2**32 + 3]), torch.zeros(1, 1, dtype=torch.int32)).any(), "64 bits count"
    assert head.embeddings_before(anchors, torch.zeros(ROWS, 0, dtype=torch.int64)).shape == (ROWS, 0, RANK)


def test_heads_load_the_published_names() -> None:
    names = {"vanilla": [], "gated": ["gate_proj.bias", "gate_proj.weight"], "rnn": ["joint_proj.bias", "joint_proj.weight"]}
    shapes = {"gate_proj.weight": (RANK, HIDDEN + RANK), "joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN)}
    for kind, own in names.items():
        state = _head(kind).state_dict()
        assert sorted(state) == sorted([*own, "markov_w1.weight", "markov_w2.weight"])
        assert all(tuple(state[name].shape) == shape for name, shape in shapes.items() if name in state)
    reduced = MarkovHead(VOCAB, RANK, draft_vocab_size=30)
    assert reduced.markov_w2.weight.shape == (30, RANK) and reduced.markov_w1.weight.shape == (VOCAB, RANK)
    assert sorted(ConfidenceHead(HIDDEN).state_dict()) == ["proj.bias", "proj.weight"]


@pytest.mark.parametrize("rank", [None, RANK])
def test_confidence_is_the_published_formula(rank: int | None) -> None:
    torch.manual_seed(0)
    head, confidence, (base, anchors, hidden) = _head("vanilla"), ConfidenceHead(HIDDEN, rank), _inputs()
    tokens = head.sample(base, anchors)
    embeddings = None if rank is None else head.embeddings_before(anchors, tokens)
    found = confidence(hidden, embeddings)
    assert found.shape == (ROWS, STEPS)
    weight, shift = confidence.proj.weight.double()[0], confidence.proj.bias.double()
    for step in range(STEPS):
        before = anchors if step == 0 else tokens[:, step - 1]
        expected = hidden[:, step].double() @ weight[:HIDDEN] + shift
        if rank is not None:
            expected = expected + head.markov_w1.weight.double()[before] @ weight[HIDDEN:]
        torch.testing.assert_close(found[:, step].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "rank must be at least 1, got 0", lambda: MarkovHead(VOCAB, 0)),
        (ValueError, "rank must be at least 1, got 0", lambda: ConfidenceHead(HIDDEN, 0)),
        (TypeError, "vocab_size must be an int, got float", lambda: MarkovHead(97.0, RANK)),
        (ValueError, "kind must be one of vanilla, gated, rnn, got 'gru'", lambda: MarkovHead(VOCAB, RANK, kind="gru")),
        (ValueError, "hidden_size must be an int for a gated head", lambda: MarkovHead(VOCAB, RANK, kind="gated")),
        (ValueError, "hidden_size must be None for a vanilla head", lambda: MarkovHead(VOCAB, RANK, hidden_size=8)),
        (TypeError, "hidden_states must be a torch.Tensor, which this head reads, got NoneType", lambda: _head("rnn").sample(*_inputs()[:2])),
        (
            TypeError,
            "hidden_states must have the dtype of the head, torch.float32, got torch.bfloat16",
            lambda: _head("gated").sample(*_inputs()[:2], hidden_states=_inputs()[2].bfloat16()),
        ),
        (
            ValueError,
            r"hidden_states must have shape \(4, 3, 12\), got \(4, 3, 11\)",
            lambda: _head("gated").sample(*_inputs()[:2], hidden_states=_inputs()[2][..., 1:]),
        ),
        (ValueError, "anchor_ids must be", lambda: _head("gated").sample(_inputs()[0], torch.zeros(9, dtype=torch.int64))),
        (ValueError, r"hidden must have shape \(4, 12\)", lambda: _head("gated").bias(_inputs()[1], _inputs()[2][0])),
        (ValueError, r"plan must be one of auto, block, step, reference, got 'xx'", lambda: _head("rnn").sample(*_inputs()[:2], plan="xx")),
        (TypeError, "tokens must be an int32 or int64 tensor", lambda: _head("rnn").embeddings_before(_inputs()[1], _inputs()[0])),
        (ValueError, "anchor_ids must be ", lambda: _head("rnn").embeddings_before(_inputs()[1][:2], torch.zeros(4, 3, dtype=torch.int64))),
        (TypeError, r"hidden_states must be a tensor \[R, K, d\], got NoneType", lambda: ConfidenceHead(HIDDEN)(None)),
        (ValueError, "embeddings must be None", lambda: ConfidenceHead(HIDDEN)(_inputs()[2], _inputs()[2])),
        (TypeError, "embeddings must be a torch.Tensor", lambda: ConfidenceHead(HIDDEN, RANK)(_inputs()[2])),
    ],
)
def test_wrong_arguments_are_named(error: type[Exception], message: str, make: Any) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()
