"""Chapter 06: the scheduler. Chunks, admission, the step's loop, preemption."""

from minikv.course.harness.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="06",
    name="continuous_batching",
    doc="Continuous batching: before every step, who computes how many tokens, and who gives way.",
    skeleton=(
        Class(
            "minikv.scheduler:Scheduler",
            write={
                "_add_chunk": "06.1",
                "_admit": "06.2",
                "schedule": "06.3",
                "preempt": "06.4",
            },
            leave_out=(
                "add_running",
                "fork",
                "schedule_without",
                "commit",
                "remove",
                "look_up",
                "share_full_blocks",
                "__iter__",
            ),
        ),
        Class(
            "minikv.course.chapters.ch06_continuous_batching.answers:FreesTheMost",
            write={
                "_add_decodes": Bug(
                    "06.5",
                    (
                        ("decoding[len(plan.slots) :] + prefilling", "decoding + prefilling"),
                        (", of those that have no slot yet,", ""),
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
            minutes=10,
            difficulty=2,
            kind="build",
            matters="A prompt that has to be computed as a whole keeps everybody else waiting "
            "for their next word. Cut into chunks, it costs each of them a little.",
            hints=(
                "Two numbers limit a chunk. One is the budget. What is the other, for a "
                "sequence that is new, for one that is half computed, and for one that was "
                "preempted after it had written forty tokens?",
                "Three cases: more is left than the budget allows, less is left, and the budget "
                "is 0. In the third nothing may get into the plan. In the other two the plan's "
                "three lists get one entry each.",
                """start = tokens of the sequence that are computed already
left  = all of its tokens (prompt and output) - start
count = the smaller of left and budget
if count is more than 0:
    plan.sequences  gets the sequence
    plan.num_tokens gets count
    plan.slots      gets the slot of position `start`, from the sequence's table
return count""",
            ),
            works="""\
Nothing in the model knows about prompts. It gets tokens, their positions and their slots, and
K and V of all positions before them are in the table's blocks. So a prompt may be cut anywhere:
the second chunk finds the first one's K and V where it expects them, as if they had been computed
in this very step. (The mask is what has to be right: chapter 02's rectangle, not a square.)

What is counted is what has no K and V yet, and not what kind of token it is. A preempted request
computes its own output again, as if it were a prompt, and the same line serves it.

Returning what was used, and not what is left over, keeps the arithmetic in one place: whoever
owns the budget subtracts. A chunk of 0 tokens must not get into the plan, for the batch would
have a row without a query, and attention a softmax over nothing to do.

The idea is from Sarathi-Serve (Agrawal et al., 2024) and, under another name, DeepSpeed-FastGen
(Holmes et al., 2024). vLLM's version 1 takes the same minimum in its `schedule`:
num_new_tokens = min(num_new_tokens, token_budget).""",
        ),
        Exercise(
            id="06.2",
            title="Admission",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="Who lets in everybody there is a seat for will throw out many of them again, "
            "and compute what they had twice. Who lets in too few leaves the memory idle.",
            hints=(
                "What could make you say no? There are two things. For each of them: what have "
                "you taken by then, and who must get it back?",
                "In order: the seats, where a no costs nothing. Then the cached prefix, which has "
                "to be locked and shared before anything is evicted. Then the blocks: all "
                "tokens', less those that the table has by now. `_make_free` says whether they "
                "can be had, with a block to spare for each that runs.",
                """if the seats of all running + this one's are more than max_num_seqs: return False
table = a new, empty table
hit = look_up(sequence);  if there is one: lock its node, then share its blocks
needed = blocks for all tokens of the sequence - blocks in the table
if not _make_free(needed, headroom = how many are running):
    release the table;  if there was a hit: unlock its node
    return False
grow the table by the tokens that it has no room for yet
_begin(sequence, table, hit, plan);  return True""",
            ),
            works="""\
All of its tokens, or none. A scheduler that reserves the first chunk alone admits a request that
cannot go on: the next chunk finds the pool full and somebody is preempted, perhaps the newcomer
itself, only to be admitted again. vLLM reserves chunk by chunk, and issue 25538 (2025) is that
see-saw. What is promised here is the prompt; the output still grows block by block, since nobody
knows its length.

The block to spare for each that runs is a rule of thumb. A decode opens at most one block in a
step, so those that ran before need not leave in the next one; the newcomer, for whom nothing is
kept back, may. Keeping more is safer and fills the memory less. vLLM's version 0 kept one per cent
of its blocks free, version 1 began without a reserve, and got one as an option in 2026 (pull
request 44594).

Locking comes before evicting, or the room you make is the hit you stand on: it counts as evictable
as long as nobody has locked it. vLLM subtracts such blocks by hand from those that are free.

A no that changes nothing can be repeated at every step, for nothing was lost by asking. And the
cache is asked again each time, because what it had before may be evicted by now, and others may
have computed more of the prompt in the meantime.""",
        ),
        Exercise(
            id="06.3",
            title="The loop",
            minutes=25,
            difficulty=4,
            kind="build",
            matters="This is the method that makes batching continuous. It runs before every "
            "single step, and looks at every request.",
            hints=(
                "Who must not be kept waiting, who has a promise already, and who has nothing "
                "yet? That is the order.",
                "Sort the running into decodes and prefills. Three parts follow, each on what "
                "the budget has left. The third is a loop with four conditions: somebody waits, "
                "budget is left, the first in the queue is admitted, and before all that, "
                "nobody was preempted in this step.",
                """decoding   = running with one token left to compute, and no fork to come
prefilling = all others that run
preempted  = _add_decodes(decoding, prefilling, plan)      # may shorten both lists
budget    -= how many are decoding now
for each that is prefilling: budget -= _add_chunk(it, budget, plan)
if nobody was preempted:
    while somebody waits, and budget > 0, and _admit(first in the queue, plan):
        take it off `waiting`; put it into `running`, in the policy's order
        budget -= _add_chunk(it, budget, plan)
return plan""",
            ),
            works="""\
Prefill and decode are the same thing here, tokens that have no K and V yet, one of them or many.
What sets them apart is who is waiting. A decode is a word that somebody is reading along with, so
it comes first, and no prompt, however long, can delay it by more than one budget's worth of
computing. A running prefill comes next: its blocks are taken, and every step that it does nothing
they lie idle. Newcomers get the rest.

Leaving needs no line at all: who finishes is out of `running` before the next step, and its seat
and its blocks go to the first in the queue. Orca (Yu et al., 2022) called this scheduling by
iteration. Static batches decide once a batch, and that is the whole difference.

The first no ends it. To let a small request slip past a large one would fill the memory better,
today; a stream of small ones would keep the large one out for ever. (The price has a name,
head-of-line blocking, and the notebook shows it.)

After a preemption nobody is admitted: the blocks just freed are for those that run. (In order of
arrival nobody would get in anyway. The victim stands first in the queue, and needs at least as
much as it has given back, and one of those blocks is taken. With another policy somebody small
might slip in.)

Counting one token a decode relies on `max_batch_tokens` being at least `max_num_seqs`, which
EngineConfig insists on. Otherwise decodes could use up more than the budget.""",
        ),
        Exercise(
            id="06.4",
            title="Preemption",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Nobody knows how long an answer will be, so sooner or later the blocks run "
            "out. Then one request has to step back, and must not lose a word.",
            hints=(
                "A request is its tokens. What else does it hold, and what of that can be had "
                "again? In which order do you have to look at the table and let go of it?",
                "Two ways. Swap, if the engine is set to it, a plan is there to take the moves, "
                "something is computed, and the host has enough free blocks: then computed tokens "
                "stay computed. Recompute in all other cases: then none is computed any more.",
                """take it off `running`; count it: its own num_preemptions, and the scheduler's
used = blocks that its computed tokens fill, rounded up
if there is a plan, and the mode is "swap", and 0 < used <= free blocks of the host pool:
    host_block_ids = so many blocks of the host pool
    plan.swap_out gets a pair for each of the table's first `used` blocks: (device, host)
    count a swap
else:
    num_computed = 0
_release(sequence);  put it into `waiting`, in the policy's order""",
            ),
            works="""\
Only K and V are lost, or not even those. The tokens stay, and K and V follow from the tokens, so
nothing that was said can change. Sampling survives it, too: in this engine the random number of a
token depends on seed, sample and position, not on how often it was drawn.

The choice is between computing and moving. Recompute costs a prefill of all that was there; all
tokens at once, so it is far cheaper than the decodes that wrote them. Swap costs two trips over
the link. Kwon et al. (2023, section 7.3) measured both in vLLM: small blocks make small transfers
and swapping slow, while for blocks of 16 to 64 tokens the two came out about even.

vLLM's version 1 only recomputes. With a prefix cache the second way is often cheap: what the
victim had computed stays cached until somebody needs the blocks.

The moves are only planned here. The engine makes them before anything is written: out first,
then in (`Runner.move_blocks`). That is why blocks may be released, and given to somebody else,
while their content still waits to be copied.

Its old place in the queue is what keeps this fair. By the order of arrival the victim, who was
the last to come of those that ran, is still before all that wait.""",
        ),
        Exercise(
            id="06.5",
            title="The largest gives way",
            minutes=20,
            difficulty=4,
            kind="debug",
            matters="A better rule for who gives way, a few lines, and it works in every test that "
            "never runs out of memory. Then answers are made of somebody else's keys and values.",
            hints=(
                "All is well until somebody gives way, and even then not always goes wrong. What "
                "is different about the victims with whom it does? Print, for a step that "
                "preempts, `plan.slots` and the sequences, before and after.",
                "Work it through: A, B and C decode. A and B have got their slots, so two slots "
                "are in the plan. C finds no block, and A is the largest. What are the two lists "
                "after that, and what does the `while` compare?",
                """before:  decoding A B C    plan.slots a b
A leaves: decoding B C      plan.slots a b        <- as long as each other: the loop ends
the engine zips them:  B writes to a's slot, C writes to b's
so: choose among those that have no slot yet
or: when someone leaves who has one, take its slot and its planned copy back, too""",
            ),
            works="""\
`plan.slots[i]` belongs to `decoding[i]`. The loop relies on that, and everybody who takes somebody
out of `decoding` has to keep it so. The scheduler's own rule never meets the trap: the list is in
the policy's order, it is served from the front, and the victim is taken from the end, so whoever
goes has never been served.

vLLM shipped this bug. With priorities the victim could stand anywhere in the list, also among those
that had been scheduled in the same step, and it stayed scheduled (issue 23347, August 2025). There
a count noticed, and the server crashed; here nothing counts, and the text is wrong, which is worse.

Both ways out are right, and the second has more to it than a slot. What was done for the victim in
this step has to be undone: with several samples also the copy of a shared block that is in the
plan already. vLLM's fix undoes, and a year later a step was found that it had not undone (issue
49097). To choose among those for whom nothing was done yet is less to think about. It has a price:
whoever has a slot is spared for this step, however large. Those who came first have theirs first,
and are often the largest, so it is often a smaller one that goes, and perhaps a second after it.

And is the rule any better? It frees more blocks at once. But the largest is often the oldest: it
has the most to compute again, and it was promised to be served first. A request that is large
enough may be thrown out again and again.""",
        ),
        Exercise(
            id="06.6",
            title="Before the race",
            minutes=15,
            difficulty=2,
            kind="predict",
            matters="With a pencil you can tell what continuous batching is worth for your "
            "requests, and when it is worth nothing.",
            hints=(
                "Draw four rows of boxes, one row a seat, one box a step. Who sits where?",
                "Static: the longest of the first four decides, then the longest of the others. "
                "Continuous: when B has its two tokens, who takes its seat, and in which step?",
                """seat 1   A A A A A A A A
seat 2   B B E E E E E E
seat 3   C C C ? …                 F wants 1, G wants 5, H wants 7
seat 4   D D D ? …
empty  = 4 * steps - all tokens
break-even: bytes that move for a token (out and back in) * tokens a second""",
            ),
            works="""\
Static batches pay for the longest of each batch, continuous ones for the sum. What is lost in the
middle of the work disappears, and what is left is the end, when nobody waits any more and seats
empty one by one. With many requests the end is a small part of it, and utilisation goes to 1; with
eight it still shows. H is why 11 steps are needed and not 9: it is long and begins late. Whoever
knew the lengths would begin with the longest.

Where all want the same, nobody waits for anybody, and there is nothing to gain. The more the
lengths differ, the more there is, and in a chat a "yes" stands beside an essay.

In steps, that is. A step with more sequences takes longer, but far less than in proportion, as
long as reading the weights is most of it. That is what makes filled seats worth having.

The break-even of swapping and computing again is a rate, and lengths cancel out of it, as long as
both grow with the tokens. PCIe 4.0 with 16 lanes carries at most 31.5 GB/s each way, six times
what is asked for here; so swapping looks good on paper. What the paper leaves out: small blocks
are copied far below that speed, attention makes long prompts slower to compute, and a prefix cache
may still have the blocks for nothing.""",
        ),
    ),
)
