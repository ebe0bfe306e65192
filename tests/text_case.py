"""Tokenizers of every kind of decoder, and token ids that text may be made of."""

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

import minikv

WORDS = ("▁", "▁the", "▁cat", "a", "s", "é", "中", "▁▁", "\n", ".", "▁é")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE, FUSE = decoders.Replace("▁", " "), decoders.Fuse()
DECODERS = {
    "llama": [REPLACE, decoders.ByteFallback(), FUSE, decoders.Strip(" ", 1, 0)],
    "gemma": [REPLACE, decoders.ByteFallback(), FUSE],
    "metaspace": [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), FUSE],
    "no fallback": [REPLACE, FUSE, decoders.Strip(" ", 1, 0)],  # <0xFF> is a word
}


def tokenizer_like(family):
    """Of few words, and a token for each byte."""
    if family == "byte level":
        return Tokenizer.from_file(str(minikv.BUNDLED["tinypy"] / "tokenizer.json"))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(DECODERS[family])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def drawn(rng, tokenizer):
    """Token ids of words, whole characters, halves of some, bytes of any kind, special tokens."""

    def of(text):
        if tokenizer.token_to_id(BYTES[0]) is None:
            return tokenizer.encode(text).ids
        return [tokenizer.token_to_id(BYTES[byte]) for byte in text.encode()]

    ids = []
    for _ in range(rng.randint(1, 12)):
        one = of(rng.choice("\n .éñ中文字🙂👍🏽aZ"))
        kind = rng.randrange(6)
        if kind == 0:
            one = one[: rng.randint(1, len(one))]
        elif kind == 1:
            one = [rng.randrange(tokenizer.get_vocab_size())]
        elif kind == 2:
            names = ["<s>", "</s>"] if tokenizer.token_to_id("<s>") else ["<|endoftext|>"]
            one = [tokenizer.token_to_id(rng.choice(names))]
        elif kind == 3:
            one = tokenizer.encode(
                rng.choice(["the cat", "a", " s.", "中"]), add_special_tokens=False
            ).ids
        ids += one
    return ids
