"""The Triton kernels of minikv. They are imported only when one is needed.

Without a CUDA device they run in Triton's interpreter, which is slow but runs the same
code, so everyone can run and test it. Triton chooses between compiler and interpreter
while it is imported, so `TRITON_INTERPRET` is set here, unless Triton is imported
already. A value that you have set yourself is kept: with 0 on a machine without a GPU
the kernels can be compiled, but not run. `minikv_kernels.mode` reports what is wrong when a
kernel is needed.

Their import name is `minikv_kernels`: `kernels` is another package, which `transformers` uses.
"""

import os
import sys

import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
