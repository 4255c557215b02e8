"""Options for `torch.compile`, and the Dynamo backend that has them built in."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from .fuse_loop import FuseLoops

# Where the pass runs: after AOTDispatcher, on functional aten operations, before Inductor pads products, merges one with an addition, or
# drops casts.
SLOT = "joint_custom_pre_pass"


class Passes(CustomGraphPass):
    """Graph passes that run one after the other in a slot that holds one."""

    def __init__(self, passes: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for run in self.passes:
            run(graph)

    def uuid(self) -> Any:
        # Without a pass's own id a cached graph could be one that another version of it made: None keeps Inductor from caching.
        ids = tuple(run.uuid() if isinstance(run, CustomGraphPass) else None for run in self.passes)
        return None if None in ids else ids


def _with_fusion(taken: object) -> CustomGraphPass:
    """The loop-fusing pass, after what the slot holds already."""
    if taken is None:
        return FuseLoops()
    if isinstance(taken, FuseLoops):
        return taken
    passes: list[Any] = [*taken] if isinstance(taken, (list, tuple)) else [*taken.passes] if isinstance(taken, Passes) else [taken]
    for run in passes:
        if not callable(run):
            raise TypeError(
                f"{SLOT} must be a callable, a list of them or None, got {type(run).__name__}: the loop-fusing pass has to run after it; "
                "remove it from the options and from torch._inductor.config"
            )
    if any(isinstance(run, FuseLoops) for run in passes):
        return Passes(passes)
    return Passes([*passes, FuseLoops()])


def compile_options(mode: str | None = None, **yours: Any) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that let Inductor replace sequential Markov loops by the fused op.

    `torch.compile` takes a mode or options, not both; so the options of the mode are part of the result. A pass that is in
    `joint_custom_pre_pass` already, in yours or in `torch._inductor.config`, is kept and runs first.

    Warming up a drafter, so that few graphs serve every batch and none is made later:

    - Two graphs serve every R, one for R = 1 and one for the rest, where the first call has R = 1, or where
      `torch._dynamo.mark_dynamic(t, 0)` was called on each tensor that carries R > 1: base logits, anchor ids, `sample_pos`, `idx_mapping`.
    - Stay in one grad mode, `torch.inference_mode()` or `torch.no_grad()`: each has graphs of its own.
    - In mode "reduce-overhead" the cache must stay where it is: a buffer of the module, or an argument after
      `torch._dynamo.mark_static_address(draft_logits)`. Otherwise Inductor makes no CUDA graph of a call that writes it.
    - Before a CUDA graph of your own is captured, call the compiled drafter once with arguments of the same kind: compile first, then capture.

    Args:
        mode: a mode of `torch.compile`, None for "default".
        yours: options of your own; they win over those of the mode. Names with dots are given as `**{"triton.cudagraphs": True}`.

    Returns:
        A new dict.

    Raises:
        ValueError: a mode or an option that Inductor does not know.
        TypeError: what is in the pass's slot cannot be called.

    >>> import torch
    >>> from dspark_ops.inductor import compile_options
    >>> options = compile_options("max-autotune-no-cudagraphs", epilogue_fusion=True)
    >>> sorted(options)
    ['coordinate_descent_tuning', 'epilogue_fusion', 'joint_custom_pre_pass', 'max_autotune']
    >>> drafter = torch.compile(torch.nn.Linear(4, 4), options=options)
    """
    modes = torch._inductor.list_mode_options()
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)} or None, got {mode!r}")
    known = torch._inductor.list_options()
    for name in yours:
        if name.replace("-", "_") not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; torch._inductor.list_options() has them all"
            raise ValueError(f"options must be known to Inductor (torch {torch.__version__}), got {name!r}{hint}")
    options = {**(modes[mode] if mode else {}), **yours}
    taken = options[SLOT] if SLOT in options else getattr(torch._inductor.config, SLOT)
    options[SLOT] = _with_fusion(taken)
    return options


def backend(graph: torch.fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """The Dynamo backend "dspark": Inductor with `compile_options`. Installed with the package: `torch.compile(model, backend="dspark")`.

    Args: graph and inputs come from Dynamo; mode and options from `torch.compile`, which with a backend of this kind takes both.
    Returns: the compiled graph. Raises: as `compile_options`.

    >>> import torch
    >>> from dspark_ops.inductor import backend
    >>> torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    tensor([1., 1.])
    """
    return torch._inductor.compile(graph, example_inputs, options=compile_options(mode, **(options or {})))
