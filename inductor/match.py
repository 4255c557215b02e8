"""Finds sequential Markov loops in functional aten graphs: predicates on FX nodes, which need `val` in their metadata and no Inductor.

A step of such a loop is `argmax(base[:, i] + w1[token before] @ w2.t())`, in any of the forms that views, decompositions and in-place updates
give it, with or without a temperature and the noise of `gumbel_noise`. What looks like one and would lose a bit, or a value that something
else reads, is left alone, with a reason for its author.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dspark_ops import api
from dspark_ops.guards import FLOATS, INTS
from dspark_ops.noise import MIN_TEMPERATURE

from .match_noise import Noise, match_noise
from .views import Slice, args_of, axes, is_call, long_dims, pick, same_size, same_sizes, val, without_views

aten = torch.ops.aten

_LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_MERGED = (aten.addmm.default, aten.baddbmm.default)
_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_ARGMAX, _MAX = aten.argmax.default, aten.max.dim
# Other ways to draw a token, and why they are not fused.
_OTHER_DRAWS = {
    aten.argmin.default: "it takes the smallest logit, not the largest",
    aten.min.dim: "it takes the smallest logit, not the largest",
    aten.topk.default: "topk leaves open which of equal logits wins; use argmax",
    aten.multinomial.default: "torch.multinomial draws from the global generator; add dspark_ops.gumbel_noise and take the argmax",
}


class Step(NamedTuple):
    """The nodes of one step: what it draws, from what, and the arguments of the fused op that they amount to."""

    token: Node
    logits: Node
    base: Slice
    before: Node  # the token before, as it is looked up
    w1: Node
    w2: Node
    temperature: Node | float | None
    noise: Noise | None


class NearMiss(NamedTuple):
    """A chain of tokens, each drawn with the one before, that stays as it is, and why."""

    steps: int
    reason: str


Loop = tuple[Step, ...]


class Miss(Exception):  # noqa: N818  # nothing is wrong where one is raised
    """Why a node is not what was looked for."""


def find(graph: Graph) -> Iterator[Loop | NearMiss]:
    """The loops in a graph, and what almost is one."""
    tokens = {node: place for place, node in enumerate(graph.nodes) if _draws(node) is not None}
    after: dict[Node, list[Node]] = {}
    starting = []
    for token in tokens:
        lookups = [node for node in _behind(token, tokens) if _is_lookup(node)]
        before = {node for lookup in lookups for node in _behind(_looked_up(lookup)[1], tokens, itself=True) if node in tokens}
        if before:
            # The latest one: in-place updates make earlier tokens visible, too.
            after.setdefault(max(before, key=tokens.__getitem__), []).append(token)
        elif lookups:
            starting.append(token)
    # A token with no lookup behind it can be the anchor of a loop, but not a step.
    anchors = [anchor for anchor in after if not any(map(_is_lookup, _behind(anchor, tokens)))]
    for token in (*starting, *anchors):
        chain = [token]
        while following := after.get(chain[-1]):
            # Of several tokens drawn with one before, the loop goes on with the one that others are drawn with.
            chain.append(max(following, key=lambda each: (each in after, isinstance(_step_or_reason(each), Step))))
        yield from _loops(chain if token in starting else chain[1:])


def _behind(node: Node, tokens: Container[Node], itself: bool = False) -> set[Node]:
    """What a node depends on, up to tokens and not beyond them."""
    found: set[Node] = set()
    pending = [node] if itself else list(node.all_input_nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if node not in tokens:
                pending += node.all_input_nodes
    return found


def _loops(chain: list[Node]) -> Iterator[Loop | NearMiss]:
    """The loops of a chain of tokens, one for each tensor of base logits, or why there are none."""
    if any(api.__file__ in (token.stack_trace or "") for token in chain):
        return  # the op itself, decomposed since the reference serves it
    parsed = [_step_or_reason(token) for token in chain]
    steps = [step for step in parsed if isinstance(step, Step)]
    reasons = [f"step {place}: {reason}" for place, reason in enumerate(parsed) if isinstance(reason, str)]
    # What is drawn in another way may stand before or after a loop, not in it.
    good = [place for place, step in enumerate(parsed) if isinstance(step, Step)]
    if reasons and (len(good) < 2 or len(good) <= good[-1] - good[0]):
        if len(chain) > 1:
            yield NearMiss(len(chain), reasons[0])
        return
    runs = [tuple(run) for _, run in itertools.groupby(steps, key=lambda step: step.base.base)]
    loops = [run for run in runs if len(run) > 1]
    if not loops:
        single = "a single step is no loop"
        separate = "each step takes its base logits from another tensor; make them one [R, K, V]"
        yield NearMiss(len(chain), single if len(steps) == 1 else separate)
    for run in loops:
        reason = why_no_loop(run)
        yield run if reason is None else NearMiss(len(run), reason)


def _step_or_reason(token: Node) -> Step | str:
    try:
        return match_step(token)
    except Miss as miss:
        return str(miss)


def why_no_loop(steps: Loop) -> str | None:
    """Why steps of the same base logits are not the steps of one loop; None where they are."""
    start = steps[0]
    made = {node for step in steps for node in (step.token, step.logits)}
    for place, step in enumerate(steps):
        if place > 0 and without_views(step.before) is not steps[place - 1].token:
            return f"step {place}: the token before goes through {_name(without_views(step.before))} before it is looked up"
        for name in ("w1", "w2"):
            if getattr(step, name) is not getattr(start, name):
                return f"step {place}: its markov_{name} is not that of step 0"
        if step.base != start.base._replace(position=start.base.position + place):
            read, first = step.base.position, start.base.position
            return f"step {place}: it reads position {read} of the base logits, step 0 reads {first}; positions must ascend"
        if (step.noise is None) != (start.noise is None):
            return f"step {place}: it is {'greedy' if step.noise is None else 'sampled'}, unlike step 0"
        if step.noise is None or start.noise is None:
            continue
        if step.temperature != start.temperature:
            return f"step {place}: its temperature is not that of step 0"
        if step.noise.seeds is not start.noise.seeds:
            return f"step {place}: its seeds are not those of step 0"
        if made & _behind(step.noise.positions, made, itself=True):
            return f"step {place}: its positions depend on what the loop draws"
        if step.noise.step != place:
            return f"step {place}: its noise is that of step {step.noise.step}"
        if step.noise.use_fp64 != start.noise.use_fp64:
            return f"step {place}: its noise has another precision than that of step 0"
    return None


def _draws(node: Node) -> Node | None:
    """The node whose tokens a node is, one for each row: itself, or the operation with two results that it takes the second of."""
    drawn: Any = node
    if is_call(node, operator.getitem) and args_of(node)[1] == 1:
        drawn = args_of(node)[0]
        if not is_call(drawn, _MAX, aten.min.dim, aten.topk.default):
            return None
    elif not is_call(node, _ARGMAX, aten.argmin.default, aten.multinomial.default):
        return None
    keys, here = val(args_of(drawn)[0]), val(node)
    if keys is None or here is None or keys.dim() < 2:
        return None
    if is_call(drawn, aten.topk.default, aten.multinomial.default):
        return drawn if args_of(drawn)[1] == 1 else None
    dim = args_of(drawn)[1] if len(args_of(drawn)) > 1 else None
    return drawn if dim is not None and dim % keys.dim() == keys.dim() - 1 else None


def _is_lookup(node: Node) -> bool:
    """Whether a node takes whole rows of a table by one tensor of ids."""
    if not is_call(node, *_LOOKUPS):
        return False
    if is_call(node, aten.index.Tensor):
        ids: Any = args_of(node)[1]
        return len(ids) == 1 and _has_ids(ids[0])
    if is_call(node, aten.index_select.default):
        return args_of(node)[1] == 0
    return True


def _has_ids(node: object) -> bool:
    ids = val(node)
    return ids is not None and ids.dtype in INTS


def _looked_up(lookup: Node) -> tuple[Node, Node]:
    """Table and ids of a lookup."""
    table: Any = args_of(lookup)[0]
    ids: Any = args_of(lookup)[-1] if is_call(lookup, aten.index_select.default) else args_of(lookup)[1]
    return table, ids[0] if isinstance(ids, (list, tuple)) else ids


def _name(node: Node) -> str:
    return str(node.target).removesuffix(".default") if node.op == "call_function" else "an input of the graph"


def match_step(token: Node) -> Step:
    """The step that draws a token. Raises Miss with a reason where there is none that the fused op computes bit for bit."""
    drawn = _draws(token)
    assert drawn is not None
    if drawn.target in _OTHER_DRAWS:
        raise Miss(_OTHER_DRAWS[drawn.target])
    if any(not is_call(user, operator.getitem) or args_of(user)[1] == 0 for user in drawn.users if drawn is not token):
        raise Miss("the largest logit itself is used, not only its index")
    keys: Any = args_of(drawn)[0]
    passed: list[Node] = []
    keys = without_views(keys, passed)
    temperature, noise = None, None
    logits = keys
    try:
        base, bias = _sum(logits)
    except Miss as greedy:
        logits, temperature, noise = _sampled(keys, greedy, [*passed, drawn])
        base, bias = _sum(logits)
    return Step(token, logits, *_base_and_weights(logits, base, bias), temperature, noise)


def _sum(logits: Node) -> tuple[Node, Node]:
    """Base logits and bias, the operands of the addition that makes the logits."""
    if is_call(logits, *_CASTS):
        source = without_views(args_of(logits)[0])
        if is_call(source, aten.add.Tensor):
            raise Miss(f"the logits are cast to {logits.meta['val'].dtype} before the argmax")
        logits = source  # decompositions compute in FP32
    if is_call(logits, *_MERGED):
        raise Miss(f"{_name(logits)} rounds base logits + bias once; compute the bias first, then add")
    if not is_call(logits, aten.add.Tensor):
        raise Miss(f"the logits are the result of {_name(logits)}, not of base logits + bias")
    operands = [without_views(x) for x in args_of(logits) if isinstance(x, Node)]
    if len(operands) != 2:
        raise Miss("the logits are a tensor and a number, not base logits + bias")
    if logits.kwargs.get("alpha", 1) != 1:
        raise Miss("the bias is scaled by alpha")
    # The base logits can be a product as well, of hidden states and the lm_head.
    for i, operand in enumerate(operands):
        if is_call(operand, *_PRODUCTS) and is_call(_projected(operand), *_LOOKUPS):
            return args_of(logits)[1 - i], args_of(logits)[i]
    for operand in operands:
        if is_call(operand, *_CASTS):
            raise Miss(f"the bias is cast to {operand.meta['val'].dtype}")
        if is_call(operand, *_MERGED):
            raise Miss("the projection to the vocabulary has a bias of its own")
        if is_call(operand, *_PRODUCTS):
            projected = _projected(operand)
            if is_call(projected, *_CASTS):
                raise Miss(f"the embedding is cast to {projected.meta['val'].dtype}")
            raise Miss(f"what is projected is {_name(projected)}, not the embedding of the token before (a gated or recurrent head)")
    raise Miss(f"the logits are the sum of {' and '.join(map(_name, operands))}, not of base logits and bias")


def _projected(product: Node) -> Node:
    return without_views(args_of(product)[0])


def _sampled(keys: Node, greedy: Miss, after: list[Node]) -> tuple[Node, Node | float, Noise]:
    """Logits, temperature and noise of `logits / temperature + noise`; raises `greedy`, why these are no logits, where they are no keys.

    `after` are the nodes from the keys to the token.
    """
    if not is_call(keys, aten.add.Tensor) or keys.kwargs or not all(isinstance(x, Node) for x in args_of(keys)):
        raise greedy
    a, b = args_of(keys)
    noise = match_noise(without_views(b))
    scaled, noisy = (a, b) if noise is not None else (b, a)
    if noise is None and (noise := match_noise(without_views(a))) is None:
        if any(_is_sum(_unscaled(x, [])[0]) for x in (a, b)):
            raise Miss("what is added to the logits is not the noise of dspark_ops.gumbel_noise for the ids 0, 1, 2, ...")
        raise greedy
    between = [keys]
    logits, divisor = _unscaled(scaled, between)
    if any(user not in (*between, *after) for node in (*between, *after[:-1]) for user in node.users):
        raise Miss("the keys, logits / temperature + noise, are used elsewhere")
    _sum(logits)
    if not all(same_sizes(x.meta["val"], logits.meta["val"]) for x in (noisy, scaled, keys)):
        raise Miss("logits, temperature and noise do not fit row by row")
    return logits, 1.0 if divisor is None else _temperature(divisor, logits), noise


def _is_sum(node: Node) -> bool:
    try:
        _sum(node)
    except Miss:
        return False
    return True


def _unscaled(scaled: Node, between: list[Node]) -> tuple[Node, Node | float | None]:
    """Logits and divisor of `logits / divisor`, computed in FP32; `between` receives the nodes from the logits on."""
    divisor = None
    node = without_views(scaled, between)
    if _is_cast(node, torch.float64):  # to the precision of the noise, after the division
        between.append(node)
        node = without_views(args_of(node)[0], between)
    if is_call(node, aten.div.Tensor):
        between.append(node)
        if node.meta["val"].dtype != torch.float32:
            raise Miss(f"the logits are divided by the temperature in {node.meta['val'].dtype}, not in FP32")
        node, divisor = args_of(node)
        node = without_views(node, between)
    if _is_cast(node, torch.float32):
        between.append(node)
        node = without_views(args_of(node)[0], between)
    return node, divisor


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    return is_call(node, *_CASTS) and node.meta["val"].dtype == dtype


def _temperature(divisor: Node | float, logits: Node) -> Node | float:
    """The temperature, one of each row or a number."""
    if not isinstance(divisor, Node):
        if not MIN_TEMPERATURE <= divisor <= torch.finfo(torch.float32).max:
            raise Miss(f"the temperature is {divisor}")
        return float(divisor)
    source, dims = axes(divisor)
    temperature = source.meta["val"]
    if temperature.dtype != torch.float32:
        raise Miss(f"the temperature is {temperature.dtype}, not FP32")
    rows = [dim for dim in dims if dim is not None]
    if rows != long_dims(temperature) or len(rows) > 1 or dims[-1:] != [None] or not _one_for_each_row(temperature, logits):
        raise Miss("the temperature is not a number or one for each row")
    return source


def _one_for_each_row(t: Tensor, logits: Node) -> bool:
    sizes = logits.meta["val"].shape[:-1]
    return statically_known_true(t.numel() == math.prod(sizes))


def _base_and_weights(logits: Node, base_logits: Node, bias: Node) -> tuple[Slice, Node, Node, Node]:
    """Slice of the base logits, ids of the tokens before and both weights."""
    inner: list[Node] = []
    product = without_views(bias, inner)
    inner.append(product)
    lookup = without_views(args_of(product)[0], inner)
    inner.append(lookup)
    allowed = {*inner, logits}
    for node in inner:
        if any(user not in allowed for user in node.users):
            raise Miss(f"the {'embedding' if node is lookup else 'bias'} of the token before is used elsewhere")
    if not _is_lookup(lookup):
        raise Miss("the embedding is not a lookup of whole rows by one tensor of ids")
    w1, ids = _looked_up(lookup)
    w2, dims = axes(args_of(product)[1])
    table, weight, sum_of = w1.meta["val"], w2.meta["val"], logits.meta["val"]
    if table.dim() != 2 or weight.dim() != 2 or dims[-2:] != [1, 0] or any(dim is not None for dim in dims[:-2]):
        raise Miss("the weights are not [V, rank] tensors (the projection being `embedding @ markov_w2.t()`)")
    source = without_views(base_logits)
    if is_call(source, *_CASTS):
        raise Miss(f"the base logits are cast to {source.meta['val'].dtype}")
    piece = pick(source)
    if not isinstance(piece, Slice) or piece.base.meta["val"].dim() != 3 or piece.dim == 2:
        raise Miss("the base logits are not a slice of one [R, K, V] tensor")
    base = piece.base.meta["val"]
    dtypes = {t.dtype for t in (table, weight, base, sum_of)}
    if len(dtypes) > 1 or sum_of.dtype not in FLOATS:
        raise Miss("the weights and the logits are not of one dtype, bf16, fp16 or fp32")
    if not same_sizes(bias.meta["val"], sum_of) or not same_sizes(base_logits.meta["val"], sum_of):
        raise Miss("base logits and bias do not have the same shape")
    if not (same_size(table.shape[0], base.shape[2]) and same_size(weight.shape[0], base.shape[2])):
        raise Miss("the vocabularies of base logits, markov_w1 and markov_w2 differ, or are not known to be equal")
    if val(ids) is None or ids.meta["val"].dtype not in INTS:
        raise Miss("the tokens are not int32 or int64")
    return piece, ids, w1, w2
