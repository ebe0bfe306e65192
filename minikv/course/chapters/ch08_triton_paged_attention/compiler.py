"""Compiles kernels for a GPU that need not be there: `watch` starts this program.

python -P kernel_compiler.py FILE '[{"kernel": "add_kernel", "signature": …, "constants": …}]'

Prints a JSON list: {"kernel", "dots", "tf32"} for each that compiles (how many `tl.dot` there
are, whether one rounds to tf32), {"kernel", "error", "line"} for each that does not. Imports
Triton alone, so it starts fast: of FILE only kernels and constants are run.
"""

import ast
import json
import linecache
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError


def kernels_of(file: str) -> dict:
    """What FILE defines with Triton: its kernels, on the lines where they stand, and constants."""
    lines = linecache.getlines(file)
    names = {"triton": triton, "tl": tl}
    for node in ast.parse("".join(lines)).body:
        is_kernel = isinstance(node, ast.FunctionDef) and any(
            "jit" in ast.unparse(decorator) for decorator in node.decorator_list
        )
        if is_kernel:
            exec(compile(ast.Module([node], []), file, "exec"), names)
        elif isinstance(node, ast.Assign | ast.AnnAssign) or _is_light(node):
            try:
                exec(compile(ast.Module([node], []), file, "exec"), names)
            except Exception:
                continue  # no constant of a kernel
    return names


def _is_light(node: ast.stmt) -> bool:
    """Whether it imports what a kernel may use, and not torch, which takes a second."""
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in ("math", "triton") for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module in ("math", "triton")


def attempt(kernel, job: dict) -> dict:
    source = ASTSource(kernel, job["signature"], job["constants"])
    try:
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except CompilationError as error:
        while isinstance(error.__cause__, CompilationError):
            error = error.__cause__
        line = getattr(error.node, "lineno", 1) + kernel.starting_line_number - 1
        what = error.error_message or error.__cause__
        return {"kernel": job["kernel"], "error": str(what), "line": line}
    ttir, ptx = str(done.asm["ttir"]), done.asm["ptx"]
    return {"kernel": job["kernel"], "dots": ttir.count("tt.dot "), "tf32": ".tf32" in ptx}


if __name__ == "__main__":
    names = kernels_of(sys.argv[1])
    print(json.dumps([attempt(names[job["kernel"]], job) for job in json.loads(sys.argv[2])]))
