"""Requests to serve: generated ones that look like a chat's, and those of published traces.

    lengths = chat_like(1000)                    # seeded: the same every time
    requests = read_trace("trace.csv")           # in the order of the file

`chat_like` draws log-normal prompts (median 735 tokens) and outputs (median 150).
`read_trace` reads two formats:

csv     the columns ContextTokens and GeneratedTokens, and TIMESTAMP where there is one, as
        AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset
jsonl   an object a line with timestamp (ms), input_length, output_length and hash_ids, as
        FAST25-release/traces of github.com/kvcache-ai/Mooncake
"""

import csv
import json
import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import NamedTuple

CSV_COLUMNS = ("ContextTokens", "GeneratedTokens")
JSON_KEYS = ("input_length", "output_length", "timestamp")


class Length(NamedTuple):
    prompt: int  # tokens
    output: int


class Request(NamedTuple):
    """One line of a trace."""

    length: Length
    arrival: float  # seconds after the first; 0 in a file that tells no times
    hash_ids: tuple[int, ...] = ()  # of each 512 tokens of the prompt: equal ids, equal prefixes


def chat_like(num_requests: int, seed: int = 0) -> list[Length]:
    """Log-normal lengths of prompts and outputs, cut off at 14,000 and 1,000 tokens.

    Their logarithms have about the mean and the spread of those in Azure's trace of conversations
    (2023). The rest is not that trace's: its medians are 1,020 and 129 tokens, and here prompt and
    output are drawn independently of each other.
    """
    draw = random.Random(seed)
    return [
        Length(
            min(14_000, 1 + round(draw.lognormvariate(6.6, 1.0))),
            min(1_000, 1 + round(draw.lognormvariate(5.0, 0.85))),
        )
        for _ in range(num_requests)
    ]


def read_trace(path: str | Path) -> list[Request]:
    """The requests of a csv or jsonl file. Raises ValueError that says what is wrong, and where."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    is_json = path.suffix == ".jsonl" or text.lstrip().startswith("{")
    found = list(_json_requests(path, text) if is_json else _csv_requests(path, text))
    if not found:
        raise ValueError(f"{path} has {'no lines' if is_json else 'a header and no requests'}")
    first = min(request.arrival for request in found)
    return [request._replace(arrival=request.arrival - first) for request in found]


def _csv_requests(path: Path, text: str) -> Iterator[Request]:
    rows = csv.DictReader(StringIO(text, newline=""))
    missing = [name for name in CSV_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"{path} has no column {' and no column '.join(missing)}")
    try:
        for row in rows:
            length = Length(*(_count(row[name]) for name in CSV_COLUMNS))
            if min(length) < 1:
                raise ValueError(
                    f"{path}, line {rows.line_num}: {' and '.join(CSV_COLUMNS)} must be "
                    f"whole numbers of at least 1, were {[row[name] for name in CSV_COLUMNS]}"
                )
            arrival = 0.0
            if "TIMESTAMP" in rows.fieldnames:
                arrival = _seconds(row["TIMESTAMP"], f"{path}, line {rows.line_num}")
            yield Request(length, arrival)
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as csv: {error}") from None


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _seconds(text: str | None, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        raise ValueError(f"{where}: TIMESTAMP must be a date and time, was {text!r}") from None
    # Without a time zone it is read as UTC: in local time the clocks may change in between.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _json_requests(path: Path, text: str) -> Iterator[Request]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid json ({error})") from None
        missing = [name for name in JSON_KEYS if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"{where}: no {' and no '.join(missing)}")
        prompt, output, milliseconds = (row[name] for name in JSON_KEYS)
        hash_ids = row.get("hash_ids", [])
        if not (_is_int(prompt) and _is_int(output) and min(prompt, output) >= 1):
            raise ValueError(
                f"{where}: input_length and output_length must be whole numbers of at least 1, "
                f"were {[prompt, output]}"
            )
        if not (_is_int(milliseconds) or _is_finite_float(milliseconds)):
            raise ValueError(f"{where}: timestamp must be a number of ms, was {milliseconds!r}")
        if not (isinstance(hash_ids, list) and all(map(_is_int, hash_ids))):
            raise ValueError(f"{where}: hash_ids must be a list of whole numbers, was {hash_ids!r}")
        yield Request(Length(prompt, output), milliseconds / 1000, tuple(hash_ids))


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite_float(value) -> bool:
    return isinstance(value, float) and math.isfinite(value)
