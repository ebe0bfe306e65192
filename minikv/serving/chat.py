"""From messages to a prompt, by the template that a checkpoint keeps, and where an answer ends."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

from tokenizers import Tokenizer

from minikv.checkpoint import find_folder, read_json, read_special_tokens

PROGRAM = Path(__file__).with_name("render.py")
SECONDS, BYTES = 2, 2**29  # that a template may take for a prompt
WORD = "minikv-was-here"  # an assistant's, behind which an end of turn is looked for


class ChatTemplate:
    """The template of a checkpoint (a bundled name, a folder or a hub id). It is a program, so it
    runs in a process of its own (`minikv.serving.render`), which the first prompt starts."""

    def __init__(self, model: str, instead: str = "use /v1/completions"):
        """`instead`: what to do where there is no template."""
        folder, self.model, self.instead = find_folder(model), model, instead
        try:
            self._text, self._tokens = read_template(folder), read_special_tokens(folder)
            self._why = "has no chat template"
        except ValueError as error:  # a file is damaged: only chats need it
            self._text, self._tokens, self._why = None, {}, f"has no chat template: {error}"
        self._process: subprocess.Popen[str] | None = None
        self._ends: tuple[str | int, ...] | None = None
        self._thread = ThreadPoolExecutor(1, "chat template")  # waits for the process

    async def __call__(self, messages: Seq[dict[str, Any]]) -> str:
        """`render`, while others go on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.render, messages)

    async def ends(self, tokenizer: Tokenizer) -> tuple[str | int, ...]:
        """`find_ends`, once, while others go on."""
        if self._ends is None:
            loop = asyncio.get_running_loop()
            self._ends = await loop.run_in_executor(self._thread, self.find_ends, tokenizer)
        return self._ends

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown()
        self._end()

    def render(self, messages: Seq[dict[str, Any]], adds_turn: bool = True) -> str:
        """The prompt that the model continues with its answer; without `adds_turn`, only what was
        said. Raises ValueError, naming the argument, if there is no template, if it refuses the
        messages, if it fails, and if it comes to no end."""
        if self._text is None:
            raise ValueError(f"messages: {self.model} {self._why}; {self.instead}")
        variables = {"messages": messages, "tools": None, "documents": None, **self._tokens}
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(10 * SECONDS, process.kill)
        if os.name == "nt":  # it does not bound the time of a process
            timer.start()
        try:
            print(
                json.dumps(variables | {"add_generation_prompt": adds_turn}),
                file=process.stdin, flush=True,
            )  # fmt: skip
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):  # the process has ended
            self._end()
            limits = f"{SECONDS} s or more than {BYTES >> 20} MiB"
            answer = {"error": f"nothing, because it takes more than {limits}"}
        finally:
            timer.cancel()
        if "error" in answer:
            said = " ".join(answer["error"].split())[:500]
            raise ValueError(f"messages: the template of {self.model} says: {said}")
        return answer["text"]

    def find_ends(self, tokenizer: Tokenizer) -> tuple[str | int, ...]:
        """What the template writes behind an assistant's words, if it is one token that was added
        to the tokenizer, such as <|im_end|>: the model has learned to end its turn with it, though
        it need not be among the checkpoint's end tokens. A token that has text is its text: it is
        not shown."""
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": WORD}]
        try:
            _, found, behind = self.render(said, adds_turn=False).rpartition(WORD)
        except ValueError:  # it says so to those who ask
            return ()
        ids = tokenizer.encode(behind.strip(), add_special_tokens=False).ids if found else []
        token = tokenizer.get_added_tokens_decoder().get(ids[0]) if ids else None
        return () if token is None else (ids[0] if token.special else token.content,)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)], text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Control-C is the server's, which lets requests end
        )  # fmt: skip
        assert process.stdin is not None
        settings = {"template": self._text, "seconds": SECONDS, "bytes": BYTES}
        print(json.dumps(settings), file=process.stdin)
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes and waits
                pass


def read_template(folder: Path) -> str | None:
    """The text of a checkpoint's template, or None. Of several that have names, the default."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text("utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = folder / name
        found = read_json(file).get("chat_template") if file.is_file() else None
        if isinstance(found, list):  # of {"name": …, "template": …}
            named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
            found = named[0].get("template") if named else None
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            return found
    return None
