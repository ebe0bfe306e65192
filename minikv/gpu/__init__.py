"""What only a GPU needs: a second loop that runs ahead, CUDA graphs, the Triton backend.

The core imports nothing of this before a model on a GPU is there, or the Triton backend is
asked for. `run_ahead` works on a CPU, too. Nothing is gained there, but it can be tested.
"""

import torch

from minikv.engine import Engine
from minikv.gpu.ahead import AheadLoop
from minikv.gpu.runner import DeviceRunner


def run_ahead(engine: Engine) -> None:
    """Let a new engine start each step before it has read the tokens of the one before.

    Raises ValueError for a model on another GPU than the current one.
    """
    device = engine.lm.device
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"lm: is on {device}, and kernels run on the current device, "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device({device.index}) first"
        )
    engine.runner = runner = DeviceRunner(engine.runner, engine.config.max_num_seqs)
    engine.loop = AheadLoop(runner)
