"""Text to tokens and back, with tokenizers of every kind that checkpoints bring."""

import json
import random
import shutil
import tracemalloc
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import small
from text_case import BYTES, DECODERS, drawn, tokenizer_like
from thorough import thorough_after
from tokenizers import Tokenizer

import minikv
from minikv import Engine, SamplingParams
from minikv.outputs import SampleOutput, SoFar, hits_stop_string, visible_text
from minikv.sequence import Request


@pytest.mark.parametrize(
    "setting",
    thorough_after(1, [
        {"truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst",
                        "direction": "Right"}},
        {"padding": {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    ]),
    ids=["truncation", "padding"],
)  # fmt: skip
def test_a_tokenizer_neither_cuts_nor_fills_up(tinypy, tmp_path, setting):
    """Whatever its file says: a prompt is what was sent."""
    shutil.copytree(tinypy.folder, tmp_path, dirs_exist_ok=True)
    file, text = tmp_path / "tokenizer.json", "def area(width, height):\n    return width * height"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | setting))
    by_itself = Tokenizer.from_file(str(file)).encode(text).ids
    lm = minikv.load(tmp_path)
    assert len(by_itself) != len(lm.encode(text))  # the file does say so
    assert lm.encode(text) == tinypy.lm.encode(text)


@pytest.mark.parametrize("family", ["llama", "gemma", "metaspace"])
def test_a_run_of_bytes_is_text_unless_others_will_follow(llama, family):
    tokenizer = tokenizer_like(family)
    lm = minikv.LanguageModel(family, llama.lm.transformer, tokenizer)
    ids = [tokenizer.token_to_id(BYTES[byte]) for byte in "é".encode()]
    assert lm.decode(ids) == lm.text_of(ids) == "é"
    assert set(lm.decode(ids, is_open=True)) == {"\ufffd"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_who_stops_a_tokenizer_is_told_nothing_of_the_text(llama, error):
    """A panic of its Rust is a fault of the text, and a BaseException as Control-C is."""
    lm = minikv.LanguageModel("stopped", llama.lm.transformer, tokenizer_like("gemma"))
    lm.tokenizer = Mock(encode=Mock(side_effect=error))
    with pytest.raises(error):
        lm.encode("text")


# ── A text in pieces ──────────────────────────────────────────────────────────


def pieces(rng, lm, ids):
    """What a reader gets who comes after some tokens, each time; and what each output says."""
    so_far, at = SoFar(), 0
    while at < len(ids):
        at = min(len(ids), at + rng.choice((1, 1, 2, 5)))
        reason = "length" if at == len(ids) else None
        one = SimpleNamespace(token_ids=ids[:at], finish_reason=reason, stop=(), decode=lm.text_of)
        yield so_far.news(one).text, SampleOutput.text.fget(one)


@pytest.mark.parametrize("family", [*DECODERS, "byte level"])
@pytest.mark.parametrize("number", thorough_after(1, [100, 1500]))
def test_pieces_join_to_the_whole(llama, family, number):
    """Wherever it is cut: in characters, in a run of wrong bytes, behind tokens without a text."""
    tokenizer, rng, num_broken = tokenizer_like(family), random.Random(family), 0
    lm = minikv.LanguageModel(family, llama.lm.transformer, tokenizer)
    for _ in range(number):
        ids = drawn(rng, tokenizer)
        whole, text = tokenizer.decode(ids), ""
        for piece, output in pieces(rng, lm, ids):
            text += piece
            assert whole.startswith(text) and whole.startswith(output) and output == text
        assert text == whole
        num_broken += "\ufffd" in whole
    assert family == "no fallback" or num_broken > number / 10


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_minimal_streams(llama, family):
    """A newline, then half of an emoji: all three are wrong bytes in the end."""
    tokenizer = tokenizer_like(family)
    lm = minikv.LanguageModel(family, llama.lm.transformer, tokenizer)
    newline, first, second = (tokenizer.token_to_id(BYTES[byte]) for byte in (10, 0xF0, 0x9F))
    word = tokenizer.token_to_id("a")
    for ids in ([newline, first], [word, newline, first, second], [newline, word]):
        texts = [piece for piece, _ in pieces(random.Random(0), lm, ids)]
        assert "".join(texts) == tokenizer.decode(ids)
    assert lm.decode([word, newline], is_open=True) == "a\ufffd"
    assert lm.decode([word, newline]) == "a\n" and lm.decode([word], is_open=True) == "a"
    # An open run that is whole goes on its way as soon as a word follows.
    assert lm.decode([newline, word], is_open=True) == "\na"


@pytest.mark.parametrize("family", ["llama", "gemma", "byte level"])
def test_a_stop_string_in_a_run_of_bytes_is_found(llama, family):
    """By the first token that completes it, however long the run before."""
    tokenizer, rng = tokenizer_like(family), random.Random(5)
    text = "".join(rng.choice("中文字é🙂") for _ in range(40)) + "。end"
    if family == "byte level":
        ids = tokenizer.encode(text).ids
    else:
        ids = [tokenizer.token_to_id(BYTES[byte]) for byte in text.encode()]
    request = Request(0, [1], SamplingParams(stop=("。",)))
    [sequence] = request.sequences
    found = None
    for number, token_id in enumerate(ids, 1):
        sequence.token_ids.append(token_id)
        if found is None and hits_stop_string(sequence, tokenizer.decode):
            found = number
    first = next(n for n in range(len(ids)) if "。" in tokenizer.decode(ids[:n]))
    assert found == first


def found_at(decode, ids, *stop):
    """After how many tokens a stop string is found."""
    [sequence] = Request(0, [1], SamplingParams(stop=stop)).sequences
    for number, token_id in enumerate(ids, 1):
        sequence.token_ids.append(token_id)
        if hits_stop_string(sequence, decode):
            return number
    return None


@pytest.mark.parametrize("family", [*DECODERS, "byte level"])
@pytest.mark.parametrize("number", thorough_after(1, [100, 1500]))
def test_a_stop_string_is_found_by_the_token_that_completes_it(llama, family, number):
    """As if each time all of the text was decoded and searched."""
    tokenizer, rng, late = tokenizer_like(family), random.Random(family), 0
    lm = minikv.LanguageModel(family, llama.lm.transformer, tokenizer)
    for _ in range(number):
        ids = drawn(rng, tokenizer) + drawn(rng, tokenizer)
        whole = tokenizer.decode(ids) or "none"
        at = rng.randrange(len(whole))
        stop = whole[at : at + rng.choice((1, 1, 2, 3, 5))]
        texts = (tokenizer.decode(ids[:length]) for length in range(1, len(ids) + 1))
        first = next((n for n, text in enumerate(texts, 1) if stop in text), None)
        assert found_at(lm.text_of, ids, stop) == first
        late += (first or 0) > 3
    assert late > number / 3


@pytest.mark.parametrize("family", ["llama", "metaspace", "no fallback"])
def test_a_blank_behind_a_token_without_text_is_found(llama, family):
    """Though these leave out the first token's."""
    tokenizer = tokenizer_like(family)
    lm = minikv.LanguageModel(family, llama.lm.transformer, tokenizer)
    ids = [tokenizer.token_to_id(token) for token in ("a", "</s>", "▁cat")]
    three = [ids[0], tokenizer.token_to_id("s"), ids[2]]
    assert tokenizer.decode(ids[1:]) == "cat"
    assert found_at(lm.text_of, ids, " cat") == 3
    assert found_at(lm.text_of, [tokenizer.token_to_id("▁"), ids[2]], " cat") == 2
    assert found_at(lm.text_of, three, "q", "as cat") == 3  # as much is kept as the longest has


@pytest.mark.parametrize("family", ["llama", "byte level"])
def test_the_search_for_a_stop_string_takes_no_longer_in_a_long_answer(llama, family):
    """Nor behind tokens without a text, nor where a part of a stop string comes again and again."""
    tokenizer = tokenizer_like(family)
    lm, most = minikv.LanguageModel(family, llama.lm.transformer, tokenizer), 0

    def decode(ids, is_open=False):
        nonlocal most
        most = max(most, len(ids))
        return lm.text_of(ids, is_open)

    end = tokenizer.token_to_id("</s>" if family == "llama" else "<|endoftext|>")
    words = tokenizer.encode("a.as.a", add_special_tokens=False).ids * 200
    ids = (
        [end] * 300
        + words
        + [end] * 300
        + words
        + tokenizer.encode("中", add_special_tokens=False).ids
    )
    assert found_at(decode, ids, "a.as.aas", "s中") is None
    assert found_at(decode, ids, "中") == len(ids)
    assert most <= 8


@pytest.mark.parametrize(
    ("text", "stop", "finished", "visible"),
    [
        ("a E", ("END", "class"), False, "a "),
        ("a E", ("END", "class"), True, "a E"),
        ("a cla", ("END", "class"), False, "a "),
        ("a END b", ("END", "class"), False, "a "),
        ("a END class", ("class", "END"), True, "a "),  # the first in the text ends it
        ("a b", (), False, "a b"),
        ("a b", (7,), False, "a b"),
        ("a \ufffd", (), False, "a "),
        ("a \ufffd", (), True, "a \ufffd"),
    ],
)
def test_what_is_visible(text, stop, finished, visible):
    assert visible_text(text, stop, finished) == visible


def test_a_stop_string_of_one_byte_ends_an_answer(tinypy):
    engine = Engine(tinypy.lm, small(block_size=16))
    text = engine.generate("def f(", SamplingParams(max_tokens=12))[0].text
    stop = text[len(text) // 2]
    [output] = engine.generate("def f(", SamplingParams(max_tokens=12, stop=(stop,)))
    assert output.finish_reason == "stop" and output.text == text[: text.index(stop)]
    assert len(output.token_ids) < 12


def test_a_stream_decodes_its_newest_tokens_alone():
    tokenizer, so_far, text, most = tokenizer_like("byte level"), SoFar(), "", 0

    def decode(ids, is_open=False):
        nonlocal most
        most = max(most, len(ids))
        return tokenizer.decode(ids)

    ids = tokenizer.encode("for one in range(10):\n    print(one)\n" * 4).ids
    for count in range(1, len(ids) + 1):
        sample = SimpleNamespace(token_ids=ids[:count], finish_reason=None, stop=(), decode=decode)
        text += so_far.news(sample).text
    assert text == tokenizer.decode(ids)
    assert most <= 3


def test_a_long_stop_string_takes_no_more_memory_than_its_length():
    """Of what begins it, no more is looked at than the text has."""
    text, stop = "ab" * 500, ("y" * 500_000, "ab" * 250_000)
    tracemalloc.start()
    try:
        assert visible_text("x" + text, stop, finished=False) == "x"
        assert visible_text(text + "y", (stop[0],), finished=False) == text
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
