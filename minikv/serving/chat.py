"""From messages to a prompt, by the template that a checkpoint keeps.

Templates are programs in Jinja, from whoever made the checkpoint, so they run in a sandbox.
"""

from collections.abc import Sequence as Seq
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minikv.checkpoint import find_folder, read_json


class ChatTemplate:
    """The template of a checkpoint (a bundled name, a folder or a hub id)."""

    def __init__(self, model: str):
        folder, self.model = find_folder(model), model
        config, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        settings = read_json(config) if config.is_file() else {}
        text = own.read_text("utf-8") if own.is_file() else settings.get("chat_template")
        self._template = None
        if isinstance(text, str):
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(text)
        names = ("bos_token", "eos_token")
        self._tokens = {name: _content(settings.get(name)) for name in names}

    def __call__(self, messages: Seq[dict[str, Any]]) -> str:
        """The prompt that the model continues with its answer. Raises ValueError, naming the
        argument, if there is no template or it refuses the messages."""
        if self._template is None:
            raise ValueError(f"messages: {self.model} has no chat template; use /v1/completions")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._tokens
            )
        except TemplateError as error:
            raise ValueError(f"messages: the template of {self.model} says: {error}") from error


def _refuse(text: str) -> None:
    raise TemplateError(text)


def _content(token: Any) -> str:
    """A special token is written as text, or as an object that has it."""
    return (token.get("content") if isinstance(token, dict) else token) or ""
