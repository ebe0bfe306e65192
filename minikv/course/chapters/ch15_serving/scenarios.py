"""Chapter 15 as programs: what readers get, what is sent, what is free, who is let in."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any
from weakref import WeakSet

import minikv
from minikv.course.chapters.ch15_serving.given import Lookup
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle, tinypy
from minikv.course.judge.programs import at_most
from minikv.course.judge.scenarios import Group, Log, numbers, scenario
from minikv.course.pictures.snapshot import counted
from minikv.serving import EngineLoop

TORCH = minikv.EngineConfig(64, attention="torch")


def calls(name: str, mine, program, log: Log) -> None:
    """Of one function: a program is its arguments."""
    log.call(f"{name}{program}", getattr(mine, name), *program)


# ── 15.1 From one thread to many readers ──────────────────────────────────────

# A program is steps: "3" hands over a request with 3 tokens, "3!" its end, "x" an error; "take"
# lets a reader take, and what it got is seen when it has; of "take+4" the 4 tokens are handed over
# while it reads what it takes; "close" ends the reader's event loop.


class State:
    """Like a RequestOutput. A token has two characters; of the last only one is final."""

    def __init__(self, step: str, is_read: Callable[[], None]):
        count = int(step.rstrip("!"))
        self.ids, self.is_read = list(range(10, 10 + count)), is_read
        self.finish_reason = "length" if step.endswith("!") else None
        text = "".join(f"{chr(97 + place % 26)}{place % 10}" for place in range(count))
        self.text = text if self.finish_reason else text[:-1]

    @property
    def token_ids(self) -> list[int]:
        self.is_read()
        return self.ids


class Hands:
    """An inbox, what was handed over to it, and the reader that takes."""

    def __init__(self, mine: Any, log: Log):
        self.log, self.inbox = log, mine.Inbox()
        self.reader: asyncio.Task | None = None
        self.states: WeakSet[State] = WeakSet()
        self.meanwhile = ""  # to be put while the reader reads
        self.pending: Callable[[], None] | None = None  # ends that put
        self.wakes, self.loop = 0, asyncio.get_running_loop()
        self.loop.set_debug(True)  # refuses what another thread does to it
        self.loop.slow_callback_duration = 60.0
        tell = self.loop.call_soon_threadsafe

        def count(*arguments: Any, **more: Any) -> Any:
            self.wakes += 1
            return tell(*arguments, **more)

        self.loop.call_soon_threadsafe = count  # type: ignore[assignment]

    def put(self, step: str) -> None:
        self.begin(step, 2.0)()

    def is_read(self) -> None:
        if self.meanwhile:
            step, self.meanwhile = self.meanwhile, ""
            self.pending = self.begin(step, 0.3)  # it may have to wait for the reader's lock

    def begin(self, step: str, seconds: float) -> Callable[[], None]:
        """In another thread, as the engine does. To call when it must have ended."""
        raised: list[Exception] = []
        found: Any = ValueError("the step has failed") if step == "x" else State(step, self.is_read)
        if step != "x":
            self.states.add(found)

        def run(found: Any) -> None:
            try:
                self.inbox.put(found)
            except Exception as error:
                raised.append(error)

        thread = Thread(target=run, args=[found], daemon=True)
        del found
        thread.start()
        thread.join(seconds)
        return partial(self.end, step, thread, raised)

    def end(self, step: str, thread: Thread, raised: list[Exception]) -> None:
        thread.join(2.0)
        if raised and isinstance(raised[0], NotImplementedError):
            raise raised[0]
        end = ", finished" if step.endswith("!") else ""
        what = "put(the error)"
        if step != "x":
            what = f"put(a request of {counted(int(step.rstrip('!')), 'token')}{end})"
        came = "it waits" if thread.is_alive() else type(raised[0]).__name__ if raised else "fine"
        self.log(what, {"in the engine's thread:": came})
        if not self.loop.is_closed():  # else a wake-up may be tried, or not
            self.log("", {"wake-ups sent:": self.wakes})
        self.log("", {"outputs kept:": at_most(1, len(self.states))})

    async def take(self, meanwhile: str) -> None:
        if self.reader is None:
            self.reader = asyncio.create_task(self.inbox.take())
        self.meanwhile = meanwhile
        await self.turn()
        self.look("take()")
        pending, self.pending = self.pending, None
        if pending is not None:
            self.log("while it reads")
            pending()

    async def turn(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    def look(self, what: str) -> None:
        if self.reader is None:
            return
        if not self.reader.done():
            self.log(what, {"the reader:": "waits"})
            return
        done, self.reader = self.reader, None
        delta = self.log.call(what, done.result, see=False)
        if self.log.events[-1].error is None:
            seen = {"tokens:": list(delta.token_ids), "text:": delta.text}
            self.log(what, seen | {"finish_reason:": delta.finish_reason})


def handing(mine, program, log: Log) -> None:
    steps = program.split()
    at = steps.index("close") if "close" in steps else len(steps)

    async def inside() -> Hands:
        hands = Hands(mine, log)
        for step in steps[:at]:
            if step.startswith("take"):
                await hands.take(step[5:])
                continue
            hands.put(step)
            if hands.reader is not None:
                await hands.turn()
                hands.look("the reader")
        return hands

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # of a reader that still waits: some never end
    try:
        hands = loop.run_until_complete(inside())
    finally:
        loop.close()
    if at < len(steps):
        log("the reader's event loop is closed")
        for step in steps[at + 1 :]:
            hands.put(step)


scenario("15.1", handing,
    Group("put, then take", ["1 take", "3 take", "1 take 2 take", "2 take 5 take 6! take",
          "1! take"], "which tokens, and how much text, were collected before?"),
    Group("the reader waits first", ["take 1", "take 2 take 3", "take 1 take 3 take 4!",
          "1 take take 2", "2 take take"], "which thread may set the event? And who clears it?"),
    Group("a slow reader", ["1 2 take", "1 2 3 4 take 5 take", "1 2 3! take", "1 take 2 3 4 take",
          "1 2 3 4 5 6 7 8"],
          "how many outputs are kept, and how many wake-ups sent, until the reader takes?"),
    Group("a put while the reader takes", ["1 take+2 take", "2 take 3 take+5! take"],
          "what if the engine's thread comes between two lines of `collect`?"),
    Group("a step fails", ["x take", "1 x take", "1 take x take", "take x", "1 2 take take x"],
          "how does the reader learn that nothing more will come?"),
    Group("a lost client", ["close 1", "1 close 2 3!", "1 take 2 close 3", "close x"],
          "what does `call_soon_threadsafe` do if the loop is closed, and who is left to read?"),
)  # fmt: skip


@runs_model("15.1")
def read_all(mine, lm) -> str:
    params = minikv.SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [lm.encode(text) for text in ("def area(", "import os", "class Stack:")]

    async def read(loop: EngineLoop, prompt: list[int]) -> list[int]:
        inbox, found = mine.Inbox(), []
        loop.submit(prompt, params, reader=inbox)
        while True:
            delta = await asyncio.wait_for(inbox.take(), 20)
            found += delta.token_ids
            if delta.finish_reason is not None:
                return found

    async def every() -> list[list[int]]:
        with EngineLoop(minikv.Engine(lm, TORCH)) as loop:
            return await asyncio.gather(*[read(loop, prompt) for prompt in prompts])

    for prompt, found in zip(prompts, asyncio.run(every()), strict=True):
        same_as_oracle(lm, prompt, found)
    return "3 readers of one engine's thread, 16 tokens each, same tokens as the oracle"


# ── 15.2 Text from tokens ─────────────────────────────────────────────────────

BAD = "\ufffd"


def streams(mine, program, log: Log) -> None:
    """(prompt, pieces, stop strings): tokens are bytes. A piece is what one step adds."""
    prompt, pieces, stop = program
    log(f"tokens are bytes; the prompt is {prompt!r}, stop strings {stop}")
    stream = mine.TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"), list(prompt), stop)
    for place, piece in enumerate(pieces, 1):
        finished = place == len(pieces)
        words = f"add({piece!r}, finished={finished})"
        sent = log.call(words, lambda ids, end: stream.add(list(ids), end), piece, finished)
        if sent is None:
            return


def cut(text: str, *places: int) -> list[bytes]:
    """Its bytes in pieces."""
    data, ends = text.encode(), (*places, None)
    return [data[a:b] for a, b in zip((0, *places), ends, strict=True)]


def random_stream(seed: int) -> tuple[bytes, list[bytes], tuple[str, ...]]:
    draw = random.Random(seed)
    text = "".join(draw.choice("abé→-") for _ in range(draw.randrange(2, 12)))
    data, begun = text.encode(), draw.randrange(0, 4)
    places = sorted({draw.randrange(begun, len(data) + 1) for _ in range(4)})
    pieces = [data[a:b] for a, b in zip((begun, *places), (*places, None), strict=True)]
    stop = tuple("".join(draw.choice("abé-") for _ in range(draw.randrange(1, 4))) for _ in "12")
    return data[:begun], pieces, stop[: seed % 3]


scenario("15.2", partial(calls, "visible_text"),
    Group("nothing can change: all is visible",
          [("ab", (), False), ("", (), False), ("ab", ("cd",), False), ("é→", ("x",), False)],
          "what is held back although no token can change it?"),
    Group("half a character", [(f"a{BAD}", (), False), (f"{BAD}{BAD}", (), False),
          (f"a{BAD}b", (), False), (f"a{BAD}", (), True), (f"a{BAD}b{BAD}", ("xy",), False)],
          "U+FFFD at the end of an unfinished text, and elsewhere"),
    Group("a stop string, and its beginning",
          [("abc", ("b",), False), ("abc", ("b",), True), ("abE", ("END",), False),
          ("abEN", ("END",), False), ("abEN", ("END",), True), ("EEN", ("END",), False),
          ("aEND b END", ("END",), False), ("x\n", ("\n\n", "\nclass"), False),
          ("aab", ("abc", "b."), False), ("a.b", ("b", "."), True), ("aEND", ("ND", "END"), True),
          (f"aE{BAD}", ("END",), False), ("abE", ("x", "END"), False), ("abE", (7, "END"), False),
          ("aaa", ("aaaa", "ab"), False)],
          "of all beginnings that the text ends with, how long is the longest?"),
)  # fmt: skip
scenario("15.2", streams,
    Group("piece by piece", [(b"p", cut("abc", 1, 2), ()), (b"p", cut("aé", 2), ()),
          (b"p", cut("→b", 1, 2, 3), ()), (b"p", cut("abENDc", 3, 4), ("END",)),
          (b"p", cut("abENc", 3, 4), ("END",)), (b"p", cut("aEéb", 2, 3), ("Eé!",)),
          (b"p", cut("aEN", 2), ("END",))], "which characters were sent, and which are final now?"),
    Group("the prompt ends inside a character",
          [(b"ab\xc3", [b"\xa9", b"c"], ()), (b"\xe2\x86", [b"\x92", b"x"], ()),
          (b"caf\xe2", [b"\x86", b"\x92", b"x"], ()), (b"\xc3", [b"\xa9END", b""], ("END",)),
          (b"ab\xe2\x86", [b"\x92ab", b"c"], ("c",)), (b"ab\xc3", [b"c", b"d"], ())],
          "of decode(prompt), what is certain before the answer has begun?"),
    Group("any text, in any pieces", [random_stream(seed) for seed in range(60)],
          "the first piece that differs: can a later token still change its last letters?"),
)  # fmt: skip


@runs_model("15.2")
def send_text(mine, lm) -> str:
    """The engine's own function is replaced, too."""
    prompt = lm.encode("# café")[:-1]  # without the last byte of é
    engine = minikv.Engine(lm, TORCH)
    params = minikv.SamplingParams(max_tokens=24, ignore_eos=True)
    [output] = engine.generate([prompt], params)
    stream, sent = mine.TextStream(lm.decode, prompt), ""
    for place, token in enumerate(output.token_ids, 1):
        sent += stream.add([token], place == len(output.token_ids))
    same_as_oracle(lm, prompt, output.token_ids)
    whole = lm.decode([*prompt, *output.token_ids])
    if "# caf" + sent != whole:
        raise AssertionError(f"{sent!r} was sent; the text is {whole!r}")
    with in_place_of("minikv.outputs:visible_text", mine.visible_text):
        pieces = [delta.text for delta in engine.stream("def area(", params)]
    if "".join(pieces) != lm.decode(lm.generate_naively(lm.encode("def area("), 24)):
        raise AssertionError(f"the engine sent {''.join(pieces)!r}")
    return f"{len(output.token_ids)} tokens after a prompt that ends inside é, none of it sent"


# ── 15.3 Tokens that no one reads ─────────────────────────────────────────────

# A program is events: "A8~" client A asks for 8 tokens as a stream, "A8" for a whole answer; "."
# is a step, "-A" says that A has left.


def clients(mine, program, log: Log) -> None:
    lm = tinypy()
    config = minikv.EngineConfig(24, 4, max_num_seqs=3, prefix_cache=False, attention="torch")
    engine = minikv.Engine(lm, config)
    front = mine.Front(engine)
    for event in program.split():
        if event == ".":
            outputs = log.call("step", front.step, see=False) if engine.has_unfinished else []
            log("", {"requests that got a token:": len(outputs or ())})
        elif event[0] == "-":
            log.call(f"{event[1]} leaves", front.leave, event[1])
        else:
            name, stream = event[0], event.endswith("~")
            count = int(event[1:].rstrip("~"))
            prompt = [40 + ord(name), *range(50, 54)]
            words = f"{name} asks for {counted(count, 'token')}{', streaming' if stream else ''}"
            log.call(words, front.submit, name, prompt, count, stream, see=False)
        free = {"free blocks:": engine.pool.num_free, "unfinished:": len(engine._requests)}
        log("", free | {"requests with an owner:": len(front.owners)})


scenario("15.3", clients,
    Group("a stream is left", ["A6~ . -A", "A6~ . . -A . .", "A6~ B3~ . -A . ."],
          "in which order does `leave` abort and forget?"),
    Group("a whole answer is not waited for", ["A6 . -A", "A6 B6~ . . -A .", "A6 A6~ . -A ."],
          "who tells the engine if nothing is sent?"),
    Group("requests that still wait", ["A6 B6 C6 D6 . -D . -A .", "A6~ -A", "A6 A6~ A6 A6~ . -A ."],
          "all requests of a client, also those that no step has seen"),
    Group("what is over, and who comes again",
          ["A1 . -A", "A2~ . . -A -A", "A6~ . -A -A", "A6 . -A A4 . -A .", "B3 . -A . .",
          "A1 A5~ . -A"], "what is left of a request after `leave`?"),
)  # fmt: skip

# ── 15.4 How long may a queue be? ─────────────────────────────────────────────

# A program is (target, events), or (target, events, enough): "a+100" a comes with 100 tokens, "a:"
# has its first token, "a-" its client leaves; "@" and a number is the time of all that follow. Who
# is refused does nothing more.


def queue(mine, program, log: Log) -> None:
    target, events, *enough = program
    admission, now, refused = mine.Admission(target, *enough), 0.0, set()
    log(f"a target of {target} s" + "".join(f", enough are {one} tokens" for one in enough))
    for event in events.split():
        if event[0] == "@":
            now = float(event[1:])
            continue
        key, what = event[0], event[1]
        if what == "+":
            tokens = int(event[2:])
            words = f"at {now:g} s: enter({key!r}, {tokens})"
            if log.call(words, admission.enter, key, tokens, now):
                refused.add(key)
        elif key in refused:
            continue
        elif what == ":":
            log.call(f"at {now:g} s: first_token({key!r})", admission.first_token, key, now)
        else:
            log.call(f"{key!r} leaves", admission.leave, key)
        log("", {"tokens queued:": admission.queued, "tokens per second:": admission.rate})


def random_queue(seed: int) -> tuple[float, str]:
    draw, now = random.Random(seed), 0.0
    came: list[str] = []
    events: list[str] = []
    names = iter("abcdefghijklmnopqrstuvwxyz")
    for _ in range(12):
        now += draw.choice((0.25, 0.5, 1.0))
        events.append(f"@{now:g}")
        if came and draw.random() < 0.45:
            events.append(f"{came.pop(0)}:")
        else:
            came.append(next(names))
            events.append(f"{came[-1]}+{draw.choice((50, 100, 200, 400))}")
    return float(1 + seed % 3), " ".join(events)


WARM = "a+100 @1 a: "  # 100 tokens per second
scenario("15.4", queue,
    Group("as long as no rate is known, all come in",
          [(1.0, "a+100"), (1.0, "a+100 b+900 c+50"), (0.5, "a+100 a- b+100 c+100")],
          "what is known before the first request has its first token?"),
    Group("the rate is measured", [(9.0, "a+100 @2 a:"), (9.0, "a+100 b+300 @1 a: @4 b:"),
          (9.0, "@5 a+60 @5.5 a: b+30 @6 b:"), (9.0, "a+100 @1 b+100 @2 a: @3 b:"),
          (9.0, "a+99 @1 a: b+100 @3 b: c+99 @4 c:", 100), (9.0, "a+60 b+60 @1 a: @2 b:", 100)],
          "which tokens are computed from when a request comes to its first token?"),
    Group("in time, or refused", [(3.0, WARM + "b+100 c+100 d+100 e+100"),
          (2.0, WARM + "b+150 c+50 d+50"), (2.0, WARM + "b+200 c+1"), (2.0, WARM + "b+420 c+50"),
          (2.0, WARM + "b+210 c+60"), (2.5, WARM + "b+100 c+125 d+25 e+1"),
          (2.0, WARM + "b+100 c+110 d+100")],
          "a request waits for all that is queued, and for its own tokens"),
    Group("Retry-After", [(1.0, WARM + "b+250 c+50"), (1.0, WARM + "b+100 c+1"),
          (2.0, WARM + "b+730 c+20 d+170"), (1.0, WARM + "b+400 c+300"),
          (0.5, WARM + "b+120 c+60")],
          "when will so few tokens be queued that it is let in? Half a second is rounded up"),
    Group("when nothing waits, all come in",
          [(1.0, WARM + "b+900"), (1.0, WARM + "b+900 c+10 @12 b: c+10"),
          (1.0, WARM + "b+50 b- c+900")], "a prompt that alone takes longer than the target"),
    Group("any queue", [random_queue(seed) for seed in range(40)],
          "work out the wait of the first request that differs: who is before it, at which rate?"),
)  # fmt: skip

# ── 15.5 What the metrics say ─────────────────────────────────────────────────

INF = float("inf")


def rates(mine, program, log: Log) -> None:
    found = [Lookup(*one) for one in program]
    told = []
    for one in found:
        words = f"{one.num_found} of {one.num_tokens} found"
        words += "" if one.is_admitted else ", not admitted"
        if one.num_preemptions:
            words += f", after {counted(one.num_preemptions, 'preemption')}"
        told.append(words)
    log.call(f"hit_rate: {'; '.join(told) or 'no look-ups'}", mine.hit_rate, found)


def random_histogram(seed: int) -> tuple:
    draw = random.Random(seed)
    size = draw.randrange(2, 6)
    bounds = [*(float(2**place) for place in range(size)), INF]
    before, after, old, new = [], [], 0, 0
    for _ in bounds:
        old, more = old + draw.randrange(4), draw.randrange(5)
        new += more
        before.append(old)
        after.append(old + new)
    return bounds, before, after, draw.choice((0.5, 0.75, 0.9))


NONE = [0, 0, 0]
scenario("15.5", partial(calls, "quantile"),
    Group("one histogram", [((1.0, 2.0, INF), NONE, (2, 6, 6), 0.5),
          ((1.0, 2.0, INF), NONE, (4, 4, 4), 0.5), ((1.0, 3.0, INF), NONE, (0, 8, 8), 0.75),
          ((1.0, 2.0, INF), NONE, (2, 4, 4), 0.5)],
          "the rank, the bucket where it is reached, and how far inside"),
    Group("what came between two looks", [((1.0, 2.0, INF), (4, 4, 4), (4, 8, 8), 0.5),
          ((1.0, 5.0, INF), (1, 9, 9), (3, 11, 11), 0.75),
          ((1.0, 2.0, 4.0, INF), (3, 3, 5, 6), (5, 9, 11, 12), 0.5)],
          "counters grow from the start of the server"),
    Group("beyond the last limit, and nothing at all",
          [((1.0, 2.0, INF), NONE, (1, 1, 4), 0.9), ((1.0, 2.0, INF), (3, 3, 3), (3, 3, 3), 0.5),
          ((1.0, INF), (0, 0), (0, 5), 0.5)],
          "what is known of an observation in the last bucket?"),
    Group("any histogram", [random_histogram(seed) for seed in range(30)],
          "in which bucket does the share lie, and how far inside?"),
)  # fmt: skip
scenario("15.5", rates,
    Group("hits and misses", [[(10, 4, True, 0)], [(10, 4, True, 0), (30, 6, True, 0)],
          [(10, 0, True, 0)], []], "tokens found over tokens looked up, of all requests together"),
    Group("a request comes back after a preemption",
          [[(10, 0, True, 0), (14, 12, True, 1)], [(10, 4, True, 0), (20, 16, True, 2)],
          [(40, 32, True, 1)]], "whose blocks does it find?"),
    Group("a request is tried again", [[(10, 4, False, 0), (10, 4, True, 0), (10, 0, True, 0)],
          [(20, 16, False, 0), (20, 16, False, 0), (20, 0, True, 0)], [(8, 4, False, 0)]],
          "what did the attempt save?"),
)  # fmt: skip

# ── 15.6 A server on paper ────────────────────────────────────────────────────

STEP = "what a step with n sequences takes, and gives"
numbers(
    "15.6",
    "on_paper",
    {
        "tokens": ("tokens per second with 16 sequences", STEP),
        "most": ("how many sequences satisfy", "6 + n milliseconds from token to token"),
        "goodput": ("answers per second that satisfy", "how long does an answer take, and how many "
                    "run at a time?"),
        "throughput": ("answers per second with 64", STEP),
        "goodput of 64": ("of these, those that satisfy", "the milliseconds between two tokens"),
        "refused": ("the share that is refused", "how many per second can be satisfied?"),
        "wait": ("seconds of waiting after a minute", "how many wait then, and how fast are they "
                 "answered?"),
    },
    near=0.002,
)  # fmt: skip
