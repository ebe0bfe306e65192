"""Chapter 07: a cache that finds blocks by chained hashes, what to keep of a turn, an attack."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence as Seq
from hashlib import sha256

from minikv.blocks import BlockPool
from minikv.radix import InsertResult, Key, MatchResult, RadixCache


def keys_of(token_ids: Seq[int], block_size: int) -> list[Key]:
    """The tokens of each whole block, in order; a rest of less than a block is left out."""
    whole = len(token_ids) // block_size * block_size
    return [tuple(token_ids[i : i + block_size]) for i in range(0, whole, block_size)]


def chained_hashes(token_ids: Seq[int], block_size: int, salt: Hashable = None) -> list[Hashable]:
    """A name for each whole block of a prompt, in order: the hash of (the name before it, the
    block's tokens).

    Two blocks have the same name if the salts are equal, and the tokens from the beginning of
    the prompt to the end of the block. Otherwise their names differ, even if an attacker searches
    for two that do not. Python's own `hash` is not enough: hash(0) == hash(2**61 - 1). Nor is a
    short checksum: among 200,000 blocks two have the same crc32.
    """
    names, before = [], b""
    for key in keys_of(token_ids, block_size):
        before = sha256(before + repr(key).encode()).digest()
        names.append((salt, before))
    return names


class ChainedCache:
    """A prefix cache without a tree: blocks by name, the least recently used first to go.

    The pool's reference counts say whether a block is in use, so nothing has to be locked. It
    has the public methods of `minikv.RadixCache` and can take its place in the engine.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self.blocks: OrderedDict[Hashable, int] = OrderedDict()  # by name, oldest use first

    def match(self, token_ids: Seq[int], salt: Hashable = None) -> MatchResult:
        """The longest cached prefix of whole blocks, made the most recently used.

        The result's `node` is None. Of the blocks used together the last counts as the
        oldest: a block that is evicted before those that follow it would make them useless.
        """
        names, block_ids = chained_hashes(token_ids, self.block_size, salt), []
        for name in names:
            if name not in self.blocks:
                break
            block_ids.append(self.blocks[name])
        for name in reversed(names[: len(block_ids)]):
            self.blocks.move_to_end(name)
        return MatchResult(None, block_ids, len(block_ids) * self.block_size)

    def insert(
        self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable = None
    ) -> InsertResult:
        """Cache whole blocks of a prefix, made the most recently used in the same order.

        Where a name is known, its block stays and the caller's is not taken; the result names
        the cache's blocks, and how many were there before. New blocks gain a holder, the cache.
        Raises ValueError when there are fewer blocks than whole blocks of tokens.
        """
        names, num_existing = chained_hashes(token_ids, self.block_size, salt), 0
        if len(block_ids) < len(names):
            raise ValueError(f"block_ids: {len(names)} blocks of tokens, {len(block_ids)} blocks")
        for name, block_id in zip(names, block_ids, strict=False):
            if name in self.blocks:
                num_existing += 1
            else:
                self.pool.acquire(block_id)
                self.blocks[name] = block_id
        for name in reversed(names):
            self.blocks.move_to_end(name)
        return InsertResult(None, [self.blocks[name] for name in names], num_existing)

    def evict(self, num_blocks: int) -> int:
        """Release up to `num_blocks` blocks that only the cache holds, least recently used
        first. Returns how many; less than asked when the others are in use. Raises ValueError for
        a negative number."""
        if num_blocks < 0:
            raise ValueError(f"num_blocks: must be at least 0, was {num_blocks}")
        unused = []
        for name, block_id in self.blocks.items():
            if len(unused) == num_blocks:
                break
            if self.pool.ref_count(block_id) == 1:
                unused.append(name)
        for name in unused:
            self.pool.release(self.blocks.pop(name))
        return len(unused)

    @property
    def num_cached_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_evictable_blocks(self) -> int:
        return sum(self.pool.ref_count(block_id) == 1 for block_id in self.blocks.values())

    def block_ids(self) -> Iterator[int]:
        """Every block that the cache holds."""
        return iter(self.blocks.values())

    def clear(self) -> None:
        """Forget everything. Sequences keep the blocks that they hold themselves."""
        for block_id in self.blocks.values():
            self.pool.release(block_id)
        self.blocks.clear()

    def lock(self, node: None) -> None:
        """Nothing to do: a sequence that uses a block holds it."""

    def unlock(self, node: None) -> None:
        """Nothing to undo."""

    def check(self) -> None:
        """Raise AssertionError if a cached block is free, or cached under two names."""
        if len(set(self.blocks.values())) < len(self.blocks):
            raise AssertionError("chained cache: a block has two names")
        if not all(self.pool.ref_count(block_id) for block_id in self.blocks.values()):
            raise AssertionError("chained cache: a cached block is free")


def insert_turn(cache: RadixCache, parts: Seq[tuple[list[int], bool]], block_ids: list[int]) -> int:
    """Cache what the next prompt can find of a turn that has ended; returns the number of dead
    blocks.

    parts: the turn's tokens in order, as pairs (token_ids, again). The next prompt begins with the
    parts whose `again` is true, and leaves out the others, such as reasoning. A part may be empty.
    block_ids: the turn's blocks, with one for each whole block of its tokens.

    A later prompt finds a block only if it repeats all tokens up to the end of that block. So the
    whole blocks before the first token that is left out are inserted, and no others. The turn's
    other whole blocks are dead: no later prompt can find them.
    """
    kept: list[int] = []  # what the next prompt has in common with the turn
    for tokens, again in parts:
        if tokens and not again:
            break
        kept += tokens
    cache.insert(kept, block_ids)
    size, length = cache.block_size, sum(len(tokens) for tokens, _ in parts)
    return length // size - len(kept) // size


def guess_prompt(
    first_token_ms: Callable[[Seq[int]], float], guesses: Seq[Seq[int]], decoy: Seq[int]
) -> int | None:
    """Which of `guesses` another customer has sent: its index, or None if the clock shows none.

    first_token_ms(token_ids) sends a prompt to the server and returns the time to its first token.
    The server caches whatever it is sent.
    guesses: prompts of one length, each different from the others in its first block. Another
    customer has sent one of them at most. decoy: a prompt of the same length that nobody has sent,
    so it takes as long as a miss. The same work may take a quarter more or less time than usual;
    a guess is a hit if it takes less than half as long as the decoy.
    """
    miss = first_token_ms(decoy)
    times = [first_token_ms(guess) for guess in guesses]
    fastest = min(range(len(guesses)), key=times.__getitem__)
    return fastest if times[fastest] < miss / 2 else None
