"""Chapter 06: the scheduler. Chunks, admission, the step's loop, preemption."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="06",
    name="continuous_batching",
    doc="Continuous batching: which sequences compute how many tokens, and which give way.",
    skeleton=(
        Class(
            "minikv.scheduler:Scheduler",
            write={
                "_add_chunk": "06.1",
                "_admit": "06.2",
                "schedule": "06.3",
                "preempt": "06.4",
            },
            show=(
                "__init__",
                "add",
                "_add_decodes",
                "_reserve_one",
                "_begin",
                "_make_free",
                "_release",
                "_drop_host_blocks",
            ),
        ),
        Class(
            "minikv.course.chapters.ch06_continuous_batching.answers:FreesTheMost",
            write={
                "_add_decodes": Bug(
                    "06.5",
                    (
                        ("decoding[len(plan.slots) :] + prefilling", "decoding + prefilling"),
                        (", of those without a slot,", ""),
                    ),
                )
            },
        ),
        Function("minikv.course.chapters.ch06_continuous_batching.answers:before_the_race", "06.6"),
    ),
    in_engine=True,
    exercises=(
        Exercise(
            id="06.1",
            title="A chunk of a prompt",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="A prompt that is computed in one piece delays the next token of every running "
            "request. Cut into chunks, it delays each of them only a little.",
            hints=(
                "Two numbers limit a chunk. One is the budget. What is the other, for a "
                "sequence that is new, for one that is half computed, and for one that was "
                "preempted after it had written forty tokens?",
                "Three cases: more is left than the budget allows, less is left, or the budget "
                "is 0. In the third, nothing may get into the plan. In the other two, each of the "
                "plan's three lists gets one entry.",
                """start = the tokens of the sequence that are computed already
left  = all of its tokens (prompt and output) - start
count = the smaller of left and budget
if count is more than 0:
    plan.sequences  gets the sequence
    plan.num_tokens gets count
    plan.slots      gets the slot of position `start`, from the sequence's table
return count""",
            ),
            works="""\
The model knows nothing about prompts. It gets tokens, their positions and their slots, and the K
and V of all earlier positions are in the table's blocks. So a prompt may be cut anywhere: the
second chunk finds the K and V of the first where it expects them, as if they had been computed in
this very step. (The mask has to be right: chapter 02's rectangle, not a square.)

What counts is which tokens have no K and V yet, and not what kind of tokens they are. A preempted
request computes its own output again as if it were a prompt, and the same line of code serves it.

Returning what was used, and not what is left over, keeps the arithmetic in one place: the caller,
who owns the budget, subtracts. A chunk of 0 tokens must not get into the plan: the batch would
have a row without a query, and attention would take the softmax of nothing.

The idea is from Sarathi-Serve (Agrawal et al., 2024) and, under another name, DeepSpeed-FastGen
(Holmes et al., 2024). vLLM's version 1 takes the same minimum in its `schedule`:
num_new_tokens = min(num_new_tokens, token_budget).""",
        ),
        Exercise(
            id="06.2",
            title="Admission",
            minutes=45,
            difficulty=4,
            kind="build",
            matters="If every request with a seat is admitted, many are preempted, and what they "
            "had is computed twice. If too few are admitted, memory is idle.",
            hints=(
                "For which two reasons can the answer be no? For each of them: what have "
                "you taken by then, and how do you give it back?",
                "In order: the seats, where a refusal costs nothing. Then the cached prefix, which "
                "must be locked and shared before anything is evicted. Then the blocks: those of "
                "all tokens, less those that the table has by now. `_make_free` says whether they "
                "can be had, with one block to spare per running sequence.",
                """if the seats of all running + this one's are more than max_num_seqs: return False
table = a new, empty table
hit = look_up(sequence);  if there is one: lock its node, then share its blocks
needed = blocks for all tokens of the sequence - blocks in the table
if not _make_free(needed, headroom = the number of running sequences):
    release the table;  if there was a hit: unlock its node
    return False
grow the table by the tokens that it has no room for yet
_begin(sequence, table, hit, plan);  return True""",
            ),
            works="""\
All of its tokens, or none. A scheduler that reserves only the first chunk admits a request that
can't continue: the next chunk finds the pool full, and a sequence is preempted, perhaps the new
one itself, only to be admitted again. vLLM reserves chunk by chunk, and issue 25538 (2025) is that
see-saw. What is promised here is the prompt. The output still grows block by block, since its
length is unknown.

One spare block per running sequence is a rule of thumb. A decode opens at most one block in a
step, so the sequences that ran before are safe in the next step; the new one, for which nothing is
kept back, may not be. Keeping more is safer and fills the memory less. vLLM's version 0 kept one
per cent of its blocks free, version 1 began without a reserve, and got one as an option in 2026
(pull request 44594).

Lock before you evict, or the room you make is the hit you are about to use: it counts as evictable
as long as it is not locked. vLLM subtracts such blocks by hand from those that are free.

A refusal that changes nothing can be repeated at every step. And the cache is asked again each
time, because what it had before may have been evicted, and other requests may have computed more
of the prompt in the meantime.""",
        ),
        Exercise(
            id="06.3",
            title="The loop",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="This method is what makes batching continuous. It runs before every single "
            "step, and looks at every request.",
            hints=(
                "Which sequences must not be kept waiting, which have been promised their "
                "blocks, and which have nothing yet? That is the order.",
                "Sort the running sequences into decodes and prefills. Three parts follow, each on "
                "the budget that the part before has left. The third is a loop with four "
                "conditions: a request waits, budget is left, the first in the queue is admitted, "
                "and, before all that, no sequence was preempted in this step.",
                """decoding   = running with one token left to compute, and no fork to come
prefilling = all others that run
preempted  = _add_decodes(decoding, prefilling, plan)      # may shorten both lists
budget    -= how many are decoding now
for each that is prefilling: budget -= _add_chunk(it, budget, plan)
if none was preempted:
    while a request waits, and budget > 0, and _admit(first in the queue, plan):
        take it off `waiting`; put it into `running`, in the policy's order
        budget -= _add_chunk(it, budget, plan)
return plan""",
            ),
            works="""\
Prefill and decode are the same thing here: tokens that have no K and V yet, many of them or one.
The difference is who is waiting. A decode is a word that a user is waiting to read, so it comes
first, and no prompt, however long, can delay it by more than one budget's worth of computing. A
running prefill comes next: its blocks are taken, and lie idle in every step that it does nothing.
New requests get the rest.

Leaving needs no line at all: a finished sequence is out of `running` before the next step, and its
seat and its blocks go to the first in the queue. Orca (Yu et al., 2022) called this scheduling by
iteration. Static batches decide once per batch, and that is the whole difference.

The first refusal ends the admissions. Letting a small request slip past a large one would fill the
memory better today, but a stream of small ones would keep the large one out for ever. (The price
is called head-of-line blocking, and the notebook shows it.)

After a preemption no request is admitted: the blocks just freed are for the running sequences. (In
order of arrival none would get in anyway. The victim is first in the queue and needs at least as
many blocks as it has given back, one of which is taken. With another policy a small request might
slip in.)

One token per decode fits into the budget because `max_batch_tokens` is at least `max_num_seqs`,
which EngineConfig insists on. Otherwise decodes could use more than the budget.""",
        ),
        Exercise(
            id="06.4",
            title="Preemption",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="The length of an answer is not known, so sooner or later the blocks run out. "
            "Then one request must step back, and must not lose a token.",
            hints=(
                "A request is its tokens. What else does it hold, and which of that can be had "
                "again? In which order do you read its table and release it?",
                "Two ways. Swap, if the engine is set to it, there is a plan to take the moves, "
                "something is computed, and the host has enough free blocks: then computed tokens "
                "stay computed. Recompute in all other cases: then no token counts as computed.",
                """take it off `running`; count it: its own num_preemptions, and the scheduler's
used = the number of blocks that its computed tokens fill, rounded up
if there is a plan, and the mode is "swap", and 0 < used <= free blocks of the host pool:
    host_block_ids = `used` blocks, allocated from the host pool
    plan.swap_out gets a pair for each of the table's first `used` blocks: (device, host)
    count a swap
else:
    num_computed = 0
_release(sequence);  put it into `waiting`, in the policy's order""",
            ),
            works="""\
Only K and V are lost, or not even those. The tokens stay, and K and V follow from the tokens, so
nothing that was written can change. Sampling survives it, too: in this engine the random number of
a token depends on seed, sample and position, and not on how often it was drawn.

The choice is between computing and moving. Recompute costs one prefill of all the tokens at once,
which is far cheaper than the decodes that wrote them. Swap costs two trips over the link. Kwon et
al. (2023, section 7.3) measured both in vLLM: small blocks make small transfers and swapping slow,
while for blocks of 16 to 64 tokens the two came out about even.

vLLM's version 1 only recomputes. With a prefix cache this is often cheap: what the victim had
computed stays cached until the blocks are needed.

The moves are only planned here. The engine makes them before anything is written: out first,
then in (`Runner.move_blocks`). That is why blocks may be released, and given to another sequence,
while their content still waits to be copied.

Its old place in the queue keeps this fair. In order of arrival the victim, the last to arrive of
those that ran, is still ahead of all that wait.""",
        ),
        Exercise(
            id="06.5",
            title="The largest gives way",
            minutes=25,
            difficulty=4,
            kind="debug",
            matters="Another rule for the victim takes a few lines, and passes every test that "
            "never runs out of memory. When memory does run out, answers are made from another "
            "request's keys and values.",
            hints=(
                "All is well until a sequence is preempted, and sometimes even then. What is "
                "different about the victims that cause trouble? For a step that preempts, "
                "print `plan.slots` and the sequences, before and after.",
                "Work it through: A, B and C decode. A and B have got their slots, so two slots "
                "are in the plan. C finds no block, and A is the largest. What are the two lists "
                "after that, and what does the `while` compare?",
                """before:  decoding A B C    plan.slots a b
A leaves: decoding B C      plan.slots a b        <- equally long: the loop ends
the engine pairs them:  B writes to a's slot, C writes to b's
so: choose among those that have no slot yet
or: when one leaves that has a slot, take back its slot, and the copy planned for it, too""",
            ),
            works="""\
`plan.slots[i]` belongs to `decoding[i]`. The loop relies on that, so code that removes a sequence
from `decoding` has to keep it true. The scheduler's own rule never meets the trap: the list is in
the policy's order, it is served from the front, and the victim is taken from the end, so the
victim has never been served.

vLLM shipped this bug. With priorities the victim could be anywhere in the list, also among those
already scheduled in the same step, and it stayed scheduled (issue 23347, August 2025). There an
assertion failed and the server crashed; here nothing checks, and the text is wrong, which is worse.

Both fixes are right, and the second takes more than a slot. What this step did for the victim has
to be undone: with several samples, also the copy of a shared block that is in the plan already.
vLLM's fix undoes, and a year later a step was found that it had not undone (issue 49097). To
choose among those for which nothing was done yet is simpler. It has a price: a sequence with a
slot is spared for this step, however large it is. Those that arrived first have theirs first, and
are often the largest, so often a smaller one has to go, and perhaps a second one after it.

And is the rule any better? It frees more blocks at once. But the largest is often the oldest: it
has the most to compute again, and it was promised to be served first. A request that is large
enough may be preempted again and again.""",
        ),
        Exercise(
            id="06.6",
            title="Before the race",
            minutes=15,
            difficulty=2,
            kind="predict",
            matters="With pencil and paper you can tell what continuous batching is worth for your "
            "requests, and when it is worth nothing.",
            hints=(
                "Draw four rows of boxes, one row per seat, one box per step. Which request is "
                "in which seat?",
                "Static: the longest of the first four decides, then the longest of the others. "
                "Continuous: when B has its two tokens, which request takes its seat, and in which "
                "step?",
                """seat 1   A A A A A A A A
seat 2   B B E E E E E E
seat 3   C C C ? …                 F wants 1, G wants 5, H wants 7
seat 4   D D D ? …
empty  = 4 * steps - all tokens
break-even: bytes that move per token (out and back in) * tokens per second""",
            ),
            works="""\
Static batches pay for the longest request of each batch, continuous ones for the sum. The waste in
the middle disappears. What is left is the end, when no request waits and seats empty one by one.
With many requests the end is a small part of the whole, and utilisation approaches 1; with eight
it still shows. H is the reason for 11 steps instead of 9: it is long and begins late. If you knew
the lengths, you would begin with the longest.

If all answers are equally long, no request waits for another, and there is nothing to gain. The
more the lengths differ, the more there is to gain, and in a chat a "yes" stands beside an essay.

That is measured in steps. A step with more sequences takes longer, but far less than in
proportion, as long as reading the weights is most of it. That is what makes full seats worth
having.

The break-even between swap and recompute is a rate, and the number of tokens cancels out of it, as
long as both costs grow with it. PCIe 4.0 with 16 lanes carries at most 31.5 GB/s each way, six
times what is asked for here; so swapping looks good on paper. What the paper leaves out: small
blocks are copied far below that speed, attention makes long prompts slower to compute, and a prefix
cache may still have the blocks at no cost.""",
        ),
    ),
)
