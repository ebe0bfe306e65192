"""What only a GPU needs: a second loop that runs ahead, CUDA graphs, the Triton backend.

The core imports nothing of this until a model is on a GPU or the Triton backend is asked for.
`run_ahead` works on a CPU, too: it gains nothing there, but can be tested.
"""

import torch

from minikv.engine import Engine
from minikv.gpu.ahead import AheadLoop
from minikv.gpu.runner import DeviceRunner


def run_ahead(engine: Engine) -> None:
    """Let a new engine start each step before it reads the tokens of the previous one.

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
