"""The pass that turns a sequential Markov loop into the fused op."""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from dspark_ops import guards
from dspark_ops.compile_cache import source_hash

from .lowering import packaging
from .match import Loop, NearMiss, find
from .views import Slice, args_of, is_call, long_dims, pick, same_size, same_sizes, scattered, val, without_views, written

aten = torch.ops.aten


class Found(NamedTuple):
    """A loop that the pass came across: how many steps, and why it is not fused, or None where it is."""

    steps: int
    reason: str | None

    @property
    def fused(self) -> bool:
        return self.reason is None


_recorders: contextvars.ContextVar[tuple[list[Found], ...]] = contextvars.ContextVar("recorders", default=())


@contextlib.contextmanager
def record() -> Iterator[list[Found]]:
    """Collects what the pass finds while graphs are compiled inside; a graph that comes from a cache of compiled graphs shows nothing."""
    found: list[Found] = []
    token = _recorders.set((*_recorders.get(), found))
    try:
        yield found
    finally:
        _recorders.reset(token)


class FuseLoops(CustomGraphPass):
    """Replaces every sequential Markov loop of a graph by one call of `dspark::markov_sample_loop`, where that changes no bit.

    Against the loop as it is written, with both roundings of each step: Inductor itself may compute a step with one. The fused op differs in
    what no sane loop relies on: NaN never wins, where `argmax` prefers it; a row with a temperature below 2^-64 is greedy instead of divided
    by it; an id outside the table has no bias, where a lookup raises or, if negative, counts from the end.

    Loops that stay as they are for a reason are logged with it, by the logger "dspark_ops" at level INFO; `record` collects both.
    """

    def __call__(self, graph: Graph) -> None:
        graph.eliminate_dead_code()
        remove_noop_ops(graph)  # as Inductor does after this pass: slices of whole dimensions, left by `base[:, step]`
        found: list[Found] = []
        barred = "a package of AOTInductor holds no Python op; call dspark_ops.markov_sample_sequential" if packaging() else None
        while barred is None and (loop := next((each for each in find(graph) if not isinstance(each, NearMiss)), None)):
            _fuse(graph, loop)
            found.append(Found(len(loop), None))
        found += [Found(*each) if isinstance(each, NearMiss) else Found(len(each), barred) for each in find(graph)]
        for each in found:
            if each.fused:
                guards.logger.info("a loop of %d steps is fused to dspark::markov_sample_loop", each.steps)
            else:
                guards.logger.info("a loop of %d steps is not fused: %s", *each)
        for recorder in _recorders.get():
            recorder.extend(found)

    def uuid(self) -> str:
        return source_hash()


def _emit(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Adds a call to a graph, with the metadata that the passes after this one read."""
    node = graph.call_function(target, args, kwargs)
    fakes = torch.fx.map_arg((args, kwargs), lambda each: each.meta["val"])
    fake_mode = detect_fake_mode(fakes)
    with fake_mode or contextlib.nullcontext():
        node.meta["val"] = target(*fakes[0], **fakes[1])
    node.meta["eager_input_vals"] = fakes  # the strides that an op with the tag needs_exact_strides is to see
    return node


def _fuse(graph: Graph, loop: Loop) -> None:
    first = loop[0]
    with graph.inserting_before(first.logits):  # a place behind all that a greedy loop reads
        base = _base_logits(graph, loop)
        anchors = _flat(graph, first.before)
        arguments = (base, anchors, first.w1, first.w2, *_sampling(graph, loop, anchors))
        call = _emit(graph, torch.ops.dspark.markov_sample_loop.default, *arguments, False)
        tokens = _emit(graph, operator.getitem, call, 0)
        _replace(graph, tokens, [step.token for step in loop])
    stable_topological_sort(graph)  # positions may come later than the logits of the first step
    graph.eliminate_dead_code()
    alive = set(graph.nodes)
    if any(step.logits in alive for step in loop):  # what is left of them is read by something else than the loop
        with graph.inserting_before(tokens):
            kept = _emit(graph, torch.ops.dspark.markov_sample_loop.default, *arguments, True)
            logits = _emit(graph, operator.getitem, kept, 1)
            _replace(graph, logits, [step.logits for step in loop])
        call.replace_all_uses_with(kept)
        graph.eliminate_dead_code()


def _base_logits(graph: Graph, loop: Loop) -> Node:
    """The base logits of the steps, [R, K, V]."""
    base, dim, start = loop[0].base
    if dim == 0:
        base = _emit(graph, aten.permute.default, base, [1, 0, 2])
    return _steps(graph, base, start, len(loop))


def _steps(graph: Graph, block: Node, start: int, steps: int) -> Node:
    """`block[:, start : start + steps]`."""
    if start == 0 and same_size(block.meta["val"].shape[1], steps):
        return block
    return _emit(graph, aten.slice.Tensor, block, 1, start, start + steps)


def _sampling(graph: Graph, loop: Loop, anchors: Node) -> tuple[Node | None, Node | None, Node | None, bool]:
    """Temperature, seeds, positions and the precision of the noise."""
    noises = [step.noise for step in loop if step.noise is not None]
    if not noises:
        return None, None, None, False
    temperature = loop[0].temperature
    temperature = (
        _flat(graph, temperature)
        if isinstance(temperature, Node)
        else _emit(graph, aten.full_like.default, anchors, temperature, dtype=torch.float32)
    )
    return temperature, _flat(graph, noises[0].seeds), _positions(graph, [noise.positions for noise in noises]), noises[0].use_fp64


def _positions(graph: Graph, rows: list[Node]) -> Node:
    """Positions [R, K] of the steps."""
    first = pick(rows[0])
    if isinstance(first, Slice) and first.dim == 1 and first.base.meta["val"].dim() == 2:
        ascending = [first._replace(position=first.position + place) for place in range(len(rows))]
        if [pick(row) for row in rows] == ascending:
            return _steps(graph, first.base, first.position, len(rows))
    columns = [_emit(graph, aten.unsqueeze.default, _flat(graph, row), 1) for row in rows]
    return _emit(graph, aten.cat.default, columns, 1)


def _flat(graph: Graph, rows: Node) -> Node:
    """A node with an element for each row, as [R]."""
    rows = without_views(rows)
    while (dims := rows.meta["val"].dim()) > 1:
        long = long_dims(rows.meta["val"])
        rows = _emit(graph, aten.select.int, rows, next(dim for dim in range(dims) if dim not in long), 0)
    return rows


def _replace(graph: Graph, stacked: Node, parts: Sequence[Node]) -> None:
    """Replaces the values of the steps by slices of `stacked` [R, K, ...], and what puts them together again by the whole of it."""
    whole = stacked.meta["val"]
    for node in [node for node in graph.nodes if _puts_together(node, parts, whole)]:
        node.replace_all_uses_with(stacked)
    for index, part in enumerate(parts):
        piece = _emit(graph, aten.select.int, stacked, 1, index)
        shape = part.meta["val"].shape
        rows = next(iter(long_dims(part.meta["val"])), 0)  # with one row any dimension of size 1 is that of the rows
        for dim in range(len(shape) - (whole.dim() - 2)):
            if dim != rows:
                piece = _emit(graph, aten.unsqueeze.default, piece, dim)
        part.replace_all_uses_with(piece)


def _puts_together(node: Node, parts: Sequence[Node], whole: Tensor) -> bool:
    """Whether a node is the stack [R, K, ...] of parts."""
    here = val(node)
    if here is None or here.dtype != whole.dtype or here.dim() != whole.dim() or not all(map(same_size, here.shape, whole.shape)):
        return False
    pieces: Any
    if is_call(node, aten.cat.default):
        pieces, dim = (*args_of(node), 0)[:2]
        if dim % here.dim() != 1:
            return False
    elif scattered(node) is not None:
        pieces = [written(Slice(node, 1, index)) for index in range(len(parts))]
    else:
        return False
    return len(pieces) == len(parts) and all(
        isinstance(piece, Node) and same_sizes(piece.meta["val"], part.meta["val"]) and without_views(piece) is part
        for piece, part in zip(pieces, parts, strict=True)
    )
