"""Markov heads and the confidence head as modules, with the parameter names and the arithmetic of DeepSpec's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import guards, reference
from .api import markov_sample_sequential
from .guards import Call

KINDS = ("vanilla", "gated", "rnn")


def _check_hidden(name: str, hidden: Tensor | None, lead: tuple[int, ...], size: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(hidden, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, which this head reads, got {type(hidden).__name__}")
    if hidden.dtype != dtype:
        raise TypeError(f"{name} must have the dtype of the head, {dtype}, got {hidden.dtype}; convert it first")
    if hidden.shape != (*lead, size):
        raise ValueError(f"{name} must have shape {(*lead, size)}, got {tuple(hidden.shape)}")
    return hidden


class MarkovHead(nn.Module):
    """The bias that a token gives to the logits of the next: `markov_w2` times a vector made of the token's row e of `markov_w1`.

    The vector, with the hidden state h of the position: "vanilla", e itself; "gated", `sigmoid(gate_proj([h; e])) * e`; "rnn", `tanh(o)` with
    `g, c, o = joint_proj([s; e; h])` and a state s, at first 0, that becomes `sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)`.

    Args:
        vocab_size: target vocabulary, the rows of `markov_w1.weight` [V_target, rank].
        rank: Markov rank.
        kind: "vanilla", "gated" or "rnn".
        hidden_size: size d of h, for the last two: `gate_proj` has weight [rank, d + rank], `joint_proj` [3 rank, 2 rank + d], both a bias.
        draft_vocab_size: rows of `markov_w2.weight` [V, rank]; None: `vocab_size`.
        device, dtype: of the parameters, which are made as torch makes those of its layers.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is below 1 (a drafter of rank 0 has no Markov head), the kind is unknown, or `hidden_size` is not what it needs.

    >>> import torch
    >>> from dspark_ops.heads import MarkovHead
    >>> head = MarkovHead(11, 16, kind="gated", hidden_size=8)
    >>> sorted(name for name, _ in head.named_parameters())
    ['gate_proj.bias', 'gate_proj.weight', 'markov_w1.weight', 'markov_w2.weight']
    >>> head.sample(torch.zeros(2, 3, 11), torch.tensor([4, 5]), hidden_states=torch.zeros(2, 3, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        vocab_size: int,
        rank: int,
        *,
        kind: str = "vanilla",
        hidden_size: int | None = None,
        draft_vocab_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        for name, size in (("vocab_size", vocab_size), ("rank", rank), ("draft_vocab_size", draft_vocab_size)):
            guards.check_size(name, size, 1)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if kind == "vanilla" and hidden_size is not None:
            raise ValueError(f"hidden_size must be None for a vanilla head, which reads no hidden states, got {hidden_size!r}")
        if hidden_size is None:
            hidden_size = 0
            if kind != "vanilla":
                raise ValueError(f"hidden_size must be an int for a {kind} head, which reads hidden states, got None")
        else:
            guards.check_size("hidden_size", hidden_size, 1)
        self.kind, self.hidden_size, self.rank = kind, hidden_size, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank, device=device, dtype=dtype)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False, device=device, dtype=dtype)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank, device=device, dtype=dtype)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank, device=device, dtype=dtype)

    def _projected(
        self, embedding: Tensor, hidden: Tensor | None, state: Tensor | None, rounded: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The vector that `markov_w2` projects, and the state after it; `rounded` is what the result of each operation goes through."""
        if self.kind == "vanilla":
            return embedding, None
        assert hidden is not None
        hidden = rounded(hidden)
        if self.kind == "gated":
            gate = rounded(torch.sigmoid(rounded(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))))
            return rounded(gate * embedding), None
        state = torch.zeros_like(embedding) if state is None else state
        joint = rounded(self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = rounded(torch.sigmoid(gate))
        new = rounded(rounded(1 - gate) * rounded(torch.tanh(candidate)))
        return rounded(torch.tanh(output)), rounded(rounded(gate * state) + new)

    def bias(self, previous: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The bias of one step, and the state of an rnn head after it, None of the others.

        Args:
            previous: [...] int32 or int64, the tokens before, in the target vocabulary.
            hidden: [..., d] hidden states of the positions, for gated and rnn heads.
            state: [..., rank], what the step before returned; None at the first step.

        Returns:
            [..., V] in the dtype of the weights, and [..., rank] or None.

        Raises:
            TypeError, ValueError: `hidden` is missing, or its dtype or shape is wrong.

        >>> import torch
        >>> from dspark_ops.heads import MarkovHead
        >>> head = MarkovHead(11, 16, kind="rnn", hidden_size=8)
        >>> bias, state = head.bias(torch.tensor([3, 4]), torch.zeros(2, 8))
        >>> bias.shape, state.shape
        (torch.Size([2, 11]), torch.Size([2, 16]))
        """
        if self.kind != "vanilla":
            hidden = _check_hidden("hidden", hidden, tuple(previous.shape), self.hidden_size, self.markov_w1.weight.dtype)
        projected, state = self._projected(self.markov_w1(previous), hidden, state, lambda x: x)
        return F.linear(projected, self.markov_w2.weight), state

    def sample(self, base_logits: Tensor, anchor_ids: Tensor, *, hidden_states: Tensor | None = None, **options: Any) -> Tensor:
        """Samples a block with this head, [R, K] int64. No gradients: tokens have none, and the cache is written without.

        A vanilla head is `markov_sample_sequential` with the weights of the head. The fused kernels have no gates and no state yet: gated and
        rnn heads take the reference, and the logger "dspark_ops" says so.

        Args:
            base_logits: [R, K, V], bf16, fp16 or fp32.
            anchor_ids: [R] int32 or int64, the token before the block.
            hidden_states: [R, K, d] in the dtype of the weights, for gated and rnn heads: those of the positions whose logits these are.
            options: the keyword arguments of `markov_sample_sequential`, all of them None unless given; without any, a greedy block.

        Raises:
            TypeError, ValueError: as `markov_sample_sequential`; `hidden_states` is missing, or its dtype or shape is wrong.

        >>> import torch
        >>> from dspark_ops.heads import MarkovHead
        >>> head = MarkovHead(5, 16)
        >>> with torch.no_grad():
        ...     _ = head.markov_w1.weight.zero_()
        >>> head.sample(torch.eye(5)[None, 2:4], torch.tensor([0]))  # no bias: the largest logits win
        tensor([[2, 3]])
        """
        options = dict.fromkeys(("temperature", "seeds", "sample_pos", "idx_mapping")) | options
        w1, w2 = self.markov_w1.weight, self.markov_w2.weight
        if self.kind == "vanilla":
            return markov_sample_sequential(base_logits, anchor_ids, w1, w2, **options)
        plan = options.pop("plan", "auto")
        call = Call(base_logits, anchor_ids, w1, w2, **options)
        if guards.error(call, "auto" if plan in ("block", "step") else plan) is not None:  # raised there, in compiled code as in eager
            return markov_sample_sequential(base_logits, anchor_ids, w1, w2, plan=plan, **options)
        hidden = _check_hidden("hidden_states", hidden_states, tuple(base_logits.shape[:2]), self.hidden_size, w1.dtype)
        reason = f"the Markov head is {'an rnn' if self.kind == 'rnn' else 'a gated'} one"
        if plan not in ("auto", "reference"):
            raise ValueError(f"plan={plan!r} cannot serve this call: {reason}; use plan='auto'")
        (guards.note if torch.compiler.is_compiling() else guards.note_once)("reference", reason)
        state: Tensor | None = None
        rounded = reference.rounding(base_logits)  # which stops gradients, so it is for sampling alone

        def projected(step: int, embedding: Tensor) -> Tensor:
            nonlocal state
            vector, state = self._projected(embedding, hidden[:, step], state, rounded)
            return vector

        return reference.sample(call, projected=projected)

    def embeddings_before(self, anchor_ids: Tensor, tokens: Tensor) -> Tensor:
        """Rows of `markov_w1` of the tokens before each token of a block, [R, K, rank]: of the anchor, then of the tokens drawn.

        Args: anchor_ids [R] and tokens [R, K] int32 or int64, target ids; one outside the vocabulary has a row of zeros, as in sampling.
        Raises: TypeError, ValueError: a dtype or shape is wrong.

        >>> import torch
        >>> from dspark_ops.heads import MarkovHead
        >>> MarkovHead(5, 16).embeddings_before(torch.tensor([0]), torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 16])
        """
        for name, ids in (("anchor_ids", anchor_ids), ("tokens", tokens)):
            if not isinstance(ids, Tensor) or ids.dtype not in guards.INTS:
                raise TypeError(f"{name} must be an int32 or int64 tensor, got {ids.dtype if isinstance(ids, Tensor) else type(ids).__name__}")
        if tokens.dim() != 2 or anchor_ids.shape != tokens.shape[:1]:
            raise ValueError(f"anchor_ids must be [R] and tokens [R, K], got shapes {tuple(anchor_ids.shape)} and {tuple(tokens.shape)}")
        before = torch.cat([anchor_ids[:, None].long(), tokens.long()], dim=1)[:, : tokens.shape[1]]
        inside = before.clamp(0, self.markov_w1.num_embeddings - 1)
        return torch.where((inside == before)[..., None], self.markov_w1(inside), 0.0)


class ConfidenceHead(nn.Module):
    """The logit of a draft token's acceptance, `proj([h; e])`: from the hidden state h of its position and, with a rank, the row e of
    `markov_w1` of the token before.

    Args:
        hidden_size: size d of h.
        rank: Markov rank, where the head reads embeddings; None where it does not. `proj` has weight [1, d + rank] or [1, d], and a bias [1].
        device, dtype: of the parameters.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is below 1; a drafter of Markov rank 0 has no embeddings to read.

    >>> import torch
    >>> from dspark_ops.heads import ConfidenceHead, MarkovHead
    >>> markov, confidence = MarkovHead(11, 16), ConfidenceHead(8, 16)
    >>> hidden_states, anchors = torch.zeros(2, 3, 8), torch.tensor([4, 5])
    >>> tokens = markov.sample(torch.zeros(2, 3, 11), anchors)
    >>> confidence(hidden_states, markov.embeddings_before(anchors, tokens)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, hidden_size: int, rank: int | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        guards.check_size("hidden_size", hidden_size, 1)
        if rank is not None:
            guards.check_size("rank", rank, 1)
        self.hidden_size, self.rank = hidden_size, rank
        self.proj = nn.Linear(hidden_size + (rank or 0), 1, device=device, dtype=dtype)

    def forward(self, hidden_states: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Logits [R, K] in the dtype of the weights.

        Args:
            hidden_states: [R, K, d] in the dtype of the weights.
            embeddings: [R, K, rank] from `MarkovHead.embeddings_before`, where the head has a rank; None where it has not.

        Raises:
            TypeError, ValueError: one is missing or given in vain, or its dtype or shape is wrong.
        """
        dtype = self.proj.weight.dtype
        if not isinstance(hidden_states, Tensor):
            raise TypeError(f"hidden_states must be a tensor [R, K, d], got {type(hidden_states).__name__}")
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states must be a tensor [R, K, d], got shape {tuple(hidden_states.shape)}")
        lead = tuple(hidden_states.shape[:-1])
        hidden_states = _check_hidden("hidden_states", hidden_states, lead, self.hidden_size, dtype)
        if self.rank is None:
            if embeddings is not None:
                raise ValueError("embeddings must be None: this head has no rank and reads hidden states alone")
            return self.proj(hidden_states).squeeze(-1)
        embeddings = _check_hidden("embeddings", embeddings, lead, self.rank, dtype)
        return self.proj(torch.cat([hidden_states, embeddings], dim=-1)).squeeze(-1)
