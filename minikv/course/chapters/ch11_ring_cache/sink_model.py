"""A model of two layers that has attention sinks, and texts that ask for a fact from far back.

    lm = load()
    ids = passkey_texts(1, 1024)[0]      # the passkey follows the token ASK

tinypy has no sinks and makes no use of distant text, so it cannot show what either is good for.
This model was trained on texts of 256 made-up tokens. Most tokens follow from the one before. Two
things need attention: one of REPEAT is followed by the word before it, and ASK by the digit that
followed KEY. Elsewhere a head that looks for these finds nothing (the task is like Bigram-Backcopy
of Guo et al., 2024, "Active-Dormant Attention Heads").

    python -m minikv.course.chapters.ch11_ring_cache.sink_model

trains it again and writes the weights beside this file: about 3 minutes on one core.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from minikv.config import ModelConfig
from minikv.language_model import LanguageModel
from minikv.model import Transformer

WEIGHTS = Path(__file__).with_suffix(".safetensors")
START, WORDS, REPEAT, KEY, DIGITS, ASK = 0, range(1, 33), range(33, 37), 37, range(38, 54), 54
CONTEXT = 256
CONFIG = ModelConfig(
    vocab_size=56, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_context=CONTEXT, rms_norm_eps=1e-6, tie_embeddings=False,
    attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, rope_theta=10_000.0,
    rope_scaling=None, windows=(None, None), eos_ids=(START,),
)  # fmt: skip
_draw = Random(0)
FOLLOWERS = {word: _draw.sample(list(WORDS), 4) for word in WORDS}


def text(
    length: int, draw: Random, key_at: int | None = None, ask_at: int | None = None
) -> list[int]:
    """`length` tokens: KEY and a digit at position `key_at`, ASK and this digit from `ask_at` on.

    None: drawn, with three places for ASK. KEY is missing if a repeated word stands there; one
    text in ten has no answer.
    """
    digit = draw.choice(DIGITS)
    if key_at is None:
        key_at = draw.randrange(8, length // 2)
    asks = draw.sample(range(key_at + 4, length - 2), 3) if ask_at is None else [ask_at]
    asks.sort()
    ids, word = [START], draw.choice(WORDS)
    while len(ids) < length:
        if len(ids) == key_at:
            ids += [KEY, digit]
        elif asks and len(ids) >= asks[0]:
            del asks[0]
            ids += [ASK, digit]
        else:
            word = draw.choices(FOLLOWERS[word], (7, 1, 1, 1))[0]
            ids.append(word)
            if draw.random() < 0.1:
                ids += [draw.choice(REPEAT), word]
    return ids[:length]


def passkey_texts(count: int, length: int) -> list[list[int]]:
    """Texts with KEY within the first 120 positions and ASK at the end."""
    draw = Random(11)
    texts: list[list[int]] = []
    while len(texts) < count:
        ids = text(length, draw, draw.randrange(20, 120), length - 24)
        if KEY in ids:
            texts.append(ids)
    return texts


def load() -> LanguageModel:
    """The stored model, without a tokenizer: its texts are token ids."""
    device = torch.device("cpu")
    transformer = Transformer(CONFIG, load_file(WEIGHTS), device, torch.float32)
    return LanguageModel("sinks", transformer, None)


def finds_passkey(logits: torch.Tensor, ids: Sequence[int]) -> bool:
    """Whether the likeliest token after ASK is the digit: logits (T, vocab_size) of T tokens."""
    at = ids.index(ASK)
    return int(logits[at].argmax()) == ids[at + 1]


def train(steps: int = 1500, rows: int = 16) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    c = CONFIG
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim, max_position_embeddings=CONTEXT, rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=False, pad_token_id=None,
        )
    )  # fmt: skip
    most, draw = 3e-3, Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=most, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = most * min(1, (step + 1) / 50) * (1 - step / steps)
        batch = torch.tensor([text(CONTEXT + 1, draw) for _ in range(rows)])
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none")
        asked = losses[batch[:, :-1] == ASK].mean()
        (losses.mean() + 0.2 * asked).backward()  # one token in 256: it would be learned late
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: {losses.mean():.3f} nats per token, {asked:.3f} after ASK")
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(state, WEIGHTS)


if __name__ == "__main__":
    train()
