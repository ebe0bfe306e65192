"""Chat templates: the prompt of `transformers`, byte for byte; a wrong template is a sentence."""

import json
import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest
from serving_case import OneEngine, server
from thorough import thorough_after
from tokenizers import AddedToken, Tokenizer

from minikv import BUNDLED, LanguageModel
from minikv.serving import chat
from minikv.serving.chat import ChatTemplate
from minikv.serving.requests import Message

TOKENS = {
    "bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"},
    "pad_token": "<pad>", "unk_token": "<unk>",
}  # fmt: skip
TALK = [
    {"role": "system", "content": "Be brief & <kind>.\n"},
    {"role": "user", "content": " What is 'é' + \"中\"? </think>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo letters. "},
    {"role": "user", "content": "🙂 Go on\n"},
]
CALL = {"id": "c1", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "São Paulo", "at": [1, 2.5, None, True], "a<b": "&"},
}}  # fmt: skip
TOOLS = [
    TALK[1],
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": '{"°C": 21}', "tool_call_id": "c1", "name": "weather"},
    {"role": "tool", "content": "<b>rain</b>", "tool_call_id": "c1", "name": "weather"},
    TALK[3],
]

# Each does what templates of a family on the hub do, in other words.
FAMILIES = {file.stem: file.read_text() for file in Path(__file__).parent.glob("templates/*.jinja")}


@pytest.fixture
def folder(tmp_path):
    """`folder(template, messages)`: a checkpoint whose tokenizer has this template."""

    def make(**config):
        shutil.copy(BUNDLED["tinypy"] / "tokenizer.json", tmp_path)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def rendered(folder, messages):
    with closing(ChatTemplate(str(folder))) as template:
        return template.render(messages)


def expected(folder, messages):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("family", thorough_after(1, sorted(FAMILIES)))
def test_a_prompt_is_that_of_transformers(folder, family):
    at, num_refused = folder(chat_template=FAMILIES[family]), 0
    for messages in (TALK, TALK[1:], TOOLS, TALK[2:], TALK[:2]):
        try:
            wanted = [expected(at, messages)]
        except Exception as error:  # what it says is asked below
            num_refused += 1
            with pytest.raises(ValueError, match=r"^messages: the template of ") as caught:
                rendered(at, messages)
            assert " ".join(str(error).split()) in str(caught.value)
        else:
            found = rendered(at, messages)
            assert found in (*wanted, expected(at, messages))  # of today, or of tomorrow
    assert num_refused < 5


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}])
def test_a_message_without_words_has_none(folder, content):
    """An assistant's that calls a tool: templates put something behind its content."""
    message = Message(role="assistant", tool_calls=[CALL], **content)
    said = message.model_dump(exclude_none=True)
    assert said == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert rendered(folder(chat_template="{{ messages[0].content + '|' }}"), [said]) == "|"


@pytest.mark.parametrize("where", thorough_after(2, ["jinja", "named json", "json", "named"]))
def test_where_a_template_is(folder, where):
    text, other = FAMILIES["zephyr"], "{{ 'the wrong one' }}"
    named = [{"name": "tool_use", "template": other}, {"name": "default", "template": text}]
    at = folder(**{"chat_template": named} if where == "named" else {})
    if where == "jinja":
        at = folder(chat_template=other)
        (at / "chat_template.jinja").write_text(text, "utf-8")
    elif where != "named":
        content = text if where == "json" else dict.fromkeys(["default"], text)
        (at / "chat_template.json").write_text(json.dumps({"chat_template": content}))
    found = rendered(at, TALK)
    if "json" not in where:  # `transformers` reads this file with processors alone
        assert found == expected(at, TALK)
    assert found == rendered(folder(chat_template=text), TALK) and "<|user|>" in found


def test_tokens_by_name_in_an_older_file(folder):
    """It counts where the newer file has no list of added tokens."""
    at = folder(chat_template="{{ eos_token }}{{ sep_token }}{{ cls_token }}", eos_token=None)
    older = {"eos_token": {"content": "<end>"}, "sep_token": "<sep>"}
    (at / "special_tokens_map.json").write_text(json.dumps(older))
    assert rendered(at, TALK) == expected(at, TALK) == "<end><sep>"
    at = folder(chat_template="{{ eos_token }}{{ sep_token }}", added_tokens_decoder={})
    assert rendered(at, TALK) == expected(at, TALK) == "</s>"


WRONG = [
    ("{% if", "unexpected 'end of template'"),
    ("{{ x | nothing }}", "No filter named 'nothing'"),
    ("{% generation %}", "Unexpected end of template"),
    ("{{ raise_exception('no <b>\n system') }}", "says: no <b> system$"),
    ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages.nothing.more }}", "has no attribute 'nothing'"),
    ("{{ 2.0 ** 5000 }}", "OverflowError"),
    ("{{ range(10 ** 9) }}", "OverflowError: Range too big"),
    ("{{ messages[0]|tojson(indent=messages[0].keys) }}", "TypeError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
    ("{{ 'a' * 10 ** 11 }}", "MemoryError"),
    ("{{ messages[0].role * 3000000 }}", "18000000 characters are too many"),
    (None, "has no chat template; use /v1/completions"),
]


@pytest.mark.parametrize(("text", "says"), thorough_after(4, WRONG))
def test_what_a_template_does_wrong_is_said(folder, text, says):
    with closing(ChatTemplate(str(folder(chat_template=text)))) as template:
        for _ in range(2):  # and the process goes on
            with pytest.raises(ValueError, match=says) as caught:
                template.render(TALK)
            assert str(caught.value).startswith("messages: ") and len(str(caught.value)) < 700
        assert template.find_ends(Tokenizer.from_file(str(folder() / "tokenizer.json"))) == ()


@pytest.mark.parametrize("name", [None, 3, {}, [], "other"])
def test_templates_of_strange_names_are_none(folder, name):
    at = folder(chat_template=[{"name": name, "template": "a"}, {"name": "b"}, 5, None])
    with closing(ChatTemplate(str(at))) as template, pytest.raises(ValueError, match="no chat tem"):
        template.render(TALK)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_no_text_is_said(folder, name):
    at = folder(chat_template=FAMILIES["zephyr"])
    (at / name).write_bytes(b"\xff\xfe\x80{")
    with (
        closing(ChatTemplate(str(at))) as template,
        pytest.raises(ValueError, match=r"^messages: "),
    ):
        template.render(TALK)


LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "text", thorough_after(0, [LONG, "{{ 9 ** (9 ** 9) }}"]), ids=["loops", "a constant"]
)
def test_a_template_without_end_keeps_nobody_waiting(tinypy, folder, monkeypatch, text):
    """Not even one that ends in no bytecode, or before it runs."""
    monkeypatch.setattr(chat, "SECONDS", 1)
    at_folder = folder(chat_template="{% if messages|length > 2 %}" + text + "{% endif %}ok")
    short, asked = {"messages": TALK[:1], "max_tokens": 1}, []
    with server(tinypy.lm, model=str(at_folder)) as at:
        if text == LONG:
            assert at.ask("/v1/chat/completions", short).status_code == 200

        def ask():
            asked.append(at.ask("/v1/chat/completions", {"messages": TALK, "max_tokens": 1}))

        thread = threading.Thread(target=ask)
        thread.start()
        while not asked:  # it is still at work
            assert at.ask("/health").status_code == 200
            assert at.ask(body={"prompt": "x", "max_tokens": 1}).status_code == 200
        thread.join()
        [found] = asked
        assert found.status_code == 400
        assert "more than 1 s or more than 512 MiB" in found.json()["error"]["message"]
        assert found.json()["error"]["param"] == "messages"
        if text == LONG:  # a process of its own for those that come after
            assert at.ask("/v1/chat/completions", short).status_code == 200


# ── Where an answer ends ──────────────────────────────────────────────────────


def tokenizer_with(*tokens):
    tokenizer = Tokenizer.from_file(str(BUNDLED["tinypy"] / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=special) for text, special in tokens])
    return tokenizer


@pytest.mark.parametrize(
    ("behind", "end"),
    [
        ("<|im_end|>\n", "<|im_end|>"),
        (" </s>", "</s>"),
        ("<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
        ("\n", None),
        ("\n### User:\n", None),
    ],
)
@pytest.mark.parametrize("special", thorough_after(1, [True, False]))
def test_the_end_of_a_turn_is_what_the_template_says(folder, behind, end, special):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}BEHIND{% endfor %}"
    names = ("<|im_start|>", "<|im_end|>", "</s>", "<end_of_turn>", "<start_of_turn>")
    tokenizer = tokenizer_with(*((name, special) for name in names))
    at = folder(chat_template=text.replace("BEHIND", json.dumps(behind)[1:-1].replace("\\n", "\n")))
    with closing(ChatTemplate(str(at))) as template:
        found = template.find_ends(tokenizer)
    wanted = [] if end is None else [tokenizer.token_to_id(end) if special else end]
    assert [*found] == wanted


@pytest.mark.parametrize("special", thorough_after(1, [True, False]))
def test_an_answer_in_a_chat_ends_with_its_turn(tinypy, folder, special):
    """Though the checkpoint's end tokens are others. What ends it is not shown."""
    end = "return"  # a token of the model
    tokenizer = tokenizer_with((end, special))
    end_id, other = tokenizer.token_to_id(end), tokenizer.token_to_id("def")
    assert end_id < tinypy.vocab_size and tinypy.lm.config.eos_ids == (0,)
    lm = LanguageModel("it", tinypy.lm.transformer, tokenizer)
    at_folder = folder(chat_template="{% for m in messages %}{{ m.content }}return\n{% endfor %}")
    body = {"messages": TALK[:1], "max_tokens": 5, "stop": ["zzz"]}
    with server(lm, served_by=OneEngine(lm), model=str(at_folder)) as at:
        for chosen, stops in ((end_id, True), (other, False)):
            asked = body | {"logit_bias": {str(chosen): 100}}
            [choice] = at.ask("/v1/chat/completions", asked).json()["choices"]
            assert choice["finish_reason"] == ("stop" if stops else "length")
            assert choice["message"]["content"] == ("" if stops else "def" * 5)
        asked = body | {"logit_bias": {str(end_id): 100}, "ignore_eos": True}
        [choice] = at.ask("/v1/chat/completions", asked).json()["choices"]
        assert choice["finish_reason"] == "length" and choice["token_ids"] == [end_id] * 5
