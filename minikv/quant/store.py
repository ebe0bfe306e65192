"""The store of quantised K and V: codes and scales of every block, and the keys of open blocks.

Everything that is needed to read a block is indexed by the block's id: its codes, its scales, its
zero points. So one loop copies them together wherever a block is copied: by copy-on-write, or by
swap out and in. Sharing a block (fork, prefix-cache hit) shares its scales.

int4 stores K by channel, and a channel's scale is known only when the block is full. Until then
the block is *open*, and its keys wait in full precision, in a row of `OpenKeys`:

    a sequence of 40 tokens in blocks 5, 9 and 2 of 16

    5  codes and scales     9  codes and scales     2  8 keys in a row of OpenKeys
       (V is stored by token: all three blocks have codes and scales of every value)

A query reads the keys of its own block in full precision, even in the step that closes the block,
and those of earlier blocks as codes. So what a query reads depends on its position alone, and not
on how the tokens were cut into chunks: preemption, swap and prefix-cache hits do not change what a
request computes.

Once a block is closed its keys are codes for good. A token inside it cannot be written again,
because the scale of a channel belongs to all of its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from minikv.batch import Batch
from minikv.blocks import BlockPool
from minikv.config import EngineConfig, ModelConfig
from minikv.events import Listener
from minikv.paged import KVStore
from minikv.quant.formats import KVFormat, Shapes, format_of
from minikv.radix import RadixCache


def part_shapes(kv_format: KVFormat, config: ModelConfig, block_size: int) -> Shapes:
    """The shapes of what the store keeps of one block in one layer: (K, …) if it belongs to a
    head's whole block, (K, block_size, …) if it belongs to a token."""
    shapes: Shapes = {}
    for name, one, by_block in (
        ("k", kv_format.k, kv_format.k_by_block), ("v", kv_format.v, False),
    ):  # fmt: skip
        front = (config.num_kv_heads,) if by_block else (config.num_kv_heads, block_size)
        for piece, (shape, dtype) in one.shapes(config.head_dim).items():
            shapes[f"{name}_{piece}"] = (*front, *shape), dtype
    return shapes


def block_bytes(kv_format: KVFormat, config: ModelConfig, block_size: int) -> int:
    """Bytes of a block in all layers: codes, scales and zero points."""
    shapes = part_shapes(kv_format, config, block_size).values()
    return config.num_layers * sum(
        torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes
    )


def store_maker(config: EngineConfig) -> Callable[..., "QuantisedStore"]:
    """What makes the stores of an engine: called like `KVStore`."""
    kv_format = format_of(config.kv_dtype, config.block_size)
    return partial(QuantisedStore, kv_format, config.max_num_seqs)


@dataclass(slots=True)
class Write:
    """Where the new tokens of a batch go. The second half is for K stored by block only."""

    block_ids: torch.Tensor  # (T,)
    offsets: torch.Tensor  # (T,)
    # Tokens whose keys wait in full precision, and where: row * block_size + offset.
    waiting: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    # First tokens of blocks that this step fills from their start, and those blocks.
    whole: list[int] = field(default_factory=list)
    whole_blocks: list[int] = field(default_factory=list)
    # Blocks that were open before this step and are full after it, and their rows.
    closing: list[int] = field(default_factory=list)
    closing_rows: list[int] = field(default_factory=list)
    # For each sequence the row with keys of its first query's block: from earlier steps, or from
    # this step if it is a decode. Any number if there are no such keys.
    own_rows: list[int] = field(default_factory=list)


class QuantisedStore(KVStore):
    """Codes, scales and zero points of every block, each a tensor (num_layers, num_blocks, …).

    `parts["k_codes"]`, `parts["k_scale"]`, … are indexed by layer, block, KV head and token; what
    belongs to the whole block of a head has no token. `open` is None unless K is stored by block.
    """

    def __init__(
        self,
        kv_format: KVFormat,
        num_open: int,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        """num_open: how many open blocks there is room for at first. dtype: the model's."""
        self.format, self.block_size, self.dtype = kv_format, block_size, dtype
        self.parts: dict[str, torch.Tensor] = {
            name: torch.zeros(
                (config.num_layers, num_blocks, *shape), dtype=part_dtype, device=device
            )
            for name, (shape, part_dtype) in part_shapes(kv_format, config, block_size).items()
        }
        self.device = torch.device(device)
        self.bytes_per_token = block_bytes(kv_format, config, block_size) / block_size
        self.open: OpenKeys | None = None
        if kv_format.k_by_block:
            row = (config.num_kv_heads, block_size, config.head_dim)
            shape = (config.num_layers, min(num_open, num_blocks), *row)
            self.open = OpenKeys(torch.zeros(shape, dtype=dtype, device=device))

    @property
    def blocks(self):  # type: ignore[override]
        raise AttributeError(
            f"a store of {self.format.name} has no floats: look at `parts`, or dequantise blocks "
            "with `read`"
        )

    slots = blocks  # type: ignore[assignment]

    def copy_to(self, other: KVStore, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks `(from, to)`, all layers, with all that is needed to read them.

        All are read before any is written. Raises ValueError for a store of another format.
        """
        if not isinstance(other, QuantisedStore) or other.format.name != self.format.name:
            raise ValueError(f"other: must be a store of {self.format.name}, as this one is")
        if not pairs:
            return
        source, target = torch.tensor(pairs).T
        source, target = source.to(self.device), target.to(other.device)
        for name, part in self.parts.items():
            other.parts[name][:, target] = part[:, source].to(other.device)
        if self.open is not None and other.open is not None:
            self.open.copy_to(other.open, pairs)

    def plan_write(self, batch: Batch) -> Write:
        """Where the new tokens of a batch go: computed once per step, used by every layer.

        Gives rows to the blocks that this step opens, and takes back the rows of the blocks that it
        closes; their content stays until the next step. Raises RuntimeError for a token inside a
        closed block.
        """
        size = self.block_size
        write = Write(batch.slot_mapping // size, batch.slot_mapping % size)
        if self.open is None:
            return write
        self.open.reclaim()
        blocks = write.block_ids.tolist()  # on a GPU this waits for the batch
        starts, ends = batch.query_start_host.tolist(), batch.context_lens_host.tolist()
        for token, end_token, end in zip(starts, starts[1:], ends, strict=False):
            position, own_row = end - (end_token - token), -1
            while position < end:
                block, offset = blocks[token], position % size
                count = min(size - offset, end - position)
                if count == size:
                    write.whole.append(token)
                    write.whole_blocks.append(block)
                else:
                    row = self.open.take(block) if offset == 0 else self.open.row(block)
                    if own_row == -1:
                        own_row = row
                    write.waiting += range(token, token + count)
                    write.places += range(row * size + offset, row * size + offset + count)
                    if offset + count == size:
                        write.closing.append(block)
                        write.closing_rows.append(row)
                token, position = token + count, position + count
            write.own_rows.append(own_row)
        for block in write.closing:
            self.open.drop(block)
        return write

    def write(self, layer: int, write: Write, k: torch.Tensor, v: torch.Tensor) -> None:
        """Quantise k and v (T, K, D) of the new tokens, and store them."""
        self._put_tokens("v", layer, write, v)
        if self.open is None:
            self._put_tokens("k", layer, write, k)
            return
        keys, size = self.open.keys[layer], self.block_size  # keys (rows, K, block_size, D)
        if write.waiting:
            places = torch.tensor(write.places, device=self.device)
            keys[places // size, :, places % size] = k[write.waiting]
        if write.whole:
            first = torch.tensor(write.whole, device=self.device)
            tokens = first[:, None] + torch.arange(size, device=self.device)
            self._put_blocks(layer, write.whole_blocks, k[tokens].transpose(1, 2))
        if write.closing:
            self._put_blocks(layer, write.closing, keys[write.closing_rows])

    def read(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these blocks in float32, (num_block_ids, block_size, K, D) each.

        Keys of open blocks are not included: see `open`.
        """
        pair = []
        for name, one in (("k", self.format.k), ("v", self.format.v)):
            pieces = {
                part.removeprefix(f"{name}_"): tensor[layer].index_select(0, block_ids)
                for part, tensor in self.parts.items()
                if part.startswith(name)
            }
            pair.append(one.decode(pieces).transpose(1, 2))
        return pair[0], pair[1]

    def _put_tokens(self, name: str, layer: int, write: Write, x: torch.Tensor) -> None:
        one = self.format.k if name == "k" else self.format.v
        for piece, values in one.encode(x).items():  # (T, K, …)
            self.parts[f"{name}_{piece}"][layer][write.block_ids, :, write.offsets] = values

    def _put_blocks(self, layer: int, block_ids: list[int], keys: torch.Tensor) -> None:
        """keys (num_block_ids, K, block_size, D)."""
        for piece, values in self.format.k.encode(keys).items():
            self.parts[f"k_{piece}"][layer][block_ids] = values


class OpenKeys(Listener):
    """The keys of blocks that are not full, in full precision: a row for each such block.

    A row is taken when the first key of a block is written or an open block is copied, and given
    back when the block is closed. A block can also become free while it is open: its sequence
    ends, or is preempted. The pool tells it when the scheduler releases the block, but a planned
    copy or swap may still have to read the row. So the block is only noted in `abandoned`, and its
    row is taken back before the next row is given out, when all planned reads are done.
    """

    def __init__(self, keys: torch.Tensor):
        """keys (num_layers, rows, K, block_size, D). Rows are added if they do not suffice."""
        self.keys = keys
        self.abandoned: set[int] = set()
        self.forget_all()

    def begin(self, pool: BlockPool, cache: RadixCache | None) -> None:
        self.forget_all()

    def freeing(self, block_id: int) -> None:
        self.abandoned.add(block_id)

    @property
    def block_ids(self) -> set[int]:
        """The open blocks."""
        return self._rows.keys() - self.abandoned

    def row(self, block_id: int) -> int:
        """Where the keys of an open block are. Raises RuntimeError if it is closed."""
        if block_id not in self._rows:
            raise RuntimeError(
                f"block {block_id} is closed: its keys are quantised together, and none of them "
                "can be written again; kv_dtype='int8' stores each token on its own"
            )
        return self._rows[block_id]

    def take(self, block_id: int) -> int:
        """A row for a block that begins."""
        self.drop(block_id)
        if not self._free:
            self._grow()
        row = self._rows[block_id] = self._free.pop()
        return row

    def drop(self, block_id: int) -> None:
        """Give a block's row back, if it has one."""
        self.abandoned.discard(block_id)
        if block_id in self._rows:
            self._free.append(self._rows.pop(block_id))

    def reclaim(self) -> None:
        """Take back the rows of blocks that became free while they were open."""
        for block_id in list(self.abandoned):
            self.drop(block_id)

    def forget_all(self) -> None:
        """Begin again, with all blocks free."""
        self._rows: dict[int, int] = {}
        self._free = list(range(self.keys.shape[1]))
        self.abandoned.clear()

    def copy_to(self, other: "OpenKeys", pairs: list[tuple[int, int]]) -> None:
        """Let the targets of `(from, to)` be open where the sources are, with the same keys."""
        is_open = [(self._rows[source], to) for source, to in pairs if source in self._rows]
        keys = self.keys[:, [row for row, _ in is_open]]
        other.reclaim()
        for _, target in pairs:
            other.drop(target)
        rows = [other.take(target) for _, target in is_open]
        other.keys[:, rows] = keys.to(other.keys.device)

    @torch.inference_mode(False)
    def _grow(self) -> None:
        """Double the rows: for beams beside a full batch, or for many swapped-out sequences."""
        num_rows = self.keys.shape[1]
        self.keys = torch.cat([self.keys, torch.zeros_like(self.keys[:, : max(num_rows, 1)])], 1)
        self._free += range(num_rows, self.keys.shape[1])
