"""Chapter 00 as programs: what the next step of a request computes."""

import random

import minikv
from minikv.course.judge.checking import plain, runs_model, same_as_oracle
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.course.pictures.snapshot import counted
from minikv.kv_cache import ConcatCache

# A program is (token ids, how many of them are computed, budget).


def passes(mine, program, log: Log) -> None:
    token_ids, num_computed, budget = program
    text = f"{counted(len(token_ids), 'token')}, {num_computed} computed, a budget of {budget}"
    found = log.call(text, mine.next_pass, list(token_ids), num_computed, budget, see=False)
    parts = plain(found)
    if not isinstance(parts, tuple | list) or len(parts) != 3:
        log("", {"it returns three things": found is None or f"no, {parts!r}"})
        return
    tokens, positions, gives = parts
    log("", {"tokens": items(tokens), "positions": items(positions), "gives a token": bool(gives)})


def items(found) -> str:
    """Those of any sequence, in words."""
    try:
        return ", ".join(str(int(item)) for item in found) or "none"
    except (TypeError, ValueError):
        return f"{found!r}"


def ids(count: int) -> tuple[int, ...]:
    return tuple(range(101, 101 + count))


def random_pass(seed: int) -> tuple:
    draw = random.Random(seed)
    count = draw.randrange(1, 40)
    token_ids = tuple(draw.randrange(3) for _ in range(count))  # equal tokens, too
    return token_ids, draw.randrange(count), draw.choice([1, 2, 5, 16, 512])


WHICH = "which tokens are not computed yet, and how many of them fit into the budget?"

scenario(
    "00.1", passes,
    Group("the first step computes the whole prompt",
          [(ids(3), 0, 512), (ids(10), 0, 10), (ids(1), 0, 1)], WHICH),
    Group("then each step computes the newest token",
          [(ids(4), 3, 512), (ids(11), 10, 1)], WHICH),
    Group("a prompt that is longer than the budget comes in parts",
          [(ids(10), 0, 4), (ids(10), 4, 4), (ids(10), 8, 4), (ids(10), 6, 4), (ids(5), 0, 1)],
          WHICH),
    Group("a token that comes twice in the text",
          [((7, 7, 7), 1, 512), ((7, 8, 7, 8), 2, 1)], "do you look for the token in the list?"),
    Group("several tokens left of an answer that is computed again",
          [(ids(9), 5, 512), (ids(600), 40, 512)], WHICH),
    Group("24 random ones", [random_pass(seed) for seed in range(24)], WHICH),
)  # fmt: skip


@runs_model("00.1")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Generate by the reader's passes, with a small and a large budget."""
    prompt_ids, count = lm.encode("def fib(n):\n    if n"), 16
    steps = []
    for budget in (4, 512):
        cache, token_ids, done = ConcatCache(lm.config), list(prompt_ids), 0
        steps.append(0)
        while len(token_ids) < len(prompt_ids) + count:
            tokens, positions, gives = mine.next_pass(list(token_ids), done, budget)
            tokens, done, steps[-1] = plain(list(tokens)), done + len(tokens), steps[-1] + 1
            if plain(list(positions)) != list(range(done - len(tokens), done)) or not tokens:
                raise AssertionError(f"tokens {tokens} at positions {list(positions)}")
            logits = lm.logits(tokens, cache)
            if gives:
                token_ids.append(int(logits[-1].argmax()))
        same_as_oracle(lm, prompt_ids, token_ids[len(prompt_ids) :])
    return (
        f"{count} tokens in {steps[0]} passes of at most 4 tokens, and in {steps[1]} of any size: "
        "same tokens as the oracle"
    )
