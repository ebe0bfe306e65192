"""Triton kernels over quantised K and V: `EngineConfig(attention="triton", kv_dtype="int8")`."""

import torch

from minikv.backend import AttentionBackend
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.gpu.attention import check_head_dim
from minikv.model import Attend
from minikv.paged import KVStore
from minikv.quant import QuantisedStore, require_quantised
from minikv_kernels.arguments import check_runnable
from minikv_kernels.codes import Codes
from minikv_kernels.codes_attention import FloatKeys, codes_decode, codes_prefill
from minikv_kernels.codes_write import write_codes
from minikv_kernels.splits import make_scratch


class TritonCodes(AttentionBackend):
    """Paged attention in Triton that reads codes where they lie.

    Launches per layer as `TritonAttention` has them, and with int4 one more in steps that fill
    blocks. Formats that store K by token ask nothing of the host. int4 does: which blocks are
    open is known in Python, so its steps are not recorded in CUDA graphs.
    """

    store: QuantisedStore

    def __init__(self, config: ModelConfig, store: KVStore):
        """Raises ValueError for a store on a CPU where kernels are compiled, or a head dim that
        the kernels do not take."""
        self.windows, self.store = config.windows, require_quantised(store)
        parts = self.store.parts
        check_runnable("store", parts["k_codes"])
        check_head_dim(config)
        self.recordable = self.store.open is None
        self.codes = [
            Codes(self.store.format.name, **{name: part[layer] for name, part in parts.items()})
            for layer in range(config.num_layers)
        ]
        self.scratch = make_scratch(
            config.num_heads, config.num_kv_heads, config.head_dim, self.store.device
        )

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. What all layers share is computed here, once per step."""
        n = batch.num_decodes
        tables, lens = batch.block_tables, batch.context_lens
        open_blocks = OpenBlocks(self.store, batch) if self.store.open is not None else None

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            codes, window = self.codes[layer], self.windows[layer]
            decodes = chunks = None
            if open_blocks is None:
                write_codes(k, v, codes, batch.slot_mapping)
            else:
                keys, rows = open_blocks.keys[layer], open_blocks.own_rows
                write_codes(
                    k, v, codes, batch.slot_mapping, keys, open_blocks.places, open_blocks.closing
                )
                decodes, chunks = FloatKeys(k[:n], keys, rows[:n]), FloatKeys(k, keys, rows[n:])
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # (T, H, D)
            if n > 0:
                codes_decode(
                    q[:n], codes, tables[:n], lens[:n], decodes, window, out[:n], self.scratch
                )
            if n < len(lens):
                start = batch.query_start[n:]
                codes_prefill(q, codes, tables[n:], lens[n:], start, chunks, window, out)
            return out

        return attend


class OpenBlocks:
    """Where the keys of a step go and come from while their blocks are open, for all layers."""

    def __init__(self, store: QuantisedStore, batch: Batch):
        write = store.plan_write(batch)
        assert store.open is not None
        self.keys = store.open.keys  # now, since planning may have added rows
        places = torch.full((len(batch.slot_mapping),), -1)
        places[write.waiting] = torch.tensor(write.places, dtype=torch.int64)
        closing = [
            *(
                (block, row, 0)
                for block, row in zip(write.closing, write.closing_rows, strict=True)
            ),
            *(
                (block, -1, token)
                for block, token in zip(write.whole_blocks, write.whole, strict=True)
            ),
        ]
        self.places = places.to(store.device)
        self.closing = torch.tensor(closing, dtype=torch.int64).view(-1, 3).to(store.device)
        self.own_rows = torch.tensor(write.own_rows).to(store.device)
