"""Train tinypy, the bundled model, on the source of Python's standard library.

    python -m minikv train                 # about 70 minutes on two CPU cores
    python -m minikv train --hybrid        # tinypy-hybrid: its attention learns to do with windows
    python -m minikv train --states        # tinypy-states: linear layers learn to do without K, V
    python -m minikv train --evaluate      # bits per byte of the bundled checkpoints
    python -m minikv train --draft         # the head that drafts for it, in minutes
    python -m minikv train --draft model   # the small model that does

Every reader has the training data: it is the `Lib` folder of the Python that
runs this script. The run is seeded, shows its progress, writes its state every
few minutes, and goes on from there when it is started again.

The recipe is short: a byte-level BPE tokenizer, a Llama with grouped-query
attention, Muon for the matrices (Jordan et al., 2024; `torch.optim.Muon`) and
AdamW for the rest, a learning rate that falls linearly to zero, and sequences
that grow from 256 to the model's 1,024 tokens.

tinypy-hybrid is tinypy with a window on four of five layers; tinypy-states has linear
layers in the place of three. Only what takes attention's place learns, and not from the
text but from tinypy's own probabilities for every next token (Hinton et al., 2015): these
are much less noisy. A new linear layer first learns alone to answer as the attention in
its place did (Bick et al., 2024, arXiv 2408.10189).
"""

import argparse
import json
import lzma
import math
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from minikv.checkpoint import BUNDLED, load, read_weights
from minikv.course.authoring import train_draft, train_head
from minikv.course.workloads.corpus import Corpus, read_corpus
from minikv.engine import Engine
from minikv.sampling import SamplingParams
from minikv.speculative import DRAFT_MODELS, HEADS

SEED = 20
VOCAB_SIZE = 2048
CONTEXT = 1024
END_OF_TEXT = "<|endoftext|>"
BATCH_TOKENS = 8192
MODEL: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=608, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
# Long sequences cost more attention; the model needs them only once it can write.
Phases = tuple[tuple[int, float], ...]  # (sequence length, share of the tokens)
PHASES = ((256, 0.60), (512, 0.25), (1024, 0.15))
HYBRID_PHASES = ((512, 1.0),)  # longer than the window, which is what it is about
LEARNED, TINYPY = "attention.safetensors", "../tinypy/model.safetensors"
WINDOW, FULL = "sliding_attention", "full_attention"
WINDOWS: dict[str, Any] = dict(
    sliding_window=64, layer_types=[WINDOW, WINDOW, WINDOW, FULL, WINDOW]
)
LINEAR = "linear_attention"
STATES: dict[str, Any] = MODEL | dict(
    rope_parameters=MODEL["rope_parameters"] | {"partial_rotary_factor": 1.0},
    layer_types=[FULL, LINEAR, LINEAR, FULL, LINEAR], linear_conv_kernel_dim=4,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
    linear_value_head_dim=64,
)  # fmt: skip
STATES_PHASES = ((256, 1.0),)
STATES_BATCH = 4096  # tokens: few are learned from, so steps are worth more than their size
LAYERWISE = 0.35  # share of the tokens from which each layer learns alone
TIME_SCALES = [8.0, 32.0, 128.0, 512.0]  # tokens after which a new layer's heads forget

# A run of blanks stays with the newline before it: indentation is one token.
SPLIT = Regex(r"\n[ \t]*|[ ]?[A-Za-z_]+|[ ]?[0-9]|[ ]?[^\sA-Za-z_0-9]+|[ \t]+|\s+")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; `<|endoftext|>` is id 0 and starts every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def windows(texts_ids: list[list[int]], length: int, epoch: int) -> torch.Tensor:
    """All texts in a new order, joined and cut: (num_windows, length + 1) int64."""
    order = random.Random(f"{SEED}-{length}-{epoch}")
    shuffled = texts_ids.copy()
    order.shuffle(shuffled)
    token_ids = [token for ids in shuffled for token in ids]
    stream = torch.tensor(token_ids[order.randrange(length) :])
    rows = stream.unfold(0, length + 1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))]


def batches(
    texts_ids: list[list[int]], num_tokens: float, phases: Phases, start: int,
    batch_tokens: int = BATCH_TOKENS,
):  # fmt: skip
    """Batches (rows, length + 1) from step `start` on, the same whenever they are made."""
    step = 0
    for length, share in phases:
        rows = batch_tokens // length
        steps = round(num_tokens * share / batch_tokens)
        epoch, at, data = 0, 0, windows(texts_ids, length, 0)
        for _ in range(steps):
            if at + rows > len(data):
                epoch, at = epoch + 1, 0
                data = windows(texts_ids, length, epoch)
            if step >= start:
                yield data[at : at + rows]
            at, step = at + rows, step + 1


def bits_per_byte(model, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Negative log2 likelihood of `texts` over their length in UTF-8 bytes.

    Each text stands alone after `<|endoftext|>`, in windows of the full context
    that overlap by half, so every token past the first window is predicted from
    at least CONTEXT / 2 tokens.
    """
    nats, num_bytes = 0.0, 0
    for text in tqdm(texts, desc="held-out modules"):
        ids = torch.tensor([0, *tokenizer.encode(text).ids])
        num_bytes += len(text.encode())
        done = 1  # ids[:done] are scored
        while done < len(ids):
            end = min(len(ids), CONTEXT if done == 1 else done + CONTEXT // 2)
            window = ids[max(0, end - CONTEXT) : end]
            with torch.inference_mode():
                logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
            nats += losses[-(end - done) :].double().sum().item()
            done = end
    return nats / math.log(2) / num_bytes


def optimizers(
    named: Iterable[tuple[str, torch.Tensor]], muon: float, adam: float, decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Muon on the matrices inside the layers, AdamW on all else, with these learning rates."""
    everything = list(named)
    matrices = [p for name, p in everything if p.ndim == 2 and "layers" in name]
    other = [p for name, p in everything if p.ndim != 2 or "layers" not in name]
    return [
        torch.optim.Muon(matrices, lr=muon, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save_atomically(state: dict, path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def learn(
    model, opts: list[torch.optim.Optimizer], loss_of: Callable, data: Callable, total: int,
    state_file: Path, warm_up: int = 50,
) -> float:  # fmt: skip
    """`total` steps on the batches that `data(step)` gives from a step on. The state is written
    every two minutes, and read if there is one. Returns how many seconds the steps took."""
    base_lrs = [group["lr"] for opt in opts for group in opt.param_groups]
    step, seconds = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
    bar = tqdm(total=total, initial=step, unit="step", smoothing=0.02, mininterval=1)
    saved_at = started = time.monotonic()
    for batch in data(step):
        scale = min(1.0, (step + 1) / warm_up) * (1 - step / total)  # warm up, then down to zero
        groups = [group for opt in opts for group in opt.param_groups]
        for group, lr in zip(groups, base_lrs, strict=True):
            group["lr"] = lr * scale
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        step += 1
        bar.update()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if time.monotonic() - saved_at > 120 or step == total:
            saved_at = time.monotonic()
            state = {
                "model": model.state_dict(),
                "optimizers": [opt.state_dict() for opt in opts],
                "step": step,
                "seconds": seconds + saved_at - started,
            }
            save_atomically(state, state_file)
    bar.close()
    return torch.load(state_file)["seconds"]


def steps_of(phases: Phases, num_tokens: float, batch_tokens: int = BATCH_TOKENS) -> int:
    return sum(round(num_tokens * share / batch_tokens) for _, share in phases)


def train(out: Path, num_tokens: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    corpus = read_corpus()
    tokenizer_file = out / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(corpus.train).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts_ids = [[0, *encoding.ids] for encoding in tokenizer.encode_batch(corpus.train)]
    print(f"{sum(map(len, texts_ids)):,} training tokens")
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))

    def loss_of(batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, 1:].flatten()
            )

    if shutil.which("g++"):  # without a compiler the same step runs, a third slower
        loss_of = torch.compile(loss_of)
    data, total = partial(batches, texts_ids, num_tokens, PHASES), steps_of(PHASES, num_tokens)
    opts = optimizers(model.named_parameters(), 0.01, 0.006, 0.1)
    seconds = learn(model, opts, loss_of, data, total, out / "state.pt")
    export(model, tokenizer, corpus, out / "tinypy", num_tokens, seconds)


def read_texts() -> list[list[int]]:
    """The training texts, in tinypy's tokens."""
    tokenizer = Tokenizer.from_file(str(BUNDLED["tinypy"] / "tokenizer.json"))
    return [[0, *encoding.ids] for encoding in tokenizer.encode_batch(read_corpus().train)]


def train_hybrid(out: Path, num_tokens: int) -> None:
    """tinypy with windows, whose attention learns to give tinypy's probabilities."""
    from transformers import AutoModelForCausalLM, MinistralConfig, MinistralForCausalLM

    tinypy = AutoModelForCausalLM.from_pretrained(BUNDLED["tinypy"], dtype=torch.float32)
    model = MinistralForCausalLM(MinistralConfig(**MODEL, **WINDOWS))
    model.load_state_dict(tinypy.state_dict())
    learned = [name for name, _ in model.named_parameters() if "self_attn" in name]
    model.requires_grad_(False)
    parameters = [model.get_parameter(name).requires_grad_() for name in learned]
    opt = torch.optim.AdamW(parameters, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    tokenizer = Tokenizer.from_file(str(BUNDLED["tinypy"] / "tokenizer.json"))
    before = bits_per_byte(model, tokenizer, read_corpus().held_out)
    data = partial(batches, read_texts(), num_tokens, HYBRID_PHASES)
    total = steps_of(HYBRID_PHASES, num_tokens)
    loss_of = partial(divergence, model, tinypy)
    seconds = learn(model, [opt], loss_of, data, total, out / "hybrid-state.pt")
    write_difference(model, tinypy, learned, out, "hybrid", num_tokens, seconds, before=before)


def train_states(out: Path, num_tokens: int) -> None:
    """tinypy with a state in the place of K and V in three of five layers. Each layer learns to
    answer as tinypy's attention does, to what tinypy's gets; then all learn to give, together,
    tinypy's probabilities."""
    from transformers import AutoModelForCausalLM

    tinypy = AutoModelForCausalLM.from_pretrained(BUNDLED["tinypy"], dtype=torch.float32)
    torch.set_flush_denormal(True)  # what is nearly forgotten is slow to multiply with
    model = states_from(tinypy)
    kept = ("mlp.", "embed_tokens", "o_proj")
    learned = [n for n, _ in model.named_parameters() if not any(part in n for part in kept)]
    model.requires_grad_(False)
    parameters = [(name, model.get_parameter(name).requires_grad_()) for name in learned]
    asked: dict[int, tuple[dict[str, Any], torch.Tensor]] = {}
    for i, layer in enumerate(tinypy.model.layers):
        layer.self_attn.register_forward_hook(
            lambda _, args, kwargs, answer, i=i: asked.update({i: (kwargs, answer[0])}),
            with_kwargs=True,
        )

    def layerwise(batch):
        with torch.no_grad():
            tinypy.model(input_ids=batch[:, :-1], use_cache=False)
        loss = 0.0
        for i, layer in enumerate(model.model.layers):
            kwargs, wanted = asked[i]
            if STATES["layer_types"][i] == FULL:
                answer = layer.self_attn(**kwargs)[0]
            else:
                answer = layer.linear_attn(kwargs["hidden_states"])
            loss = loss + (answer - wanted).square().sum() / wanted.square().sum()
        return loss

    texts_ids, seconds = read_texts(), 0.0
    for name, loss_of, share, lr in (
        ("layers", layerwise, LAYERWISE, 0.02),
        ("states", partial(divergence, model, tinypy), 1 - LAYERWISE, 0.01),
    ):
        opts = optimizers(parameters, lr, lr / 4)
        size, phases = share * num_tokens, STATES_PHASES
        data = partial(batches, texts_ids, size, phases, batch_tokens=STATES_BATCH)
        total = steps_of(phases, size, STATES_BATCH)
        file = out / f"{name}-state.pt"
        seconds += learn(model, opts, loss_of, data, total, file, warm_up=10)
    write_difference(model, tinypy, learned, out, "states", num_tokens, seconds)


@torch.no_grad()
def states_from(tinypy):
    """A Qwen3.5 that begins with tinypy's own matrices where these have a part like the new one."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(SEED)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**STATES))
    old, state = tinypy.state_dict(), model.state_dict()
    for name, weight in old.items():
        if name.endswith("norm.weight"):
            state[name] = weight - 1  # these norms multiply by 1 + weight
        elif name in state and state[name].shape == weight.shape:
            state[name] = weight
    heads, size = MODEL["num_attention_heads"], MODEL["head_dim"]
    for i, kind in enumerate(STATES["layer_types"]):
        at = f"model.layers.{i}."
        q, k, v, o = (old[f"{at}self_attn.{name}_proj.weight"] for name in "qkvo")
        by_head = q.view(heads, size, -1)
        if kind == FULL:  # each head's queries, then its output gate: 0 lets through a half
            at += "self_attn."
            gates = torch.zeros_like(by_head)
            state[at + "q_proj.weight"] = torch.cat([by_head, gates], 1).flatten(0, 1)
            state[at + "v_proj.weight"] = 2 * v
            # tinypy has no norms of queries and keys, whose length these shall keep, on average:
            # a layer's inputs have the length of its norm's weights.
            inputs = old[f"model.layers.{i}.input_layernorm.weight"]
            for name, matrix in (("q", q), ("k", k)):
                length = (matrix * inputs).square().sum(1).mean().sqrt()
                state[f"{at}{name}_norm.weight"].fill_(length - 1)
        else:  # two heads of queries, and four of values, where tinypy has four and two
            at += "linear_attn."
            values = v.view(-1, size, v.shape[1]).repeat_interleave(2, 0).flatten(0, 1)
            state[at + "in_proj_qkv.weight"] = torch.cat([by_head[::2].flatten(0, 1), k, values])
            state[at + "out_proj.weight"] = o
            state[at + "in_proj_z.weight"].normal_(std=MODEL["hidden_size"] ** -0.5)
            state[at + "conv1d.weight"].normal_(std=0.05)[:, 0, -1] += 1  # the newest input
            state[at + "A_log"].zero_()
            state[at + "dt_bias"] = torch.tensor(TIME_SCALES).reciprocal().expm1().log()
    model.load_state_dict(state)
    return model


def divergence(model, tinypy, batch) -> torch.Tensor:
    """Of a model's probabilities from tinypy's, in nats per token. In float32: many CPUs multiply
    bfloat16 several times more slowly."""

    def log_probs(model):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return logits.flatten(0, 1).log_softmax(-1)

    with torch.no_grad():
        wanted = log_probs(tinypy)
    return torch.nn.functional.kl_div(
        log_probs(model), wanted, log_target=True, reduction="batchmean"
    )


def write_difference(
    model, tinypy, learned: list[str], out: Path, kind: str, num_tokens: int, seconds: float,
    **bpb: float,
) -> None:  # fmt: skip
    """Write the `learned` parameters of a model, with an index that takes all else from tinypy's
    file, to `out` / tinypy-`kind`. `bpb`: what else its card says of bits per byte."""
    corpus, folder = read_corpus(), out / f"tinypy-{kind}"
    tokenizer = Tokenizer.from_file(str(BUNDLED["tinypy"] / "tokenizer.json"))
    model.half()
    bpb["after"] = bits_per_byte(model.float(), tokenizer, corpus.held_out)
    bpb["tinypy"] = bits_per_byte(tinypy, tokenizer, corpus.held_out)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in learned}, folder / LEARNED)
    files = {name: LEARNED if name in learned else TINYPY for name, _ in model.named_parameters()}
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")
    shutil.copy(BUNDLED["tinypy"] / "tokenizer_config.json", folder)
    card = Path(__file__).with_name(f"tinypy_{kind}_card.md").read_text(encoding="utf-8").format(
        **bpb, tokens=num_tokens / 1e6, minutes=seconds / 60, threads=torch.get_num_threads(),
        params=sum(state[name].numel() for name in learned) / 1e6, torch=torch.__version__,
        size=(folder / LEARNED).stat().st_size / 1e6,
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")


def export(model, tokenizer: Tokenizer, corpus: Corpus, out: Path, num_tokens: int, seconds: float):
    """Write the checkpoint as `transformers` lays it out: float16 weights, tokenizer, a stored
    value for the environment check, and the model card."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    model.half().save_pretrained(out)
    write_golden(out)
    bpb = bits_per_byte(model.float(), tokenizer, corpus.held_out)
    write_card(out, corpus, bpb, num_tokens, seconds)


def write_golden(folder: Path) -> None:
    """What the saved model computes for one prompt, for `python -m minikv doctor` to compare."""
    lm = load(folder)
    text = "def fib(n):"
    token_ids = lm.encode(text)
    logits = lm.logits(token_ids)[-1]
    golden = {
        "text": text,
        "token_ids": token_ids,
        "next_token": int(logits.argmax()),
        "next_logit": round(logits.max().item(), 4),
        "continuation": lm.generate_naively(token_ids, 8),
    }
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


def write_card(folder: Path, corpus: Corpus, bpb: float, num_tokens: int, seconds: float) -> None:
    lm = load(folder)
    held_out = "".join(corpus.held_out).encode()
    xz = 8 * len(lzma.compress(held_out, preset=9)) / len(held_out)
    num_params = sum(t.numel() for t in read_weights(folder).values())
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "README.md")
    prompt = "def binary_search("
    sample = Engine(lm).generate(
        [prompt], SamplingParams(max_tokens=160, temperature=0.9, top_p=0.9, seed=SEED)
    )
    c = lm.config
    template = Path(__file__).with_name("tinypy_card.md").read_text(encoding="utf-8")
    card = template.format(
        params=num_params / 1e6, size=size / 1e6, layers=c.num_layers, hidden=c.hidden_size,
        heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, vocab=c.vocab_size,
        context=c.max_context, kv_bytes=c.kv_bytes_per_token(torch.float32), bpb=bpb, xz=xz,
        held_out_kb=len(held_out) / 1e3, held_out_modules=len(corpus.held_out),
        train_mb=len("".join(corpus.train).encode()) / 1e6, train_modules=len(corpus.train),
        tokens=num_tokens / 1e6, minutes=seconds / 60, python=platform.python_version(),
        torch=torch.__version__, sample=prompt + sample[0].text, seed=SEED,
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("build/train"), help="working folder")
    parser.add_argument(
        "--tokens",
        type=int,
        help="how long to train; default: 20 million, --hybrid 2 million, --states 1.4 million",
    )
    parser.add_argument("--hybrid", action="store_true", help="train only tinypy-hybrid")
    parser.add_argument("--states", action="store_true", help="train only tinypy-states")
    parser.add_argument(
        "--draft", nargs="?", const="head", choices=("head", "model"),
        help="train only what drafts (a few minutes): the head, or the small model",
    )  # fmt: skip
    parser.add_argument(
        "--evaluate", action="store_true", help="only measure the bundled models' bits per byte"
    )


def run(args: argparse.Namespace) -> int:
    if args.evaluate:
        from transformers import AutoModelForCausalLM

        print(f"Bits per byte on the held-out modules of Python {platform.python_version()}:")
        tokenizer = Tokenizer.from_file(str(BUNDLED["tinypy"] / "tokenizer.json"))
        for name, folder in BUNDLED.items():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            print(f"{name}: {bits_per_byte(model, tokenizer, read_corpus().held_out):.3f}")
        return 0
    if args.draft:
        make, place = {
            "head": (train_head.run, HEADS["tinypy"]),
            "model": (train_draft.run, DRAFT_MODELS["tinypy"]),
        }[args.draft]
        make(args.out / place.name)
        print(f"Written to {args.out / place.name}; its place is {place}.")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, tuple[Callable[[Path, int], None], int]] = {
        "tinypy": (train, 20_000_000),
        "tinypy-hybrid": (train_hybrid, 2_000_000),
        "tinypy-states": (train_states, 1_400_000),
    }
    name = "tinypy-hybrid" if args.hybrid else "tinypy-states" if args.states else "tinypy"
    method, num_tokens = kinds[name]
    try:
        method(args.out, args.tokens or num_tokens)
    except KeyboardInterrupt:
        print(f"\nStopped; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    print(f"Written to {args.out / name}; copy it over {BUNDLED[name]} to bundle it.")
    return 0
