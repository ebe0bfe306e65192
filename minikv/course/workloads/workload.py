"""Requests to serve: generated ones that look like a chat's, and those of published traces.

    lengths = chat_like(1000)                    # seeded, as all here: the same every time
    jobs = shared_prompts(lm, 48, groups=4)      # real tokens, and when they arrive
    jobs = conversations(lm, 8, turns=4)         # each turn's prompt holds all before it
    requests = read_trace("trace.csv")           # in the order of the file

`chat_like` draws log-normal prompts (median 735 tokens) and outputs (median 150). The text of
jobs is made of snippets of Python, which is what tinypy knows. `read_trace` reads two formats:

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
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams

CSV_COLUMNS = ("ContextTokens", "GeneratedTokens")
JSON_KEYS = ("input_length", "output_length", "timestamp")


class Length(NamedTuple):
    prompt: int  # tokens
    output: int


class TraceRequest(NamedTuple):
    """One line of a trace."""

    length: Length
    arrival: float  # seconds after the first; 0 in a file that tells no times
    hash_ids: tuple[int, ...] = ()  # of each 512 tokens of the prompt: equal ids, equal prefixes


class Job(NamedTuple):
    """A request to be served on the real engine."""

    prompt_ids: list[int]
    max_tokens: int  # so many are served, end token or not
    arrival: float = 0.0  # seconds after the first
    salt: str | None = None  # its `cache_salt`


# ── Generated ─────────────────────────────────────────────────────────────────


def chat_like(num_requests: int, seed: int = 0, shrink: tuple[int, int] = (1, 1)) -> list[Length]:
    """Log-normal lengths of prompts and outputs, cut off at 14,000 and 1,000 tokens.

    Their logarithms have about the mean and the spread of those in Azure's trace of conversations
    (2023). The rest is not that trace's: its medians are 1,020 and 129 tokens, and here prompt and
    output are drawn independently of each other.

    `shrink`: prompts and outputs are so many times shorter, for a model with a small context.
    """
    draw = random.Random(seed)
    lengths = [
        Length(
            min(14_000, 1 + round(draw.lognormvariate(6.6, 1.0))),
            min(1_000, 1 + round(draw.lognormvariate(5.0, 0.85))),
        )
        for _ in range(num_requests)
    ]
    return [Length(-(-prompt // shrink[0]), -(-output // shrink[1])) for prompt, output in lengths]


def poisson(num_requests: int, rate: float, seed: int = 0) -> list[float]:
    """When requests arrive that know nothing of each other: seconds after the first, ascending.

    The gaps are drawn from the exponential distribution with mean 1 / `rate`; `rate` is in
    requests per second, and `math.inf` lets all arrive at once.
    """
    if not rate > 0:
        raise ValueError(f"rate: must be more than 0 requests per second, was {rate!r}")
    draw = random.Random(f"arrivals {seed}")
    gaps = [draw.expovariate(1.0) / rate for _ in range(num_requests - 1)]
    return list(accumulate(gaps, initial=0.0))[:num_requests]


def write_code(lm: LanguageModel, num_tokens: int, seed: object = 0) -> list[int]:
    """`num_tokens` token ids of made-up Python, cut off wherever that is; `seed` may be anything
    that prints, and another one gives another text."""
    draw, text = random.Random(f"code {seed}"), ""
    ids: list[int] = []
    while len(ids) < num_tokens:
        # Of a snippet it takes at least 20 tokens, so few rounds are needed.
        for _ in range(1 + (num_tokens - len(ids)) // 20):
            words = {kind: draw.choice(choices) for kind, choices in WORDS.items()}
            text += draw.choice(SNIPPETS).format(**words, number=draw.randrange(2, 10_000))
        ids = lm.encode(text)
    return ids[:num_tokens]


SNIPPETS = (
    """def {verb}_{thing}_{number}({many}, limit={number}):
    for {thing} in {many}:
        if {thing}.{part} > limit:
            return {thing}.{part}
    return None


""",
    """class {Name}{number}:
    def __init__(self, {many}, {part}=None):
        self.{many} = list({many})
        self.{part} = {part}

    def {verb}(self, {thing}):
        self.{many}.append({thing})


""",
    """{many}_{number} = {{}}
for {thing} in {verb}({many}):
    {many}_{number}[{thing}.{part}] = {thing}


""",
    """def test_{verb}_{number}(self):
    {thing} = {Name}({number})
    self.assertEqual({thing}.{verb}(), {number})


""",
)
WORDS = {
    "verb": ("read", "write", "parse", "find", "merge", "split", "update", "check"),
    "thing": ("line", "name", "user", "token", "block", "event", "node", "path"),
    "many": ("lines", "values", "items", "records", "entries", "names", "queue", "rows"),
    "part": ("size", "value", "count", "index", "offset", "weight", "time", "length"),
    "Name": ("Reader", "Parser", "Counter", "Table", "Cache", "Stream", "Message", "Handler"),
}
SHRINK = (30, 4)  # of a chat's prompts and outputs: medians of about 25 and 38 tokens


def shared_prompts(
    lm: LanguageModel,
    num_requests: int = 48,
    groups: int = 4,
    shared: int = 128,
    rate: float = math.inf,
    seed: int = 0,
) -> list[Job]:
    """Requests that begin with one of `groups` system prompts, all with a question of their own.

    A system prompt has `shared` tokens; with none, no two requests share anything. Questions
    and outputs are `chat_like`, shrunk to at most 467 and 250 tokens; arrivals are `poisson`.
    """
    if groups < 1 or shared < 0:
        raise ValueError(f"groups: must be at least 1, was {groups}; shared: at least 0, {shared}")
    draw = random.Random(f"groups {seed}")
    system = [write_code(lm, shared, f"{seed}, system {group}") for group in range(groups)]
    lengths, arrivals = chat_like(num_requests, seed, SHRINK), poisson(num_requests, rate, seed)
    return [
        Job(
            draw.choice(system) + write_code(lm, length.prompt, f"{seed}, question {index}"),
            length.output,
            arrival,
        )
        for index, (length, arrival) in enumerate(zip(lengths, arrivals, strict=True))
    ]


def conversations(
    lm: LanguageModel,
    num: int = 8,
    turns: int = 4,
    shared: int = 64,
    rate: float = 4.0,
    think: float = 2.0,
    seed: int = 0,
    real_answers: bool = True,
) -> list[Job]:
    """Conversations that grow: a turn's prompt is all that was said, and a new message.

    All begin with the same system prompt of `shared` tokens. Messages and answers are
    `chat_like`, shrunk. `rate` conversations start per second, on average; a turn comes `think`
    seconds after the one before it, on average, at least half of that. One that would outgrow the
    model's context ends early. Sorted by arrival.

    What was said holds the answers that the model gives greedily, worked out here and now, or
    with `real_answers=False` made-up ones of the same length, which is quicker.
    """
    draw = random.Random(f"turns {seed}")
    engine = Engine(lm) if real_answers else None
    system = write_code(lm, shared, f"{seed}, system")
    lengths = iter(chat_like(num * turns, seed, SHRINK))
    live = [(list(system), start) for start in poisson(num, rate, seed)]
    jobs: list[Job] = []
    for turn in range(turns):
        said, live = live, []
        asked: list[Job] = []
        for index, (context, arrival) in enumerate(said):
            length = next(lengths)
            prompt = context + write_code(lm, length.prompt, f"{seed}, {index} says {turn}")
            if len(prompt) + length.output <= lm.config.max_context:
                asked.append(Job(prompt, length.output, arrival))
        if engine is not None:
            params = [SamplingParams(max_tokens=job.max_tokens, ignore_eos=True) for job in asked]
            outputs = engine.generate([job.prompt_ids for job in asked], params)
            answers = [output.token_ids for output in outputs]
        else:
            answers = [
                write_code(lm, job.max_tokens, f"{seed}, {index} hears {turn}")
                for index, job in enumerate(asked)
            ]
        jobs += asked
        for job, answer in zip(asked, answers, strict=True):
            later = job.arrival + think * (0.5 + draw.expovariate(2.0))
            live.append((job.prompt_ids + answer, later))
    return sorted(jobs, key=lambda job: job.arrival)


# ── Published ─────────────────────────────────────────────────────────────────


def read_trace(path: str | Path) -> list[TraceRequest]:
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


def _csv_requests(path: Path, text: str) -> Iterator[TraceRequest]:
    rows = csv.DictReader(StringIO(text, newline=""))
    columns = rows.fieldnames or ()
    missing = [name for name in CSV_COLUMNS if name not in columns]
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
            if "TIMESTAMP" in columns:
                arrival = _seconds(row["TIMESTAMP"], f"{path}, line {rows.line_num}")
            yield TraceRequest(length, arrival)
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


def _json_requests(path: Path, text: str) -> Iterator[TraceRequest]:
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
        yield TraceRequest(Length(prompt, output), milliseconds / 1000, tuple(hash_ids))


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite_float(value) -> bool:
    return isinstance(value, float) and math.isfinite(value)
