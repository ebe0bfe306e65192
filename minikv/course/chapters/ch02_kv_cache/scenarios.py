"""Chapter 02: two caches layer by layer, the loop around them, chunks, and prefixes."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

import minikv
from minikv.attention import causal_mask, naive_attention
from minikv.course.chapters.ch02_kv_cache.answers import BytesWritten
from minikv.course.harness.checking import (
    Suspect,
    Wrong,
    check,
    close,
    equal,
    plain,
    runs_model,
    tinypy,
)
from minikv.kv_cache import ConcatCache, PreallocatedCache
from minikv.language_model import LanguageModel

# Where to look if nothing more precise is known.
APPENDING = "over which k and v is attention computed, and what is kept for the next call?"
PASSES = "the tokens and the positions of each pass, and the row that its new token comes from"
SLOTS = "which slots are written, and over which is attention computed?"
MASK = "which keys may query i of the chunk see? Which position has it?"

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
PROMPT = "def fib(n):\n    if n"


def small_config(windows: tuple[int | None, ...] = (None,) * LAYERS) -> minikv.ModelConfig:
    """A shape that keeps the checks fast. `attend` needs no more than the shape."""
    return dataclasses.replace(
        tinypy().config, num_layers=len(windows), num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, windows=windows,
    )  # fmt: skip


class Tokens(NamedTuple):
    """q, k, v of some tokens, for every layer."""

    q: torch.Tensor  # (layers, T, H, D)
    k: torch.Tensor  # (layers, T, K, D)
    v: torch.Tensor


def some_tokens(length: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def numbers(heads: int) -> torch.Tensor:
        return torch.randn(LAYERS, length, heads, HEAD_DIM, generator=generator)

    return Tokens(2 * numbers(HEADS), numbers(KV_HEADS), numbers(KV_HEADS))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention under any mask (T, L), to compute what mistakes give. A mask of numbers is
    added to the scores, as PyTorch does."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q, k) * q.shape[-1] ** -0.5
    masked = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = masked.softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v)


def square(num_queries: int, num_keys: int) -> torch.Tensor:
    """The mask whose triangle begins in the wrong corner."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril()


def upper(num_queries: int, num_keys: int) -> torch.Tensor:
    """The mask whose rows and columns have changed places."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries)


def plural(count: int, word: str = "token") -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# ── 02.1 and 02.4: what every cache must do ───────────────────────────────────


K_TWICE = "K was written where V belongs, too: both hold the keys"
OWN_KEYS = "the new tokens' own keys are missing: a query has to see its own position, too"
OWN_KEYS_LOOK = "is attention computed over the tokens of this call as well?"
ONE_PLACE = "all layers keep their tokens in one place"
LAYER_S_OWN = "each layer has an element of its own in `self.k` and `self.v`"


def wrong_outputs(
    tokens: Tokens, layer: int, edges: list[int], windows: tuple[int | None, ...]
) -> Iterator[Suspect]:
    """What plausible mistakes give for the last chunk of those between `edges`."""
    start, end = edges[-2:]
    q, k, v = tokens.q[layer, start:end], tokens.k[layer, :end], tokens.v[layer, :end]
    window, num_new, first = windows[layer], end - start, edges[1]

    def naive(keys, values, window=window):
        return lambda: naive_attention(q, keys, values, window)

    yield Suspect(
        naive(v, k), "K and V have changed places", "which of the two do the scores come from?"
    )
    yield Suspect(naive(k, k), K_TWICE, "what is kept as V?")
    if window is not None:
        yield Suspect(
            naive(k, v, None),
            "the layer's sliding window is not used",
            "what does naive_attention take besides q, k and v?",
        )
    if windows[0] != window:
        yield Suspect(
            naive(k, v, windows[0]),
            "every layer gets the window of layer 0",
            "which element of `self.windows`?",
        )
    if layer > 0:
        calls = [(i, chunk) for chunk in pairwise(edges) for i in range(LAYERS)]
        calls = calls[: calls.index((layer, (start, end))) + 1]
        mixed = (torch.cat([x[i, a:b] for i, (a, b) in calls]) for x in tokens[1:])
        yield Suspect(naive(*mixed), ONE_PLACE, LAYER_S_OWN)
    if start == 0:
        yield Suspect(torch.zeros_like(q), OWN_KEYS, OWN_KEYS_LOOK)  # a sum over no keys
        return
    yield Suspect(
        naive(torch.cat([v[:start], k[start:]]), torch.cat([k[:start], v[start:]])),
        "K is kept as V, and V as K",
        "which of the two goes where?",
    )
    yield Suspect(
        naive(k[start:], v[start:]),
        "the new queries see only the new keys: what is cached is never looked at",
        "over which k and v is attention computed? And is anything kept?",
    )
    yield Suspect(naive(k[:start], v[:start]), OWN_KEYS, OWN_KEYS_LOOK)
    if first < start:
        kept = torch.arange(end) < first
        kept[start:] = True
        yield Suspect(
            naive(k[kept], v[kept]),
            "only the first chunk and the newest are there: what is joined is never kept",
            "what is `self.k[layer]` after the second call?",
        )
    backwards = torch.cat([torch.arange(a, b) for a, b in reversed(list(pairwise(edges)))])
    yield Suspect(
        naive(k[backwards], v[backwards]),
        "the new keys stand before the old ones",
        "the order in which old and new are joined",
    )
    if num_new > 1:
        yield Suspect(
            lambda: attention(q, k, v, square(num_new, end)),
            "the mask is square: the first of the new queries sees only the very first key",
            "the queries stand at the last T of the L positions",
        )


NO_WINDOWS = (None,) * LAYERS


def feed(
    cache,
    tokens: Tokens,
    chunks: list[int],
    windows: tuple[int | None, ...] = NO_WINDOWS,
    done: int = 0,
) -> None:
    """Hand the tokens to the cache in chunks, layer by layer, and compare every result. The
    first `done` chunks are in it already."""
    edges = [0, *accumulate(chunks)]
    for count, (start, end) in enumerate(pairwise(edges), start=2):
        for layer in range(LAYERS if count >= done + 2 else 0):
            q, k, v = (x[layer, start:end].clone() for x in tokens)
            found = cache.attend(layer, q, k, v)
            expected = naive_attention(
                q, tokens.k[layer, :end], tokens.v[layer, :end], windows[layer]
            )
            close(
                found,
                expected,
                f"attend, layer {layer}: {plural(end - start)} after {start}",
                *wrong_outputs(tokens, layer, edges[:count], windows),
            )


def same_as_one_pass(make: Callable, chunks: list[int]) -> None:
    """tinypy's logits at every position, tokens coming in chunks, against the oracle's."""
    lm = tinypy()
    token_ids = lm.encode(PROMPT + " == 0:\n        return")[: sum(chunks)]
    cache, start = make(lm.config), 0
    expected = lm.logits(token_ids)
    for length in chunks:
        chunk = token_ids[start : start + length]
        what = f"logits of tinypy, {plural(length)} after {start}"
        close(lm.logits(chunk, cache), expected[start : start + length], what, tolerance=1e-3)
        start += length
    equal(cache.num_tokens, start, "num_tokens at the end")


# ── 02.1 Append by concatenation ──────────────────────────────────────────────


@check("02.1", "the first tokens attend to each other", look=APPENDING)
def _(mine):
    for length in (6, 1):  # alone, a single token does not tell K twice from K and V swapped
        cache = mine.ConcatCache(small_config())
        feed(cache, some_tokens(length, seed=length), [length])


@check(
    "02.1",
    "K and V of every layer are kept",
    look="what is assigned to `self.k[layer]` and `self.v[layer]`?",
)
def _(mine):
    tokens, cache = some_tokens(6, seed=1), mine.ConcatCache(small_config())
    for start, end in ((0, 3), (3, 6)):
        for layer in range(LAYERS):
            cache.attend(layer, *(x[layer, start:end].clone() for x in tokens))
        for name, kept, new in (("k", cache.k, tokens.k), ("v", cache.v, tokens.v)):
            for layer in range(LAYERS):
                what = f"cache.{name}[{layer}] after {end} tokens"
                if kept[layer] is None:
                    raise Wrong(f"{what}: None, expected {plural(end)}", "nothing is kept")
                other = tokens.v if name == "k" else tokens.k
                close(
                    kept[layer],
                    new[layer, :end],
                    what,
                    Suspect(
                        other[layer, :end],
                        "K is kept as V, and V as K",
                        "which of the two goes where?",
                    ),
                    Suspect(
                        torch.cat([new[layer, start:end], new[layer, :start]]),
                        "the new keys stand before the old ones",
                        "the order in which old and new are joined",
                    ),
                    Suspect(
                        new[layer, start:end] if start else new[layer, :start],
                        "only the newest tokens are kept",
                        "is what was kept before still part of it?",
                    ),
                    Suspect(
                        new[layer, :3],
                        "what is joined is never kept: the next call finds the first chunk alone",
                        "what is `self.k[layer]` after the second call?",
                    ),
                    Suspect(
                        torch.cat([new[layer, :start], new[layer, start:end]], dim=1)
                        if start
                        else new[layer, :start],
                        "joined along the heads, dimension 1, not along the tokens, dimension 0",
                        "the dimension along which old and new are joined",
                    ),
                    Suspect(
                        torch.cat([new[i, :end] for i in range(LAYERS)]), ONE_PLACE, LAYER_S_OWN
                    ),
                )


@check("02.1", "tokens that come one by one see all before them", look=APPENDING)
def _(mine):
    cache = mine.ConcatCache(small_config())
    feed(cache, some_tokens(6, seed=2), [2, 1, 1, 1, 1])


@check("02.1", "chunks of several tokens after a prefix", look=APPENDING)
def _(mine):
    for seed, chunks in enumerate(([4, 3], [1, 2, 5], [7, 1, 3])):
        cache = mine.ConcatCache(small_config())
        feed(cache, some_tokens(sum(chunks), seed), chunks)


@check("02.1", "each layer has its own sliding window", look=APPENDING)
def _(mine):
    windows = (4, None, 2)
    cache = mine.ConcatCache(small_config(windows))
    feed(cache, some_tokens(9, seed=3), [5, 3, 1], windows)


@check("02.1", "num_tokens counts every token once", look=APPENDING)
def _(mine):
    cache, tokens, found = mine.ConcatCache(small_config()), some_tokens(7, seed=4), []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        for layer in range(LAYERS):
            cache.attend(layer, *(x[layer, start:end].clone() for x in tokens))
        found.append(cache.num_tokens)
    equal(
        found,
        [4, 5, 7],
        "num_tokens after chunks of 4, 1 and 2 tokens",
        Suspect([0, 0, 0], "nothing is kept", "what is assigned to `self.k[layer]`?"),
        Suspect([12, 15, 21], ONE_PLACE, LAYER_S_OWN),
        Suspect([4, 1, 2], "only the newest chunk is kept", "is the old part of what is kept?"),
        Suspect(
            [4, 4, 4],
            "what is joined is never kept: the next call finds the first chunk alone",
            "what is `self.k[layer]` after the second call?",
        ),
    )


@check(
    "02.1",
    "tinypy: logits with the cache equal logits without, at every position",
    look="the first position named here: which keys does it need?",
)
def _(mine):
    for chunks in ([10, 1, 1, 1], [4, 7, 1, 3]):
        same_as_one_pass(mine.ConcatCache, chunks)


# ── 02.2 Prefill once, then one token a step ──────────────────────────────────


class Watched:
    """tinypy's transformer, noting what goes through it."""

    def __init__(self):
        self.inner = tinypy().transformer
        self.passes: list[tuple[list[int], list[int]]] = []  # token ids, positions

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def forward(self, token_ids, positions, attend):
        given = (torch.as_tensor(x).flatten().tolist() for x in (token_ids, positions))
        self.passes.append(tuple(given))
        return self.inner.forward(token_ids, positions, attend)


def watched() -> tuple[LanguageModel, Watched]:
    transformer = Watched()
    return LanguageModel("tinypy", transformer, tinypy().tokenizer), transformer


def generate(mine, prompt_ids: list[int], count: int, prefix: list[int] = (), cache=None) -> list:
    """Run the reader's loop after a cached prefix, compare its tokens; the passes it made."""
    lm, transformer = watched()
    cache = ConcatCache(lm.config) if cache is None else cache
    if prefix:
        tinypy().logits(prefix, cache)
    found = mine.generate_with_cache(lm, cache, list(prompt_ids), count)
    expected = tinypy().generate_naively([*prefix, *prompt_ids], count)
    what = f"{plural(count, 'new token')} after a prompt of {len(prompt_ids)}"
    if prefix:
        what += f" that follows {len(prefix)} cached tokens"
    if found is None:
        raise Wrong(f"{what}: None", "nothing is returned", "what stands after the loop?")
    equal(
        found,
        expected,
        what,
        Suspect(
            prompt_ids + expected,
            "the prompt is returned, too",
            "only the new tokens are asked for",
        ),
        Suspect(
            lambda: by_first_rows(prompt_ids, count, prefix),
            "the token is taken after the first row of a pass, not after the last",
            "which row of the logits says what comes next?",
        ),
    )
    return transformer.passes


def by_first_rows(prompt_ids: list[int], count: int, prefix: list[int]) -> list[int]:
    lm, new_ids, fed = tinypy(), [], prompt_ids
    cache = ConcatCache(lm.config)
    if prefix:
        lm.logits(prefix, cache)
    for _ in range(count):
        new_ids.append(int(lm.logits(fed, cache)[0].argmax()))
        fed = new_ids[-1:]
    return new_ids


def passes_of(mine, prompt_ids: list[int], count: int, prefix: list[int] = ()) -> list:
    """The passes that the reader's loop makes, whatever it returns."""
    lm, transformer = watched()
    cache = ConcatCache(lm.config)
    if prefix:
        tinypy().logits(prefix, cache)
    mine.generate_with_cache(lm, cache, list(prompt_ids), count)
    if not transformer.passes:
        raise Wrong("nothing has gone through the model", "no pass is made")
    return transformer.passes


def compare_positions(passes: list, start: int, what: str) -> None:
    """Every token at the number of tokens before it. `start` of them were cached at first."""
    found = [position for _, positions in passes for position in positions]
    lengths = [len(token_ids) for token_ids, _ in passes]
    prompt, rest = lengths[0], len(found) - lengths[0]
    look = "how many tokens are in the cache when a pass begins?"
    again = "in decode the positions begin again at 0"
    own = "positions count from the prompt's own start, though the cache is not empty"

    def placed(prompt_at: int, decode_at: int) -> list[int]:
        return [*range(prompt_at, prompt_at + prompt), *range(decode_at, decode_at + rest)]

    end = start + prompt
    equal(
        found,
        list(range(start, start + len(found))),
        what,
        Suspect(
            [position for length in lengths for position in range(length)],
            again if max(lengths[1:], default=1) == 1 else "in every pass the positions begin at 0",
            look,
        ),
        Suspect(placed(start, 0), again, look),
        Suspect([*range(start, end), *[0] * rest], again, look),
        Suspect(placed(start, end - 1), "in decode tokens stand one position too early", look),
        Suspect(placed(start, end + 1), "in decode tokens stand one position too late", look),
        *(Suspect(placed(*at), own, look) for at in ((0, prompt), (start, prompt), (0, end))),
    )


@check("02.2", "one pass for the prompt, then one token a pass", look=PASSES)
def _(mine):
    prompt_ids, count = tinypy().encode(PROMPT), 5
    length = len(prompt_ids)
    equal(
        [len(token_ids) for token_ids, _ in passes_of(mine, prompt_ids, count)],
        [length] + [1] * (count - 1),
        f"tokens in each pass, {count} new ones after a prompt of {length}",
        Suspect(
            [length + step for step in range(count)],
            "the whole sequence is fed in every pass, so nothing is gained and all is cached twice",
            "what is new since the pass before?",
        ),
        Suspect(
            [1] * (length + count - 1),
            "the prompt is fed token by token: right, but its tokens are all known and can share "
            "one pass",
            "the first pass",
        ),
        Suspect(
            [length] + [1] * count,
            "the last new token is fed, though nobody asks what follows it",
            "how many passes give how many tokens?",
        ),
    )


@check("02.2", "every token at its own position", look=PASSES)
def _(mine):
    prompt_ids, count = tinypy().encode(PROMPT), 5
    what = f"positions of all passes, {count} new tokens after a prompt of {len(prompt_ids)}"
    compare_positions(passes_of(mine, prompt_ids, count), 0, what)


@check("02.2", "the oracle's tokens, from a ConcatCache", look=PASSES)
def _(mine):
    generate(mine, tinypy().encode(PROMPT), 12)


@check("02.2", "the oracle's tokens, from a PreallocatedCache without a slot too many", look=PASSES)
def _(mine):
    prompt_ids, count = tinypy().encode("import os\n\nclass "), 8
    capacity = len(prompt_ids) + count - 1
    try:
        generate(mine, prompt_ids, count, cache=PreallocatedCache(tinypy().config, capacity))
    except ValueError as error:
        raise Wrong(
            f"{count} new tokens after {len(prompt_ids)}, room for {capacity}: {error}",
            "more tokens are fed than necessary: the last new token is fed, or some are fed twice",
            "how many tokens of prompt and answer must go through the model?",
        ) from None


@check("02.2", "a prompt that follows cached tokens", look=PASSES)
def _(mine):
    token_ids, count = tinypy().encode(PROMPT), 4
    prefix, rest = token_ids[:6], token_ids[6:]
    what = f"positions of {len(rest)} prompt tokens and {count} new ones, after 6 cached"
    compare_positions(passes_of(mine, rest, count, prefix), len(prefix), what)
    generate(mine, rest, count, prefix)


@check("02.2", "one new token; a prompt of one token; the prompt stays as it was", look=PASSES)
def _(mine):
    prompt_ids = tinypy().encode(PROMPT)
    generate(mine, prompt_ids, 1)
    generate(mine, prompt_ids[:1], 3)
    given = list(prompt_ids)
    mine.generate_with_cache(tinypy(), ConcatCache(tinypy().config), given, 3)
    if given != prompt_ids:
        raise Wrong(
            f"the prompt had {plural(len(prompt_ids))} before, and {len(given)} after",
            "the new tokens are appended to the caller's own list",
            "which list is appended to?",
        )


# ── 02.3 What appending moves ─────────────────────────────────────────────────


def by_hand(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Counted off a cache that is only lengths: no formula."""
    written, kept = {"concat": 0, "in place": prompt_tokens}, prompt_tokens
    for _ in range(new_tokens - 1):
        kept += 1
        written["concat"] += kept
        written["in place"] += 1
    return written


def number(mine, key: str, prompt_tokens: int, new_tokens: int):
    found = mine.tokens_written(prompt_tokens, new_tokens)
    if not isinstance(found, dict) or key not in found:
        raise Wrong(
            f"tokens_written({prompt_tokens}, {new_tokens}) is {found!r:.80}, without {key!r}",
            "nothing is returned" if found is None else "the keys are not those of the docstring",
            'what is asked for: {"concat": …, "in place": …}',
        )
    return found[key]


def compare_written(mine, key: str, sizes: list[tuple[int, int]]) -> None:
    for prompt, new in sizes:
        steps = new - 1
        suspects = {
            "concat": (
                (
                    new * prompt + new * (new + 1) // 2,
                    "one decode step too many: the last new token is never fed",
                    "the number of decode steps",
                ),
                (
                    steps * prompt + steps * (steps - 1) // 2,
                    "only the old tokens are counted; the new tensor holds the new one as well",
                    "how many tokens has the tensor that torch.cat makes in the first step?",
                ),
                (
                    prompt + steps * prompt + steps * (steps + 1) // 2,
                    "the prompt is counted, but it is kept as the model made it",
                    "what does the docstring say of the prompt?",
                ),
                (
                    steps * (prompt + steps),
                    "every step is counted as if it were the last, the longest",
                    "how long is the tensor in the first step?",
                ),
                (
                    steps * (prompt + 1),
                    "every step is counted as if it were the first, the shortest",
                    "how long is the tensor in the last step?",
                ),
                (
                    prompt + steps,
                    "that is what is written in place: torch.cat writes the old tokens again",
                    "what is in the tensor that torch.cat makes?",
                ),
            ),
            "in place": (
                (
                    prompt + new,
                    "the last new token is counted, but never fed",
                    "which tokens go through the model?",
                ),
                (
                    steps,
                    "the prompt is missing: in place it has to be written like everything else",
                    "what is written in the prefill?",
                ),
            ),
        }[key]
        equal(
            number(mine, key, prompt, new),
            by_hand(prompt, new)[key],
            f"{key!r}, {plural(prompt, 'prompt token')} and {new} new",
            *(Suspect(*suspect) for suspect in suspects),
        )


@check("02.3", "in place: every token that is fed, once", look="which tokens go through the model?")
def _(mine):
    compare_written(mine, "in place", [(5, 3), (1, 2), (10, 16), (170, 64)])


@check("02.3", "torch.cat: the lengths of all tensors", look="list the tensors of a small case")
def _(mine):
    compare_written(mine, "concat", [(5, 3), (1, 2), (10, 16), (170, 64)])


@check("02.3", "a single new token: prefill alone", look="how many decode steps are there then?")
def _(mine):
    for key in ("concat", "in place"):
        compare_written(mine, key, [(1, 1), (9, 1)])


@check(
    "02.3",
    "twice the new tokens: nearly four times the copies",
    look="the sum over the steps: are its terms all the same?",
)
def _(mine):
    short, long = (number(mine, "concat", 1, new) for new in (10_000, 20_000))
    equal(round(long / short, 1), 4.0, "'concat' of 20,000 new tokens over that of 10,000")
    short, long = (number(mine, "in place", 1, new) for new in (10_000, 20_000))
    equal(round(long / short, 1), 2.0, "'in place' of 20,000 new tokens over that of 10,000")


# ── 02.4 Write in place ───────────────────────────────────────────────────────


def make_storage(mine, capacity: int, windows: tuple[int | None, ...] = NO_WINDOWS):
    """A cache whose unwritten slots are NaN, so that looking at one shows. Refused at once if
    its counter goes wrong: then every other fault is only what follows from that."""
    compare_counts(mine)
    return storage_of_nan(mine, capacity, windows)


def storage_of_nan(mine, capacity: int, windows: tuple[int | None, ...] = NO_WINDOWS):
    cache = mine.PreallocatedCache(small_config(windows), capacity)
    cache.kv.fill_(torch.nan)
    return cache


def compare_counts(mine) -> None:
    tokens, cache, found = some_tokens(5, seed=8), storage_of_nan(mine, 40), []
    for start, end in ((0, 4), (4, 5)):
        for layer in range(LAYERS):
            cache.attend(layer, *(x[layer, start:end].clone() for x in tokens))
            found.append(cache.num_tokens)
    look = "under which condition does `num_tokens` change?"
    equal(
        found,
        [0, 0, 4, 4, 4, 5],
        "num_tokens after each of 3 layers, for 4 tokens and then for 1",
        Suspect([0] * 6, "num_tokens never changes", "which layer is to change it?"),
        Suspect(
            [4, 8, 12, 13, 14, 15],
            "every layer counts the tokens, so they count once a layer",
            look,
        ),
        Suspect(
            [4, 4, 4, 5, 5, 5],
            "the first layer counts the tokens: the others then write behind them, and a pass "
            "that dies halfway has counted tokens that not all layers have",
            look,
        ),
        Suspect(
            [0, 4, 4, 4, 5, 5], "the counter moves a layer too early", "the last layer's number"
        ),
        Suspect(
            [0, 0, 4, 4, 4, 1], "num_tokens is set to the new tokens, not raised by them", look
        ),
    )


@check("02.4", "num_tokens moves with the last layer, and with no other", look=SLOTS)
def _(mine):
    compare_counts(mine)


@check(
    "02.4",
    "K and V are in their slots, and nowhere else",
    look="the slots of this chunk: from num_tokens up to num_tokens + T",
)
def _(mine):
    tokens, cache = some_tokens(6, seed=5), make_storage(mine, capacity=9)
    expected = torch.full_like(cache.kv, torch.nan)
    for start, end in ((0, 4), (4, 5), (5, 6)):
        for layer in range(LAYERS):
            cache.attend(layer, *(x[layer, start:end].clone() for x in tokens))
            expected[layer, 0, start:end] = tokens.k[layer, start:end]
            expected[layer, 1, start:end] = tokens.v[layer, start:end]
            compare_slots(cache, expected, tokens, layer, start, end)


def compare_slots(
    cache, expected: torch.Tensor, tokens: Tokens, layer: int, start: int, end: int
) -> None:
    what = f"after layer {layer} of {plural(end - start)} from position {start} on"
    kv = cache.kv
    if not isinstance(kv, torch.Tensor) or kv.shape != expected.shape:
        raise Wrong(
            f"{what}: cache.kv has shape {tuple(getattr(kv, 'shape', ()))}, "
            f"it was {tuple(expected.shape)}",
            "the storage is made anew instead of written",
            "an assignment to a slice writes into the tensor: kv[a:b] = x",
        )
    written = ~kv[..., 0, 0].isnan()  # (layers, 2, capacity)
    wanted = ~expected[..., 0, 0].isnan()
    if torch.equal(written, wanted) and torch.equal(kv[wanted], expected[wanted]):
        return
    here, there = (x[layer, 0].nonzero().flatten().tolist() for x in (written, wanted))
    elsewhere = (written != wanted).any(-1).any(-1).nonzero().flatten().tolist()
    cause = look = None
    if here == there and elsewhere == []:
        difference = f"K or V in slots {here} of layer {layer} are others than were handed over"
        if torch.equal(kv[layer, 1, start:end], tokens.k[layer, start:end]) and torch.equal(
            kv[layer, 0, start:end], tokens.k[layer, start:end]
        ):
            cause, look = K_TWICE, "what is assigned to kv[layer, 1]?"
        elif torch.equal(kv[layer, 0, start:end], tokens.v[layer, start:end]):
            cause, look = "K lies where V should, and V where K", "kv[layer, 0] is K"
        elif start and torch.equal(kv[layer, 0, : end - start], tokens.k[layer, start:end]):
            cause = "the new tokens are written over cached ones"
            look = "the first slot of a chunk"
    elif elsewhere not in ([], [layer]):
        difference = f"layer {layer} was to be written, layer {elsewhere[0]} differs"
    else:
        difference = f"layer {layer} has K in slots {here}, expected {there}"
        if here == there:
            difference = f"layer {layer} has no V in some of the slots {there}"
        elif start and here == list(range(start)):
            cause = "the new tokens are written over cached ones"
            look = "the first slot of a chunk"
    raise Wrong(f"{what}: {difference}", cause, look)


@check("02.4", "tokens that come one by one see all before them", look=SLOTS)
def _(mine):
    feed(make_storage(mine, 6), some_tokens(6, 6), [2, 1, 1, 1, 1])


@check("02.4", "chunks of several tokens, with slots to spare", look=SLOTS)
def _(mine):
    for seed, chunks in enumerate(([4, 3], [1, 2, 5], [7, 1, 3])):
        cache, tokens = make_storage(mine, sum(chunks) + 5), some_tokens(sum(chunks), seed)
        feed(cache, tokens, chunks)


@check("02.4", "each layer has its own sliding window", look=SLOTS)
def _(mine):
    windows = (4, None, 2)
    cache = make_storage(mine, 12, windows)
    feed(cache, some_tokens(9, seed=7), [5, 1, 3], windows)


@check(
    "02.4",
    "the storage stays where it is",
    look="what is assigned to `self.kv`? A slice of it, or all of it?",
)
def _(mine):
    tokens, cache = some_tokens(4, seed=9), make_storage(mine, 8)
    storage = cache.kv  # held on to, or its address might be given out again
    for start, end in ((0, 3), (3, 4)):
        for layer in range(LAYERS):
            cache.attend(layer, *(x[layer, start:end].clone() for x in tokens))
    equal(tuple(cache.kv.shape), tuple(storage.shape), "shape of cache.kv after 4 tokens")
    if cache.kv.data_ptr() != storage.data_ptr():
        raise Wrong(
            "cache.kv lies somewhere else in memory after 4 tokens",
            "a new tensor takes the storage's place: that is the copying this cache avoids",
        )


def refused(cache, new: list[torch.Tensor], what: str) -> None:
    """Layer 0 has to refuse these q, k and v with a ValueError."""
    try:
        cache.attend(0, *new)
    except ValueError:
        return
    except Exception as error:
        wrong = f"{type(error).__name__} ({error}), expected ValueError"
    else:
        wrong = "layer 0 was accepted, expected ValueError"
    raise Wrong(
        f"{what}: {wrong}",
        "too many tokens are not refused with a ValueError: refuse in every layer, before writing",
        "compare with `capacity` before anything is written",
    )


@check(
    "02.4",
    "what does not fit is refused, and nothing has changed",
    look="what is done before it is known whether the tokens fit?",
)
def _(mine):
    tokens, cache = some_tokens(9, seed=10), make_storage(mine, 6)
    feed(cache, tokens, [4])
    before = cache.kv.clone()
    for length in (3, 5):
        new = [x[0, 4 : 4 + length].clone() for x in tokens]
        refused(cache, new, f"{length} tokens into a cache of 6 that holds 4")
        equal(cache.num_tokens, 4, "num_tokens after a refusal")
        if not torch.equal(cache.kv.nan_to_num(9.0), before.nan_to_num(9.0)):
            raise Wrong(
                f"cache.kv has changed after {length} tokens were refused",
                "some of the tokens were written before they were refused",
                "the order of asking and writing",
            )


@check("02.4", "filled to the last slot, also after a refusal", look=SLOTS)
def _(mine):
    tokens, cache = some_tokens(6, seed=11), make_storage(mine, 6)
    feed(cache, tokens, [4])
    twice = [torch.cat([x[0], x[0]]) for x in tokens]
    refused(cache, twice, "12 tokens into a cache of 6 that holds 4")
    try:
        feed(cache, tokens, [4, 2], done=1)
    except ValueError as error:
        raise Wrong(
            f"2 tokens into a cache of 6 that holds 4: refused ({error})",
            "tokens that just fit are refused",
            "is `capacity` itself too many?",
        ) from None


@check(
    "02.4",
    "tinypy: logits with the cache equal logits without, at every position",
    look="the first position named here: which keys does it need?",
)
def _(mine):
    compare_counts(mine)
    for chunks in ([10, 1, 1, 1], [4, 7, 1, 3]):
        same_as_one_pass(lambda c: mine.PreallocatedCache(c, 20), chunks)


# ── 02.5 A chunk after a prefix ───────────────────────────────────────────────


FLOAT_MASK = "a float mask is added to the scores, so 0 and 1 hide nothing: use bool"
FLOAT_MASK_LOOK = "the dtype of the mask"
TURNED_MASK = "the mask is transposed: queries see their own key and those that come after it"
TURNED_MASK_LOOK = "a row of the mask is a query, a column a key"


@check("02.5", "which keys each query sees", look=MASK)
def _(mine):
    for num_queries, num_keys in ((8, 8), (1, 8), (3, 8), (2, 3)):
        # Equal scores, and values that are unit vectors: a weight shows in its own channel.
        q, k = torch.zeros(num_queries, 2, num_keys), torch.zeros(num_keys, 1, num_keys)
        out = mine.fused_attention(q, k, torch.eye(num_keys)[:, None])
        prefix = num_keys - num_queries
        what = f"{plural(num_queries)} after {prefix}"
        if not isinstance(out, torch.Tensor) or out.shape != q.shape:
            close(out, torch.empty_like(q), what)
        found = [row.nonzero().flatten().tolist() for row in out[:, 0] > 1e-6]
        numbers = causal_mask(num_queries, num_keys).float()  # added to scores that are all 0
        if num_queries > 1 and torch.allclose(out[:, 0], numbers.softmax(-1), atol=1e-4):
            seen = f"{what}: query 0 sees all {num_keys} keys, some of them more"
            raise Wrong(seen, FLOAT_MASK, FLOAT_MASK_LOOK)
        if num_queries > 1 and found == [
            list(range(prefix + query, num_keys)) for query in range(num_queries)
        ]:
            raise Wrong(f"{what}: query 0 sees the keys {found[0]}", TURNED_MASK, TURNED_MASK_LOOK)
        for query, seen in enumerate(found):
            expected = list(range(prefix + query + 1))
            equal(
                seen,
                expected,
                f"{what}: keys that query {query} sees",
                Suspect(
                    list(range(query + 1)),
                    "the triangle begins in the upper left corner, as if nothing came before",
                    "which position does query 0 of the chunk have?",
                ),
                Suspect(
                    list(range(num_keys)),
                    "there is no mask: queries see the tokens that come after them",
                    "when may the mask be left out?",
                ),
                Suspect(
                    list(range(prefix, prefix + query + 1)),
                    "the prefix is hidden: queries see only keys of their own chunk",
                    "what does a later chunk need from the tokens before it?",
                ),
                Suspect(expected[:-1], "a query does not see its own key", "< or <=?"),
                Suspect(
                    list(range(prefix + query + 2)),
                    "a query sees one token of its future",
                    "the position that is compared with the key's",
                ),
                Suspect(
                    list(range(prefix + query + 1, num_keys)),
                    "the mask is upside down: True has to mean that the key is seen",
                    "what `attn_mask` means by True",
                ),
                Suspect([], "a query sees nothing at all, which gives NaN", "the mask's first row"),
            )


def some_heads(length: int, num_queries: int, heads: int, kv_heads: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(num_queries, heads, 16, generator=generator)
    k, v = (torch.randn(length, kv_heads, 16, generator=generator) for _ in range(2))
    return q, k, v


def compare_fused(mine, num_queries: int, length: int, heads: int, kv_heads: int) -> None:
    q, k, v = some_heads(length, num_queries, heads, kv_heads, seed=length)
    before = [x.clone() for x in (q, k, v)]
    prefix, group = length - num_queries, heads // kv_heads
    turned = torch.arange(heads) % kv_heads  # query head h with KV head h % K
    close(
        mine.fused_attention(q, k, v),
        naive_attention(q, k, v),
        f"{plural(num_queries)} after {prefix}, {heads} query heads on {kv_heads}",
        Suspect(
            lambda: attention(q, k, v, square(num_queries, length)),
            "the triangle begins in the upper left corner, as if nothing came before",
            "which position does query 0 of the chunk have?",
        ),
        Suspect(
            lambda: attention(q, k, v, torch.ones(num_queries, length, dtype=torch.bool)),
            "there is no mask: queries see the tokens that come after them",
            "when may the mask be left out?",
        ),
        Suspect(
            lambda: attention(q, k, v, causal_mask(num_queries, length).float()),
            FLOAT_MASK,
            FLOAT_MASK_LOOK,
        ),
        Suspect(
            lambda: attention(q, k, v, upper(num_queries, length)),
            TURNED_MASK,
            TURNED_MASK_LOOK,
        ),
        Suspect(
            lambda: naive_attention(q, k[prefix:], v[prefix:]),
            "the prefix is hidden: queries see only keys of their own chunk",
            "what does a later chunk need from the tokens before it?",
        ),
        Suspect(
            lambda: naive_attention(q, k[:, turned], v[:, turned]),
            f"query heads meet the wrong KV heads: a group is {group} neighbours",
            "repeat, or repeat_interleave?",
        ),
    )
    if not all(torch.equal(x, old) for x, old in zip((q, k, v), before, strict=True)):
        raise Wrong(
            "q, k or v are not what they were before the call",
            "the arguments are changed in place",
            "operations whose name ends in _",
        )


@check("02.5", "a whole prompt", look=MASK)
def _(mine):
    for length in (1, 3, 9):
        compare_fused(mine, length, length, 4, 2)


@check("02.5", "one token after a prefix", look=MASK)
def _(mine):
    for length in (7, 2, 33):
        compare_fused(mine, 1, length, 4, 2)


@check("02.5", "a chunk after a prefix", look=MASK)
def _(mine):
    for num_queries, length in ((4, 9), (2, 3), (8, 16), (3, 50), (31, 33)):
        compare_fused(mine, num_queries, length, 4, 2)


@check("02.5", "heads in groups of one, two and three, and all in one", look=MASK)
def _(mine):
    for heads, kv_heads in ((3, 3), (4, 2), (6, 2), (4, 1)):
        compare_fused(mine, 3, 7, heads, kv_heads)


class CacheWith(ConcatCache):
    """A ConcatCache that attends with another function."""

    def __init__(self, config, attend_over):
        super().__init__(config)
        self.attend_over = attend_over

    def attend(self, layer, q, k, v):
        super().attend(layer, q, k, v)
        return self.attend_over(q, self.k[layer], self.v[layer])


@check("02.5", "tinypy: what comes after a prompt, however it is cut", look=MASK)
def _(mine):
    lm = tinypy()
    token_ids = lm.encode(PROMPT)
    expected = lm.logits(token_ids)[-1]
    for cuts in ([], [5], [3], [2, 6], list(range(1, len(token_ids)))):
        cache = CacheWith(lm.config, mine.fused_attention)
        edges = [0, *cuts, len(token_ids)]
        for start, end in pairwise(edges):
            found = lm.logits(token_ids[start:end], cache)[-1]
        pieces = " + ".join(str(end - start) for start, end in pairwise(edges))
        what = f"after a prompt of {pieces} tokens"
        token, right = (lm.decode([int(row.argmax())]) for row in (found, expected))
        equal(token, right, f"the token {what}")
        close(found, expected, f"logits {what}", tolerance=1e-3)


# ── 02.6 The request after the first ──────────────────────────────────────────

PREFIX = '"""Numbers in the order of their size."""\n\n\ndef '
REQUESTS = ("fib(n):\n    if n", "is_even(n):\n    return n", "area(width, height):\n    return")
POSITIONS = "the positions of a request begin again at 0, as if no prefix came before it"
LEFT_OVER = "what earlier requests left in the cache is seen by this one"
AT = "the position of the request's first token"
COUNTER = "how many of the cached tokens count when a request begins?"


def ids_of(*texts: str) -> list[list[int]]:
    return [tinypy().encode(text) for text in texts]


def words(logits: torch.Tensor) -> list[str]:
    """The likeliest token after each row, blanks and line ends visible."""
    texts = [tinypy().decode([int(row.argmax())]) for row in logits]
    return [text.replace(" ", "·").replace("\n", "↵") for text in texts]


@torch.inference_mode()
def continued(
    prefix: list[int], request: list[int], at: int, before: tuple[list[int], ...] = ()
) -> torch.Tensor:
    """Logits of `request` at positions from `at` on, seeing the prefix and then `before`."""
    lm, cache = tinypy(), ConcatCache(tinypy().config)

    def run(token_ids: list[int], start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(token_ids))
        model = lm.transformer
        return model.logits(model.forward(torch.tensor(token_ids), positions, cache.attend))

    run(prefix, 0)
    for earlier in before:
        run(earlier, len(prefix))
    return run(request, at)


def wrong_continuations(
    prefix: list[int], request: list[int], before: tuple[list[int], ...]
) -> Iterator[tuple[Callable[[], torch.Tensor], str, str]]:
    """(logits, cause, look) of plausible mistakes."""
    start, used = len(prefix), sum(map(len, before))

    def logits(at: int, before: tuple[list[int], ...] = ()):
        return lambda: continued(prefix, request, at, before)

    yield logits(0), POSITIONS, AT
    yield logits(start - 1), "the request begins one position too early", AT
    yield logits(start + 1), "the request begins one position too late", AT
    lost = "the prefix is lost: the request is read as if it stood alone"
    yield (lambda: tinypy().logits(request)), lost, COUNTER
    if before:
        yield logits(start, before), LEFT_OVER, COUNTER
        yield logits(start + used, before), LEFT_OVER, COUNTER
        yield logits(0, before), f"{LEFT_OVER}, and its positions begin at 0", AT
        yield logits(start + used), "positions are counted over all requests", AT


def compare_request(
    shared, prefix: list[int], request: list[int], before: tuple[list[int], ...], what: str
) -> None:
    expected = tinypy().logits(prefix + request)[len(prefix) :]
    found = shared.logits(list(request))
    mistakes = list(wrong_continuations(prefix, request, before))
    if isinstance(found, torch.Tensor) and found.shape == expected.shape:
        equal(
            words(found),
            words(expected),
            f"{what}: likeliest token after each of its tokens",
            *(Suspect(lambda m=m: words(m[0]()), *m[1:]) for m in mistakes),
        )
    suspects = (Suspect(*mistake) for mistake in mistakes)
    close(found, expected, f"{what}: logits", *suspects, tolerance=1e-3)


@check("02.6", "the first request", look="which tokens does it see, and at which positions?")
def _(mine):
    prefix, *requests = ids_of(PREFIX, *REQUESTS)
    for request in requests:
        shared = mine.SharedPrefix(tinypy(), list(prefix), len(prefix) + len(request))
        compare_request(shared, prefix, request, (), "a first request")


@check("02.6", "the second request", look="which tokens does it see, and at which positions?")
def _(mine):
    prefix, first, second, _ = ids_of(PREFIX, *REQUESTS)
    shared = mine.SharedPrefix(tinypy(), list(prefix), len(prefix) + len(first) + len(second))
    shared.logits(list(first))
    compare_request(shared, prefix, second, (first,), "a second request")


@check("02.6", "the same request three times: the same tokens", look=COUNTER)
def _(mine):
    prefix, request, *_ = ids_of(PREFIX, *REQUESTS)
    shared = mine.SharedPrefix(tinypy(), list(prefix), len(prefix) + 3 * len(request))
    first, second, third = (words(shared.logits(list(request))) for _ in range(3))
    for times, count, found in ((1, "second", second), (2, "third", third)):
        mistakes = wrong_continuations(prefix, request, (request,) * times)
        equal(
            found,
            first,
            f"likeliest token after each of its tokens, {count} time",
            *(Suspect(lambda m=m: words(m[0]()), *m[1:]) for m in mistakes),
        )


@check("02.6", "ten requests, room for the longest of them", look=COUNTER)
def _(mine):
    prefix, *requests = ids_of(PREFIX, *REQUESTS)
    capacity = len(prefix) + max(map(len, requests))
    shared = mine.SharedPrefix(tinypy(), list(prefix), capacity)
    for count in range(10):
        request = requests[count % len(requests)]
        try:
            found = shared.logits(list(request))
        except ValueError as error:
            raise Wrong(
                f"request {count + 1}: ValueError ({error})",
                LEFT_OVER,
            ) from None
    expected = tinypy().logits(prefix + request)
    mistakes = wrong_continuations(prefix, request, ())
    equal(
        words(found)[-1],
        words(expected)[-1],
        "the token after the tenth request",
        *(Suspect(lambda m=m: words(m[0]())[-1], *m[1:]) for m in mistakes),
    )


@check("02.6", "only the request goes through the model, not the prefix", look="the pass's tokens")
def _(mine):
    lm, transformer = watched()
    prefix, *requests = ids_of(PREFIX, *REQUESTS)
    new = sum(map(len, requests))
    shared = mine.SharedPrefix(lm, list(prefix), len(prefix) + new)
    transformer.passes.clear()
    for request in requests:
        shared.logits(list(request))
    equal(
        sum(len(token_ids) for token_ids, _ in transformer.passes),
        new,
        f"tokens that go through the model in {len(requests)} requests",
        Suspect(
            new + len(requests) * len(prefix),
            "the prefix is computed again for every request: that is the work it was kept for",
            "the pass's tokens",
        ),
    )


@check("02.6", "a request that does not fit is refused; the next one is right", look=COUNTER)
def _(mine):
    prefix, first, second, _ = ids_of(PREFIX, *REQUESTS)
    shared = mine.SharedPrefix(tinypy(), list(prefix), len(prefix) + len(second))
    too_long = (first * 9)[: len(second) + 1]
    try:
        shared.logits(list(too_long))
    except ValueError:
        compare_request(shared, prefix, second, (), "after a refusal")
        return
    raise Wrong(
        f"a request of {len(too_long)} tokens where {len(second)} fit: taken, not refused",
        "there is more room than there should be: the prefix has lost its place",
    )


@check("02.6", "a prefix of one token, requests of one token", look=AT)
def _(mine):
    prefix, request, other, _ = ids_of(PREFIX, *REQUESTS)
    shared = mine.SharedPrefix(tinypy(), list(prefix[:1]), 1 + len(request))
    compare_request(shared, prefix[:1], request, (), "after a prefix of 1 token")
    shared = mine.SharedPrefix(tinypy(), list(prefix), len(prefix) + 2)
    compare_request(shared, prefix, request[:1], (), "a request of 1 token")
    compare_request(shared, prefix, other[:1], (request[:1],), "another request of 1 token")


# ── tinypy on the reader's parts ──────────────────────────────────────────────


def generated(mine, lm: LanguageModel, make: Callable, cuts: list[int], expected: list[int]) -> int:
    """Generate from a prompt in chunks; the bytes of K and V that are then in the cache."""
    prompt_ids, count = lm.encode(PROMPT), len(expected)
    edges = [0, *cuts, len(prompt_ids)]
    cache = make(lm.config, len(prompt_ids) + count - 1)
    for start, end in pairwise(edges[:-1]):
        lm.logits(prompt_ids[start:end], cache)
    found = plain(mine.generate_with_cache(lm, cache, prompt_ids[edges[-2] :], count))
    if found != expected:
        raise AssertionError(
            f"prompt cut at {cuts}: tinypy writes {lm.decode(found)!r}, "
            f"the oracle {lm.decode(expected)!r}"
        )
    return cache.num_tokens * lm.config.kv_bytes_per_token(lm.dtype)


def run_caches(mine, lm: LanguageModel, caches: dict[str, Callable]) -> str:
    count = 24
    expected = lm.generate_naively(lm.encode(PROMPT), count)
    [kept] = {
        generated(mine, lm, make, cuts, expected)
        for make in caches.values()
        for cuts in ([], [4], [1, 2, 7])
    }
    return (
        f"{count} tokens with {' and '.join(caches)}, the prompt in 1, 2 and 4 chunks: same tokens "
        f"as the oracle, {kept:,} bytes of K and V kept"
    )


@runs_model("02.1")
def _(mine, lm):
    return run_caches(mine, lm, {"your ConcatCache": lambda c, _: mine.ConcatCache(c)})


@runs_model("02.2")
def _(mine, lm):
    caches = {
        "your loop on a ConcatCache": lambda c, _: mine.ConcatCache(c),
        "on a PreallocatedCache": mine.PreallocatedCache,
    }
    return run_caches(mine, lm, caches)


@runs_model("02.3")
def _(mine, lm):
    prompt_ids, count = lm.encode(PROMPT), 24
    caches = {
        "concat": ConcatCache(lm.config),
        "in place": PreallocatedCache(lm.config, len(prompt_ids) + count - 1),
    }
    size, found = lm.config.kv_bytes_per_token(lm.dtype), {}
    for name, cache in caches.items():
        with BytesWritten() as written:
            mine.generate_with_cache(lm, cache, prompt_ids, count)
        found[name] = written.total
    predicted = plain(mine.tokens_written(len(prompt_ids), count))
    if found != {name: size * tokens for name, tokens in predicted.items()}:
        raise AssertionError(
            f"the caches wrote {found} bytes, {size} a token; not {predicted} tokens"
        )
    return (
        f"{count} tokens after {len(prompt_ids)}: tinypy's caches wrote {found['concat']:,} bytes "
        f"by torch.cat and {found['in place']:,} in place, as you predicted"
    )


@runs_model("02.4")
def _(mine, lm):
    return run_caches(mine, lm, {"your PreallocatedCache": mine.PreallocatedCache})


@runs_model("02.5")
def _(mine, lm):
    caches = {"your fused_attention": lambda c, _: CacheWith(c, mine.fused_attention)}
    return run_caches(mine, lm, caches)


@runs_model("02.6")
def _(mine, lm):
    prefix, *requests = ids_of(PREFIX, *REQUESTS)
    shared = mine.SharedPrefix(lm, prefix, len(prefix) + max(map(len, requests)))
    for request in requests:
        found = int(shared.logits(request)[-1].argmax())
        [expected] = lm.generate_naively(prefix + request, 1)
        if found != expected:
            raise AssertionError(
                f"after {lm.decode(request)!r} tinypy says {lm.decode([found])!r}, "
                f"the oracle {lm.decode([expected])!r}"
            )
    total, new = len(requests) * len(prefix) + sum(map(len, requests)), sum(map(len, requests))
    return (
        f"{len(requests)} requests after a prefix of {len(prefix)} tokens: same tokens as the "
        f"oracle, {new + len(prefix)} tokens computed instead of {total}"
    )
