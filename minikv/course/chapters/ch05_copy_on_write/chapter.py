"""Chapter 05: forks that share blocks until one of them writes."""

from minikv.course.harness.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="05",
    name="copy_on_write",
    doc="Copy on write: tables that share blocks, samples, beams, branches.",
    skeleton=(
        Class(
            "minikv.blocks:BlockTable",
            write={"fork": "05.1", "writable_slot": "05.2"},
            leave_out=("grow", "share", "replace"),
        ),
        Function("minikv.course.chapters.ch05_copy_on_write.answers:blocks_for_samples", "05.3"),
        Function("minikv.beam:next_beams", "05.4"),
        Function(
            "minikv.course.chapters.ch05_copy_on_write.answers:copy_prefix",
            Bug(
                "05.5",
                (
                    (
                        "table.block_ids[: -(-num_tokens // table.block_size)]",
                        "table.block_ids[: num_tokens // table.block_size]",
                    ),
                    (
                        "    branch.num_tokens = num_tokens\n",
                        "    branch.num_tokens = len(branch.block_ids) * table.block_size\n"
                        "    branch.grow(num_tokens - branch.num_tokens)\n",
                    ),
                ),
            ),
        ),
        Function(
            "minikv.course.chapters.ch05_copy_on_write.answers:copy_blocks",
            Bug(
                "05.6",
                (
                    ("dict[int, list[int]]", "dict[int, int]"),
                    ("targets.setdefault(source, []).append(target)", "targets[source] = target"),
                    (
                        "    for source, wanted in targets.items():\n"
                        "        for target in wanted:\n"
                        "            blocks[:, target] = blocks[:, source]\n",
                        "    for source, target in targets.items():\n"
                        "        blocks[:, target] = blocks[:, source]\n",
                    ),
                ),
            ),
        ),
    ),
    in_engine=True,
    exercises=(
        Exercise(
            id="05.1",
            title="A fork",
            minutes=10,
            difficulty=1,
            kind="build",
            matters="The second sample of a prompt costs a list of numbers, not a second copy of "
            "the prompt's keys and values.",
            hints=(
                "What does a table consist of? Which of it may two tables have in common, and "
                "what must each have for itself, so that one can grow without the other?",
                "Three things: the block ids, the number of tokens, and somebody who has to hear "
                "that every one of these blocks has a holder more. Who counts the holders?",
                """twin = a new, empty table over the same pool, with the same block size
for each block id of this table: tell the pool that one more holds it
twin's block_ids = a copy of the list, not the list itself
twin's num_tokens = this table's
return twin""",
            ),
            works="""\
A fork moves no key and no value, and takes nothing from the pool. It costs one small number per
block, in the table and in the counts, where a copy would cost all K and V of the prompt in every
layer. An operating system's fork() does the same: it copies the page table, and no page.

Two lists, one memory: each table needs its own list, because from now on they grow apart. Handing
over the list itself is Python's classic trap: both tables then grow when one does, and only one
of them has paid for the block.

Every block gains a holder, the full ones too. It is tempting to count only the last block, since
that is the only one that anybody will write to. But a count has two readers. The writer asks "am
I alone?", and the last to leave asks "may this be freed?". A full block is never written again
and still has to outlive the first sample that ends.

vLLM's first block manager did the same in its `fork`: copy the list, count every block up.""",
        ),
        Exercise(
            id="05.2",
            title="Copy on first write",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Without it, two samples of one prompt overwrite each other's last block, and "
            "the text of both turns to soup a few tokens later.",
            hints=(
                "Who else may be looking at the block that you are about to write to? Somebody "
                "keeps count.",
                "Two cases: the block is yours alone, or others hold it, too. In the second, "
                "three things change: what your table names, who holds the new block, who holds "
                "the old one. One of the three can fail. In which order is nothing lost if it "
                "does?",
                """if the table has no token at this position: raise ValueError
index, offset = position divided by block_size, and what is left over
old = the block at index
if the pool counts one holder of it: return its slot, None
new = allocate                      # may raise OutOfBlocks: nothing is changed yet
put new in the place of old in the table; release old
return the slot in new, (old, new)""",
            ),
            works="""\
Nobody is asked to keep still. Whoever writes first looks at the count, finds others there, leaves
them the block and takes a copy. The last one finds itself alone and writes in place: n samples
cost n - 1 copies, and no sample has to know of another.

A processor traps the write to a shared page, and the program never notices. Here no hardware helps:
the engine has to ask before it writes. That is cheap, because a cache only grows at its end. There
is one block a sequence to ask about, and the answer holds until the block is full or forked.

Allocate first, then change, then release: allocate is the only step that can fail. And the old
block's slots must be copied before anything is written. The method only says so; to copy is the
engine's job, for all layers at once.

Engines that leave this out look right for a while. In 2026 the Rust engine Atlas shared partly
filled blocks and never copied one (issue 1193). As long as all writers wrote the same tokens,
nothing showed. When they differed, three sequences emitted the same wrong text: all of them read
one torn block.

vLLM copied on write in its first engine. Since late 2024 (pull request 9302) n samples are n
requests, which find each other's full blocks in the prefix cache (chapter 07) and each compute the
partly filled one. In 2026 it has come back for models whose blocks are very large (46384).""",
        ),
        Exercise(
            id="05.3",
            title="How many blocks?",
            minutes=15,
            difficulty=2,
            kind="predict",
            matters="Whether sharing saves a little or nearly everything depends on four numbers. "
            "An engine that admits requests has to know before it runs them.",
            hints=(
                "Draw it for 2 samples of 7 tokens in blocks of 4. Which blocks does everybody go "
                "on sharing, for ever? Which stop being shared, and when?",
                "Per sample, one number answers both: how many blocks does it hold altogether? "
                "Full blocks of the prompt count once for all, the rest once for each. And "
                "before anybody has written?",
                """each   = (num_prompt + num_new) / block_size, rounded up
full   = num_prompt / block_size, rounded down
copied = n * each
shared = each                       if nobody has written yet
         full + n * (each - full)   otherwise""",
            ),
            works="""\
Full blocks of the prompt are there once, whatever n is. Everything else is there n times: what
comes after them, and the block in which the prompt ends as soon as everybody has written to it.
One of the n copies is the original, so it is n blocks and not n + 1.

Hence what sharing saves: (n - 1) * full blocks, of n * each. With many samples the share saved
goes to full / each: the part of a sequence that is full blocks of the prompt. A prompt shorter
than a block has none, so there is nothing to save once all have written. An answer ten times as
long as the prompt makes the saving small, however many samples there are.

The step from no token to the first is the dear one: n - 1 blocks at once, for n tokens. An engine
that admits a request with n samples should have them to spare, or somebody is preempted in the
very next step.

A prompt that ends with a block is the kind case: nothing is ever copied, and with its first token
every sample opens a block of its own. The formula does not change, for then no block of the prompt
is partly filled, and `full` counts all of them.""",
        ),
        Exercise(
            id="05.4",
            title="Beams fork and end",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="Beam search branches and prunes in every step. A block released too early "
            "goes to somebody else while a beam still reads it; one released too late is lost.",
            hints=(
                "A beam may have no child, one or several. If you take care of the parents one "
                "after the other, when do you know that nobody needs a parent's blocks any more?",
                "Two rounds. In the first every child gets its blocks, and while that goes on all "
                "parents still hold theirs. What is left to do for the parents then, the ones "
                "with children and the ones without?",
                """children = []
for each (parent, token) of chosen, in order:
    child = that parent's sequence, forked
    the child's tokens end with the token
    put it at the end of children
for each beam of beams: release its table
return children""",
            ),
            works="""\
A block is free when its last holder lets go, so nobody has to find out which blocks a pruned beam
leaves behind. Fork for every child, release every parent, and the counts do the rest: a block of
a parent with two children goes from 1 to 3 to 2, a block of a parent with none from 1 to 0, and
what all beams share never moves.

First all forks, then all releases. The other way round a block can be free for a moment, and
another allocation, in this thread or the next, may take it. Handing a parent's table on to its
last child, without fork or release, is right as well. vLLM's first engine did so, and readers of
its code were puzzled (issue 1101).

Without a block table beams have to move memory. `transformers` picks the surviving rows of its
cache and copies all of them, in every step (`reorder_cache`). Here at most the last block of each
beam is copied, on its first write.

Kwon et al. name beam search as the case that shares most. vLLM took it out of its core in
2024 (pull request 9105), for few used it and it complicated the scheduler; it is built on top
since, as many short requests over the prefix cache.""",
        ),
        Exercise(
            id="05.5",
            title="A branch in the middle",
            minutes=15,
            difficulty=3,
            kind="debug",
            matters="Editing an earlier message, trying another answer: conversations branch in "
            "the middle, and hardly ever where a block ends.",
            hints=(
                "For some lengths the branch is right, for others not. List the lengths from 5 to "
                "12 in blocks of 4, and what you see for each. What do the right ones have in "
                "common?",
                "Take 6 tokens in blocks of 4. Print both tables' block ids, and follow position "
                "5: in which block does each of the tables look for it, and who wrote K and V "
                "there?",
                """6 tokens, blocks of 4:        table  block 0, block 1, …
                              branch block 0, and then?
positions 4 and 5 were computed, and lie in the table's block 1
the branch may hold block 1, too: a write to it will be copied on first write
so: how many blocks hold the first 6 tokens, and who has to hear of it?""",
            ),
            works="""\
The broken one shares what is full and opens a new block for the rest, as if the rest were still to
come. But those tokens were computed: their K and V lie in a block of the other table, and nothing
ever puts them into the new one. The branch attends to whatever lies there. The counts are
perfect, no invariant of the pool is hurt, and `engine.check()` has nothing to say. The cut after
21 tokens is luck: one position of 21 holds nothing, which moves the scores of the next tokens, and
by too little to change which is the likeliest.

Sharing the partly filled block is not dangerous, because sharing never is: only writing is, and
`writable_slot` looks before each write. Here it may even copy a block that is full. The other
table has gone on and filled it; for the branch it ends in the middle.

To say it the other way: one fork and one rule for writing do for samples, beams and branches. The
broken version had made a case of its own for the last block, and got it wrong.

Real engines meet this where a cached prefix ends inside a block. Most round down and compute
the rest again, which is right and wastes at most a block. vLLM shares the partly filled block and
copies it on write where blocks are very large (pull request 46384, 2026).""",
        ),
        Exercise(
            id="05.6",
            title="Right for two",
            minutes=15,
            difficulty=2,
            kind="debug",
            matters="The bookkeeping is right and every count fits. What has to be moved in memory "
            "is a job of its own, and the tests with two samples pass.",
            hints=(
                "Four samples, blocks of 4, a prompt that ends inside a block. In the first step "
                "after the prompt, which copies are asked for? Write the list down.",
                "How many entries has `targets` after the loop, and how many copies were asked "
                "for? Which samples are the ones that write nonsense?",
                """copies = [(1, 2), (1, 3), (1, 4)]     # three samples leave block 1 to the fourth
targets after (1, 2):   {1: 2}
targets after (1, 3):   ?
targets after (1, 4):   ?
what should be in the place of a single target?
and then: one target after the other is simplest. For all at once, blocks[:, [2, 3, 4]] has a
dimension for them that blocks[:, 1] lacks and blocks[:, [1]] keeps""",
            ),
            works="""\
One source can have many targets: n samples leave the same block to the last of them. A
dictionary has one value for a key, so each copy forgot the one before, and only the last of the
n - 1 new blocks was ever filled. With two samples there is one copy, and nothing to forget.

vLLM's second block manager began with the same dictionary and the right value, a list of targets
for each source. Later it kept plain pairs, as `KVStore.copy_to` does, which reads all sources
before it writes any target.

Why did nothing else notice? The tables named the right blocks, and the counts were right. A
copy that is not made breaks no rule of the bookkeeping; it leaves a block with whatever its last
owner wrote. Only tokens, compared with an oracle, show it. In 2026 xLLM found the same on one of
its backends: beams read stale or never written memory, until block copies were switched on there
(pull request 1984).

So test sharing with more than two samples, and with samples that differ: where all of them write
the same tokens, even a block that everybody overwrites holds the right numbers.""",
        ),
    ),
)
