"""Whether this process compiles kernels or interprets them: `INTERPRETED`.

The import raises ImportError if there is no Triton, or if it is too late to choose.
"""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "minikv_kernels needs Triton, which exists for Linux only. On Linux: make setup. Elsewhere "
        "everything but these kernels works: leave attention at 'auto', or set it to 'torch'."
    ) from error

INTERPRETED = triton.knobs.runtime.interpret

# Triton's own library (tl.sum, tl.cdiv, ...) was set to one of the two at `import triton`. Without
# a CUDA device, it may compile only if TRITON_INTERPRET=0 was set on purpose.
_must_interpret = INTERPRETED or not (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "0"
)
if _must_interpret and isinstance(tl.cdiv, triton.JITFunction):
    raise ImportError(
        "triton was imported before minikv_kernels and is set to compile, but this process has to "
        "interpret (no CUDA device, or TRITON_INTERPRET=1). Restart Python and import "
        "minikv_kernels before transformers, which imports triton; or set TRITON_INTERPRET=1 "
        "before Python starts."
    )
