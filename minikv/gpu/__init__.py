"""What only a GPU needs: a second loop that runs ahead, CUDA graphs, the Triton backends.

`minikv.assembly` imports this for a model on a GPU, or if the Triton backend is asked for.
`run_ahead` works on a CPU, too: it gains nothing there, but can be tested.
"""

import torch

from minikv.backend import AttentionBackend
from minikv.config import ModelConfig
from minikv.gpu.ahead import AheadLoop
from minikv.gpu.runner import DeviceRunner
from minikv.groups import GroupedAttention
from minikv.paged import KVStore
from minikv.runner import Runner


def run_ahead(plain: Runner, max_num_seqs: int) -> tuple[DeviceRunner, AheadLoop]:
    """A runner and a loop that start each step before the tokens of the previous one are read.

    Raises ValueError for a model on another GPU than the current one.
    """
    device = plain.transformer.device
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"lm: is on {device}, and kernels run on the current device, "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device({device.index}) first"
        )
    runner = DeviceRunner(plain, max_num_seqs)
    return runner, AheadLoop(runner)


def triton_attention(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Over K and V of a kind: see `minikv.assembly.kind_of_store`. Raises ImportError without
    Triton."""
    if kind == "codes":
        from minikv.gpu.codes import TritonCodes  # here, because it needs Triton

        return TritonCodes(config, store)
    from minikv.gpu.attention import TritonAttention

    return (
        GroupedAttention(TritonAttention, config, store)
        if kind == "groups"
        else TritonAttention(config, store)
    )
