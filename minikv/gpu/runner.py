"""Running plans on a device: batches are sent to it, and the tokens that it samples stay there.

Nothing here waits for the device before `read`, the call that `launch` returns.
"""

import copy
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from time import perf_counter
from weakref import WeakMethod

import torch

from minikv.gpu.graphs import DecodeGraphs
from minikv.gpu.tokens import DeviceBatch, DeviceBuilder, TokenPool
from minikv.model import Layer, Transformer, mix, project
from minikv.runner import Runner
from minikv.scheduler import Plan
from minikv.sequence import Sequence


class DeviceRunner(Runner):
    """Launches plans instead of waiting for them. Batches of decodes run as graphs if the
    attention backend can be recorded."""

    graphs: DecodeGraphs | None

    def __init__(self, plain: Runner, max_num_seqs: int):
        """Takes over the weights, stores, backend and sampler of `plain`."""
        vars(self).update(vars(plain))
        self.max_num_seqs = max_num_seqs
        self.device = self.transformer.device
        builder = self.builder
        self.builder: DeviceBuilder = DeviceBuilder(
            max_num_seqs, builder.max_blocks, builder.block_size
        )
        with torch.inference_mode(False):  # its buffers are written in any mode
            self.tokens = TokenPool(max_num_seqs, self.device)
        self._prepare()

    def launch(self, plan: Plan) -> Callable[[], list[int]]:
        """Start a plan whose blocks have been moved; returns the call that waits for its tokens."""
        started = perf_counter()
        logits = self.forward(plan.sequences, plan.num_tokens, plan.slots)
        token_ids = self.sample(logits, plan)
        read = self.tokens.put(token_ids) if len(token_ids) > 0 else list
        self.seconds += perf_counter() - started
        self.num_tokens += sum(plan.num_tokens)

        def timed() -> list[int]:
            started = perf_counter()
            token_ids = read()
            self.seconds += perf_counter() - started
            return token_ids

        return timed

    @torch.inference_mode()
    def forward(
        self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]
    ) -> torch.Tensor:
        batch = self.builder.build(sequences, num_tokens, slots)
        if self.graphs is not None and batch.num_decodes == len(sequences):
            return self.graphs.run(batch)
        return self.compute_on_device(batch.to(self.device))

    def compute_on_device(
        self, batch: DeviceBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of a batch on the device, (S, vocab_size); on CUDA written to `out`, if given."""
        batch = replace(batch, token_ids=self.tokens.fill(batch.token_ids, batch.from_rows))
        if out is None:
            return self.compute(batch)
        return torch.mm(self.hidden(batch), self.transformer.head.weight.T, out=out)

    def use(self, transformer: Transformer) -> None:
        self.graphs = None  # they read the old weights
        super().use(transformer)
        self._prepare()

    def _prepare(self) -> None:
        """Compile the layers, and make new graphs."""
        self.graphs = None
        if self.device.type != "cuda":
            return
        self.transformer = with_compiled_layers(self.transformer)
        if self.attention.recordable:
            shape = self.max_num_seqs, self.transformer.config.vocab_size
            with torch.inference_mode(False):
                logits = torch.empty(shape, dtype=self.transformer.dtype, device=self.device)
                self.graphs = self._make_graphs(logits)

    def _make_graphs(self, logits: torch.Tensor) -> DecodeGraphs:
        # Weak, or the runner and its graphs would hold each other, and all their memory.
        method = WeakMethod(self.compute_on_device)

        def compute(batch: DeviceBatch, out: torch.Tensor) -> None:
            run = method()
            assert run is not None
            run(batch, out)

        return DecodeGraphs(compute, self.max_num_seqs, self.builder.max_blocks, logits)


def with_compiled_layers(transformer: Transformer) -> Transformer:
    """The same transformer, with one kernel for all that lies between two matrix products."""
    twin = copy.copy(transformer)
    twin.project, twin.mix = compiled(project), compiled(mix)
    return twin


def compiled(part: Callable) -> Callable:
    """`project` or `mix`, compiled: once for one token and once for any number of tokens, the
    first dimension of every tensor; all other sizes are constants."""
    run = torch.compile(part)

    def call(layer: Layer, *rest):
        for value in rest:
            if isinstance(value, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return run(layer, *rest)

    return call
