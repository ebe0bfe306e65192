"""Train the head that drafts for tinypy: `python -m minikv train --draft`, minutes on one thread.

The target continues pieces of its training text, most of them greedily: drafts are for what it
writes, not for what others wrote. It then reads all of it once, and what it computes for each token
is kept: the hidden state, and its most likely next token. From these the head learns to guess (see
`minikv.speculative.head`), also from its own guess.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from minikv.checkpoint import BUNDLED, load
from minikv.config import EngineConfig
from minikv.course.workloads.corpus import read_corpus
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams

PROMPT, ANSWER = 96, 160  # tokens of a window
TEMPERATURES = (0.0, 0.0, 0.8)  # in turns
WINDOWS, HELD_OUT = 2048, 128
WIDTH = 256  # of the head's layer
KEPT = 768  # tokens that it can draft: those that the target says most often
TOKENS = 3  # of the text that it sees
DEPTH = 2  # guesses in a row that it learns
ROWS, EPOCHS, LEARNING_RATE = 8, 4, 3e-3  # windows of a step


class Read(NamedTuple):
    """What the target computed, by window and place."""

    token_ids: torch.Tensor  # (N, L)
    hidden: torch.Tensor  # (N, L, hidden_size), float16
    said: torch.Tensor  # (N, L): the most likely next token


@torch.inference_mode()
def read(
    lm: LanguageModel, texts: list[str], num_windows: int, temperatures: tuple[float, ...]
) -> Read:
    """Pieces of texts, each continued by the target."""
    draw = random.Random(num_windows)
    ids = [token for text in texts for token in (0, *lm.encode(text))]
    engine = Engine(lm, EngineConfig(num_blocks=64 * (PROMPT + ANSWER) // 16, prefix_cache=False))
    transformer, places = lm.transformer, torch.arange(PROMPT + ANSWER)
    rows, hidden, said = [], [], []
    with tqdm(total=num_windows, desc="the target writes", mininterval=1) as bar:
        for first in range(0, num_windows, 64):
            starts = [draw.randrange(len(ids) - PROMPT) for _ in range(64)]
            prompts = [ids[start : start + PROMPT] for start in starts]
            params = [
                SamplingParams(
                    max_tokens=ANSWER, ignore_eos=True, seed=first + i,
                    temperature=temperatures[i % len(temperatures)],
                )
                for i in range(64)
            ]  # fmt: skip
            for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
                rows.append(torch.tensor(prompt + output.token_ids))
                found = transformer.forward(rows[-1], places, transformer.attend_naively)
                hidden.append(found.half())
                said.append(transformer.logits(found).argmax(-1))
                bar.update()
    return Read(*map(torch.stack, (rows, hidden, said)))


def guesses(
    head: dict[str, torch.Tensor], embedding: torch.Tensor, data: Read
) -> Iterator[tuple[torch.Tensor, Read]]:
    """For each draft in a row: the hidden states that the head guesses, and the true values."""
    num_places = data.token_ids.shape[1] - DEPTH - TOKENS
    tables = [embedding @ weight for weight in head["from_tokens"]]
    hidden = data.hidden[:, TOKENS : TOKENS + num_places].float()
    for first in range(TOKENS + 1, TOKENS + 1 + DEPTH):
        inner = hidden @ head["from_hidden"]
        for back, table in enumerate(tables):
            token_ids = data.token_ids[:, first - back : first - back + num_places]
            inner = inner + F.embedding(token_ids, table)
        hidden = hidden + F.silu(inner) @ head["to_hidden"]
        yield hidden, Read(*(part[:, first : first + num_places] for part in data))


def train(lm: LanguageModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(20)
    embedding = lm.transformer.embedding
    vocab_size, size = embedding.shape
    data = read(lm, read_corpus().train, WINDOWS, TEMPERATURES)
    kept = torch.bincount(data.said.flatten(), minlength=vocab_size).topk(KEPT).indices
    place_of = torch.full((vocab_size,), -100)  # which cross_entropy leaves out
    place_of[kept] = torch.arange(KEPT)
    head = {
        "from_hidden": torch.randn(size, WIDTH) * size**-0.5,
        "from_tokens": torch.randn(TOKENS, size, WIDTH) * size**-0.5 / embedding.std(),
        "to_hidden": torch.randn(WIDTH, size) * 0.1 * WIDTH**-0.5,
    }
    for weight in head.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(head.values(), lr=LEARNING_RATE, weight_decay=0.01)
    steps = EPOCHS * WINDOWS // ROWS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    bar = tqdm(total=steps, desc="the head learns", mininterval=1)
    for chosen in (rows for _ in range(EPOCHS) for rows in torch.randperm(WINDOWS).split(ROWS)):
        loss = torch.zeros(())
        for hidden, true in guesses(head, embedding, Read(*(part[chosen] for part in data))):
            logits = (hidden @ embedding[kept].T).flatten(0, 1)
            loss = loss + F.cross_entropy(logits, place_of[true.said].flatten()) / DEPTH
            loss = loss + F.smooth_l1_loss(hidden, true.hidden.float()) / DEPTH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()
    bar.close()
    return {name: weight.detach() for name, weight in head.items()} | {"kept": kept}


@torch.inference_mode()
def acceptance(
    lm: LanguageModel, head: dict[str, torch.Tensor]
) -> list[tuple[float, float, float]]:
    """On greedy continuations of held-out text, for each draft in a row: how often it is right
    after the target's own tokens; how often it is surer than a half, and how often right then."""
    data = read(lm, read_corpus().held_out, HELD_OUT, (0.0,))
    out, rows = lm.transformer.embedding[head["kept"]], []
    for hidden, true in guesses(head, lm.transformer.embedding, data):
        p, index = (hidden[:, PROMPT:] @ out.T).softmax(-1).max(-1)
        right = (head["kept"][index] == true.said[:, PROMPT:]).float()
        sure = p > 0.5
        rows.append((right.mean().item(), sure.float().mean().item(), right[sure].mean().item()))
    return rows


CARD = """---
license: psf-2.0
tags: [tiny]
---

# tinypy-head

Drafts for tinypy: a layer on its last hidden state and its newest three tokens
(`minikv/speculative/head.py`). Made by `python -m minikv train --draft`.

| | |
| --- | --- |
| parameters | {params:,}, float16, {size:.2f} MB; embedding and output matrix are tinypy's |
| can draft | {kept} of 2,048 tokens |
| training data | {tokens:,} tokens: pieces of tinypy's training text, each of {prompt} tokens, and what tinypy writes after them |
| training | {minutes:.0f} minutes on one thread, torch {torch} |
| licence | the data's: Python Software Foundation License 2.0 |

Acceptance on greedy continuations of held-out text, {held_out:,} tokens. Each draft is made after
tinypy's own tokens, as if those before it were right.

| draft | right | surer than 0.5 | right then |
| --- | --- | --- | --- |
{rows}
"""  # noqa: E501


def run(out: Path) -> None:
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lm = load(BUNDLED["tinypy"])
        head = train(lm)
        minutes = (time.monotonic() - started) / 60
        rows = acceptance(lm, head)
    finally:
        torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "head.safetensors"
    save_file({n: t.half() if n != "kept" else t.int() for n, t in head.items()}, file)
    card = CARD.format(
        params=sum(t.numel() for n, t in head.items() if n != "kept"),
        size=file.stat().st_size / 1e6, kept=KEPT, prompt=PROMPT, minutes=minutes,
        tokens=WINDOWS * (PROMPT + ANSWER), held_out=HELD_OUT * ANSWER, torch=torch.__version__,
        rows="\n".join(f"| {i} | {a:.1%} | {b:.1%} | {c:.1%} |" for i, (a, b, c) in
                       enumerate(rows, 1)),
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")
