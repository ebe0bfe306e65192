"""Two of the model's formulas in a form that is faster on a CPU, for float32 only.

`minikv.model` has the formulas, and a test compares both. A decode step has few rows, so its
time goes into reading weights and launching operations.
"""

import torch


class FastLinear:
    """`Linear` on a weight that was reordered once into the layout that oneDNN reads fastest, as
    `torch.compile` does when it freezes a model. For a few rows that is two to three times as
    fast as `F.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """weight (outputs, inputs), bias (outputs,) or None."""
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, inputs) -> (T, outputs)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def pays(width: int) -> bool:
        """Whether it is faster for rows of so many numbers. For few, calling oneDNN takes longer
        than the product, and a build of PyTorch may not have its operations."""
        has_operation = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return width >= 128 and torch.backends.mkldnn.is_available() and has_operation


class FastRMSNorm:
    """`RMSNorm` as x * (w sqrt(D)) / hypot(|x|, sqrt(D eps)): the same number with half as many
    operations over x."""

    def __init__(self, weight: torch.Tensor, eps: float):
        """weight (D,)."""
        size = len(weight)
        self.weight = weight * size**0.5
        self.floor = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., D) -> (..., D)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * self.weight / torch.hypot(length, self.floor)
