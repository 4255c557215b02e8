"""The pass that turns a sequential Markov loop into the fused op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from dspark_ops.compile_cache import source_hash


class Found(NamedTuple):
    """A loop, or what nearly is one, in a graph: its steps, whether the pass replaced it, and why not."""

    steps: int
    fused: bool
    reason: str | None


@contextlib.contextmanager
def record() -> Iterator[list[Found]]:
    """Yields a list that gets what every `FuseLoops` finds meanwhile."""
    yield []


class FuseLoops(CustomGraphPass):
    """Replaces every loop that `match` finds in a graph."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return source_hash()
