"""What Inductor is told of drafters: compile options with the loop-fusing pass, a Dynamo backend with them, and a report on the result.

The folder stands at the top of the repository; the package reaches it through the symbolic link `dspark_ops/inductor`.
"""

if __name__ != "dspark_ops.inductor":
    raise ImportError(f"import dspark_ops.inductor, not {__name__}: this folder is a part of that package")

from .explain import Report, explain
from .options import backend, compile_options

__all__ = ["Report", "backend", "compile_options", "explain"]
