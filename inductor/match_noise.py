"""Recognises the noise of `gumbel_noise` in a graph, by comparison with a trace of that function: no formula is written twice."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dspark_ops.guards import INTS
from dspark_ops.noise import gumbel_noise

from .views import Size, args_of, is_call, same_size, val, without_views

aten = torch.ops.aten
prims = torch.ops.prims

# Sizes and step of the trace, which stand for those of the graph: no numbers that the noise has among its constants.
_ROWS, _VOCAB, _STEP = 1009, 2003, 987654321
_RESHAPES = (aten.view.default, aten.reshape.default)


class Noise(NamedTuple):
    """The arguments of `gumbel_noise` at one step."""

    seeds: Node
    positions: Node
    step: int
    use_fp64: bool


def match_noise(node: Node) -> Noise | None:
    """The arguments that a node is the `gumbel_noise` of, for the ids 0, 1, 2, ... of its last dimension; None where it is something else."""
    noise = val(node)
    if noise is None or noise.dim() < 2 or noise.dtype not in (torch.float32, torch.float64):
        return None
    rows = tuple(1 if same_size(size, 1) else _ROWS for size in noise.shape[:-1])
    if _ROWS not in rows:  # a single row
        rows = (_ROWS, *rows[1:])
    sizes: dict[int, Size] = {1: 1, _ROWS: noise.shape[rows.index(_ROWS)], _VOCAB: noise.shape[-1]}
    use_fp64 = noise.dtype == torch.float64
    for dtypes in itertools.product(INTS, INTS):
        trace = _trace(rows, *dtypes, use_fp64)
        seeds, positions, ids = (each for each in trace.nodes if each.op == "placeholder")
        comparison = Comparison(sizes)
        if comparison.equal(args_of(trace.output_node())[0], node) and _counts_up(comparison.bound[ids], noise.shape[-1]):
            return Noise(without_views(comparison.bound[seeds]), without_views(comparison.bound[positions]), comparison.bound[_STEP], use_fp64)
    return None


@functools.cache
def _trace(rows: tuple[int, ...], positions: torch.dtype, ids: torch.dtype, use_fp64: bool) -> Graph:
    """`gumbel_noise` as Inductor decomposes it, for fake arguments."""
    with FakeTensorMode():
        arguments = (torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=positions), torch.empty(_VOCAB, dtype=ids))
        noise = functools.partial(gumbel_noise, step=_STEP, use_fp64=use_fp64)
        return make_fx(noise, decomposition_table=select_decomp_table())(*arguments).graph


def _counts_up(ids: Node, vocab: Size) -> bool:
    """Whether a node, int32 or int64, holds 0, 1, 2, ..."""
    if is_call(ids, prims.convert_element_type.default) and (uncast := args_of(ids)[0]).meta["val"].dtype in INTS:
        ids = uncast  # both hold every id
    return is_call(ids, prims.iota.default) and same_size(args_of(ids)[0], vocab) and (ids.kwargs["start"], ids.kwargs["step"]) == (0, 1)


class Comparison:
    """Compares the graph behind a node with a traced one; the inputs of the trace, and its step, are bound to what is in their place.

    `sizes` gives the sizes that those of the trace stand for.
    """

    def __init__(self, sizes: dict[int, Size]) -> None:
        self.sizes = sizes
        self.bound: dict[Node | int, Any] = {}
        self._equal: set[tuple[Node, Node]] = set()

    def equal(self, traced: Any, found: Any) -> bool:
        if isinstance(traced, Node) and isinstance(found, Node):
            if (traced, found) in self._equal:
                return True
            if self._equal_nodes(traced, found):
                self._equal.add((traced, found))
                return True
            return False
        if isinstance(traced, (list, tuple)) and isinstance(found, (list, tuple)):
            return len(traced) == len(found) and all(map(self.equal, traced, found))
        if traced == _STEP and isinstance(found, int):
            return bool(self.bound.setdefault(_STEP, found) == found)
        return type(traced) is type(found) and bool(traced == found)

    def _equal_nodes(self, traced: Node, found: Node) -> bool:
        there, here = val(traced), val(found)
        if there is None or here is None or there.dtype != here.dtype or there.dim() != here.dim():
            return False
        if not all(same_size(self.sizes[size], other) for size, other in zip(there.shape, here.shape, strict=True)):
            return False
        if traced.op == "placeholder":
            return self.bound.setdefault(traced, found) is found
        if (value := _uniform(traced)) is not None:
            return value == _uniform(found)  # of whatever shape
        if is_call(traced, *_RESHAPES) and is_call(found, *_RESHAPES):
            return self.equal(args_of(traced)[0], args_of(found)[0])  # their sizes are compared already
        return is_call(found, traced.target) and traced.kwargs == found.kwargs and self.equal(traced.args, found.args)


def _uniform(node: Node) -> float | None:
    """The value of a tensor of equal elements."""
    if is_call(node, aten.full.default):
        value = args_of(node)[1]
    elif is_call(node, prims.convert_element_type.default):
        value = _uniform(args_of(node)[0])
    else:
        return None
    return value if value is None else torch.tensor(value, dtype=node.meta["val"].dtype).item()
