"""`python -m minikv generate --chat`: a conversation, whose K and V are computed once."""

import io
import re
import shutil
import signal
import sys
from itertools import takewhile

import pexpect
import pytest
import torch
from thorough import thorough_after
from tokenizers import AddedToken, Tokenizer
from waiting import PATIENCE

import minikv
from minikv.course.commands import main
from minikv.engine import Loop

END = "return"  # a token of the model: here it ends a turn
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}return\n{% endfor %}"
    "{{ '# assistant\n' if add_generation_prompt }}"
)


@pytest.fixture
def model(tmp_path):
    """tinypy, as an instruct model would lie in a folder, with a context of 200 tokens."""
    shutil.copy(minikv.BUNDLED["tinypy"] / "model.safetensors", tmp_path)
    config = (minikv.BUNDLED["tinypy"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("1024", "200"))
    tokenizer = Tokenizer.from_file(str(minikv.BUNDLED["tinypy"] / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def control_c():
    """As a program in the foreground finds it. One behind `&` is not interrupted by it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def turns(monkeypatch):
    """(engine, prompt, parameters, new tokens) of each turn."""
    seen, stream = [], minikv.Engine.stream

    def watched(engine, prompt, params):
        seen.append((engine, prompt, params, []))
        for delta in stream(engine, prompt, params):
            seen[-1][-1].extend(delta.token_ids)
            yield delta

    monkeypatch.setattr(minikv.Engine, "stream", watched)
    return seen


def say(monkeypatch, model, text, *more):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["generate", "--chat", "--model", str(model), *more])


@pytest.mark.parametrize("presses", thorough_after(1, [1, 0, 2]))
@pytest.mark.usefixtures("control_c")
def test_a_later_turn_computes_only_what_is_new(presses, model, turns, monkeypatch, capsys):
    """Also after Control-C inside a step. After a second one only the conversation is kept."""
    numbers, step = iter(range(100)), Loop.step

    def interrupted(loop, engine):
        for _ in range(presses if next(numbers) == 20 else 0):
            signal.raise_signal(signal.SIGINT)
        return step(loop, engine)

    monkeypatch.setattr(Loop, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert say(monkeypatch, model, "def f(\n\nHow?\n", "--max-tokens", "40") == 0
    assert signal.getsignal(signal.SIGINT) is before
    (engine, prompt, params, new), (_, second, _, _) = turns
    assert params.stop == (engine.lm.tokenizer.token_to_id(END),)
    assert len(new) == {0: 40, 1: 21, 2: 20}[presses]
    answer = engine.lm.decode(new)
    said = "# user\ndef f(return\n# assistant\n"
    assert engine.lm.decode(prompt) == said.replace(END, "")
    told = f"{said}{answer}return\n# user\nHow?return\n# assistant\n"
    assert engine.lm.tokenizer.encode(told).ids == second
    out = capsys.readouterr().out
    assert out.startswith(f"{answer}\n") and out.endswith("\n\n")
    computed = [*prompt, *new][:-1]
    pairs = zip(computed, second, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert engine.stats().hit_tokens == (0 if presses == 2 else same // 16 * 16)
    assert same > len(prompt) + 16
    engine.check()


def test_what_does_not_fit_is_forgotten(model, turns, monkeypatch, capsys):
    room, long = 200, "x = 1; " * 200
    assert say(monkeypatch, model, f"Hi\n{long}\nHi\n", "--max-tokens", "4") == 0
    assert len(turns) == 3 and turns[0][1] == turns[2][1]  # nothing of what was before
    err = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"a prompt of \d+ tokens .* context is {room}", err) and "forgotten" in err


def test_an_answer_may_take_what_room_there_is(model, turns, monkeypatch):
    assert say(monkeypatch, model, "x = [1, 2, 3, 4, 5, 6, 7, 8, 9\n") == 0
    [(engine, prompt, params, new)] = turns
    assert len(prompt) + params.max_tokens == engine.lm.config.max_context == 200 >= len(new)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("chat_template.jinja", "{} has no chat template; take an instruct model, or leave out"),
        ("tokenizer.json", "{} has no tokenizer.json; take an instruct model"),
    ],
)
def test_a_model_that_is_not_for_chats(gone, said, model, monkeypatch, capsys):
    (model / gone).unlink()
    assert say(monkeypatch, model, "Hi\n") == 2
    out, err = capsys.readouterr()
    assert said.format(model).replace(" ", "") in "".join(err.split()) and out == ""


def test_without_a_prompt_it_says_what_is_missing(capsys):
    assert main(["generate"]) == 2
    assert "--chat" in capsys.readouterr().err


def test_weights_are_loaded_as_asked(turns):
    assert main(["generate", "x", "--max-tokens", "1", "--dtype", "bfloat16"]) == 0
    assert turns[0][0].lm.dtype == torch.bfloat16


def test_in_a_terminal(model):
    """Answers as they come, what was found again, and an end by Control-D."""
    arguments = ["-m", "minikv", "generate", "def f(", "--chat", "--model", str(model)]
    terminal = pexpect.spawn(sys.executable, [*arguments, "--max-tokens", "40"], timeout=PATIENCE)
    try:
        terminal.expect_exact("40 tokens, ")
        terminal.expect_exact("\n> ")
        assert b"cached" not in terminal.before
        terminal.sendline("How?")
        terminal.expect(r"; (\d+) of (\d+) prompt tokens were cached\r\n> ")
        found, before = map(int, terminal.match.groups())
        assert 32 <= found < before
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
        assert terminal.wait() == 0
    finally:
        terminal.close(force=True)
