"""A plan in, tokens out: where blocks are moved, the model runs and tokens are sampled.

plan ── swaps and copies of blocks ── Batch ── Transformer.forward ── sampler ── token ids
                                                 │  writes K and V to slots,
                                                 └─ attends through block tables
"""

from collections.abc import Callable, Sequence as Seq
from functools import partial
from time import perf_counter

import torch

from minikv.backend import AttentionBackend
from minikv.batch import Batch, BatchBuilder
from minikv.blocks import blocks_for
from minikv.config import EngineConfig
from minikv.errors import blame
from minikv.language_model import LanguageModel
from minikv.model import Transformer
from minikv.paged import KVStore
from minikv.sampling import SamplingParams
from minikv.scheduler import Plan
from minikv.sequence import Sequence

# (logits (S, vocab_size), S params, S draws) -> S token ids: see `Sampler`.
ChooseTokens = Callable[
    [torch.Tensor, Seq[SamplingParams], Seq[float | None]], torch.Tensor | list[int]
]


class Runner:
    """Runs plans. It holds the weights and all K and V, and knows nothing of waiting requests."""

    def __init__(
        self, lm: LanguageModel, config: EngineConfig, sampler: ChooseTokens, store: KVStore,
        host_store: KVStore, attention: AttentionBackend,
    ):  # fmt: skip
        """`attention` is the backend over `store`. Raises ValueError if it is none, or cannot be
        what `config.batch_invariant` asks for."""
        self.transformer = lm.transformer
        self.max_batch_tokens = config.max_batch_tokens
        self.store, self.host_store, self.attention = store, host_store, attention
        if not isinstance(self.attention, AttentionBackend):
            raise ValueError(
                f"attention: must make an AttentionBackend, with bind and copy_blocks, made "
                f"{self.attention!r}; inherit from minikv.AttentionBackend"
            )
        self.sampler = attention.on_one_thread(sampler)
        if config.batch_invariant:
            if attention.one_kernel is None:
                name = type(attention).__name__
                raise ValueError(f"batch_invariant: only attention 'cpu', not {name}")
            attention.one_kernel = True
        longest = min(lm.config.max_context, config.num_blocks * config.block_size)  # tokens
        max_blocks = blocks_for(longest, config.block_size)
        self.builder = BatchBuilder(config.max_num_seqs, max_blocks, config.block_size)
        self.num_tokens = 0  # that went through the model
        self.seconds = 0.0  # of the forward pass and sampling
        self.last_hidden = torch.empty(0)  # below the last logits, until the next batch

    def run(self, plan: Plan) -> list[int]:
        """Compute a plan. Returns a token id for each sequence that gets one, in the order of
        `Scheduler.commit`."""
        self.move_blocks(plan)
        if not plan.sequences:
            return []
        started = perf_counter()
        logits = self.forward(plan.sequences, plan.num_tokens, plan.slots)
        token_ids = self.as_ids(self.sample(logits, plan))
        self.seconds += perf_counter() - started
        self.num_tokens += sum(plan.num_tokens)
        return token_ids

    def move_blocks(self, plan: Plan) -> None:
        """Move blocks to where the batch expects them, each read before it is overwritten."""
        self.store.copy_to(self.host_store, plan.swap_out)
        self.attention.copy_blocks(plan.copies)
        self.host_store.copy_to(self.store, plan.swap_in)

    @torch.inference_mode()
    def forward(
        self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]
    ) -> torch.Tensor:
        """Compute the next `num_tokens[i]` tokens of each sequence, writing K and V from
        `slots[i]` on; logits after the last of each: (S, vocab_size)."""
        return self.compute(self.builder.build(sequences, num_tokens, slots))

    def compute(self, batch: Batch) -> torch.Tensor:
        """Logits after the last token of each sequence in the batch: (S, vocab_size)."""
        found = self.attention.compute(self.transformer, batch)
        if found is None:
            hidden = self.hidden(batch)
            found = self.transformer.logits(hidden), hidden
        logits, self.last_hidden = found
        return logits

    def hidden(self, batch: Batch) -> torch.Tensor:
        """What the logits are computed from: (S, hidden_size)."""
        attend = partial(blame, "attention", blame("attention", self.attention.bind, batch))
        hidden = self.transformer.forward(batch.token_ids, batch.positions, attend)  # (T, hidden)
        if len(hidden) > len(batch.context_lens):
            hidden = hidden[batch.query_start[1:] - 1]  # (S, hidden)
        return hidden

    def sample(self, logits: torch.Tensor, plan: Plan) -> torch.Tensor | list[int]:
        """Choose from the logits (S, vocab_size) of a plan the token of each sequence that gets
        one: the decodes, and each chunk that reaches the end of its sequence (one token for each
        sample that forks there)."""
        rows = list(range(plan.num_decodes))
        decodes = plan.sequences[: plan.num_decodes]
        params = [sequence.request.params.after(sequence) for sequence in decodes]
        draws = [s.draw() if s.request.params.temperature > 0 else None for s in decodes]
        for row, sequence in enumerate(plan.sequences[plan.num_decodes :], plan.num_decodes):
            if sequence.num_computed + plan.num_tokens[row] == len(sequence.token_ids):
                rows += [row] * len(sequence.samples)
                params += [sequence.request.params.after(sequence)] * len(sequence.samples)
                draws += map(sequence.draw, sequence.samples)
        if not rows:
            return []
        if len(rows) != len(logits) or rows[-1] != len(rows) - 1:
            logits = logits[torch.tensor(rows).to(logits.device, non_blocking=True)]
        found = blame("sampler", self.sampler, logits, params, draws)
        if len(found) != len(rows):
            raise ValueError(f"sampler: must choose {len(rows)} tokens, has chosen {found!r}")
        return found

    def as_ids(self, chosen: torch.Tensor | list[int]) -> list[int]:
        """What a sampler has chosen. Raises ValueError, naming it, for what are no token ids."""
        ids = chosen.tolist() if isinstance(chosen, torch.Tensor) else chosen
        size = self.transformer.config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise ValueError(f"sampler: must choose token ids from 0 to {size - 1}, chose {ids!r}")
        return ids

    def use(self, transformer: Transformer) -> None:
        """Continue with another transformer of the same shape."""
        self.transformer = transformer
