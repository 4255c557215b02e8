"""Recognises the noise of `gumbel_noise` in a graph, by comparison with a trace of that function."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node


class Noise(NamedTuple):
    """The arguments of `gumbel_noise` at one step."""

    seeds: Node
    positions: Node
    step: int
    use_fp64: bool


def match_noise(node: Node) -> Noise | None:
    return None
