"""Chapter 15: an engine behind an address."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

ANSWERS = "minikv.course.chapters.ch15_serving.answers"

CHAPTER = Chapter(
    number="15",
    name="serving",
    doc="Serving: an engine's thread and its readers, text, clients that leave, load, and metrics.",
    skeleton=(
        Class(f"{ANSWERS}:Inbox", write={"put": "15.1", "collect": "15.1"}),
        Function(f"{ANSWERS}:visible_text", "15.2"),
        Class(f"{ANSWERS}:TextStream", write={"add": "15.2"}),
        Class(
            f"{ANSWERS}:Front",
            write={
                "leave": Bug(
                    "15.3",
                    (
                        (
                            "if owner == client:",
                            "if owner == client and request_id in self.streams:",
                        ),
                        (
                            "            self.abort(request_id)\n"
                            "            self.forget(request_id)\n",
                            "            self.forget(request_id)\n"
                            "            self.abort(request_id)\n",
                        ),
                    ),
                )
            },
        ),
        Class(f"{ANSWERS}:Admission", write={"enter": "15.4", "first_token": "15.4"}),
        Function(f"{ANSWERS}:quantile", "15.5"),
        Function(f"{ANSWERS}:hit_rate", "15.5"),
        Function(f"{ANSWERS}:on_paper", "15.6"),
    ),
    exercises=(
        Exercise(
            id="15.1",
            title="From one thread to many readers",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="One reader that is slow, or gone, must cost the others nothing. If the engine "
            "waits for it, all wait; if its tokens pile up, the memory fills.",
            hints=(
                "Which thread runs `put`, and which `collect`? What may the one do that the other "
                "may not?",
                "An output has all tokens of its request so far, so the newest replaces the one "
                "before. What is new is everything behind `num_tokens` and `num_chars`. The flag "
                "`is_waking` is set by the `put` that sends a wake-up, and cleared by `collect`.",
                """put(found):
    with the lock:
        keep found: as the error, or in place of the output
        if is_waking: return
        is_waking = True
    loop.call_soon_threadsafe(woken.set), and ignore RuntimeError
collect():
    with the lock:
        woken.clear(); is_waking = False
        take the output and the error out
    raise the error if there is one
    cut what was collected before off token_ids and text; note how far they go now""",
            ),
            works="""\
The two threads share one object, and the lock guards it for a few assignments. Nothing waits inside
the lock. So the engine's thread is held up for microseconds, whatever its readers do.

Replacing is what bounds the memory. A queue of pieces grows as long as nobody reads: vLLM limits it
to 256 outputs and then aborts the request (issue 56094). A state that is replaced needs no limit,
because it never has more than the request's own tokens. It works because the newest state contains
all earlier ones. (If states were increments, as between machines, they would have to be joined.)

An asyncio.Event belongs to its loop. Set from another thread it may wake nobody: the loop sleeps in
the operating system until one of its own timers or sockets has something.
`call_soon_threadsafe` writes to a socket that the loop listens on. That is a system call, so it is
made once per wake-up, not once per token: a loop that is busy finds one call waiting, not hundreds.

The worse error is the other way round: to run the engine's step inside the event loop. Then nothing
is sent during a step, and tokens arrive in lumps (vLLM, issue 1629).""",
        ),
        Exercise(
            id="15.2",
            title="Text from tokens",
            minutes=35,
            difficulty=3,
            kind="build",
            matters="What was sent cannot be taken back: no half character, no beginning of a stop "
            "string, and not a word of the prompt.",
            hints=(
                "Which ends of a text could still turn into something else with the next token?",
                "Hold back U+FFFD at the end first, then look at what stands before it: is it the "
                "beginning of a stop string? Of several beginnings the longest counts. For "
                "`add`, decode prompt and answer together, and leave out the whole characters of "
                "the prompt.",
                """visible_text:
    if a stop string is in the text: return what is before the first
    if finished: return text
    text = text without U+FFFD at its end
    n = the longest proper beginning of any stop string that text ends with
    return text without its last n characters
add:
    append the tokens
    begin = number of characters of decode(prompt) without U+FFFD at its end
    text = decode(prompt + answer) from begin on
    return what visible_text(text) has beyond num_sent; raise num_sent""",
            ),
            works="""\
Sent text is final, so only what no later token can change may be sent. Two things can change: bytes
that are no whole character yet, and the beginning of a stop string, which will be cut off if the
string is completed.

How much is held back is a matter of taste only at first sight. vLLM once sent the first part of
stop strings (issue 3574). Its cure was to hold back as many characters as the longest stop string
has, less one, at all times; then the first pieces of every stream were empty, and were reported as
a bug (issue 11089). Only an end that *is* a beginning need wait.

If a prompt ends inside a character, its last byte decodes to U+FFFD, until the answer completes it.
A fast detokenizer of vLLM took the prompt's text as known only if it did not end in U+FFFD, and
sent the whole prompt with the first token otherwise (issue 48853).

Decoding everything at each step takes time that grows with the text. Engines decode a window of the
last tokens, as wide as a character or a stop string can be.""",
        ),
        Exercise(
            id="15.3",
            title="Tokens for nobody",
            minutes=20,
            difficulty=3,
            kind="debug",
            matters="A client that closes its window costs blocks and steps until its answer is "
            "complete, unless the server notices, and tells the engine.",
            hints=(
                "There are two bugs, both of real servers. Follow a client that does not stream "
                "through `leave`. Then follow one that does, line by line.",
                "`abort` does nothing for a request that has no owner. Who takes the owner away, "
                "and when?",
                """for each request of the client, streaming or not:
    abort it, while it is still known
    then forget it""",
            ),
            works="""\
Both bugs leave the engine computing for nobody, and neither raises an error. You see them in the
number of free blocks, or in steps that take longer than they should.

The first is of SGLang (issue 36333): a request's state was deleted before the abort was sent, and
the abort looked for the state. One report counts 182 requests that ran to their last token with
nobody there, and nine log lines in ten about them. Tell first, then forget.

The second is of ATOM (issue 1562). A web framework cancels the handler of a stream when the client
leaves, because the next send fails. A handler that only waits for the whole answer sends nothing,
and so nothing fails: it must watch for the disconnect itself. `Work.watch` in
`minikv/serving/app.py` does.

The opposite was shipped, too: ATOM aborted at every normal end (issue 1589), 58,455 times in one
log.""",
        ),
        Exercise(
            id="15.4",
            title="How long may a queue be?",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="A queue without a limit serves everybody too late. A refused client can go to "
            "another server; one that waits cannot.",
            hints=(
                "A request has its first token when all that is queued before it is computed, and "
                "its own prompt. How many tokens is that, and how many per second are computed?",
                "In `target` seconds `target * rate` tokens are computed; its own take a part of "
                "them. If more than the rest is queued, how long until the surplus is gone?",
                """enter:
    if the rate is known and something is queued:
        room = target * rate - num_tokens, at least 0
        if queued > room: return (queued - room) / rate, rounded up
    note num_tokens as waiting; note now and queued + num_tokens
    return 0
first_token:
    take out what was noted
    measured.append((tokens noted, now - when it came))""",
            ),
            works="""\
A limit in requests says little, because prompts differ by a factor of a thousand. A limit in tokens
divided by tokens per second is a time, and a time is what was promised. vLLM's users ended up with
the same rule: the limit is the target times the rate of prefill (issue 49330).

The rate is measured on requests that waited. It contains everything that slows prefill down: decode
steps in between, other processes, cache hits that speed it up. It follows the machine, which a
configured number does not.

Retry-After turns a refusal into a plan. Clients wait at least so long, so refused requests come
back when there is room and not all at once a second later.

A prompt that alone takes longer than the target is let in when nothing waits: otherwise it could
never be answered. `Queue` in `minikv/serving/queue.py` has this rule over the tokens that are
queued, with a limit in tokens until a rate is known.""",
        ),
        Exercise(
            id="15.5",
            title="What the metrics say",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="A dashboard shows percentiles that were never measured, and rates that were "
            "counted by somebody. Both can be far off.",
            hints=(
                "The counters of a histogram grow for ever. What has happened between two looks? "
                "And is a bucket's counter the number of observations in it?",
                "Subtract, then find the first bucket whose cumulative count reaches the rank. "
                "What part of the way through this bucket is the rank? For the hit rate: which "
                "look-ups saved nothing?",
                """quantile:
    counts = after - before;  rank = share * the last count
    no observations: None
    the first bucket with counts >= rank;  if it is the last: the limit before it
    lower limit and count are those of the bucket before, or 0
    lower + width * (rank - count below) / (count inside)
hit_rate:
    of look-ups that were admitted and not preempted before: found / looked up""",
            ),
            works="""\
A histogram keeps a dozen counters and forgets the values. A percentile from it is a guess inside
one bucket: if 0.99 of the requests end in the bucket from 1 to 2.5 s, the true value may be
anywhere there. In the last bucket nothing is known but the lower limit, and dashboards show that
limit, whatever happens above it. So buckets must be narrow where promises are made.

Means of percentiles mean nothing; counters can be added. To join the figures of several engines,
add their buckets and then take the quantile.

A counter that counts the wrong event looks exactly like a right one. vLLM's hit rate on random
prompts was 32.2 % (issue 25780): preempted requests found their own blocks when they came back.
After the change it was 0.2 %. A further bug counted each attempt to admit a request (45202). The
test is a workload whose answer is known: random prompts share nothing.

And a right hit rate is not a gain: with 94.59 % of hits, one user had some 6 % more throughput
(issue 53395).""",
        ),
        Exercise(
            id="15.6",
            title="A server on paper",
            minutes=20,
            difficulty=2,
            kind="predict",
            matters="Throughput grows with every sequence that joins, and satisfied users do not. "
            "Where the two part can be computed before a server is bought.",
            hints=(
                "How many milliseconds does a step with 16 sequences take, and how many tokens "
                "does it give?",
                "With n sequences a user waits 6 + n ms from token to token. An answer takes 50 "
                "times that, and n are answered in this time.",
                """tokens = 16 / step(16)
most: the largest n with 6 + n <= 16
goodput = most / (50 * step(most));  throughput = 64 / (50 * step(64))
refused = the part of 20 above goodput
wait = what has piled up after 60 s, / goodput""",
            ),
            works="""\
Throughput, n / (50 (6 + n)), grows with n for ever, towards one answer per 50 ms. Goodput counts
only answers that somebody wants: it grows up to n = 10, and is zero at 11. On a real server it does
not fall so steeply, since steps differ, but it falls.

Beyond its capacity a server has two choices. It refuses three requests in eight, and all others are
served as promised; or it lets everybody wait, and after a minute everybody waits 36 seconds. In the
second case as many answers are computed, and none of them is in time. That is why a limit on the
queue is not unfriendly.

Little's law ties the three numbers: the sequences that run are answers per second times seconds per
answer, here 10 = 12.5 · 0.8.""",
        ),
    ),
)
