"""Chapter 10: what its notebook and checks are given. No exercise is answered here."""

from collections.abc import Callable

import torch

from minikv.blocks import BlockPool, BlockTable
from minikv.config import ModelConfig
from minikv.course.chapters.ch10_quantised_kv.answers import Int8Blocks, attend_int8
from minikv.language_model import LanguageModel
from minikv.quant.formats import format_of
from minikv.quant.oracle import QuantisedOracle, read_back
from minikv.quant.quality import Scheme
from minikv.quant.store import block_bytes
from minikv.sampling import Sampler, SamplingParams
from minikv.sequence import Request, Sequence


class Int8Cache:
    """One sequence's K and V in int8 blocks, for `LanguageModel.logits`. Forks share blocks.

    `blocks`: one store per layer. All forks of a cache have the same stores and the same pool.
    """

    def __init__(self, blocks: list[Int8Blocks], table: BlockTable, attend: Callable = attend_int8):
        self.blocks, self.table, self.attend_to = blocks, table, attend

    @classmethod
    def new(
        cls,
        lm: LanguageModel,
        num_blocks: int,
        block_size: int = 4,
        make: Callable = Int8Blocks,
        attend: Callable = attend_int8,
    ) -> "Int8Cache":
        """An empty one over a pool of its own."""
        c = lm.config
        blocks = [
            make(num_blocks, block_size, c.num_kv_heads, c.head_dim) for _ in range(c.num_layers)
        ]
        return cls(blocks, BlockTable(BlockPool(num_blocks), block_size), attend)

    @property
    def num_tokens(self) -> int:
        return self.table.num_tokens

    def fork(self) -> "Int8Cache":
        return Int8Cache(self.blocks, self.table.fork(), self.attend_to)

    def logits(self, lm: LanguageModel, token_ids: list[int]) -> torch.Tensor:
        """Logits after each of the next tokens. Blocks that a fork also holds are copied first."""
        start = self.num_tokens
        self.table.grow(len(token_ids))
        self._slots = []
        for position in range(start, self.num_tokens):
            slot, copy = self.table.writable_slot(position)
            self._slots.append(slot)
            if copy is not None:
                for layer in self.blocks:
                    layer.copy(*copy)
        with torch.inference_mode():
            positions = torch.arange(start, self.num_tokens)
            hidden = lm.transformer.forward(torch.tensor(token_ids), positions, self.attend)
            return lm.transformer.logits(hidden).float()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores K and V of the new tokens, and reads all of them as codes."""
        store, rows = self.blocks[layer], []
        for slot, key, value in zip(self._slots, k, v, strict=True):
            store.write(slot, key, value)
        scales = {name: torch.stack(scales) for name, scales in store.scales.items()}
        for index, query in enumerate(q):
            rows.append(
                self.attend_to(
                    query, store.codes["k"], scales["k"], store.codes["v"], scales["v"],
                    self.table.block_ids, self.num_tokens - len(q) + index + 1,
                )
            )  # fmt: skip
        return torch.stack(rows)


def sample_together(
    lm: LanguageModel, prompt_ids: list[int], params: SamplingParams, make: Callable = Int8Blocks,
    attend: Callable = attend_int8,
) -> list[list[int]]:  # fmt: skip
    """Tokens of `params.n` samples of one prompt: forks of one cache, a step of each in turn."""
    request = Request(-1, prompt_ids, params)
    samples = [Sequence(request, index, prompt_ids) for index in range(params.n)]
    first = Int8Cache.new(lm, 8 + 4 * len(prompt_ids), make=make, attend=attend)
    logits = first.logits(lm, prompt_ids)[-1:]
    caches = [first, *(first.fork() for _ in samples[1:])]
    for sequence in samples:
        sequence.token_ids += Sampler()(logits, [params], [sequence.draw()]).tolist()
    for _ in range(params.max_tokens - 1):
        for sequence, cache in zip(samples, caches, strict=True):
            row = cache.logits(lm, sequence.token_ids[-1:])[-1:]
            sequence.token_ids += Sampler()(row, [params], [sequence.draw()]).tolist()
    return [sequence.output_ids for sequence in samples]


def sample_naively(
    lm: LanguageModel, prompt_ids: list[int], params: SamplingParams, index: int
) -> list[int]:
    """Sample `index` by naive attention over K and V that were stored in int8 and read back."""
    oracle = QuantisedOracle(lm.config, format_of("int8", 1), 1)
    sequence = Sequence(Request(-1, prompt_ids, params), index, prompt_ids)
    for _ in range(params.max_tokens):
        row = lm.logits(sequence.token_ids, oracle)[-1:]
        sequence.token_ids += Sampler()(row, [params], [sequence.draw()]).tolist()
    return sequence.output_ids


def keys_and_values(lm: LanguageModel, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of these tokens in every layer, (num_layers, K, T, D) each."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer, q, k, v):
        seen.append((k.transpose(0, 1), v.transpose(0, 1)))
        return lm.transformer.attend_naively(layer, q, k, v)

    with torch.inference_mode():
        lm.transformer.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    keys, values = zip(*seen, strict=True)
    return torch.stack(keys), torch.stack(values)


# ── Ways that no engine here stores K and V ───────────────────────────────────────


def five_bits(x: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's q5_0 reads back of x (..., D), for D a multiple of 32: for every 32 numbers
    a scale in float16, so that the one farthest from 0 gets code -16 of -16 … 15."""
    groups = x.unflatten(-1, (-1, 32))
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = farthest / -16
    codes = (groups / scale.where(scale != 0, 1) + 16.5).floor().clamp(0, 31) - 16
    return (codes * scale.half().float()).flatten(-2)


def by_channel(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """What 4 bits by channel read back of x (T, K, D). An incomplete last block is not coded."""
    return read_back(format_of("int4", block_size), x, x, block_size)[0]


def by_token(x: torch.Tensor, block_size: int) -> torch.Tensor:
    return read_back(format_of("int4", block_size), x, x, block_size)[1]


def _five(config: ModelConfig, block_size: int) -> float:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 22 / 32


def _four(config: ModelConfig, block_size: int) -> float:
    return block_bytes(format_of("int4", block_size), config, block_size) / block_size


FIVE_BITS = Scheme(
    "5 bits, by token (q5_0)", lambda k, v, block_size: (five_bits(k), five_bits(v)), _five
)
MORE = (  # "own block exact" is true of keys alone
    Scheme(
        "int4, K and V by channel",
        lambda k, v, size: (by_channel(k, size), by_channel(v, size)),
        _four,
        exact_own_block=True,
    ),
    Scheme(
        "int4, but V in 5 bits",
        lambda k, v, size: (by_channel(k, size), five_bits(v)),
        lambda config, size: (_four(config, size) + _five(config, size)) / 2,
        exact_own_block=True,
    ),
    FIVE_BITS,
)


def _half_exact(config: ModelConfig, block_size: int) -> float:
    return (_four(config, block_size) + config.kv_bytes_per_token(torch.float32)) / 2


ALONE = (  # the other one of K and V stays in float32
    Scheme(
        "K by channel", lambda k, v, size: (by_channel(k, size), v), _half_exact,
        exact_own_block=True,
    ),
    Scheme("V by token", lambda k, v, size: (k, by_token(v, size)), _half_exact),
    Scheme("V by channel", lambda k, v, size: (k, by_channel(v, size)), _half_exact),
)  # fmt: skip
