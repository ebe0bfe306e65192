"""Checks of chapter 08: kernels, from adding two vectors to split contexts.

All run in Triton's interpreter, under a `Watch` that looks at every address.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

import minikv
from minikv import naive_attention
from minikv.course.chapters.ch04_paged_blocks.block_by_block import DecodesTogether
from minikv.course.chapters.ch04_paged_blocks.scenarios import attention_with_a_mistake
from minikv.course.chapters.ch08_triton_paged_attention.watch import Watch, compiled
from minikv.course.harness.checking import Suspect, Wrong, check, close, equal, runs_model
from minikv.course.harness.examine import COMPILES

# ── Under the watch ───────────────────────────────────────────────────────────


def same(
    call: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    what: str,
    *suspects: Suspect,
    backwards: bool = False,
    nan: tuple[str, str] | None = None,
    case: "Case | None" = None,
) -> Watch:
    """Raise Wrong unless the call's result is `expected`, and nothing else was touched.

    `case`: whose block tables are read.
    `nan`: the cause if there is NaN in what was written, and where to look.
    """
    with Watch(backwards) as seen:
        found = call()
    known = {suspect.cause for suspect in suspects}
    try:
        close(found, expected, what, *suspects)
    except Wrong as wrong:
        if wrong.cause in known:
            raise
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            raise
        missing = seen.never_written(found)
        if missing:
            raise Wrong(
                f"{what}: {len(missing)} of {found.numel()} elements of the result were never "
                f"written, the first is element {missing[0]}",
                "no program stores there",
                "which programs are there, and what does each of them store?",
            ) from None
        complain(seen, what, case)
        if seen.undefined and found.isnan().any():
            raise Wrong(
                f"{what}: NaN",
                "a masked load without `other`: what it has in the masked places is undefined on a "
                "GPU (in this check it is NaN), and 0 * NaN is NaN",
                "tl.load(…, mask=…, other=0.0)",
            ) from None
        if nan and not found.isfinite().all():
            raise Wrong(f"{what}: NaN or infinite values", *nan) from None
        raise
    complain(seen, what, case)
    return seen


def complain(seen: Watch, what: str, case: "Case | None" = None) -> None:
    """Raise Wrong for what may still come out right here, and not on a GPU."""
    for element in sorted(seen.looked_up["block_tables"]) if case else []:
        row, i = divmod(element, case.tables.shape[1])
        if i >= -(-case.lens[row] // case.block_size):
            raise Wrong(
                f"{what}: entry {i} of block table {row} is read, and {case.lens[row]} tokens have "
                f"{number(-(-case.lens[row] // case.block_size), 'block')}",
                "the loop runs one block too far (cdiv, not // + 1; the sequence's blocks, not "
                "`width`): what the table has there is somebody's block, or none",
                "how many blocks has this context? A tile of several block ids needs a mask",
            )
    if seen.unwritten:
        raise Wrong(
            f"{what}: {seen.unwritten[0]}",
            "a program with nothing to do left its place in memory as it was, and another program "
            "reads it",
            "every program has to store, also one without any tokens",
        )
    if seen.races:
        raise Wrong(
            f"{what}: {seen.races[0]}",
            "two programs write one element: on a GPU either may come last",
            "which elements are this program's own?",
        )


def compiles(mine, call: Callable) -> list[dict]:
    """Raise Wrong if a GPU's compiler refuses one of the reader's kernels that `call` starts."""
    with Watch() as seen:
        call()
    results = compiled(mine.__file__, seen.launches)
    for result in results:
        if "is not string" in result.get("error", ""):
            raise Wrong(
                f"{Path(mine.__file__).name}, line {result['line']}, in {result['kernel']}: "
                f"{result['error']}",
                "a print is left in: take it out",
                "the line that is named here",
            )
        if "error" in result:
            raise Wrong(
                f"{Path(mine.__file__).name}, line {result['line']}, in {result['kernel']}: "
                f"{result['error']}",
                "the interpreter is Python, and runs what no GPU can: Python's own functions, "
                "`break`, a number that is taken out of a tile, a variable whose shape or type "
                "changes from round to round",
                "the line that is named here",
            )
    return results


def number(count: int, thing: str) -> str:
    """ "1 head", "2 heads"."""
    return f"{count} {thing}{'s' * (count != 1)}"


# ── 08.1 A tile for each program ──────────────────────────────────────────────


def check_add(mine, size: int, tile: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randn(2, size, generator=generator)
    right, place = x + y, torch.arange(size)

    def only(some: torch.Tensor) -> torch.Tensor:
        return torch.where(some, right, torch.nan)

    suspects = [
        Suspect(2 * x, "x is added to itself", "which of the two loads reads y?"),
        Suspect(x, "y is never added", "what is stored?"),
    ]
    if size > tile:
        suspects.append(
            Suspect(
                only(place < size // tile * tile),
                "the last tile is left out because it is not full",
                "how many programs are there, and which elements of the last tile exist?",
            )
        )
    if size > tile > 1:
        suspects += [
            Suspect(
                only(place < -(-size // tile) - 1 + tile),
                "the tiles overlap: tile p begins at p, not at p * TILE",
                "what is the first element of program 2?",
            ),
            Suspect(
                only(place < tile),
                "every program does the first tile",
                "what tells program 2 that it is not program 0?",
            ),
        ]
    what = f"{number(size, 'element')}, tiles of {tile}"
    seen = same(lambda: mine.add(x.clone(), y.clone(), tile), right, what, *suspects)
    writers = torch.from_numpy(seen.writers["out"])
    if (writers != place // tile).any():
        one = int((writers != place // tile).nonzero()[0])
        raise Wrong(
            f"{what}: element {one} is written by program {int(writers[one])}, expected program "
            f"{one // tile}",
            "one program does the work of all"
            if len(writers.unique()) == 1
            else "the programs share the elements out in another way than by tiles",
            "program p does the TILE elements from p * TILE on, and no others",
        )
    if seen.stores > -(-size // tile):
        raise Wrong(
            f"{what}: {seen.stores} stores, expected one for each of "
            f"{number(-(-size // tile), 'program')}",
            "a tile is done one element after the other",
            "`tl.arange` makes one line do the whole tile",
        )


@check("08.1", "one full tile", look="`tl.load(x + element)`, and a store to `out + element`")
def _(mine):
    for tile in (4, 1, 16):
        check_add(mine, tile, tile)


@check("08.1", "several full tiles", look="which elements are program 2's?")
def _(mine):
    for size, tile in ((12, 4), (8, 4), (5, 1), (128, 64)):
        check_add(mine, size, tile)


@check("08.1", "the example: 10 elements, three programs", look="the mask of the last tile")
def _(mine):
    check_add(mine, 10, 4)


@check("08.1", "any length, any tile", look="the mask of the last tile")
def _(mine):
    for size, tile in ((1, 4), (3, 4), (9, 4), (11, 8), (100, 16), (7, 64), (65, 64), (3, 2)):
        check_add(mine, size, tile)


@check("08.1", COMPILES)
def _(mine):
    compiles(mine, lambda: mine.add(torch.ones(10), torch.ones(10)))


# ── Attention, and what comes out of it with a mistake ────────────────────────


def draw(length: int, kv_heads: int, dim: int, heads: int, generator) -> tuple[torch.Tensor, ...]:
    """q (H, D); k, v (L, K, D)."""
    q = 2 * torch.randn(heads, dim, generator=generator)
    return q, *torch.randn(2, length, kv_heads, dim, generator=generator)


@dataclass
class Case:
    """Sequences in one pool. Whatever is not theirs is filled with something loud."""

    lens: list[int]
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    fill: float = 40.0  # how loud; NaN is the loudest. So loud, one slot of them decides alone
    seed: int = 8
    extra: Callable | None = None  # changes (q, k, v) of a sequence

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        widths = [-(-n // self.block_size) for n in self.lens]
        pool = sum(widths) + 2
        ids = random.Random(self.seed).sample(range(pool), sum(widths))
        shape = (pool, self.block_size, 2, self.kv_heads, self.dim)
        self.kv = self.fill * torch.randn(shape, generator=generator)
        # Beyond a context a table names blocks that do not exist.
        self.tables = torch.full((len(self.lens), max(widths) + 1), 10**9)
        self.lens_tensor = torch.tensor(self.lens)
        rows = []
        for row, (length, width) in enumerate(zip(self.lens, widths, strict=True)):
            q, k, v = draw(length, self.kv_heads, self.dim, self.heads, generator)
            if self.extra is not None:
                q, k, v = self.extra(q, k, v)
            self.tables[row, :width] = torch.tensor(ids[:width])
            slots = [ids[p // self.block_size] * self.block_size + p % self.block_size
                     for p in range(length)]  # fmt: skip
            self.kv.flatten(0, 1)[slots] = torch.stack([k, v], 1)
            del ids[:width]
            rows.append((q, naive_attention(q[None], k, v)[0]))
        self.q, self.expected = (torch.stack(each) for each in zip(*rows, strict=True))

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv, self.tables, self.lens_tensor

    @property
    def what(self) -> str:
        some = f"context lengths {self.lens}" if len(self.lens) > 1 else f"context {self.lens[0]}"
        heads = f"{number(self.heads, 'query head')} on {number(self.kv_heads, 'KV head')}"
        return f"{some}, blocks of {self.block_size}, {heads}, head_dim {self.dim}"

    @cached_property
    def emptied(self) -> torch.Tensor:
        """The pool with zeros wherever no token is."""
        empty = torch.zeros_like(self.kv)
        for table, length in zip(self.tables.tolist(), self.lens, strict=True):
            for start in range(0, length, self.block_size):
                filled = min(self.block_size, length - start)
                block = table[start // self.block_size]
                empty[block, :filled] = self.kv[block, :filled]
        return empty

    def by_mistake(self, mistake: str) -> torch.Tensor | None:
        """What comes out with one thing wrong; None if this case cannot tell."""
        rows = []
        kv = self.emptied if mistake == "score of 0" else self.kv
        for row, length in enumerate(self.lens):
            q, table = self.q[row], self.tables[row].tolist()
            if mistake == "first table":
                table = self.tables[0].tolist()
            if mistake == "first length":
                length = self.lens[0]
            if mistake == "first KV head":
                kv = self.kv[:, :, :, :1].expand_as(self.kv)
            inner = {"score of 0": "unfilled slots", "first table": "", "first length": "",
                     "first KV head": ""}.get(mistake, mistake)  # fmt: skip
            count = -(-length // self.block_size)
            try:
                if mistake in OF_PLACES:
                    rows.append(self._misplaced(row, mistake))
                else:
                    rows.append(attention_with_a_mistake(q, kv, table[:count], length, inner))
            except (IndexError, RuntimeError):
                return None
        found = torch.stack(rows)
        return found if found.isfinite().all() else None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def slots(self, row: int) -> torch.Tensor:
        """Where the tokens of a sequence lie: (L,)."""
        position = torch.arange(self.lens[row])
        return self.tables[row, position // self.block_size] * self.block_size + (
            position % self.block_size
        )

    def _misplaced(self, row: int, mistake: str) -> torch.Tensor:
        """The output of a sequence, plainly, with one address or mask wrong."""
        slots, q = self.slots(row), self.q[row]
        k, v = self.kv.flatten(0, 1)[slots].unbind(1)
        k, v = (x.repeat_interleave(self.group, 1) for x in (k, v))  # (L, H, D)
        if mistake == "block for slot":
            position = torch.arange(self.lens[row])
            slots = self.tables[row, position // self.block_size] + position % self.block_size
            k, v = self.kv.flatten(0, 1)[slots].repeat_interleave(self.group, 2).unbind(1)
        if mistake == "query head for KV head":
            flat = self.kv.reshape(-1, self.dim)
            place = slots[:, None] * (2 * self.kv_heads) + torch.arange(self.heads)
            k, v = flat[place], flat[place + self.kv_heads]
        if mistake in ("group for KV head", "no factor 2", "K before V"):
            flat, kv_head = self.kv.reshape(-1, self.dim), torch.arange(self.heads) // self.group
            block, offset = slots // self.block_size, slots % self.block_size
            place, behind = slots[:, None] * (2 * self.kv_heads), self.kv_heads
            if mistake == "group for KV head":
                kv_head = kv_head * self.group
            if mistake == "no factor 2":
                place = slots[:, None] * self.kv_heads
            if mistake == "K before V":
                place = (block * 2 * self.block_size + offset)[:, None] * self.kv_heads
                behind *= self.block_size
            k, v = flat[place + kv_head], flat[place + kv_head + behind]
        if mistake == "V beside K":
            flat, kv_head = self.kv.reshape(-1, self.dim), torch.arange(self.heads) // self.group
            v = flat[slots[:, None] * (2 * self.kv_heads) + kv_head + 1]
        scores = torch.einsum("hd,lhd->hl", q, k) * self.dim**-0.5
        if mistake == "physical mask":
            scores = scores.masked_fill(slots >= self.lens[row], -torch.inf)
        if mistake == "not transposed":
            padded = torch.zeros(-(-len(k) // self.dim) * self.dim, self.heads, self.dim)
            padded[: len(k)] = k
            tiles = padded.view(-1, self.dim, self.heads, self.dim)
            scores = torch.einsum("hd,bdhl->hbl", q, tiles).flatten(1)[:, : len(k)]
            scores = scores * self.dim**-0.5
        if mistake == "base 2":
            scores = scores * math.log(2)
        if mistake in ("factor in base 2", "weights in base 2"):
            return self._mixed(scores, v, mistake)
        return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)

    def _mixed(self, scores: torch.Tensor, v: torch.Tensor, mistake: str) -> torch.Tensor:
        """A running softmax in two bases at once: scores (H, L), v (L, H, D)."""
        factor, weight = (torch.exp2, torch.exp)[:: 1 if mistake.startswith("factor") else -1]
        top, total, acc = torch.full((self.heads,), -torch.inf), 0.0, 0.0
        parts = scores.split(self.block_size, 1), v.split(self.block_size)
        for some, values in zip(*parts, strict=True):
            new_top = torch.maximum(top, some.amax(1))
            shrink, weights = factor(top - new_top), weight(some - new_top[:, None])
            total = total * shrink + weights.sum(1)
            acc = acc * shrink[:, None] + torch.einsum("hl,lhd->hd", weights, values)
            top = new_top
        return acc / total[:, None]

    def suspects(self, *names: str) -> list[Suspect]:
        return [Suspect(partial(self.by_mistake, name), *MISTAKES[name]) for name in names]


SUMS = "which sums were made relative to the old maximum? All of them need the factor"
MISTAKES = {  # (cause, where to look)
    "output not rescaled": ("`acc` is not rescaled when the maximum moves", SUMS),
    "sum not rescaled": ("`total` is not rescaled when the maximum moves", SUMS),
    "nothing rescaled": ("nothing is rescaled when the maximum moves: there are two scales", SUMS),
    "wrong sign": (
        "the factor is upside down: e^(new - old) where e^(old - new) is meant",
        "the factor when the maximum rises: is it below 1?",
    ),
    "swapped": ("keys and values have changed places", "which of the two gives the scores?"),
    "last token": ("the last token is not seen", "for which keys is the mask true?"),
    "no partial block": (
        "only full tiles are read, so the newest tokens are missing",
        "how often does the loop run? 7 tokens in tiles of 4 are two tiles",
    ),
    "no scale": (
        "the scores are not multiplied by `scale`",
        "the formula of attention: softmax(q k / sqrt(D)) v",
    ),
    "score of 0": (
        "what is masked out is read as 0, so it has a score of 0, and a weight of e^(0 - top)",
        "which score gives a weight of 0? `tl.where` puts it there",
    ),
    "not divided": (
        "the weighted sum of V is never divided by the sum of the weights",
        "what is stored: do the weights add up to 1?",
    ),
    "mean of blocks": (
        "every tile gets a softmax of its own, and the tiles are averaged",
        "a tile with larger scores has to count for more than another",
    ),
    "last block only": (
        "each tile overwrites what the tiles before it gave: only the last one counts; or `top` is "
        "never updated",
        "what has to be carried from one tile to the next?",
    ),
    "no table": (
        "logical block i is read from physical block i: the block table is never used",
        "what is loaded before the keys?",
    ),
    "unfilled slots": (
        "the last block is read to its end, also where no token was written",
        "which slots of the last block hold a token?",
    ),
    "interleaved groups": (
        "query heads take turns over the KV heads; those of a group should lie side by side",
        "with 4 query heads and 2 KV heads, heads 0 and 1 share KV head 0",
    ),
    "first table": (
        "all sequences read the first one's blocks",
        "where does the row of `sequence` begin in a table of rows of `width`?",
    ),
    "first length": (
        "all sequences see as far as the first",
        "which element of `context_lens` is this program's?",
    ),
    "first KV head": (
        "all query heads read KV head 0",
        "how far is it from one KV head of a token to the next?",
    ),
    "query head for KV head": (
        "a query head's number is taken for a KV head's, and there are fewer of those",
        "with 4 query heads and 2 KV heads, which KV head does query head 3 read?",
    ),
    "V beside K": (
        "V is sought right behind its K, and that is the K of the next KV head",
        "(…, 2, KV_HEADS, HEAD_DIM): how many numbers lie between a K and its V?",
    ),
    "block for slot": (
        "a block's number is taken for a slot's: block b begins at slot b * BLOCK_SIZE",
        "how many slots lie before block 7?",
    ),
    "no factor 2": (
        "a slot has K and V of every KV head, so 2 * KV_HEADS rows: the 2 is missing",
        "(…, 2, KV_HEADS, HEAD_DIM): how many numbers lie between two slots?",
    ),
    "K before V": (
        "V is sought behind all K of a block, but each slot has its K and its V side by side",
        "(num_blocks, BLOCK_SIZE, 2, …): what comes first, the slot or K and V?",
    ),
    "group for KV head": (
        "in `kv` a KV head is one row: only in q and out are there GROUP rows for each",
        "how far is it from one KV head of a token to the next?",
    ),
    "base 2": (
        "counts in powers of two, but the scores were not multiplied by log2(e)",
        "2^(x log2(e)) is e^x",
    ),
    "factor in base 2": (
        "the factor is a power of two, and the weights are powers of e",
        "`exp` and `exp2`: one of them, everywhere",
    ),
    "weights in base 2": (
        "the weights are powers of two, and the factor is one of e",
        "`exp` and `exp2`: one of them, everywhere",
    ),
    "not transposed": (
        "the keys have to be transposed: a score sums over head_dim, not over tokens",
        "the shapes: (ROWS, D) times (D, BLOCK_SIZE)",
    ),
    "physical mask": (
        "the mask compares places in the pool with the context's length",
        "position i * BLOCK_SIZE + offset is visible, wherever its block lies",
    ),
}
OF_SOFTMAX = (
    "output not rescaled", "sum not rescaled", "nothing rescaled", "wrong sign", "swapped",
    "last token", "no partial block", "no scale", "score of 0", "not divided", "mean of blocks",
    "last block only", "base 2", "factor in base 2", "weights in base 2",
)  # fmt: skip
OF_TABLES = (
    "block for slot", "no table", "unfilled slots", "interleaved groups", "first table",
    "first length", "first KV head", "query head for KV head", "physical mask", "V beside K",
    "no factor 2", "K before V", "group for KV head",
)  # fmt: skip
OF_PLACES = (
    "query head for KV head", "physical mask", "block for slot", "V beside K", "not transposed",
    "no factor 2", "K before V", "group for KV head", "base 2", "factor in base 2",
    "weights in base 2",
)  # fmt: skip
NAN = (
    "inf * 0 or -inf - -inf: is the factor e^(old - new)? Does a tile count in which nothing is "
    "seen?",
    "the factor at the first tile, when the largest score so far is -inf",
)
LOUD_SCORES = {
    "300": "exp of a large number overflows: it is taken before the largest score is subtracted, "
    "or the factor is e^(new - old)",
    "-300": "the largest score is taken to be 0 at least, so that every weight is 0, and 0 / 0",
    "300, after the first tile -300": "the maximum is that of the new tile alone, so that "
    "e^(old - new) overflows",
}


def louder(name: str, tile: int) -> Callable:
    """Lifts the scores of all heads to about that. The keys point along their queries."""

    def lift(q, k, v):
        q = q / q.norm(dim=-1, keepdim=True)
        q = q[:1].expand_as(q) * q.shape[1] ** 0.5
        size = torch.full((len(k),), -300.0 if name.startswith("-") else 300.0)
        if "after" in name:
            size[tile:] = -300.0
        return q, k + size[:, None, None] * q[:1] / q.shape[1] ** 0.5, v

    return lift


# ── 08.2 A running softmax ────────────────────────────────────────────────────


def check_attend(mine, length: int, dim: int, tile: int, extra=None, nan=NAN, name="") -> Watch:
    """One query over contiguous K and V: a pool of a single sequence, with tiles for blocks."""
    case = Case([length], tile, 1, 1, dim, fill=0.0, seed=length, extra=extra)
    count = -(-length // tile)
    k, v = case.kv[case.tables[0, :count], :, :, 0].flatten(0, 1)[:length].unbind(1)  # (L, D)
    call = partial(mine.attend, case.q[0, 0].clone(), k.contiguous(), v.contiguous(), tile)
    suspects = case.suspects(*OF_SOFTMAX)
    suspects = [Suspect(partial(_first, s.value), s.cause, s.look) for s in suspects]
    suspects.append(
        Suspect(
            partial(_tile_for_dim, case.q[0, 0], k, v, tile),
            "key j is sought at j * TILE, and begins at j * HEAD_DIM",
            "k is (context, HEAD_DIM): how many numbers lie between two keys?",
        )
    )
    what = f"{number(length, 'token')}, tiles of {tile}, head_dim {dim}{name}"
    return same(call, case.expected[0, 0], what, *suspects, nan=nan)


def _first(value: Callable) -> torch.Tensor | None:
    found = value()
    return None if found is None else found[0, 0]


def _tile_for_dim(q, k, v, tile: int) -> torch.Tensor | None:
    place = torch.arange(len(k))[:, None] * tile + torch.arange(len(q))
    if place.max() >= k.numel():
        return None
    k, v = k.flatten()[place], v.flatten()[place]
    return (k @ q * len(q) ** -0.5).softmax(0) @ v


@check("08.2", "one full tile", look="scores, weights, the weighted sum of values, the division")
def _(mine):
    for length, dim in ((4, 8), (1, 8), (16, 4)):
        check_attend(mine, length, dim, length)


@check("08.2", "several full tiles", look="what is carried from tile to tile")
def _(mine):
    for length, dim, tile in ((8, 8, 4), (12, 8, 4), (32, 4, 16), (5, 8, 1)):
        check_attend(mine, length, dim, tile)


@check("08.2", "a last tile that is not full", look="which keys of the last tile exist?")
def _(mine):
    for length, dim, tile in ((10, 8, 4), (3, 8, 4), (1, 8, 4), (9, 16, 8), (17, 8, 16)):
        check_attend(mine, length, dim, tile)


@check("08.2", "scores far above and far below 0", look="what is subtracted from a score")
def _(mine):
    for name, cause in LOUD_SCORES.items():
        nan = cause, "what is subtracted from a score, and the largest argument that `exp` gets"
        check_attend(mine, 11, 8, 4, louder(name, 4), nan, f", scores of about {name}")


@check("08.2", "any sizes", look="which keys of the last tile exist?")
def _(mine):
    for length, dim, tile in ((40, 64, 16), (7, 32, 64), (23, 2, 8), (13, 16, 2)):
        check_attend(mine, length, dim, tile)


@check("08.2", "every key and value is read once", look="how often does a line load K or V?")
def _(mine):
    seen = check_attend(mine, 11, 8, 4)
    for name in ("k", "v"):
        if seen.reads[name] > 88:
            raise Wrong(
                f"11 tokens of 8 numbers: {seen.reads[name]} numbers are read from `{name}`, "
                "expected 88",
                "K or V is read more than once: with a running softmax one pass is enough",
            )


@check("08.2", COMPILES)
def _(mine):
    compiles(mine, lambda: mine.attend(torch.ones(8), torch.ones(11, 8), torch.ones(11, 8)))


# ── 08.3 Through the block table ──────────────────────────────────────────────


def check_decode(function: Callable, case: Case, name: str = "", nan=NAN) -> Watch:
    suspects = case.suspects(*OF_TABLES, *OF_SOFTMAX)
    if case.block_size == case.dim:
        suspects += case.suspects("not transposed")
    arguments = [argument.clone() for argument in case.arguments]
    what, call = case.what + name, partial(function, *arguments)
    return same(call, case.expected, what, *suspects, nan=nan, case=case)


QUIET = 2.0  # so that two mistakes never give the same
READS_GARBAGE = (
    "slots that hold no token are read: their weight is 0, but 0 * NaN is NaN",
    "the masks of the loads, and what stands in for what is not read",
)


@check("08.3", "one sequence, one full block", look="the addresses: which block, which head")
def _(mine):
    check_decode(mine.decode, Case([4], heads=1, kv_heads=1))


@check("08.3", "one sequence, several blocks", look="what is loaded before the keys?")
def _(mine):
    for length, block_size in ((12, 4), (11, 4), (5, 1), (19, 16)):
        check_decode(mine.decode, Case([length], block_size, 1, 1, fill=QUIET))


@check("08.3", "several heads", look="which KV head does query head 1 read?")
def _(mine):
    for heads, kv_heads in ((2, 2), (4, 2), (6, 3), (4, 1)):
        check_decode(mine.decode, Case([7], heads=heads, kv_heads=kv_heads))


@check("08.3", "several sequences", look="the row of q, of the table, of the lengths")
def _(mine):
    check_decode(mine.decode, Case([7, 6, 5]))
    check_decode(mine.decode, Case([11, 4, 6]))
    check_decode(mine.decode, Case([1, 9], 4, 2, 1))


@check("08.3", "whatever lies in slots without a token", look="the masks of the loads")
def _(mine):
    for fill in (1000.0, torch.nan):
        check_decode(mine.decode, Case([6, 5], fill=fill), f", other slots {fill:g}", READS_GARBAGE)


@check("08.3", "scores far above and far below 0", look="what is subtracted from a score")
def _(mine):
    check_loud(mine.decode, 4)


def check_loud(function: Callable, block_size: int, **sizes) -> None:
    length = 2 * block_size + 3
    for name, cause in LOUD_SCORES.items():
        case = Case([length], block_size, 2, 1, extra=louder(name, block_size))
        nan = cause, "what is subtracted from a score, and the largest argument that `exp` gets"
        check_decode(partial(function, **sizes), case, f", scores of about {name}", nan)


@check("08.3", COMPILES)
def _(mine):
    compiles(mine, lambda: mine.decode(*Case([5, 2]).arguments))


# ── 08.4 A group in one product ───────────────────────────────────────────────


@check("08.4", "one query head a KV head", look="the shapes: (ROWS, …) for what each row has")
def _(mine):
    check_decode(mine.decode_packed, Case([32], 32, 1, 1, fill=QUIET))
    check_decode(mine.decode_packed, Case([16], 16, 1, 1, fill=QUIET))
    check_decode(mine.decode_packed, Case([37], 16, 2, 2, 32, fill=QUIET))


@check("08.4", "groups of 2, 3 and 4", look="which rows are query heads, and which of them?")
def _(mine):
    for heads, kv_heads in ((2, 1), (4, 2), (6, 2), (8, 2)):
        check_decode(mine.decode_packed, Case([37], 16, heads, kv_heads))


@check("08.4", "a group of 20", look="ROWS is given: at least 16, and a power of two")
def _(mine):
    check_decode(mine.decode_packed, Case([20], 16, 20, 1))


@check("08.4", "several sequences", look="the row of q, of the table, of the lengths")
def _(mine):
    check_decode(mine.decode_packed, Case([40, 7, 16], 16, dim=32))
    check_decode(mine.decode_packed, Case([1, 33], 32, 4, 1))


@check("08.4", "whatever lies in slots without a token", look="the masks of the loads")
def _(mine):
    for fill in (1000.0, torch.nan):
        case = Case([21, 19], 16, fill=fill)
        check_decode(mine.decode_packed, case, f", other slots {fill:g}", READS_GARBAGE)


def one_head_loud(q, k, v):
    """Scores of about 300 for the first head, and -300 for the second, of the same keys."""
    unit = q[:1] / q[:1].norm()
    q = torch.cat([unit, -unit]) * q.shape[1] ** 0.5
    return q, k + 300.0 * unit, v


@check("08.4", "scores far above and far below 0", look="what is subtracted from a score")
def _(mine):
    nan = (
        "one maximum serves all rows, or it is 0 at least: where scores are far below it every "
        "weight is 0, and 0 / 0",
        "the axis of `tl.max`, and what `top` begins with",
    )
    case = Case([21], 16, 2, 1, extra=one_head_loud)
    check_decode(mine.decode_packed, case, ", scores of about 300, and for head 1 of -300", nan)
    check_loud(mine.decode_packed, 16)


def check_read_once(seen: Watch, num_tokens: int, cause: str) -> None:
    """Raise Wrong if more was read of `kv` than K and V of so many tokens, two KV heads of 16."""
    once = num_tokens * 2 * 2 * 16
    if seen.reads["kv"] > once:
        raise Wrong(
            f"{num_tokens} tokens, 2 KV heads, K and V of 16 numbers: {seen.reads['kv']:,} numbers "
            f"are read from `kv`, expected {once:,}",
            cause,
        )


@check("08.4", "K and V are read once for the whole group", look="what the loop loads, how often")
def _(mine):
    seen = check_decode(mine.decode_packed, Case([37], 16, 8, 2))
    again = "K and V are read again for each query head of a group, or beyond the context"
    check_read_once(seen, 37, again)


@check("08.4", COMPILES)
def _(mine):
    check_products(compiles(mine, lambda: mine.decode_packed(*Case([5, 20], 16).arguments)))


def check_products(results: list[dict]) -> None:
    for result in results:
        if result["kernel"] == "join_kernel":
            continue
        if result["dots"] < 2:
            raise Wrong(
                f"{result['kernel']} has {result['dots']} `tl.dot`, expected 2",
                "a product is a sum, over a tile of three dimensions or for a head at a time: "
                "right, but no work for tensor cores",
                "scores = queries times keys, transposed; acc += weights times values",
            )
        if result["tf32"]:
            raise Wrong(
                f"{result['kernel']}: compiled for sm_90, a `tl.dot` rounds float32 to tf32",
                "by default `tl.dot` keeps 10 of the 23 bits behind the point; the interpreter "
                "does not show it",
                'input_precision="ieee", in both products; "tf32x3" rounds, too',
            )


# ── 08.5 Split and join ───────────────────────────────────────────────────────

EMPTY = (
    "an empty split: 0 / 0 is NaN, and stays NaN times a weight of 0; or -inf - -inf",
    "`top`, `total` and `acc` after a loop that never ran, and what is made of them",
)


def lost(case: Case, splits: int, which: str) -> torch.Tensor | None:
    """What comes out if splits are joined in another way, or do not cover the context."""
    rows = []
    for row, length in enumerate(case.lens):
        count = -(-length // case.block_size)
        share = -(-count // splits)
        if which == "rounded down":
            share = count // splits
        parts = []
        for split in range(splits):
            begin = split * share
            end = min(begin + share + (which == "overlap"), count)
            tokens = range(begin * case.block_size, min(end * case.block_size, length))
            if len(tokens):
                parts.append(_part(case, row, tokens))
        if not parts:
            return None
        outs, lses, tops = (torch.stack(each) for each in zip(*parts, strict=True))
        if which == "mean":
            rows.append(outs.mean(0))
        elif which == "by the largest score":
            rows.append((outs * tops.softmax(0)[..., None]).sum(0))
        elif which == "join in base e":
            rows.append((outs * (lses / math.log(2)).softmax(0)[..., None]).sum(0))
        elif which == "join in base 2":
            rows.append((outs * (lses * math.log(2)).softmax(0)[..., None]).sum(0))
        elif which == "by the sums":
            rows.append((outs * (lses - tops).softmax(0)[..., None]).sum(0))
        elif which == "first split":
            rows.append(outs[0])
        elif which == "not divided":
            weights = torch.exp(lses - lses.max(0).values)[..., None]
            rows.append((outs * weights).sum(0))
        else:
            rows.append((outs * lses.softmax(0)[..., None]).sum(0))
    return torch.stack(rows)


def _part(case: Case, row: int, tokens: range) -> tuple[torch.Tensor, ...]:
    """(output (H, D), lse (H,), largest score (H,)) over some tokens of a sequence."""
    slots = [
        int(case.tables[row, p // case.block_size]) * case.block_size + p % case.block_size
        for p in tokens
    ]
    k, v = case.kv.flatten(0, 1)[slots].unbind(1)
    k, v = (x.repeat_interleave(case.group, 1) for x in (k, v))
    scores = torch.einsum("hd,lhd->hl", case.q[row], k) * case.dim**-0.5
    out = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1), scores.amax(-1)


JOINED = {  # in this order: 3 blocks in 2 splits do not tell the first from "first split"
    "rounded down": (
        "the share of a split is rounded down, so the last blocks belong to none",
        "5 blocks in 4 splits: how many has each?",
    ),
    "mean": (
        "the splits are averaged, as if all had the same weight",
        "a split's share of the sum of exp(score)",
    ),
    "by the largest score": (
        "a split counts by its largest score alone: how many tokens it has makes no difference",
        "lse is top + log(total)",
    ),
    "by the sums": (
        "a split counts by its `total`, which is relative to its own maximum: log(total), without "
        "top",
        "lse is top + log(total)",
    ),
    "join in base e": (
        "split and join use different bases: powers of two there, of e here",
        "log2(total) goes with exp2, log(total) with exp",
    ),
    "join in base 2": (
        "split and join use different bases: powers of e there, of two here",
        "log2(total) goes with exp2, log(total) with exp",
    ),
    "first split": ("only the first split counts", "how many numbers of lse are loaded?"),
    "not divided": (
        "the joined output is not divided by the sum of the weights",
        "what do the weights of the splits add up to?",
    ),
    "overlap": (
        "each split also reads the first block of the next",
        "where does split 0 end, and where does split 1 begin?",
    ),
}


def check_split(mine, case: Case, splits: int, name: str = "", nan=EMPTY) -> Watch:
    suspects = [Suspect(partial(lost, case, splits, which), *why) for which, why in JOINED.items()]
    suspects += case.suspects(*OF_TABLES, *OF_SOFTMAX)
    what = f"{case.what}, {number(splits, 'split')}{name}"
    arguments = [argument.clone() for argument in case.arguments]
    call = partial(mine.decode_split, *arguments, splits=splits)
    return same(call, case.expected, what, *suspects, nan=nan, case=case)


@check("08.5", "one split: nothing to join", look="what is stored for a split, and where")
def _(mine):
    check_split(mine, Case([37], 16, fill=QUIET), 1, nan=NAN)


@check("08.5", "two and four splits, as many blocks for each", look="which blocks are split 1's?")
def _(mine):
    check_split(mine, Case([64], 16, 2, 1), 2)
    check_split(mine, Case([64], 16, 2, 1), 4)


@check("08.5", "splits of different lengths", look="how many blocks has each split?")
def _(mine):
    check_split(mine, Case([43], 16, 2, 1), 2)
    check_split(mine, Case([105], 16, 2, 1), 4)


@check("08.5", "an empty split", look="what an empty split stores")
def _(mine):
    check_split(mine, Case([69], 16, 2, 1), 4)  # 2, 2, 1 and no block
    check_split(mine, Case([5], 16, 2, 1), 8)
    check_split(mine, Case([64], 16, 2, 1), 8)  # split 4 begins where the context ends


@check("08.5", "sequences of very different lengths", look="each has splits of its own size")
def _(mine):
    check_split(mine, Case([70, 3, 33], 16), 4)


@check("08.5", "scores far above and far below 0", look="what is subtracted before `exp`")
def _(mine):
    for name, cause in LOUD_SCORES.items():
        case = Case([40], 16, 2, 1, extra=louder(name, 16))
        nan = (
            f"{cause}. Or the same in the join: what is subtracted from lse there?",
            "the largest argument that `exp` gets",
        )
        check_split(mine, case, 2, f", scores of about {name}", nan)


@check("08.5", "each token is read once, by one split", look="where a split begins and ends")
def _(mine):
    seen = check_split(mine, Case([69], 16, 4, 2), 4, nan=EMPTY)
    check_read_once(seen, 69, "splits overlap, or a split reads what it does not count")


@check("08.5", COMPILES)
def _(mine):
    check_products(compiles(mine, lambda: mine.decode_split(*Case([5, 20], 16).arguments)))


# ── 08.6 Right on this machine ────────────────────────────────────────────────


def check_gather(mine, lens: list[int], block_size: int, backwards: bool = False) -> Watch:
    case = Case(lens, block_size, 1, 2, 8, seed=sum(lens))
    tables = case.tables.masked_fill(case.tables == 10**9, 0)[:, :-1]
    expected = torch.cat([
        case.kv[table[: -(-length // block_size)]].flatten(0, 1)[:length]
        for table, length in zip(case.tables, lens, strict=True)
    ])  # fmt: skip
    first, starts = [], [0]
    for length in lens:
        first.append(torch.arange(length) < length // block_size * block_size)
        starts.append(starts[-1] + length)
    whole = torch.cat(first)[:, None, None, None]
    suspects = [
        Suspect(
            torch.where(whole, expected, torch.nan),
            "a last block that is not full is not copied at all",
            "which of its positions are tokens?",
        ),
    ]
    if any(length % block_size == 0 for length in lens):
        kept = torch.cat([
            torch.arange(n) < (n - block_size if n % block_size == 0 else n) for n in lens
        ])[:, None, None, None]  # fmt: skip
        suspects.append(
            Suspect(
                torch.where(kept, expected, torch.nan),
                "a last block that is full is taken for an empty one: n % BLOCK_SIZE is 0 then",
                "how many tokens has the last block of a context of 8, in blocks of 4?",
            )
        )
    order = "from the last program to the first" if backwards else "in the order of this machine"
    what = f"packing {', '.join(map(str, lens))} tokens, blocks of {block_size}, programs {order}"
    with Watch(backwards) as seen:
        found = mine.gather(case.kv.clone(), tables.clone(), case.lens_tensor.clone())
    close(found, expected, what, *suspects)
    return seen


OVERWRITES = (
    "what a block has beyond its sequence's end is copied, too, over the next sequence's first "
    "tokens",
    "for which positions is `held` true, in the last block of a sequence?",
)


@check("08.6", "packing: blocks that are full", look="which rows does each program write?")
def _(mine):
    for block_size in (4, 1, 16):
        check_gather(mine, [2 * block_size, block_size], block_size)


@check("08.6", "packing: 5, 7 and 8 tokens", look="which rows does each program write?")
def _(mine):
    check_gather(mine, [5, 7, 8], 4)
    check_gather(mine, [1, 16], 16)


@check("08.6", "packing: the same, programs in another order", *OVERWRITES)
def _(mine):
    check_gather(mine, [5, 7, 8], 4, backwards=True)
    check_gather(mine, [1, 16], 16, backwards=True)


@check("08.6", "packing: no row has two writers", *OVERWRITES)
def _(mine):
    for lens, block_size in (([5, 7, 8], 4), ([3, 1, 1, 2], 2), ([17, 16], 16)):
        complain(check_gather(mine, lens, block_size), f"packing {lens}, blocks of {block_size}")


@check("08.6", "packing: the last sequence ends inside a block", *OVERWRITES)
def _(mine):
    for lens, block_size in (([8, 5], 4), ([3], 4), ([4, 4, 9], 8)):
        complain(check_gather(mine, lens, block_size), f"packing {lens}, blocks of {block_size}")


class Recording:
    """A captured step's recording; counts how often it is played."""

    def __init__(self, graph: Callable):
        self.graph, self.played = graph, 0

    def __call__(self) -> None:
        self.played += 1
        self.graph()

    def __getattr__(self, name: str):
        return getattr(self.graph, name)


class Steps:
    """A CapturedDecode of the reader's, and the sequences that it decodes for."""

    def __init__(self, mine, lens: list[int], seed: int = 8):
        self.case = case = Case([16] * 6, 4, 2, 1, 8, seed=seed)  # 24 blocks of 4, all filled
        self.decode = mine.CapturedDecode(case.kv, 2, max_seqs=4, max_blocks=6)
        self.decode.graph = self.recording = Recording(self.decode.graph)
        self.free = case.tables[:, :4].flatten().tolist()
        self.lens = list(lens)
        self.tables = [[self.free.pop() for _ in range(-(-n // 4))] for n in lens]
        self.held = (self.decode.q, self.decode.block_tables, self.decode.context_lens)
        self.generator = torch.Generator().manual_seed(seed)
        rows, width = len(lens), max(len(table) for table in self.tables)
        self.before = (  # what lies there before anything is copied
            torch.zeros(rows, 2, 8), torch.zeros(rows, width, dtype=torch.int64),
            torch.ones(rows, dtype=torch.int64),
        )  # fmt: skip

    def inputs(self) -> tuple[torch.Tensor, ...]:
        q = 2 * torch.randn(len(self.lens), 2, 8, generator=self.generator)
        width = max(len(table) for table in self.tables)
        padded = [table + [0] * (width - len(table)) for table in self.tables]
        return q, torch.tensor(padded), torch.tensor(self.lens)

    def grow(self) -> None:
        """One more token each, and a new block where it has no place."""
        for row, table in enumerate(self.tables):
            self.lens[row] += 1
            if self.lens[row] > 4 * len(table):
                table.append(self.free.pop())

    def step(self, what: str) -> None:
        inputs = self.inputs()
        suspects = [
            Suspect(partial(self._with_old, inputs, names), *why) for names, why in STALE.items()
        ]
        before = self.recording.played
        found = self.decode.replay(*(value.clone() for value in inputs))
        held = (self.decode.q, self.decode.block_tables, self.decode.context_lens)
        known = {suspect.cause for suspect in suspects}
        try:
            close(found, self._right(*inputs), what, *suspects)
        except Wrong as wrong:
            if any(one is not other for one, other in zip(held, self.held, strict=True)):
                raise Wrong(
                    wrong.what,
                    "an input was exchanged for another tensor, of which the recording knows "
                    "nothing: it has the addresses of the old ones",
                    "`tensor[...] = values` writes into a tensor, `name = tensor` does not",
                ) from None
            if wrong.cause not in known:
                raise Wrong(wrong.what) from None
            raise
        if self.recording.played != before + 1:
            raise Wrong(
                f"{what}: the recording was played {self.recording.played - before} times, "
                "expected 1",
                "the step does not come from the recording, or more often than once",
                "`self.graph()` is the step: what does `replay` call besides it?",
            )
        self.before = inputs

    def _right(self, q, tables, lens) -> torch.Tensor:
        rows = []
        for one, table, length in zip(q, tables, lens.tolist(), strict=True):
            k, v = self.case.kv[table].flatten(0, 1)[:length].unbind(1)
            rows.append(naive_attention(one[None], k, v)[0])
        return torch.stack(rows)

    def _with_old(self, inputs, names: str) -> torch.Tensor | None:
        """What comes out if some of the inputs are those of the step before."""
        q, tables, lens = inputs
        old_q, old_tables, old_lens = self.before
        if names == "q":
            return self._right(old_q, tables, lens) if old_q.shape == q.shape else None
        if names == "lens":
            return self._right(q, tables, old_lens) if len(old_lens) == len(lens) else None
        rows, width = len(tables), max(tables.shape[1], old_tables.shape[1])
        held = torch.zeros(max(rows, len(old_tables)), width, dtype=torch.int64)
        held[: len(old_tables), : old_tables.shape[1]] = old_tables
        return self._right(q, held[:rows], lens)


STALE = {
    "tables": (
        "the recording still reads the block tables of an earlier step",
        "what of a step's inputs is copied, and on which condition?",
    ),
    "lens": (
        "the recording still has the context lengths of the step before",
        "which inputs does `replay` copy?",
    ),
    "q": (
        "the recording still has the queries of the step before",
        "which inputs does `replay` copy?",
    ),
}


@check("08.6", "a step: the first, and the next", look="which inputs does `replay` copy?")
def _(mine):
    steps = Steps(mine, [5, 2, 9])
    steps.step("the first step, context lengths 5, 2 and 9, blocks of 4")
    steps.grow()
    steps.step("the next step, context lengths 6, 3 and 10, blocks of 4")


@check("08.6", "a step in which a sequence opens a block", look="which inputs can change?")
def _(mine):
    steps = Steps(mine, [5, 2, 9])
    for turn in range(5):
        now = ", ".join(map(str, steps.lens))
        steps.step(f"step {turn}, context lengths {now}, blocks of 4")
        steps.grow()


@check("08.6", "a step after a shared block was copied", look="which inputs can change?")
def _(mine):
    for row, place in ((0, 1), (2, 0)):
        steps = Steps(mine, [6, 2, 9])
        steps.step("the step before, context lengths 6, 2 and 9, blocks of 4")
        steps.grow()
        steps.tables[row][place] = steps.free.pop()
        steps.step(f"sequence {row} has another block in place {place}: it has been copied")


@check("08.6", "a step of another batch", look="which inputs can change?")
def _(mine):
    steps = Steps(mine, [5, 2, 9])
    steps.step("the step before, context lengths 5, 2 and 9, blocks of 4")
    steps.lens = [6, 3]  # as if the first two were one token further
    steps.tables = [[steps.free.pop() for _ in range(2)], [steps.free.pop()]]
    steps.step("two other sequences, of 6 and 3 tokens")
    steps.lens, steps.tables = [4, 7, 3, 1], [[steps.free.pop() for _ in range(2)] for _ in "1234"]
    steps.step("four other sequences, of 4, 7, 3 and 1 tokens")


@check("08.6", "a step with fewer sequences than there are rows", look="what other rows hold")
def _(mine):
    steps = Steps(mine, [16, 16, 16, 16])
    steps.step("four sequences of 16 tokens")
    steps.lens, steps.tables = [3], [[steps.tables[2][0]]]
    steps.step("one sequence of 3 tokens")
    found = steps.decode.context_lens.tolist()
    equal(found[1:], [1, 1, 1], "context lengths of the rows that no sequence uses")


# ── The reader's parts in the engine ──────────────────────────────────────────

PROMPTS = ("class Stack:\n    def push(self, item):\n", "import os\n")
NEW_TOKENS = 4


def generate(lm: minikv.LanguageModel, attend_all: Callable) -> str:
    """tinypy with decodes by `attend_all`, prefills by the reference; a sentence about it."""
    prompts = [lm.encode(text) for text in PROMPTS]
    engine = minikv.Engine(
        lm,
        minikv.EngineConfig(num_blocks=16, block_size=16, prefix_cache=False),
        attention=partial(DecodesTogether, attend_all=attend_all),
    )
    params = minikv.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        expected = lm.generate_naively(prompt, NEW_TOKENS)
        if list(output.token_ids) != expected:
            raise Wrong(
                f"{list(output.token_ids)}, the oracle: {expected}",
                "something that no check has: other lengths, other tables, slots with old tokens",
                f"your kernel on contexts of {len(prompt)} tokens and more, in blocks of 16",
            )
    lengths = " and ".join(str(len(prompt)) for prompt in prompts)
    return f"{lengths} prompt tokens, {NEW_TOKENS} new ones each, same tokens as the oracle"


class Programs:
    """Calls a function, and counts the programs that it starts."""

    def __init__(self, function: Callable):
        self.function, self.calls, self.rows = function, 0, 0

    def __call__(self, q, kv, block_tables, context_lens):
        self.calls += 1
        self.rows += len(q)
        return self.function(q, kv, block_tables, context_lens)


def run_decodes(name: str, each: Callable, mine, lm: minikv.LanguageModel) -> str:
    function = Programs(getattr(mine, name))
    said = generate(lm, function)
    programs = function.rows * each(lm.config)
    return f"{said}: {function.calls} calls of `{name}`, {programs:,} programs of your kernel."


def by_heads(config) -> int:
    return config.num_heads


def by_kv_heads(config) -> int:
    return config.num_kv_heads


def by_splits(config) -> int:
    return 4 * config.num_kv_heads


runs_model("08.3")(partial(run_decodes, "decode", by_heads))
runs_model("08.4")(partial(run_decodes, "decode_packed", by_kv_heads))
runs_model("08.5")(partial(run_decodes, "decode_split", by_splits))


@runs_model("08.6")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on a captured step for each layer."""
    steps = {}

    def replay(q, kv, block_tables, context_lens):
        if kv.data_ptr() not in steps:  # a layer's
            step = mine.CapturedDecode(kv, q.shape[1], max_seqs=2, max_blocks=4)
            step.graph = Recording(step.graph)
            steps[kv.data_ptr()] = step
        return steps[kv.data_ptr()].replay(q, block_tables, context_lens).clone()

    said = generate(lm, replay)
    played = sum(step.graph.played for step in steps.values())
    return f"{said}: {len(steps)} recordings, one a layer, played {played} times."
