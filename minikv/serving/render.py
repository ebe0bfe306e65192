"""A process that renders one chat template: `python -P render.py`. `ChatTemplate` starts it.

A template is a program from the checkpoint, and the text that it works on is a client's. In here
neither can keep a server waiting, or take its memory: the operating system bounds both.

    in    {"template": "…", "seconds": 2, "bytes": 536870912}, and for each prompt its variables
    out   for each prompt {"text": "…"} or {"error": "what the template says"}

One line of JSON each. Prompts are those of `transformers`: its `apply_chat_template` is the oracle
of the tests. This file imports nothing of ours, so the process starts in a tenth of a second.
"""

import json
import sys
from contextlib import suppress
from datetime import datetime
from math import ceil
from time import process_time
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

with suppress(ImportError):  # there is none on Windows
    import resource

LONGEST = 2**24  # characters of a prompt


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what a model is trained on. Here, what it says."""

    tags = {"generation"}  # noqa: RUF012  as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # Jinja's own is for HTML
    environment.globals.update(raise_exception=refuse, strftime_now=strftime_now)
    return environment.from_string(text)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(text: str) -> None:
    raise TemplateError(text)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def limit(name: str, amount: int) -> None:
    with suppress(NameError, OSError, ValueError):  # no such limit on this system
        kind = getattr(resource, name)
        resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    limit("RLIMIT_AS", settings["bytes"])
    template = None
    for line in sys.stdin:
        limit("RLIMIT_CPU", ceil(process_time()) + settings["seconds"])
        try:
            template = template or compiled(settings["template"])
            answer = {"text": template.render(**json.loads(line))}
            if len(answer["text"]) > LONGEST:
                answer = {"error": f"{len(answer['text'])} characters are too many for a prompt"}
        except TemplateError as error:
            answer = {"error": str(error)}
        except Exception as error:  # whatever a program can do wrong
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
