"""What is told of single tokens: their bytes are those of the text, wherever it is cut."""

import random

import pytest
from text_case import BYTES, DECODERS, tokenizer_like

from minikv.outputs import Delta
from minikv.serving.app import Chat, Completion
from minikv.serving.requests import CompletionRequest
from minikv.serving.scores import Token
from minikv.serving.spelling import Places, Spelling

FAMILIES = [*DECODERS, "byte level"]


def written(rng, tokenizer):
    """Ids of a text, with special tokens in it, and characters of which each byte is a token."""
    ids = []
    for _ in range(rng.randint(1, 12)):
        if tokenizer.token_to_id(BYTES[0]) is None:
            ids += tokenizer.encode(rng.choice(["é", "🙂", " the cat", "中", "a", " "])).ids
            ids += [tokenizer.token_to_id("<|endoftext|>")] * rng.randrange(2)
            continue
        names = [BYTES[byte] for byte in rng.choice("é中🙂 \n").encode()]
        if tokenizer.decode([tokenizer.token_to_id(BYTES[65])]) != "A":
            names = ["a"]  # a tokenizer that reads no bytes
        words = ["▁the", "▁cat", "a", "▁", "▁▁", "中", "▁é", "</s>"]
        ids += [tokenizer.token_to_id(name) for name in rng.choice([names, [rng.choice(words)]])]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_and_places_are_those_of_the_text(family):
    """Each token's bytes stand at its place: only the first blank may be missing in the text."""
    tokenizer, rng = tokenizer_like(family), random.Random(3)
    spelling, num_parts = Spelling(tokenizer), 0
    for _ in range(200):
        ids = written(rng, tokenizer)
        text, places, at = tokenizer.decode(ids), Places(spelling), 0
        data = text.encode()
        said = b"".join(spelling.bytes_of(one) for one in ids if not spelling.is_special(one))
        assert said in (data, b" " + data, b"  " + data if family == "metaspace" else data)
        assert spelling.places(ids, len(text)) == [places.take(one) for one in ids]
        assert places.end == len(text)
        places, missing = Places(spelling), len(said) - len(data)
        for one in ids:
            place = places.take(one)
            if not spelling.is_special(one):
                start = max(0, at - missing)
                at += len(spelling.bytes_of(one))
                assert place == len(data[:start].decode(errors="ignore"))
            num_parts += spelling.text_of(one).startswith("bytes:")
    assert num_parts > 20 or family == "no fallback"


def test_a_token_says_what_it_adds_to_a_text():
    llama = Spelling(tokenizer := tokenizer_like("llama"))

    def said(spelling, name):
        token_id = tokenizer.token_to_id(name)
        return spelling.text_of(token_id), [*spelling.bytes_of(token_id)]

    assert said(llama, "▁the") == (" the", [*b" the"]) and said(llama, "▁") == (" ", [32])
    assert said(llama, "a") == ("a", [97]) and said(llama, "<0x41>") == ("A", [65])
    assert said(llama, "<0xC3>") == ("bytes:\\xc3", [195])
    assert said(llama, "</s>") == ("</s>", [*b"</s>"])
    assert said(Spelling(tokenizer := tokenizer_like("no fallback")), "<0x41>")[0] == "<0x41>"
    assert llama.bytes_of(10**6) == b"" and llama.text_of(10**6) == ""
    tokenizer = tokenizer_like("byte level")
    spelling = Spelling(tokenizer)
    assert [spelling.bytes_of(one) for one in tokenizer.encode("é").ids] == [b"\xc3", b"\xa9"]
    assert spelling.text_of(0) == "<|endoftext|>"


def test_places_in_a_prompt_of_which_special_tokens_were_written_or_added():
    tokenizer = tokenizer_like("llama")
    spelling = Spelling(tokenizer)
    ids = [tokenizer.token_to_id(name) for name in ("<s>", "▁the", "▁cat", "</s>", "a")]
    assert spelling.places(ids, len("the cata")) == [0, 0, 3, 7, 7]
    assert spelling.places(ids[1:], len("the cat</s>a")) == [0, 3, 7, 11]


def told(token_id, *top):
    token = Token(token_id)
    token.logprob, token.top = -1.0, [(one, -1.0 - i) for i, one in enumerate(top)]
    return token


def test_log_probabilities_name_each_token():
    """Also those of parts of characters, and those that differ in a blank."""
    tokenizer = tokenizer_like("llama")
    spelling = Spelling(tokenizer)
    names = ("<0xC3>", "<0xA9>", "<0xE4>", "▁the", "▁")
    first, second, *_ = ids = [tokenizer.token_to_id(name) for name in names]
    tokens = [told(first, *ids), told(second, *ids)]
    chunk = Chat(spelling).chunk(0, Delta(tokens, "é", "stop"), is_first=True)
    content = chunk["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[195], [169]]
    assert [one["bytes"] for one in content[0]["top_logprobs"]][2:] == [[228], [*b" the"], [32]]
    body = CompletionRequest(prompt="x", logprobs=5)
    shape = Completion(spelling, lambda index: "", body)
    logprobs = shape.chunk(0, Delta(tokens, "é", None), is_first=True)["logprobs"]
    assert [len(one) for one in logprobs["top_logprobs"]] == [5, 5]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 0]
    the = tokenizer.token_to_id("▁the")
    chunk = shape.chunk(0, Delta([told(the), told(the)], " the the", "stop"), is_first=False)
    assert chunk["logprobs"]["text_offset"] == [1, 5]
    assert chunk["logprobs"]["tokens"] == [" the", " the"]
