"""Chapter 05: forks that share blocks until one of them writes."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="05",
    name="copy_on_write",
    doc="Copy on write: tables that share blocks, samples, beams, branches.",
    skeleton=(
        Class(
            "minikv.blocks:BlockTable",
            write={"fork": "05.1", "writable_slot": "05.2"},
            show=("__init__", "release"),
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
                "What does a table consist of? What may two tables have in common, and "
                "what must each have for itself, so that one can grow without the other?",
                "There are three things to do: set the block ids, set the number of tokens, and "
                "report that every one of these blocks has one more holder. What counts the "
                "holders?",
                """twin = a new, empty table over the same pool, with the same block size
for each block id of this table: tell the pool that it has one more holder
twin's block_ids = a copy of the list, not the list itself
twin's num_tokens = this table's
return twin""",
            ),
            works="""\
A fork moves no key and no value, and takes nothing from the pool. It costs two small numbers per
block, one in the table and one in the counts. A copy would cost all K and V of the prompt in every
layer. An operating system's fork() does the same: it copies the page table, and no page.

Each table needs a list of its own, because from now on the two grow apart. Passing on the list
itself is Python's classic trap: both tables then grow when one does, and only one of them has
taken the block.

Every block gains a holder, the full ones too. It is tempting to count only the last block, since
only that one will be written to. But the count answers two questions: "may I write here?" and
"may this block be freed?". A full block is never written again, and still has to outlive the
first sample that ends.

vLLM's first block manager did the same in its `fork`: it copied the list and raised the counts.""",
        ),
        Exercise(
            id="05.2",
            title="Copy on first write",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Without it, two samples of one prompt overwrite each other's last block, and "
            "a few tokens later both texts go wrong.",
            hints=(
                "Which other tables may read the block that you are about to write to? The pool "
                "counts them.",
                "Two cases: only your table holds the block, or others hold it, too. In the "
                "second, three things change: the block that your table names, the count of the "
                "new block, the count of the old one. One of the three steps can fail. In which "
                "order is nothing lost if it does?",
                """if the table has no token at this position: raise ValueError
index, offset = position divided by block_size, and what is left over
old = the block at index
if the pool counts one holder of it: return its slot, None
new = allocate                      # may raise OutOfBlocks: nothing has changed yet
put new in the place of old in the table; release old
return the slot in new, (old, new)""",
            ),
            works="""\
The samples need not wait for each other, or know of each other. The first to write sees a count
above 1, leaves the block to the others and takes a copy. The last one sees a count of 1 and writes
in place. So n samples cost n - 1 copies.

A processor traps the write to a shared page, and the program never notices. Here no hardware helps:
the engine has to look at the count before it writes. That is cheap, because a cache only grows at
its end: there is one block per sequence to look at, and the answer holds until that block is full
or the sequence is forked.

Allocate first, then change the table, then release: allocate is the only step that can fail. The
old block's slots must be copied before anything is written. The method only reports this; the
engine copies, in all layers at once.

Engines that leave this out look right for a while. In 2026 the Rust engine Atlas shared partly
filled blocks and never copied one (issue 1193). As long as all writers wrote the same tokens,
nothing showed. When they differed, three sequences emitted the same wrong text: all of them read
one block with tokens of several.

vLLM copied on write in its first engine. Since late 2024 (pull request 9302) n samples are n
requests, which find each other's full blocks in the prefix cache (chapter 07), and each computes
the partly filled one. In 2026 copy on write returned for models with very large blocks (46384).""",
        ),
        Exercise(
            id="05.3",
            title="How many blocks?",
            minutes=15,
            difficulty=2,
            kind="predict",
            matters="Whether sharing saves a little or nearly everything depends on four numbers. "
            "An engine that admits requests must know before it runs them.",
            hints=(
                "Draw it for 2 samples of 7 tokens in blocks of 4. Which blocks stay shared for "
                "ever? Which stop being shared, and when?",
                "Start with one sample: how many blocks does it hold altogether? Of these, the "
                "full blocks of the prompt count once for all samples, the rest once per sample. "
                "And before any sample has written?",
                """each   = (num_prompt + num_new) / block_size, rounded up
full   = num_prompt / block_size, rounded down
copied = n * each
shared = each                       if no sample has written yet
         full + n * (each - full)   otherwise""",
            ),
            works="""\
Full blocks of the prompt are stored once, whatever n is. Everything else is stored n times: the
blocks after them, and, once every sample has written, the block in which the prompt ends. One of
these n blocks is the original, so there are n and not n + 1.

So sharing saves (n - 1) * full blocks, of n * each. With many samples the share saved approaches
full / each: the share of a sequence's blocks that the prompt fills completely. A prompt shorter
than a block fills none, so nothing is saved once all samples have written. An answer ten times as
long as the prompt makes the saving small, however many samples there are.

The step from no new token to the first is the expensive one: n - 1 blocks at once, for n tokens.
An engine that admits a request with n samples should keep them free, or it has to preempt a
sequence in the very next step.

A prompt that ends with a block is the easy case: nothing is ever copied, and with its first token
every sample opens a block of its own. The formula does not change: no block of the prompt is
partly filled then, and `full` counts all of them.""",
        ),
        Exercise(
            id="05.4",
            title="Beams fork and end",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="Beam search branches and prunes in every step. A block released too early is "
            "given to another request while a beam still reads it; a block released too late is "
            "lost.",
            hints=(
                "A beam may have no child, one or several. If you handle the parents one after the "
                "other, when do you know that no child needs a parent's blocks any more?",
                "Two rounds. In the first every child gets its blocks, and all parents still hold "
                "theirs. What is left to do for the parents after that, both for those with "
                "children and for those without?",
                """children = []
for each (parent, token) of chosen, in order:
    child = that parent's sequence, forked
    the child's tokens end with the token
    put it at the end of children
for each beam of beams: release its table
return children""",
            ),
            works="""\
A block is free when its last holder releases it, so the code need not find out which blocks a
pruned beam leaves behind. Fork for every child, release every parent, and the counts do the rest:
a block of a parent with two children goes from 1 to 3 to 2, a block of a parent with none from 1
to 0, and the blocks that all beams share stay where they are.

First all forks, then all releases. In the other order a block can be free for a moment, and
another allocation, in this thread or the next, may take it. Passing a parent's table on to its
last child, without fork or release, is right as well. vLLM's first engine did so, and readers of
its code were puzzled (issue 1101).

Without a block table beams have to move memory. `transformers` picks the surviving rows of its
cache and copies all of them, in every step (`reorder_cache`). Here at most the last block of each
beam is copied, on its first write.

Kwon et al. name beam search as the case that shares most. vLLM took it out of its core in
2024 (pull request 9105), because few people used it and it complicated the scheduler. Since then
it is built on top, as many short requests over the prefix cache.""",
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
                "For some lengths the branch is right, for others it is not. List the lengths from "
                "5 to 12 in blocks of 4, and what you see for each. What do the right ones have in "
                "common?",
                "Take 6 tokens in blocks of 4. Print both tables' block ids, and follow position "
                "5: in which block does each of the tables look for it, and where were K and V "
                "written?",
                """6 tokens, blocks of 4:        table  block 0, block 1, …
                              branch block 0, and then?
positions 4 and 5 were computed, and lie in the table's block 1
the branch may hold block 1, too: the first write to it makes a copy
so: how many blocks hold the first 6 tokens, and what has to be told to the pool?""",
            ),
            works="""\
The broken version shares the full blocks and opens a new block for the rest, as if the rest were
still to come. But those tokens were computed: their K and V lie in a block of the other table, and
nothing ever puts them into the new one. The branch attends to whatever lies there. The counts are
right, no invariant of the pool is violated, and `engine.check()` finds nothing. The cut after 21
tokens is luck: one position of 21 holds nothing, which changes the scores of the next tokens too
little to change which one is the likeliest.

Sharing the partly filled block is safe, because sharing always is: only writing is dangerous, and
`writable_slot` looks at the count before each write. Here it may even copy a block that is full:
the other table has filled it since, and the branch ends in its middle.

One fork and one rule for writing are enough for samples, beams and branches. The broken version
made a special case of the last block, and got it wrong.

Real engines meet this where a cached prefix ends inside a block. Most of them round down and
compute the rest again, which is right and wastes at most a block. Where blocks are very large,
vLLM shares the partly filled block and copies it on write (pull request 46384, 2026).""",
        ),
        Exercise(
            id="05.6",
            title="Right for two",
            minutes=15,
            difficulty=2,
            kind="debug",
            matters="Tables and counts are right, and the tests with two samples pass. Moving K "
            "and V is a job of its own.",
            hints=(
                "Four samples, blocks of 4, a prompt that ends inside a block. In the first step "
                "after the prompt, which copies are asked for? Write the list down.",
                "How many entries does `targets` have after the loop, and how many copies were "
                "asked for? Which samples write nonsense?",
                """copies = [(1, 2), (1, 3), (1, 4)]     # three samples leave block 1 to the fourth
targets after (1, 2):   {1: 2}
targets after (1, 3):   ?
targets after (1, 4):   ?
what should stand in the place of a single target?
then: one target after the other is simplest. For all at once, blocks[:, [2, 3, 4]] has a
dimension for them that blocks[:, 1] lacks and blocks[:, [1]] keeps""",
            ),
            works="""\
One source can have many targets: n samples leave the same block to the last of them. A
dictionary has one value per key, so each copy replaced the one before, and only the last of the
n - 1 new blocks was ever filled. With two samples there is one copy, and nothing to replace.

vLLM's second block manager began with the same dictionary and the right value, a list of targets
for each source. Later it kept plain pairs, as `KVStore.copy_to` does. That method reads all sources
before it writes any target. The result is the same as one pair after the other, because no block is
a source after it has been a target.

Why did nothing else notice? The tables named the right blocks, and the counts were right. A
missing copy breaks no rule of the bookkeeping; it leaves a block with whatever its last owner
wrote. Only tokens, compared with an oracle, show it. In 2026 xLLM found the same on one of its
backends: beams read stale or never written memory, until block copies were switched on there
(pull request 1984).

So test sharing with more than two samples, and with samples that differ: if all of them write
the same tokens, even a block that all of them overwrite holds the right numbers.""",
        ),
    ),
)
