"""`explain`: what `torch.compile` makes of a drafter, read from the graphs that it traces and the code that it generates."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import io
import itertools
import json
import logging
import math
import re
import shutil
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from dspark_ops import guards
from dspark_ops.guards import Call

from . import fuse_loop
from .fuse_loop import Found
from .options import compile_options

RICH = importlib.util.find_spec("rich") is not None  # plain lines do

_numbers = itertools.count()


class MarkovOp(NamedTuple):
    """A call of `dspark::markov_sample_sequential` in a traced graph: the plan that serves it and why that is not the fused one."""

    plan: str
    reason: str | None


class Kernel(NamedTuple):
    """What the generated code of a block calls: kind ("user Triton", "Inductor Triton", "C++", "extern"), name and number of calls."""

    kind: str
    name: str
    launches: int


@dataclass(frozen=True)
class Report:
    """What `explain` found; all but `recompilations` is about the first call. None, but for `noise`: this version of torch does not tell."""

    graphs: int
    breaks: tuple[str, ...] | None  # place and reason
    ops: tuple[MarkovOp, ...]
    loops: tuple[Found, ...]  # that the loop-fusing pass replaced, or nearly
    kernels: tuple[Kernel, ...] | None
    copies: tuple[str, ...] | None  # buffers of the generated code as large as the draft-logits cache, or base_logits without one
    recompilations: tuple[str, ...] | None  # the cause of each over the further argument sets
    noise: str | None  # how markov_noise is scheduled, "in order" or "overlapped"; None where the graphs have none

    def __str__(self) -> str:
        rows = list(self._rows())
        if RICH:
            from rich.console import Console  # noqa: PLC0415  # not sooner: compilations import this module and print nothing
            from rich.markup import escape  # noqa: PLC0415
            from rich.table import Table  # noqa: PLC0415

            table = Table(show_header=False)
            for name, text in rows:
                table.add_row(name, escape(text))
            drawn = io.StringIO()
            Console(file=drawn, width=shutil.get_terminal_size().columns).print(table)
            return drawn.getvalue().rstrip()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)

    def _rows(self) -> Iterator[tuple[str, str]]:
        unknown = f"not known (torch {torch.__version__})"
        yield "graphs", str(self.graphs)
        yield from _listed("graph break", self.breaks, unknown)
        yield from _listed("Markov op", [_told(op.plan, op.reason) for op in self.ops], unknown, none="no Markov op found")
        for loop in self.loops:
            yield "Markov loop", _told(f"{loop.steps} steps, {'fused' if loop.fused else 'not fused'}", loop.reason)
        for kind in dict.fromkeys(kernel.kind for kernel in self.kernels or ()):
            launches = {kernel.name: kernel.launches for kernel in self.kernels or () if kernel.kind == kind}
            # Names that Inductor makes up are long and say little.
            made_up = kind in ("C++", "Inductor Triton")
            which = f"{len(launches)} different" if made_up else ", ".join(f"{name} {count}" for name, count in launches.items())
            yield f"{kind} launches", f"{sum(launches.values())} ({which})"
        if not self.kernels:
            yield "launches", unknown if self.kernels is None else "none"
        if self.ops:
            yield from _listed("cache-sized buffer", self.copies, unknown)
        yield from _listed("recompilation", self.recompilations, unknown)
        if self.noise is not None:
            yield "noise", self.noise


def _told(what: str, reason: str | None) -> str:
    return what if reason is None else f"{what}, because {reason}"


def _listed(name: str, texts: Sequence[str] | None, unknown: str, none: str = "none") -> Iterator[tuple[str, str]]:
    for text in [unknown] if texts is None else texts or [none]:
        yield name, text


# Kinds of entries in the structured trace of torch.compile.
BREAK, CAUSE, CODE = "dynamo_graph_break_reason", "recompile_reasons", "inductor_output_code"


class _Entry(NamedTuple):
    kind: str
    frame: tuple[Any, Any]  # numbers of a code object and of a compilation of it
    text: str


class _Trace(logging.Handler):
    """Listens to the structured trace, the log that tlparse reads. On a torch with another one it hears nothing, which is no error."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        kind = CODE if CODE in metadata else metadata.get("artifact", {}).get("name")
        if kind in (BREAK, CAUSE, CODE):
            frame = metadata.get("frame_id"), metadata.get("frame_compile_id")
            self.entries.append(_Entry(kind, frame, str(getattr(record, "payload", None) or "")))

    def __enter__(self) -> None:
        logging.getLogger("torch.__trace").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch.__trace").removeHandler(self)


class _Graph:
    """What is of interest in a graph from Dynamo and in the code made from it; once it has run, the values of its symbolic sizes as well."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]) -> None:
        # Names are taken now: a symbol that turns out to be one number is shown as that later.
        self.symbols = {place: str(x) for place, x in enumerate(inputs) if isinstance(x, torch.SymInt)}
        self.sizes: dict[str, int] = {}
        self.codes: list[str] = []
        self.cause: str | None = None  # why it was made, where there was a graph of the same function
        self.ops: list[MarkovOp] = []
        self.caches: list[str] = []  # shapes
        self.has_noise = False
        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                self.has_noise |= _calls(node, "markov_noise")
                if _calls(node, "markov_sample_sequential"):
                    self._add(node)

    def _add(self, node: Node) -> None:
        given = {**dict(zip((*Call._fields, "plan"), node.args, strict=False)), **node.kwargs}
        values: dict[str, Any] = {name: x.meta.get("example_value") if isinstance(x, Node) else x for name, x in given.items()}
        plan = str(values.pop("plan", "auto"))
        if any(isinstance(given[name], Node) and value is None for name, value in values.items()):
            self.ops.append(MarkovOp(plan, f"not known on torch {torch.__version__}"))
            return
        call = Call(**values)
        if (error := guards.error(call, plan)) is not None:  # which the graph will raise
            self.ops.append(MarkovOp("none", str(error)))
            return
        chosen, reason = guards.choose(call, plan)
        if plan == "reference":  # one that was chosen while tracing looks like one that was asked for
            reason = guards.choose(call, "auto")[1] or reason
        self.ops.append(MarkovOp(chosen, reason))
        self.caches.append(str(tuple((call.base_logits if call.draft_logits is None else call.draft_logits).shape)))

    def compiled(self, entries: Sequence[_Entry], since: int) -> None:
        """Takes what the trace says of it: entries from `since` on are of its compilation."""
        codes = [entry for entry in entries[since:] if entry.kind == CODE]
        self.codes = [entry.text for entry in codes]
        causes = [entry.text for entry in entries if codes and entry.kind == CAUSE and entry.frame == codes[0].frame]
        self.cause = causes[-1] if causes else None

    def ran(self, inputs: Sequence[Any]) -> None:
        self.sizes = {name: inputs[place] for place, name in self.symbols.items()}


def _calls(node: Node, op: str) -> bool:
    packet = getattr(torch.ops.dspark, op)
    return node.op == "call_function" and node.target in (packet, packet.default)


def _break(text: str) -> str:
    """Place and reason of a graph break, without hints and tracebacks."""
    place, _, rest = text.partition("\n")
    lines = [line.strip() for line in rest.partition("User code traceback:")[0].splitlines()]
    noise = ("Graph Break Reason: Encountered", "Hint:", "Developer debug context:", "For more details")
    told = " ".join(line for line in lines if line and not line.startswith(noise))
    return f"{place.removeprefix('Graph break in user code at ')}: {told.removeprefix('Graph Break Reason: ')}"


def _cause(text: str, names: Sequence[str]) -> str:
    """The guards that failed, one for each graph that was there, in the names of the model's parameters."""
    causes = json.loads(text) if text.startswith("[") else [text]
    # Before: the number of a graph. After: where the size is used first.
    text = "; ".join(re.sub(r"^\d+/\d+: ", "", cause).partition("  #")[0] for cause in causes)
    text = re.sub(r"\bargs\[(\d+)\]", lambda found: names[int(found[1])] if int(found[1]) < len(names) else found[0], text)
    return re.sub(r"\bkwargs\['(\w+)'\]", r"\1", text)


def _parameters(model: Any) -> list[str]:
    try:
        return list(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):  # some callables that are not written in Python have none
        return []


def _elements(shape: str, sizes: dict[str, int]) -> float:
    """Elements of a shape that may name symbolic sizes; infinitely many where one is not known."""
    try:
        return math.prod(eval(shape, {}, sizes))
    except (NameError, TypeError):
        return math.inf


def _kernels(code: ast.AST) -> Iterator[tuple[str, str]]:
    """Kind and name of each kernel that generated code calls, once a call."""
    defined: dict[str, tuple[str, str]] = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name, maker = ast.unparse(node.targets[0]), ast.unparse(node.value.func)
            if maker == "async_compile.triton":
                kind = "user Triton" if "user_autotune" in ast.unparse(node.value) else "Inductor Triton"
                # A kernel of the user's that is called with other constants has another name here; the first argument is its own.
                defined[f"{name}.run"] = kind, ast.literal_eval(node.value.args[0])
            elif maker.startswith("async_compile.cpp"):
                defined[name] = "C++", name
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in defined:
                yield defined[function]
            elif function.startswith(("extern_kernels.", "torch.ops.", "aten.")):
                yield "extern", function.removeprefix("extern_kernels.")


def _buffers(code: ast.AST) -> Iterator[tuple[str, str]]:
    """Name and shape of each buffer that generated code allocates, or gets from an operator that it calls."""
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "empty_strided" in ast.unparse(node.value.func):
            yield ast.unparse(node.targets[0]), ast.unparse(node.value.args[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_size_stride" and ast.unparse(node.args[0]).startswith("buf"):
            yield ast.unparse(node.args[0]), ast.unparse(node.args[1])


def _enters_a_stream(code: ast.AST) -> bool:
    withs = [node for node in ast.walk(code) if isinstance(node, ast.With)]
    return any(re.fullmatch(r"stream\d+", ast.unparse(item.context_expr)) for node in withs for item in node.items)


def _report(graphs: Sequence[_Graph], breaks: Sequence[str], loops: Sequence[Found], causes: Sequence[str], names: Sequence[str]) -> Report:
    """The report on the graphs of a first call; `causes` are of the graphs of further ones, `names` those of the model's parameters."""
    report = Report(
        graphs=len(graphs),
        breaks=None,
        ops=tuple(op for graph in graphs for op in graph.ops),
        loops=tuple(loops),
        kernels=None,
        copies=None,
        recompilations=None,
        noise="in order" if any(graph.has_noise for graph in graphs) else None,
    )
    texts = [code for graph in graphs for code in graph.codes]
    if (graphs and not texts) or any("cpp_wrapper_src" in text for text in texts):  # the option cpp_wrapper makes C++ of it all
        return report
    least = min((_elements(shape, graph.sizes) for graph in graphs for shape in graph.caches), default=math.inf)
    try:
        codes = [(graph, ast.parse(text)) for graph in graphs for text in graph.codes]
        launches = Counter(kernel for _, code in codes for kernel in _kernels(code))
        buffers = [(f"{name} {shape}", _elements(shape, graph.sizes)) for graph, code in codes for name, shape in _buffers(code)]
        recompilations = tuple(_cause(cause, names) for cause in causes)
    except (IndexError, SyntaxError, ValueError):  # written in a way that is not known
        return report
    return replace(
        report,
        breaks=tuple(dict.fromkeys(map(_break, breaks))),
        kernels=tuple(Kernel(*kernel, count) for kernel, count in launches.items()),
        copies=tuple(dict.fromkeys(buffer for buffer, size in buffers if size >= least)) if least < math.inf else None,
        recompilations=recompilations,
        noise="overlapped" if report.noise is not None and any(_enters_a_stream(code) for _, code in codes) else report.noise,
    )


def explain(
    model: Any, *args: Any, options: dict[str, Any] | None = None, dynamic: bool | None = None, also: Sequence[Any] = (), **kwargs: Any
) -> Report:
    """Compiles a drafter afresh, calls it and reports what became of it; the report prints as a table.

    The model runs: what it writes, its cache for one, is written. No cached graph is used and what is compiled already stays. Only where
    the graph breaks, the functions below the break get further graphs, which stay until the next `torch._dynamo.reset()`.

    Args:
        model: a module or another callable, not compiled.
        args, kwargs: of the first call.
        options: for `torch.compile`; None: those of `compile_options()`.
        dynamic: as in `torch.compile`.
        also: further calls, to see what compiles again: each a tuple of positional arguments, in place of the first call's, or a dict of
            keyword arguments, which override those of the first call.

    Returns:
        A `Report`.

    Raises:
        TypeError: an element of `also` is neither a tuple nor a dict.
        What the model raises, and what `torch.compile` raises where the model itself does not.

    >>> import dspark_ops
    >>> from dspark_ops.inductor import explain
    >>> logits, ids, weights = torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(8, 16)
    >>> none = dict.fromkeys(("temperature", "seeds", "sample_pos", "idx_mapping"))
    >>> report = explain(dspark_ops.markov_sample_sequential, logits, ids, weights, weights, **none)
    >>> report.graphs, report.breaks
    (1, ())
    >>> report.ops
    (MarkovOp(plan='reference', reason='the tensors are on a cpu device; the fused kernels need a GPU'),)
    """
    calls = [(args, kwargs)]
    for index, further in enumerate(also):
        if not isinstance(further, (tuple, dict)):
            raise TypeError(f"also[{index}] must be a tuple of positional or a dict of keyword arguments, got {type(further).__name__}")
        calls.append((further, kwargs) if isinstance(further, tuple) else (args, {**kwargs, **further}))
    chosen = {**(compile_options() if options is None else options), "fx_graph_cache": False, "fx_graph_remote_cache": False}
    graphs: list[_Graph] = []
    trace = _Trace()

    def compiler(module: GraphModule, example_inputs: list[Any]) -> Any:
        graph, since = _Graph(module, example_inputs), len(trace.entries)
        compiled = torch._inductor.compile(module, example_inputs, options=chosen)
        graph.compiled(trace.entries, since)
        graphs.append(graph)

        def run(*inputs: Any) -> Any:
            graph.ran(inputs)
            return compiled(*inputs)

        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo keeps its graphs with a code object and its globals, and what it knows of sizes that change by the name: these are new ones.
    code = call.__code__.replace(co_name=f"explained_{next(_numbers)}")
    afresh = types.FunctionType(code, {"__name__": __name__, "__builtins__": builtins}, closure=call.__closure__)
    compiled = torch.compile(afresh, backend=compiler, dynamic=dynamic)
    ends = []
    with trace, fuse_loop.record() as loops:
        for positional, by_name in calls:
            try:
                compiled(*positional, **by_name)
            except torch._dynamo.exc.TorchDynamoException:
                model(*positional, **by_name)  # where the fault is the model's, its own error tells it best
                raise
            ends.append((len(graphs), len(trace.entries), len(loops)))
    num_graphs, num_entries, num_loops = ends[0]
    return _report(
        graphs[:num_graphs],
        [entry.text for entry in trace.entries[:num_entries] if entry.kind == BREAK],
        loops[:num_loops],
        [graph.cause or "code that the calls before did not reach" for graph in graphs[num_graphs:]],
        _parameters(model),
    )
