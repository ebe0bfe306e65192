"""Chapter 12: two tiers, the way between them, files that survive a crash, sessions."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

HERE = "minikv.course.chapters.ch12_tiers_and_sessions.answers"
SEEN_BEFORE_IT_IS_WRITTEN = (
    (
        "        try:\n"
        "            self.write(self.memory, block, content)\n"
        "        except OSError:\n"
        "            self.pool.release(block)\n"
        "            continue\n"
        "        self.blocks[name] = block\n",
        "        self.blocks[name] = block\n"
        "        try:\n"
        "            self.write(self.memory, block, content)\n"
        "        except OSError:\n"
        "            continue  # the next request will compute it\n",
    ),
)
COUNTS_BEYOND_A_GAP = (
    (
        "    count = 0\n"
        "    while count < len(names) and names[count] in self.blocks:\n"
        "        count += 1\n"
        "    return count\n",
        "    return sum(name in self.blocks for name in names)\n",
    ),
)

CHAPTER = Chapter(
    number="12",
    name="tiers_and_sessions",
    doc="Tiers and sessions: blocks go down and come back, and files survive a crash.",
    skeleton=(
        Function(f"{HERE}:what_two_tiers_find", "12.1"),
        Function("minikv.tiers.moves:demote", "12.2"),
        Function("minikv.tiers.moves:promote", "12.2"),
        Class(
            f"{HERE}:HostTier",
            write={
                "store": Bug("12.3", SEEN_BEFORE_IT_IS_WRITTEN),
                "find": Bug("12.3", COUNTS_BEYOND_A_GAP),
            },
        ),
        Function("minikv.tiers.costs:break_even", "12.4"),
        Function("minikv.tiers.costs:blocks_to_fetch", "12.4"),
        Function("minikv.tiers.folder:save", "12.5"),
        Function("minikv.tiers.identity:add_tensors", "12.6"),
        Function("minikv.tiers.identity:check_session", "12.6"),
    ),
    exercises=(
        Exercise(
            id="12.1",
            title="What two tiers find",
            minutes=10,
            difficulty=2,
            kind="predict",
            matters="A few blocks more or less, or keeping blocks twice, can decide whether a "
            "second tier finds everything or nothing.",
            hints=(
                "In turn order, how many other conversations come between two turns of A? How many "
                "blocks are that, and how many conversations does the device hold?",
                "Write-back keeps a block once, so the tiers together hold 60 + 80 blocks. With "
                "write-through, what is on the device is on the host, too. In random order, each "
                "of the 12 conversations is equally likely to be among the last 6.",
                """device alone:       12 conversations × 10 blocks > 60, always the wrong 6
write-back:         60 + 80 ≥ 120?  what comes next was used longest ago: in which tier is it?
write-through, 80:  max(60, 80) ≥ 120?    write-through, 120:  max(60, 120) ≥ 120?
random order:       6 of 12
written down:       10 blocks come to a full device, so … must leave it""",
            ),
            works="""\
A loop that is larger than a cache is the worst case for LRU: whatever comes next was used longest
ago, so it has just been evicted. The hit rate does not fall slowly with the size, it falls from
everything to nothing.

A second tier moves this cliff. With write-back both sizes add up, because a block is in one place.
With write-through the device is a copy of a part of the host, and only the larger of the two
counts. On a server the host is ten or a hundred times larger than the device, and the difference
is small; with tiers of equal size it is everything.

Write-back pays with a write at the worst moment: a request waits for a block of the device, which
is free only when its old content is written down. Write-through has written it before, and can drop
it at once. It also writes what is never evicted.

The tiers found everything here, and nothing of it on the device. So every turn moves 10 blocks up
and 10 down, and what is gained depends on how fast they move: exercise 12.4.

Real requests are neither a loop nor random. In the trace of the notebook a second tier of ten times
the size finds several times as much as the device alone.""",
        ),
        Exercise(
            id="12.2",
            title="Down and back",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="If a block is released one line too early, another request gets it while its "
            "keys are still being read, and the text is wrong.",
            hints=(
                "At the moment when K and V are copied, which of the two blocks may be given out "
                "to another request? None should. And what must be undone if the copy fails?",
                "Three things happen: a block is taken, K and V are copied, a block is released. "
                "Only one order is safe. For `promote`: `device.allocate()` may have to make room "
                "first. To make room is to demote, and to demote may evict from the host. What "
                "keeps a block of the host from being evicted?",
                """demote:   refuse a block that is not on the device, or has another holder
          if it is not on the host: take a block there; copy; if that raises, give it back
          the place says so; only now release the device's block
promote:  refuse a block that is not on the host
          if it is not on the device:
              hold the host's block once more (acquire)        # it cannot be evicted now
              take a device block; copy; if that raises, give it back
              the place says so; in any case, hold the host's block no longer
          unless keep: the place forgets the host's block, and it is released""",
            ),
            works="""\
The reference count is the lock: a block with a holder is not given out. So both blocks have to have
a holder for as long as the copy runs, and a count may fall to zero only when K and V are stored
somewhere else. It is the order of `BlockTable.replace` in chapter 05: acquire, then release.

A failed copy must leave no trace. The new block is released, the old one is still there, and the
place still names it. If the place is changed first, a later request finds a block full of whatever
was in it before.

`promote` has a trap that no test of one block shows. Before a block can come to the device, room is
made there. The block that leaves goes to the host, and a full host evicts its oldest block. That
may be the very block that was asked for. Without the extra holder, its host block holds another
block's keys when the copy begins.

SGLang had this for about a year. `load_back` locked the device's side and not the host's; under
memory pressure the nested eviction took the pages away. Sometimes it crashed (`object of type
'NoneType' has no len()`, pull request 27631), sometimes, with asynchronous copies, K and V were
silently wrong (27444, merged in June 2026: a lock on the host's pages until the copy has ended).

On a GPU the copy is asynchronous, and "after the copy" means after an event of its stream. vLLM
launched a store before the kernels that compute the block had ended, and kept garbage on the host
(issue 45704, fixed in June 2026 by 46278). Here copies are synchronous; the order is the same.""",
        ),
        Exercise(
            id="12.3",
            title="Found, but never written",
            minutes=20,
            difficulty=3,
            kind="debug",
            matters="The second tier returns a block that was never written, or that belongs to "
            "another conversation. The only trace is a line in a log, or nothing at all. LMCache "
            "and SGLang both shipped such bugs.",
            hints=(
                "There are two bugs, and the first hides the second. In each line of the report "
                "that fails: which block could not be written, or was forgotten? What does `find` "
                "say about it?",
                "`store`: look at the moment when `write` raises. Which names are known then, and "
                "who holds the block? `find`: the blocks A, AB and ABC belong together. What are A "
                "and ABC worth without AB?",
                """store:  take a block, write, and only if that succeeded: blocks[name] = block
        if it failed: give the block back, and continue with the next name
find:   count = 0
        while names[count] is here: count += 1
        the first name that is missing ends it""",
            ),
            works="""\
A name in the table is a promise that the block can be used. So it is entered last, when the content
is there. If it is entered first and the write fails, the name stays and the block holds what was in
it before: the keys of another conversation. They are finite, of the right shape, and the model
answers fluently from them.

LMCache shipped this. With its file store, failed stores stayed visible to lookups, and every later
hit on them gave gibberish, reproducibly at temperature 0; all that could be seen was a warning
(issue 4991, September 2026). In SGLang a node whose backup had failed was treated as backed up
(27108, June 2026). In vLLM and in this engine's disk, a file gets its name after it is written,
which is the same rule: exercise 12.5.

With the first bug fixed, prefixes have gaps. That is when the second one shows: `find` counted all
blocks that are there, wherever they are. A block after a gap cannot be used. Its keys are right,
but attention also needs all the blocks before it. SGLang's pull request 27562 names the same
mistake: stop at the first gap.

Gaps also come from eviction in the wrong order. `load` uses a prefix from its end to its beginning,
so that its end is the older part and goes first; chapter 07 showed what happens otherwise.

The block of a failed write has to be given back, too. Without that, each failure makes the host one
block smaller, until nothing is left.""",
        ),
        Exercise(
            id="12.4",
            title="Fetch or compute",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="K and V can be computed again. If that is faster than fetching them, the tier "
            "costs memory and time, and gains nothing.",
            hints=(
                "What does one more token cost when it is fetched, and when it is computed? Which "
                "cost comes once, however many tokens there are?",
                "break_even: latency / (what is gained per token), unless nothing is gained. "
                "blocks_to_fetch: for every count from 0 to all, the time of fetching that many "
                "and computing the rest. The blocks of a tier make up for its latency together, so "
                "do not stop at the first one that does not pay.",
                """break_even:  gain = 1 / rate - bytes_per_token / bandwidth
             gain <= 0: infinite;  otherwise latency / gain
blocks_to_fetch:
    saved = best_saved = 0;  best = 0
    for count, tier in 1, 2, …:
        saved += time to compute a block - time to fetch its bytes
        if this tier is used for the first time: saved -= its latency
        if saved > best_saved: best, best_saved = count, saved
    return best""",
            ),
            works="""\
Both times are straight lines in the number of tokens. They cross at most once, where the latency
has been earned back, and not at all if a token takes longer to fetch than to compute. The start of
a step is left out on purpose: at least one token is computed after every hit, so it is paid either
way.

The line for computing is not quite straight: every token also attends to all before it. So long
prefixes are worth more than the formula says, and the answer errs on the side of computing.

`blocks_to_fetch` is a running sum with its maximum, in one pass. It has to look beyond a loss: the
first block of a disk pays the latency of all. And it may not pick single blocks. K and V after a
missing block are of no use, so a slow block in the middle is the price for a fast one after it.

SGLang's HiCache does not ask: a hit on the host of fewer than 10 tokens is computed
(`load_back_threshold`, with the comment that it should be adjusted dynamically), anything longer is
fetched. With a link much faster than the prefill that is nearly always right. On a disk, on a
network, or with a small model, it is not.

Bytes per token decide. With grouped-query attention a large model has few bytes of K and V per
token and much to compute, so fetching wins early. tinypy has many for its size. The notebook
measures where it stands.""",
        ),
        Exercise(
            id="12.5",
            title="Whole, or not there",
            minutes=15,
            difficulty=3,
            kind="build",
            matters="The machine loses power while a session is being saved. If neither the old "
            "nor the new file is whole afterwards, the conversation is lost.",
            hints=(
                "What may a crash leave of a file that is written in place? Which operation "
                "changes "
                "what a name stands for, at once and completely?",
                "Write under another name first. Before the rename, what was written has to be on "
                "the disk, or the new name may lead to an empty file. After the rename, the name "
                "has to get there, too. And if a step fails, the other file has to go.",
                """temporary = name + TEMPORARY
try:
    write temporary;  sync temporary;  rename temporary to name
except BaseException:              # KeyboardInterrupt is not an Exception
    remove temporary;  raise again
sync the folder""",
            ),
            works="""\
A rename within a folder is atomic: a process that opens the name gets the old file or the new one.
So the new content is prepared under another name, and the rename publishes it.

The two syncs are about the disk. The system keeps contents and names in memory and writes them when
it likes, in an order of its own. Without the first sync, the rename may reach the disk before the
content, and after a crash the right name leads to an empty file: ext4 users met this in 2009, with
desktop settings that came up empty. Without the second one, the old file may come back after the
caller was told that the new one is saved.

A killed process is not a power failure. What a process has written survives its end, synced or not.
So a test with SIGKILL alone cannot find a missing sync; the simulated disk can, because it tries
every state that a crash may leave. Pillai et al. (2014) tried real file systems and databases that
way, and most had a hole.

Blocks in a cache need less. If one is lost, it is computed again, so vLLM's file store and SGLang's
write without sync and rename without sync; what they need instead is a checksum, or a rule by which
a file that is too short counts as a miss. A session is all there is of a conversation.

The temporary name contains the process id, so that two processes do not write into one file. A
process that is killed leaves its temporary file behind; the next process that opens the folder may
delete the files of processes that have ended.""",
        ),
        Exercise(
            id="12.6",
            title="A session for this model and no other",
            minutes=20,
            difficulty=2,
            kind="build",
            matters="K and V of other weights have the right shape and dtype. An engine that "
            "accepts them writes fluent nonsense, and nothing fails.",
            hints=(
                "Which changes of a model leave names, shapes and dtypes as they are? Which "
                "changes "
                "of a file leave its header as it is?",
                "`add_tensors`: for each name in sorted order, something that cannot be mistaken "
                "for anything else with name, dtype and shape, and then all bytes. "
                "`check_session`: four comparisons, cheapest first; use `header.get`, since a "
                "field "
                "may be missing, and `shapes_of` and `checksum_of`.",
                """add_tensors:  for name, tensor in sorted order:
    digest.update of name, dtype and shape;  digest.update(bytes_of(tensor))
check_session:
    each name, value of expected:  header.get(name) == value
    json.dumps(shapes_of(tensors), sort_keys=True) == header.get("shapes")
    str(number of tokens) == header.get("num_tokens")      # tokens may be missing
    checksum_of(header, tensors) == header.get("checksum")
    otherwise: raise SessionError, with both values""",
            ),
            works="""\
Two different things are checked. The header says *whose* K and V these are: model, dtype, format,
block size. Checksum, shapes and count say whether they are *whole*. A file can be whole and of
another model, and that is the dangerous case: nothing in its numbers shows it.

The fingerprint covers the numbers, bit by bit. A name does not: "tinypy" is the name of the model
before the fine-tuning and after it, and a path names whatever is stored there now. Name, dtype and
shape are hashed with the bytes, because the same bytes cut in other places are other weights. JSON
puts the name in quotes and escapes the quotes in it, so no name can imitate the next header. The
names are sorted, because a dictionary's order depends on how the model was loaded.

What do others check? llama.cpp's state files begin with a magic number, a version and the name of
the architecture, and the code says in a comment what is missing ("TODO: add more model-specific
info which should prevent loading the session file if not identical", there since 2024). Layers and
row sizes are compared as well, so another Llama of another size is refused, and a fine-tuned one
is accepted. vLLM's file store hashes the model's name, dtype and layout into the folder's name;
SGLang's puts the model's name into each file's. Neither looks at the weights.

Hashing the weights costs little: SHA-256 reads some hundred megabytes to two gigabytes per second,
once per process. For a model of 100 GB that takes a minute or several, and there one would hash the
files' checksums instead, which the hub publishes.

The checksum finds accidents. It does not stop an attacker, who can compute it again: that needs a
key (HMAC) or a signature. The same holds for the tokens: a session states its tokens, and K and V
do not show whether that is true.""",
        ),
    ),
)
