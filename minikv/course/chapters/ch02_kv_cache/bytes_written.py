"""Counts what appending writes."""

import torch
from torch.overrides import TorchFunctionMode


class BytesWritten(TorchFunctionMode):
    """Within this context, `total` counts the bytes that torch.cat and slice assignments write."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.cat:
            self.total += result.nbytes
        elif function is torch.Tensor.__setitem__:
            tensor, index, _ = args
            self.total += tensor[index].nbytes
        return result
