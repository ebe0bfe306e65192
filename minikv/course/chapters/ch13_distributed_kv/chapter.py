"""Chapter 13: names that cannot collide, a store that may be wrong or down, routing,
hand-over."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

HERE = "minikv.course.chapters.ch13_distributed_kv.answers"
CANCEL_RELEASES = (
    (
        "    transfer.wanted = False\n    if transfer.complete:\n        self.forget(number)\n",
        "    self.forget(number)\n",
    ),
)
STOPPED_IS_COMPLETE = (
    (
        "    if transfer.wanted and num_written == len(transfer.blocks):\n"
        "        transfer.complete = True\n"
        "    else:\n"
        "        self.forget(number)\n",
        "    transfer.complete = True\n",
    ),
)
WAITS_FOR_THE_DEAD = (
    (
        "        if transfer.sender == sender and not transfer.complete:\n",
        "        if transfer.sender == sender and transfer.wanted and not transfer.complete:\n",
    ),
)

CHAPTER = Chapter(
    number="13",
    name="distributed_kv",
    doc="Distributed K and V: names, an unreliable store, routing, hand-over.",
    skeleton=(
        Function("minikv.tiers.names:identity_of", "13.1"),
        Function("minikv.tiers.names:spell", "13.1"),
        Function("minikv.tiers.names:block_name", "13.1"),
        Function("minikv.tiers.names:root_name"),
        Function("minikv.tiers.names:block_names"),
        Function(f"{HERE}:fetch_prefix", "13.2"),
        Class(
            "minikv.cluster.routing:ByPrefix",
            write={"choose": "13.3", "hits": "13.3"},
            show=(),
        ),
        Class(
            f"{HERE}:Receiver",
            write={
                "stopped": Bug("13.4", STOPPED_IS_COMPLETE),
                "cancel": Bug("13.4", CANCEL_RELEASES),
                "died": Bug("13.4", WAITS_FOR_THE_DEAD),
            },
        ),
        Function(f"{HERE}:what_many_caches_find", "13.5"),
        Class(
            "minikv.cluster.breaker:Breaker",
            write={"allows": "13.6", "worked": "13.6", "failed": "13.6"},
            show=("__init__", "is_open"),
        ),
    ),
    exercises=(
        Exercise(
            id="13.1",
            title="Block names that cannot collide",
            minutes=15,
            difficulty=3,
            kind="build",
            matters="Two prompts with one name share K and V. In a store that many tenants use, a "
            "tenant who can give two prompts one name reads or spoils another tenant's "
            "prefix. vLLM and Megatron-LM both shipped names that could be made to "
            "collide.",
            hints=(
                "What does a name have to depend on, and which part of that can a caller choose? "
                "If two things are joined into one string of bytes, can you tell where the first "
                "ends?",
                "`identity_of`: a spelling with quotes and separators, such as JSON's, sorted. "
                "`block_name`: every token in the same number of bytes. `spell`: the spelling "
                "includes the type, and a tuple shows where it begins and ends. And a hash "
                "without known collisions: hashlib.sha256, not `hash`.",
                """identity_of:  sha256 of json.dumps(facts, sort_keys=True)
block_name:   sha256 of parent + each token as 8 bytes       # struct.pack(f"<{n}q", *tokens)
spell:        tuple:  "(" + spellings joined by "," + ")";  None if one of them is None
              None, str, bytes, int, bool, float:  name of the type + ":" + repr(salt)
              anything else:  None""",
            ),
            works="""\
A chain makes a name short and complete: the name of a block stands for all tokens before it, since
its parent's name does. So equal names mean equal prefixes, as far as the hash goes, and the depth
costs nothing.

"As far as the hash goes" is the point. vLLM began with Python's `hash` of a tuple of integers. It
is made for dictionaries: -1 and -2 collide, and since Python 3.12 `hash(None)` is a constant, so
the chain's beginning was known to everybody. It was possible to write prompts whose blocks had the
names of another prompt's blocks (GHSA-rm76-4mrf-v9r8, fixed in 0.7.2 by a random start; SHA-256
became the default in 0.10.2). Megatron-LM's hash was a polynomial: two changes in neighbouring
tokens cancelled out, and the name stayed the same (pull request 4158, April 2026). A random start
also gives every process other names, which is no solution for processes that share blocks.

The other half is spelling. SHA-256 of "ab" + "c" is that of "a" + "bc". So everything that a caller
can choose is written with a fixed length or with quotes: tokens as 8 bytes each, facts and salts
as text whose quotes are escaped. An integer 1 and a text "1" are two tenants.

What is in `facts` decides what never meets: weights, dtype of K and V, block size, the layout's
version. An engine with last year's layout causes misses, not garbage.

A name is not a password. Anyone who knows the tokens and the salt can compute it, and anyone who
may write to the store can put anything under it. So a salt that must keep tenants apart is long and
random, and what comes back is verified (13.2).""",
        ),
        Exercise(
            id="13.2",
            title="Fetch from an unreliable store",
            minutes=15,
            difficulty=3,
            kind="build",
            matters="Between the question and the answer another engine may have filled the "
            "store. What it sends then decides what the model reads.",
            hints=(
                "Which blocks are of use if the second one is missing? Which of the store's two "
                "answers tells you so for certain?",
                "Count the blocks before the first that the store does not claim. Compare the two "
                "times for all of them. Then look at the entries that came, in order, and stop at "
                "the first that is missing or refused. Which calls may raise OSError?",
                """no names:  []
try:
    count = blocks before the first False of store.contains(names)
    if count == 0, or link.seconds(count · block_bytes) >= count · block_seconds:  []
    entries = store.get_many(the first count names)
except OSError:  []
for each name and entry:
    None:  stop
    unpack(entry, name);  EntryError: stop""",
            ),
            works="""\
The store's answer to `contains` is a hint, not a promise. Between the two calls other engines
write, and blocks are evicted. That is not an error, and it is not worth a lock on a remote machine.
So only the second answer is believed, and the loss is bounded: a wrong hint costs one fetch, which
was expected to take less time than computing.

A prefix is cut at the first gap, as in exercise 12.3. It is cut at the first refused entry as well:
to the engine a damaged block and a missing one are the same.

With one link the decision is all or nothing. Each block gains the same, block_seconds minus its
bytes over the bandwidth, and the latency comes once. So no shorter beginning can beat both nothing
and all of it. In exercise 12.4 there were several tiers, and a shorter beginning could win.

The estimate assumes that everything comes. If the first block does not, the time of the whole fetch
is lost, because none of the other blocks can be used. An engine that sees this often should trust
the store less, or ask for the first block first.

`contains` for the whole prefix is one round trip. LMCache, Mooncake's connector in vLLM and this
engine ask that way; a question per block would pay the latency for each, and 60 times half a
millisecond is longer than many prefills.

The exercise leaves out what happens during the fetch. The engine does not wait for it: other
requests decode while a thread fetches, and the request gives up when computing would have been
faster.""",
        ),
        Exercise(
            id="13.3",
            title="Route by prefix, with a bound",
            minutes=25,
            difficulty=4,
            kind="build",
            matters="A router that looks at prefixes alone sends everyone with the same system "
            "prompt to one worker. A router that looks at loads alone computes that "
            "prompt on every worker. You write the plain rule here, and meet its "
            "corrections below.",
            hints=(
                "A worker holds a beginning of a prompt if it holds the first block, and the "
                "second, and so on. In which unit can a queue and a hit be compared?",
                "`hits`: walk along the names with the set of workers that have held all so far. "
                "`choose`: the candidates from `hits`, without those whose `sent` is above the "
                "bound, and the least loaded with 0 if it is not among them. Then `min` with a "
                "tuple as its key.",
                """hits:    alive = holders of the first name;  found = {}
         for place 1, 2, …:  alive = alive and the holders of this name
                             none alive: stop;  found[worker] = place for each alive
choose:  most = bound · (sum of sent + num_tokens) / number of workers
         candidates = hits of the workers with sent <= most
         least_loaded() is a candidate, too: with 0 if it is not yet
         the one with the least (load - hits · block_size, sent, number)
         self.stored(the worker, names)
         return it, and its hits: at most (num_tokens - 1) // block_size""",
            ),
            works="""\
Queue and hit are both tokens: those that a worker has to compute before this prompt, and those of
the prompt that it need not compute. Their difference says when the prompt would be done, up to a
part that is equal for all workers. So there is no weight to tune between them.

A prefix spreads by itself. While the holder's queue is shorter than the prefix, it is quicker to
wait. Once it is longer, the least loaded worker computes the prefix, and from then on two hold it.

The bound is for what queues do not show. With little traffic all loads are 0 when a request comes,
so the holder always wins, and one worker does everything while the others are idle. Nothing waits,
so nothing is lost, until the traffic grows within a second. `sent` remembers how much each worker
has been sent lately.

The router's knowledge is a belief: it notes a prompt's blocks when the prompt is sent, before they
are computed, and removes what a worker reports as evicted. If the belief is wrong, the worker
computes what the router had taken for a hit. That costs time and changes no token.

Others do the same in other units. SGLang's router keeps a tree of the texts that it has sent; it
takes the longest match while the loads are balanced, and the shortest queue otherwise. NVIDIA
Dynamo adds blocks to prefill and blocks that decode, with a weight for the overlap. llm-d gives
workers scores from 0 to 1 and adds them with weights. The last two can use events from the workers;
without events they assume, as this router does.

`min` over a tuple makes the choice repeatable. Ties are common: at the start everything is 0.""",
        ),
        Exercise(
            id="13.4",
            title="A hand-over that survives failures",
            minutes=20,
            difficulty=4,
            kind="debug",
            matters="A request is cancelled, its blocks go to the next one, and the network card "
            "of another machine still writes into them. Nothing raises an error.",
            hints=(
                "Who may write into the blocks of a transfer, and until when? Who knows that it "
                "is over? For each of the three methods: what if the other two come before it, or "
                "never?",
                "There is a bug in each. `cancel`: the request is gone, but is the sender? "
                "`stopped`: has everything been written, and does anybody still want it? `died`: "
                "for which transfers will `stopped` never be called?",
                """cancel:   not wanted any more
          complete: nothing is written any more, so give the blocks back
          otherwise leave them where they are
stopped:  wanted, and all blocks written: complete
          otherwise: give the blocks back
died:     every transfer of this sender that is not complete: give the blocks back""",
            ),
            works="""\
A block on its way has two lifetimes: that of the request which wants it, and that of the writer on
the other machine. It is free when both are over. `wanted` is the first; the second ends with
`stopped` or with `died`, and with nothing else.

SGLang had the first bug in its decode side. An aborted request gave its pages back at once, the
next request got them, and a late write of the old transfer overwrote its keys: fluent text about
another user's prompt, and no error (issue 24527, May 2026). A first change told the writer to stop
(27372, June), which made it rare; since 35049 the pages are meant to be kept until the writer has
answered, or a timeout (merged in August 2026, behind a setting).

Keeping them brings the opposite bug. vLLM keeps the blocks of an aborted load until the sender
reports. If the sender is dead, no report comes, and the blocks are never free again (issue 46283,
June 2026, in push mode): a leak of one request at a time, until nothing is admitted.

The second bug is a message that is believed too much. In SGLang a prefill that was aborted because
its prompt was too long ended its transfer, and the decode side took the part that had arrived for
the whole (issue 30233).

The sender's side has the mirror image of the problem: the prefill worker may not free its blocks
while they are being read. vLLM did it with one timeout of 480 s; now a lease of 30 s is renewed by
heartbeats while the reader lives (pull request 41383). A lease is what remains when "dead" and
"slow" cannot be told apart: the blocks are kept until a stated time, and the reader must have
closed the connection before that time is over.

A request whose transfer was forgotten is computed again, by this worker or by another. K and V can
always be computed again; that is why giving up is safe.""",
        ),
        Exercise(
            id="13.5",
            title="Four caches, or one",
            minutes=10,
            difficulty=2,
            kind="predict",
            matters="Four workers have four times the memory. How much more they find depends on "
            "which worker is asked; it may be nothing.",
            hints=(
                "Write down which worker gets the turns of A, of B, of C. How many different "
                "conversations does a worker see, and how many can it hold?",
                "12 is a multiple of 4, and 13 is not. By prefix, each worker sees the same three "
                "or four conversations. Random: with what chance was none of the earlier turns on "
                "the worker that is drawn now?",
                """one worker, 13:     130 blocks of 160
round robin, 12:    conversation c always meets worker c mod 4: 30 blocks of 40
round robin, 13:    every worker meets all 13 in turn: a loop of 130 blocks in a cache of 40
by prefix, 13:      3, 3, 3 and 4 conversations: at most 40 blocks
shared store, 13:   130 of 160, wherever the turn goes;  how many of them are on the worker?
random, turn k:     1 - (1 - 1/workers)^(k - 1)""",
            ),
            works="""\
N private caches are one cache with N times the memory only if each block is asked for where it
is. Round robin asks anywhere: every worker sees all conversations, and each cache has to hold all
of them. The memory of the other workers does not help.

Round robin works by accident with 12 conversations: 12 is a multiple of 4, so each conversation
always meets the same worker. A thirteenth conversation makes everything a miss: that is the loop of
exercise 12.1, now on four workers. In a test with round numbers it looks perfect.

By prefix the caches add up, and so they do behind a shared store: what is found is the same. The
price is not. With the store each turn fetches its 10 blocks over the network; by prefix nothing
moves, but the router must know who holds what, and a worker may get more than its share. Clusters
run both: the router for the ordinary case, the store for what was evicted, for new workers and for
those that died.

With random routing and caches of unlimited size, the second turn finds its prefix with a chance of
1/N. The more workers, the longer a conversation has to be before its prefix is everywhere; and then
there are N copies of it. With a thousand workers and conversations of six turns, next to nothing is
found.

A system prompt that everybody shares is the exception. It is on every worker after its first
request, whatever the router does. That is why a benchmark with a long system prompt and one turn
says little about routing.""",
        ),
        Exercise(
            id="13.6",
            title="A circuit breaker for the store",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="A store that is down must not make every request wait for its time limit. A "
            "cache that slows its engine is worse than none.",
            hints=(
                "How do you know which of the three states it is in? `wait` tells closed from "
                "open. What tells open from half-open? Which method changes the state?",
                "Half-open needs no variable. If the time of the next trial has come, `allows` "
                "says True once, and sets the next time before it returns: that refuses all "
                "others. It doubles the wait at that moment, so `failed` need only start it again.",
                """allows:  closed (wait is 0): True
         before _next_trial: False
         wait = the smaller of most and 2 · wait;  _next_trial = now + wait;  True
worked:  wait = 0;  was it open?
failed:  closed: wait = first
         _next_trial = now + wait;  was it closed?
all of it while holding _lock""",
            ),
            works="""\
A time limit bounds one call. A breaker bounds all of them: while the store is down, the calls that
wait for the limit become rarer, each wait twice as long as the one before, until one call in `most`
seconds is left. So an outage costs a few calls however many requests there are, and then next to
nothing.

The price is at the other end. When the store is back, it is noticed at the next trial: `most`
seconds later in the worst case. For a cache that is cheap, since a miss is only slow. That is also
why one failure is enough to open: Hystrix and its followers wait for a share of failures, because
for them an open breaker means an error.

Half-open is where breakers fail. If everyone may try at that moment, a store that has just come
back gets all the waiting load at once, and a dead one makes everyone wait. One trial is enough. And
a trial may never report: its thread was cancelled, or died. A flag "a trial is running" would then
refuse for ever. A time passes by itself, so the state here is two numbers and a clock.

A report may be late. Two calls go through while it is closed, and both fail. The second report
restarts the wait and does not double it: it is the same outage, not a second one.

The clock is passed in, so that tests need not sleep. It must be a monotonic one: with the time of
day, a correction by an hour would keep the store away for an hour.""",
        ),
    ),
)
