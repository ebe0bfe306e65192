"""Train the small model that drafts for tinypy: `python -m minikv train --draft model`.

First it reads tinypy's training text, then what tinypy itself writes: there it learns tinypy's most
likely next token, for that is what a draft must guess.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from minikv.checkpoint import BUNDLED, load
from minikv.course.authoring.train_head import ANSWER, PROMPT, TEMPERATURES, WINDOWS, read
from minikv.course.workloads.corpus import read_corpus

MODEL: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
ROWS, LENGTH, EPOCHS, LEARNING_RATE = 16, PROMPT + ANSWER, 3, 6e-3  # windows of a step; tokens
READING = 10_000  # windows of the training text, before the target's own writing
HELD_OUT = 128  # windows

CARD = """---
license: psf-2.0
tags: [tiny]
---

# tinypy-draft

Drafts for tinypy: a Llama of one layer (`minikv/speculative/draft_model.py`). Made by
`python -m minikv train --draft model`. It has tinypy's tokens, and no tokenizer of its own.

| | |
| --- | --- |
| parameters | {params:,}, float16, {size:.2f} MB |
| training data | {tokens:,} tokens of tinypy's training text; then, {epochs} times, {written:,} tokens that tinypy writes after pieces of it |
| training | {minutes:.0f} minutes on one thread, torch {torch} |
| licence | the data's: Python Software Foundation License 2.0 |

On greedy continuations of held-out text, {held_out:,} tokens, its most likely next token is
tinypy's in {right:.1%}; where it is surer than 0.5 ({sure:.1%}), in {right_then:.1%}.
"""  # noqa: E501


def run(out: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    lm, corpus = load(BUNDLED["tinypy"]), read_corpus()
    size = dict(vocab_size=lm.config.vocab_size, max_position_embeddings=lm.config.max_context)
    rope = {"rope_type": "default", "rope_theta": lm.config.rope_theta}
    model = LlamaForCausalLM(LlamaConfig(**MODEL, **size, rope_parameters=rope))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    stream = torch.tensor([token for text in corpus.train for token in (0, *lm.encode(text))])
    rows = stream.unfold(0, LENGTH + 1, LENGTH)
    rows = rows[torch.randperm(len(rows))[:READING]]
    steps = [(part[:, :-1], part[:, 1:]) for part in rows.split(ROWS)]
    written = read(lm, corpus.train, WINDOWS, TEMPERATURES)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(WINDOWS).split(ROWS):
            steps.append((written.token_ids[chosen], written.said[chosen]))

    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=len(steps), pct_start=0.05, anneal_strategy="linear"
    )
    bar = tqdm(steps, desc="the draft model learns", mininterval=1)
    for token_ids, labels in bar:
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    minutes = (time.monotonic() - started) / 60

    held_out = read(lm, corpus.held_out, HELD_OUT, (0.0,))
    with torch.inference_mode():
        logits = model(input_ids=held_out.token_ids, use_cache=False).logits[:, PROMPT:]
    p, guess = logits.softmax(-1).max(-1)
    right, sure = (guess == held_out.said[:, PROMPT:]).float(), p > 0.5
    torch.set_num_threads(threads)
    model.half().save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    card = CARD.format(
        params=model.num_parameters(), size=(out / "model.safetensors").stat().st_size / 1e6,
        tokens=READING * LENGTH, epochs=EPOCHS, written=WINDOWS * LENGTH, minutes=minutes,
        torch=torch.__version__, held_out=right.numel(), right=right.mean().item(),
        sure=sure.float().mean().item(), right_then=right[sure].mean().item(),
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")
