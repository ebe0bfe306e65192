"""What docs/ENGINE.md shows of curl is what a server answers, but for names, texts and numbers."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from serving_case import server
from waiting import PATIENCE

DOCS = Path(__file__).parents[2] / "docs" / "ENGINE.md"
BLOCKS = re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL)


def shape(value):
    """Names and kinds, in place of values. Of token ids one stands for all."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        kinds = [shape(one) for one in value]
        return kinds[:1] if set(map(str, kinds)) == {"int"} else kinds
    return type(value).__name__


def shape_of_line(line):
    """Of JSON its shape; of anything else the words."""
    begin, brace, rest = line.partition("{")
    try:
        return begin, shape(json.loads(brace + rest))
    except ValueError:
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line)


@pytest.fixture(scope="module")
def at(tinypy):
    with server(tinypy.lm, keys=()) as at:
        yield at


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0][-30:])
def test_a_transcript_is_true(at, block):
    command, _, shown = block.removeprefix("$ ").replace("\\\n", "").partition("\n")
    assert "localhost:8000" in command
    command = command.replace("localhost:8000", at.url.removeprefix("http://"))
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    found = [shape_of_line(one) for one in ran.stdout.splitlines() if one]
    expected = [shape_of_line(one) for one in shown.splitlines() if one]
    if "stream" in command:  # tokens that come together are one chunk
        assert found[-2:] == expected[-2:] and all(one in expected for one in found)
    else:
        assert found == expected


def test_there_are_transcripts_of_each_kind():
    words = "/v1/completions", "/v1/chat/completions", '"stream": true', "/metrics", '"error"'
    assert all(any(word in block for block in BLOCKS) for word in words)
