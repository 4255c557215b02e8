"""Looking through views in a functional aten graph: which tensor's elements a node has, and in which order.

Dimensions of size 1 come and go with `unsqueeze`, `keepdim` and the decompositions of matrix products, so they never count here.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

Size = int | torch.SymInt

_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)
_EXPANDS = (aten.expand.default,)
_RESHAPES = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.slice.Tensor,
    aten.clone.default,
    aten.alias.default,
)


def is_call(node: object, *targets: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def args_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a node; their declared type is too wide to use."""
    return node.args


def val(node: object) -> Tensor | None:
    """The fake tensor that a node stands for; None for what is no tensor."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, Tensor) else None


def same_size(a: Size, b: Size) -> bool:
    return statically_known_true(a == b)


def long_dims(t: Tensor) -> list[int]:
    """The dimensions that are not of size 1."""
    return [dim for dim, size in enumerate(t.shape) if not same_size(size, 1)]


def same_sizes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape but for dimensions of size 1."""
    sizes_a, sizes_b = ([t.shape[dim] for dim in long_dims(t)] for t in (a, b))
    return len(sizes_a) == len(sizes_b) and all(map(same_size, sizes_a, sizes_b))


def _permutation(node: Node, dims: int) -> list[int]:
    order = list(range(dims))
    if is_call(node, aten.permute.default):
        return [dim % dims for dim in args_of(node)[1]]
    a, b = args_of(node)[1:] if is_call(node, aten.transpose.int) else (0, -1)
    order[a], order[b] = order[b], order[a]
    return order


def _viewed(node: Node) -> tuple[Node, dict[int, int]] | None:
    """What a view is a view of, and the dimension there of each of its own that is not of size 1, broadcast ones left out."""
    if is_call(node, aten.copy.default):
        source = args_of(node)[1]  # copy(old, new) is new, where neither dtype nor shape change
    elif is_call(node, *_PERMUTES, *_EXPANDS, *_RESHAPES):
        source = args_of(node)[0]
    else:
        return None
    here, there = val(node), val(source)
    if here is None or there is None or here.dtype != there.dtype:
        return None
    own, theirs = long_dims(here), long_dims(there)
    if is_call(node, *_PERMUTES):
        order = _permutation(node, there.dim())
        return source, {dim: order[dim] for dim in own}
    if is_call(node, *_EXPANDS):
        added = here.dim() - there.dim()
        return source, {dim: dim - added for dim in own if dim - added in theirs}
    return (source, dict(zip(own, theirs, strict=True))) if same_sizes(here, there) else None


def axes(node: Node) -> tuple[Node, list[int | None]]:
    """The tensor behind the views, and for each dimension of the node the one there that it runs along: None for size 1 and broadcasts."""
    here = val(node)
    assert here is not None
    own = long_dims(here)
    dims: list[int | None] = [dim if dim in own else None for dim in range(here.dim())]
    while (view := _viewed(node)) is not None:
        node, along = view
        dims = [None if dim is None else along.get(dim) for dim in dims]
    return node, dims


def without_views(node: Node, passed: list[Node] | None = None) -> Node:
    """The node that made these elements in this order, behind views and slices of what was written slice by slice.

    `passed` receives the nodes on the way.
    """
    while True:
        piece = pick(node)
        if isinstance(piece, Node):
            source = piece
        else:
            view = _viewed(node)
            if view is None or [*view[1].values()] != long_dims(view[0].meta["val"]):
                return node
            source = view[0]
        if passed is not None:
            passed.append(node)
        node = source


class Slice(NamedTuple):
    """The elements of `base` at one position of a dimension."""

    base: Node
    dim: int
    position: int


def _slice(base: Node, dim: int, start: object, end: object = None) -> Slice | None:
    """The slice of length 1 from `start`, with the end of a longer notation; None where it is not one."""
    there = val(base)
    if there is None or not isinstance(start, int):
        return None
    size = there.shape[dim]
    if start < 0:
        if not isinstance(size, int):
            return None
        start += size
    # The last slice may end beyond the tensor, or at its symbolic size.
    if end is None or end == start + 1 or same_size(start + 1, size):
        return Slice(base, dim % there.dim(), start)
    return None


def _from_slice(base: Node, dim: int = 0, start: object = None, end: object = None, step: object = 1) -> Slice | None:
    """The same from the arguments of `slice`."""
    return _slice(base, dim, 0 if start is None else start, 2**63 - 1 if end is None else end) if step == 1 else None


def pick(node: Node) -> Slice | Node | None:
    """The slice of length 1 that a node is, or what was `written` there; None where it is no such slice."""
    piece = None
    if is_call(node, aten.select.int):
        piece = _slice(*args_of(node))
    elif is_call(node, aten.slice.Tensor):
        piece = _from_slice(*args_of(node))
    elif is_call(node, operator.getitem):
        parts, position = args_of(node)
        if is_call(parts, aten.unbind.int):
            base, dim = (*args_of(parts), 0)[:2]
            piece = _slice(base, dim, position)
        elif is_call(parts, aten.split.Tensor) and args_of(parts)[1] == 1:
            base, _, dim = (*args_of(parts), 0)[:3]
            piece = _slice(base, dim, position)
    return None if piece is None else written(piece)


def written(piece: Slice) -> Slice | Node:
    """The node that a functional update wrote to a slice, or the slice of what was there before all updates of other slices."""
    while (update := scattered(piece.base)) is not None:
        value, place = update
        if place.dim != piece.dim:
            break
        if place.position == piece.position:
            return value
        piece = piece._replace(base=place.base)
    return piece


def scattered(node: Node) -> tuple[Node, Slice] | None:
    """What a functional update of one slice writes, and where."""
    if is_call(node, aten.select_scatter.default):
        base, value, *place = args_of(node)
        piece = _slice(base, *place)
    elif is_call(node, aten.slice_scatter.default):
        base, value, *place = args_of(node)
        piece = _from_slice(base, *place)
    else:
        return None
    here, new = val(node), val(value)
    if piece is None or here is None or new is None or here.dtype != new.dtype:
        return None
    # A value that is broadcast to its place does not have the elements of the place.
    return (value, piece) if same_sizes(here.select(piece.dim, 0), new) else None
