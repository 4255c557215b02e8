"""The pass that turns a sequential Markov loop into the fused op."""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from dspark_ops.compile_cache import source_hash


class FuseLoops(CustomGraphPass):
    """Replaces every loop that `match` finds in a graph."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return source_hash()
