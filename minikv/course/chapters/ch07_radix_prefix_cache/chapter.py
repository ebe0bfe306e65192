"""Chapter 07: a tree of cached prefixes, a cache without one, and what goes wrong around them."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

ONLY_WHOLE_PROMPTS = (
    ("block_ids = self.root, []", "block_ids, known = self.root, [], 0"),
    (
        "        block_ids.append(block_id)\n    return block_ids",
        "        block_ids.append(block_id)\n"
        "        if not children:  # a prompt ends here\n"
        "            known = len(block_ids)\n"
        "    return block_ids[:known]",
    ),
)
PATH_TO_THE_ROOT = (
    "    path = []  # up to the root\n"
    "    while node.parent is not None:\n"
    "        node = node.parent\n"
    "        path.append(node)\n"
    "    for node in path[:-1]:  # the root is never locked\n"
)
LOCKS_FROM_THE_PARENT = (
    ("    while node.parent is not None:\n", PATH_TO_THE_ROOT),
    (
        "        node.lock_count += 1\n        node = node.parent\n",
        "        node.lock_count += 1\n",
    ),
)
UNLOCKS_FROM_THE_PARENT = (
    (
        "    if node.parent is not None and node.lock_count == 0:\n"
        '        raise ValueError("this node is not locked: unlock was called once too often")\n'
        "    while node.parent is not None:\n",
        PATH_TO_THE_ROOT + "        if node.lock_count == 0:\n"
        "            raise ValueError("
        '"this node is not locked: unlock was called once too often")\n',
    ),
    (
        "+= len(node.block_ids)\n        node = node.parent\n",
        "+= len(node.block_ids)\n",
    ),
)
FULL_AND_STALE_HITS = (
    (" Looked up at every attempt: what was found before may be evicted by now.", ""),
    (
        "    # One token at least is left to compute: without it there are no logits.\n"
        "    match = self.cache.match(sequence.token_ids[:-1], "
        "sequence.request.params.cache_salt)\n",
        '    found = vars(self).setdefault("found", {})  # by sequence\n'
        "    if sequence not in found:  # it may wait for many steps, and ask in each of them\n"
        "        salt = sequence.request.params.cache_salt\n"
        "        found[sequence] = self.cache.match(sequence.token_ids, salt)\n"
        "    match = found[sequence]\n",
    ),
)
FREED_COPIES = (
    (
        "its blocks replace ours,\n    which are released only then.",
        "there are two copies of it,\n    and ours are given back.",
    ),
    (
        "            table.replace(index, result.block_ids[index])\n",
        "            self.pool.release(table.block_ids[index])\n",
    ),
)

CHAPTER = Chapter(
    number="07",
    name="radix_prefix_cache",
    doc="The radix prefix cache: a trie, a tree, chained hashes, hits that went wrong, the "
    "engine's step.",
    skeleton=(
        Class(
            "minikv.course.chapters.ch07_radix_prefix_cache.answers:BlockTrie",
            write={"match": Bug("07.1", ONLY_WHOLE_PROMPTS)},
        ),
        Class(
            "minikv.radix:RadixCache",
            write={
                "insert": "07.3",
                "lock": Bug("07.5", LOCKS_FROM_THE_PARENT),
                "unlock": Bug("07.5", UNLOCKS_FROM_THE_PARENT),
                "evict": "07.3",
                "_walk": "07.2",
                "_split": "07.2",
            },
            show=("__init__", "match", "_keys", "_append", "_touch", "_remove"),
        ),
        Function("minikv.course.chapters.ch07_radix_prefix_cache.answers:chained_hashes", "07.4"),
        Class(
            "minikv.course.chapters.ch07_radix_prefix_cache.answers:ChainedCache",
            write={"match": "07.4", "insert": "07.4", "evict": "07.4"},
        ),
        Class(
            "minikv.scheduler:Scheduler",
            write={
                "look_up": Bug("07.6", FULL_AND_STALE_HITS),
                "share_full_blocks": Bug("07.6", FREED_COPIES),
            },
            show=(),
        ),
        Class("minikv.engine:Loop", write={"step": "07.7"}, show=()),
        Class(
            "minikv.engine:Engine",
            write={"append": "07.7", "_finishes": "07.7"},
            show=(),
        ),
        Function("minikv.course.chapters.ch07_radix_prefix_cache.answers:guess_prompt", "07.8"),
    ),
    in_engine=True,
    exercises=(
        Exercise(
            id="07.1",
            title="A tree that only knows whole prompts",
            minutes=10,
            difficulty=2,
            kind="debug",
            matters="Most requests share a prefix that was never a prompt of its own. A cache that "
            "looks for whole prompts saves nothing there, and raises no error.",
            hints=(
                "A chat that grows is found; ten questions under one system prompt are not. What "
                "is different about where the walk stops? Draw both tries.",
                "The walk ends in one of three ways: the next block is missing; the prompt has no "
                "more blocks; or not even the first block is there. What should be returned in "
                "each case? And in which of them does the code return it?",
                """children = the root's;  found = []
for each whole block of the prompt:
    if it is not among the children: leave the loop
    found gets its physical block
    children = those of that node
return found       # whatever follows the node where the walk stopped""",
            ),
            works="""\
A trie of words has to tell a word from the beginning of a word, so its nodes have a mark: a word
ends here. A trie of prompts needs none. The K and V of a block depend on the tokens of that block
and of those before it, and on nothing that comes after. So they are right for every prompt that
begins the same way, however the prompt that stored them continued.

That is why the answer is the deepest node of the walk. It need not be a leaf: a node with many
children is one that many prompts share, and the most valuable of all.

Why did the chat work? Turn two begins with all of turn one, and turn one ended in a leaf. A test
of repeated prompts and growing chats passes with this bug. Under a shared system prompt, the walk
ends in the middle of a stored prompt.

Nothing crashed, and no token was wrong. A cache that misses is only slow, so it needs a test that
counts: the number of hits for a list of requests, known beforehand.""",
        ),
        Exercise(
            id="07.2",
            title="Walk down, and split",
            minutes=40,
            difficulty=4,
            kind="build",
            matters="The walk is done for every waiting request, and a split that loses a lock lets"
            " blocks be evicted while they are in use.",
            hints=(
                "A child is found by its first key. How many of its other keys agree with the "
                "prompt? And why can there be no second child to try?",
                "The walk has three cases: a child agrees as a whole, in part, or there is none. "
                "For the split: a new node goes in between. Which pointers lead to the old node, "
                "and which lead away from it? List all of them, and what each is afterwards.",
                """walk:  until the keys are used up, or no child has the next key:
    n = how many of the child's keys agree, one after the other (at least one does)
    if that is not all of them: child = split(child, n)
    node = child;  depth grows by n;  its blocks are added to those found
split: upper = Node(lower's parent, the first n keys, the first n blocks)
    upper's lock_count = lower's lock_count
    in lower's old parent, upper replaces lower;  lower keeps the other keys and blocks
    upper's only child is lower, under lower's new first key;  lower's parent is upper
    if upper is not locked: it goes into `unlocked`""",
            ),
            works="""\
Siblings differ in their first block, so the first key decides which child it is, and one lookup in
a dictionary finds it. From there, keys are compared one by one. In all, each block of the prompt is
hashed or compared once: the cost of the walk is the length of the match, not the size of the tree.

Why split at all, when a match could say "this node, up to block 2"? Because a lock holds a whole
node. Without the split, a short match would lock all of a long node. A Rust port of SGLang's tree
(bytedance-iaas/sglang, pull request 508) left the split out of its match: leaves stayed locked.

The lower half keeps the old node's identity, so references to it stay valid. A request that locked
the old node locked all its ancestors, and now the upper half is one of them. If the upper half
were the old node, the same lock would suddenly hold less.

A split changes nothing about what is cached or evictable: the blocks and the counts are the same.
That makes it easy to test: compare the tree with a dictionary that stores every prefix separately.
The results must be equal.""",
        ),
        Exercise(
            id="07.3",
            title="Insert and evict",
            minutes=40,
            difficulty=4,
            kind="build",
            matters="After an insert, the caller must know which blocks are valid, the tree's or "
            "its own. Eviction must never remove a node with children.",
            hints=(
                "Insert: the walk tells you what is there. What is left to add, and where? The "
                "tree is a holder of blocks, like a block table. Evict: what is at the front of "
                "`unlocked`, and why is it always a leaf?",
                "Insert has three cases: fewer blocks than keys; everything is known; a rest is "
                "new. Evict has three, too: the leaf has enough blocks; it is used up; nothing is "
                "unlocked any more. From which end of a leaf do blocks go? And what has to be "
                "updated for each block: the pool, two counters, the tree?",
                """insert: refuse too few blocks; no keys: nothing to do
    walk from the salt's root (made if there is none): node, depth, the tree's blocks
    new = the caller's blocks from `depth` on, as many as there are keys
    if there are any: acquire each; append them below node; count them as cached
    touch the node;  the result: node, the tree's blocks + new, depth
evict: refuse a negative number;  gone = 0
    until enough is gone or nothing is unlocked:
        leaf = the first of `unlocked`;  from its end: release a block, drop its key, gone += 1
        if the leaf is empty: remove it, by the key that was dropped last
    both counters go down by gone; return it""",
            ),
            works="""\
Two numbers have two meanings. The pool's reference count is the number of holders of a block; the
tree is one of them. The lock count is the number of requests that use a node. A block of a locked
node has both. An evicted block leaves the tree, and is free if it has no other holder.

Where a prefix is known, the tree's own block stays, because other requests may be reading it. The
caller learns this from the result, and has to change its block table before it releases its own
copy (exercise 07.6 shows what happens otherwise).

Why is the oldest entry of `unlocked` always a leaf? When a node is touched, its ancestors are
touched after it, so no node is younger than its parent; and a parent is unlocked only if its
children are. So nothing has to be searched. (SGLang's tree makes a heap of its evictable leaves
whenever it evicts.)

The end of a leaf goes first, because a beginning is useful without its end, and not the other way
round. And the least recently used goes first because the future is unknown: what was asked for
just now is the best guess at what will be asked for next. Zheng et al. (2024) call the whole design
RadixAttention.""",
        ),
        Exercise(
            id="07.4",
            title="Chained hashes",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="vLLM has no tree and finds the same prefixes with a dictionary. What goes into"
            " the keys makes it work.",
            hints=(
                "Two prompts have the same tokens in their third block, behind different "
                "beginnings. Why must these blocks have different names? What must go into the "
                "hash, if the name of the block before is known?",
                "Match: the names that are cached, up to the first that isn't. Insert: known "
                "names, and new ones. Evict: blocks that only the cache holds, and blocks that "
                "others hold as well. And after a match or an insert: which of the prompt's names "
                "must be the oldest of them?",
                """chained_hashes:  before = b""
    for each key:  before = sha256(before + the key as bytes);  a name is (salt, before)
match:   collect blocks until a name is missing; then make these names the youngest,
         the last one first;  MatchResult(None, blocks, tokens)
insert:  refuse too few blocks
    for each name and block: known? count it.  new? acquire the block, store it
    make all the names the youngest, the last one first;  look their blocks up for the result
evict:   refuse a negative number
    from the oldest on: if only the cache holds the block, forget and release it""",
            ),
            works="""\
Each hash contains the hash before it, which contains the one before that. So 32 bytes and the salt
stand for the whole beginning, and a walk down a tree becomes a few lookups in one dictionary. (The
beginning itself would be a right name, too. But each name would be as long as everything before
it, so memory and time would grow with the square of the prompt.) There are no pointers and no
splits; and two machines give the same prefix the same name, which the nodes of a tree don't have.

What the tree knew by its shape must now be kept by order. Nothing links a block to those that
follow it. If it is evicted before them, they stay in memory and can't be found until it returns.
So of the blocks used together, the last one is made the oldest; vLLM frees a request's blocks in
reverse. With that, the two caches find and evict the same blocks, as your last check has shown.
Reference counts do what locks did.

A collision here is worse than a wrong word in a spelling checker: it gives one request another's K
and V. vLLM began with Python's `hash` and got a security advisory for it in 2025 (CVE-2025-25183):
since Python 3.12, hash(None), from which the chain began, is the same everywhere, so prompts that
collide could be worked out beforehand. Its default has been sha256 since 0.10.2. The tree compares
tokens, so it has no such problem.""",
        ),
        Exercise(
            id="07.5",
            title="A prefix that vanished",
            minutes=10,
            difficulty=3,
            kind="debug",
            matters="When memory is tight, a prefix in use is evicted, and all later requests "
            "compute it again.",
            hints=(
                "Which nodes must a lock cover? The docstring says so. Lock a node below the root "
                "by hand, and look at the lock counts of the whole path.",
                "Follow `node` through the loop of `lock`, for the path root – A – B and the node "
                "B. Which node's count changes first? And what happens if the node is a child of "
                "the root? Then the same for `unlock`.",
                """lock(B):    should change B, then A, and stop at the root
            changes A, and stops at the root
so: handle the node first, then step to its parent
the same in unlock, where the given node also decides whether there is a lock to undo""",
            ),
            works="""\
The step to the parent came first, so the path began with the parent, and the node itself was never
locked. mini-sglang shipped this in 2025 (pull request 52). On a path of many nodes nearly
everything is locked, and short tests pass.

Was any K or V wrong? No: the request's block table holds its blocks, too, and the pool counts that
holder. What breaks is the tree's promise. It counts blocks as evictable that do not become free
when they are evicted. So the scheduler throws away a prefix, gains nothing, and the next request
with that prefix is a miss. And if a node is split while it is "locked", lock and unlock take
different paths: an error far from its cause.

Both methods had the same fault, so their errors cancelled out, and every counter returned to its
old value. A test that ends with "everything is as before" can't see that. You have to look in the
middle: while something is locked, what can be evicted?""",
        ),
        Exercise(
            id="07.6",
            title="Three hits that went wrong",
            minutes=35,
            difficulty=4,
            kind="debug",
            matters="A hit gives another request's text, or hangs the engine, or ends in an error "
            "far from its cause.",
            hints=(
                "Take them one at a time; the first three lines of the check are for one each. "
                "First: which tables name a block, which hold it, and do the two agree after "
                "`share_full_blocks`? Second: what does a model need to predict the next token? "
                "Third: what can happen between two attempts to admit a request?",
                "First: our copy is released, but is that all that `table.replace` would do? "
                "Second: how long may a hit be, for a prompt of n tokens? Third: a result is "
                "remembered. How long is it valid?",
                """share_full_blocks: where the tree's block differs from ours,
    the table must hold and name the tree's block before ours is released
look_up: ask the cache each time, and remember nothing
    ask for all tokens but the last
    (not for one block less: a hit may end right before the last token)""",
            ),
            works="""\
Freed too early. Two equal prompts in one step are both misses, and both compute. The second to
insert finds the blocks of the first. Its own copy is superfluous and is released; but if the table
continues to name it, the next request that allocates overwrites it. mini-sglang had this bug (pull
request 142), and so does every engine that inserts while a request still runs, unless it changes
the table first.

Nothing left to compute. The cache has K and V, not logits. To predict what follows the last token,
the model has to compute that token. So the longest useful hit is one token shorter than the prompt:
vLLM sets `max_cache_hit_length` to the prompt's length minus 1 (pull request 17999). A prompt that
ends inside a block never shows the bug; a test with a round length does. And why not drop the last
block of a full hit? Its node would still have it, so the lock would hold more than the hit.

Remembered too long. A result of the cache is valid until the next eviction, and a waiting request
has no lock. Between two attempts, the blocks may go to another request. In the lucky case that is
an error; in the other, the text continues another request's prompt. If asking again is too slow,
lock what was found instead of remembering it.

All three break an agreement between two owners of the same block. Neither the tree's own tests nor
the scheduler's can find them.""",
        ),
        Exercise(
            id="07.7",
            title="The step of your engine",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Pool, table, scheduler and tree do nothing until they are called in the right "
            "order: about twenty lines.",
            hints=(
                "Write `Loop.step` first. Which of the four calls changes what the next one reads? "
                "Then run one request with one new token on paper: which parts of the engine must "
                "have forgotten it when `append` returns?",
                "In `append`, go through sequences and tokens in pairs. Four things happen to each "
                "pair, and the order matters: note its request and append the token; share the "
                "blocks, while the sequence still has a table; then ask whether it is finished, "
                "and only then remove it. In `_finishes`, a stop comes before the length.",
                """step:       plan = schedule();  ids = run(plan);  append(commit(plan), ids)
            True if the plan has sequences
append:     for each sequence and its token:
                self._moved[id of its request] = its request;  append the token;  count it
                share_full_blocks(sequence)  # it checks itself whether a block is full
                _finishes?  scheduler.remove(sequence)
                            all sequences of its request have a finish_reason?
                            delete the request from self._requests
_finishes:  stop id, or stop string?     finish_reason = "stop"
            otherwise max_length tokens?  finish_reason = "length"
            True if it has one""",
            ),
            works="""\
Data flows one way, and each part knows only the next one. The scheduler decides what to compute
and knows nothing of a model. The runner computes it and knows nothing of a queue. `commit` comes
after `run`, because the sampler asks whether a chunk is the last one of its prompt, and the answer
depends on what has been counted so far.

The newest token has no K and V yet: the next step computes them. So a block that a decode fills is
full only once `commit` has counted, and `append` is the first that can share it. After `remove`
there is no table left to share from. Without the call the text is the same, but the next turn of a
chat computes the last answer again.

Three places know what is alive: the scheduler's queues, the engine's requests, and the pool's
counts. All three must forget a sequence in the same step. If the scheduler does not, its blocks
are lost until the process ends; if the requests do not, `generate` waits forever. vLLM's
`update_from_output` and SGLang's `process_batch_result` do the work of `append`, with many more
cases.

A fast engine changes only the order: it plans the next step while the GPU still computes this one.
`minikv/gpu/ahead.py` replaces `Loop` for that, and nothing else.""",
        ),
        Exercise(
            id="07.8",
            title="The clock tells",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="A cache that customers share shows each of them what the others have sent. "
            "The attack needs one clock and a few lines; so does the test that your salts work.",
            hints=(
                "A hit computes one block or less of a prompt, a miss all of it. Which two times "
                "do you compare to tell one from the other? And what does your own prompt leave "
                "behind in the cache?",
                "The decoy tells how long a miss takes. Send it once, and each guess once: "
                "whatever you send a second time is a hit, because you have sent it before. The "
                "clock varies by a quarter, so a guess that is a little faster than the decoy "
                "means nothing.",
                """miss = the time of the decoy
times = the time of each guess, sent once
fastest = the index of the smallest of them
its time is less than half of miss?  fastest, otherwise None""",
            ),
            works="""\
A hit skips the work of a prefix, and work is time. The longer the prefix, the larger the
difference: here the clock may be wrong by a quarter, and the attack still succeeds every time.
Noise that a server adds on purpose only helps if it is as large as what the cache saves; then the
cache no longer helps its users either.

The attacker has one attempt per guess, because asking changes the answer: after the first attempt
the guess is cached, whether it was right or wrong. Measuring is writing. So attackers of real
servers wait until the entry is evicted, or continue each attempt in another way behind the part
that they want to test.

The decoy is what makes it an attack and not a lottery. Without it some guess is always the fastest,
under salts too, and the attacker never learns that there was nothing to see.

A salt closes the channel at the key: prompts of different salts have no block in common, so what
one customer sends never makes another's prompt faster. Inside one salt the channel stays open.
So customers may share a salt only if each may know what the others send.""",
        ),
    ),
)
