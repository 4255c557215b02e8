"""What Inductor must know of the ops; the one file for private names of the lowering stage, behind a check of the version.

A Triton kernel in a graph gets its arguments with the strides that they had when the graph was made. Inductor sees to that for each launch by
itself, so what it computes, pads or lays out anew is copied for every step of a block. Here it is done once, before the first step.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dspark_ops.guards import Call, logger

KNOWN = ("2.11", "2.14")  # versions of torch, from the first to before the second, whose names below are known

_library = torch.library.Library("dspark", "FRAGMENT")
_library.define("keep_layout(Tensor x) -> Tensor", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


def _keep_layout(x: Tensor) -> Tensor:
    """`dspark::keep_layout`, a copy with the same strides, which Inductor leaves out where `x` has them already."""
    out = x.new_empty_strided(x.shape, x.stride())
    once = tuple(slice(None) if stride else slice(1) for stride in x.stride())  # of what is expanded there is one element to write
    out[once].copy_(x[once])
    return out


_library.impl("keep_layout", _keep_layout, "CompositeExplicitAutograd")
torch.library.register_fake("dspark::keep_layout", lambda x: x.new_empty_strided(x.shape, x.stride()), lib=_library)


@functools.cache
def _known() -> bool:
    """Whether the private names below are those of this torch; says once if not."""
    known = KNOWN[0] <= torch.__version__ < KNOWN[1]
    if not known:
        logger.warning(
            "torch %s: its Inductor is not known here; step launches in compiled graphs are right, but may copy computed arguments once a "
            "step, and a package of AOTInductor may hold an op that it cannot call: compile that with plan='step'",
            torch.__version__,
        )
    return known


@functools.cache
def _lower() -> None:
    """Gives Inductor a lowering for the op."""
    from torch._inductor.lowering import register_lowering  # noqa: PLC0415  # takes seconds, and only a compilation needs it

    # The tag of the op has made the argument a buffer with the strides of the graph, which is then the result.
    register_lowering(torch.ops.dspark.keep_layout.default, type_promotion_kind=None)(lambda x: x)


def _in_inductor() -> bool:
    """Whether Inductor is making a graph; other compilers would run the op as a copy."""
    from torch._inductor.virtualized import V  # noqa: PLC0415  # as above

    return isinstance(V.fake_mode, FakeTensorMode)


def packaging() -> bool:
    """Whether a package of AOTInductor is compiled. It may run where there is no Python: kernels become part of it, opaque ops would not."""
    if not _known():
        return False
    from torch._inductor.virtualized import V  # noqa: PLC0415  # as above

    return V.aot_compilation is True


def keep_layouts(call: Call) -> Call:
    """The call with arguments that every step can read as they are; the cache, which is written in place, is left alone."""
    if not (_known() and _in_inductor()):
        return call
    _lower()
    read = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor) and name != "draft_logits"}
    return call._replace(**{name: torch.ops.dspark.keep_layout(x) for name, x in read.items()})
