"""Chapter 04: blocks, tables of blocks, and attention that reads through them."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="04",
    name="paged_blocks",
    doc="Paged blocks: a pool, a table for each sequence, slots, and attention over blocks.",
    skeleton=(
        Class("minikv.blocks:BlockPool", write={"allocate": "04.1", "release": "04.1"}),
        Class(
            "minikv.blocks:BlockTable",
            write={"grow": "04.2"},
            show=("__init__", "release"),
        ),
        Function("minikv.course.chapters.ch04_paged_blocks.answers:slot_mapping", "04.3"),
        Function("minikv.paged:blockwise_attention", "04.4"),
        Function(
            "minikv.course.chapters.ch04_paged_blocks.answers:batched_attention",
            Bug("04.5", (("keys < context_lens", "keys <= context_lens"),)),
        ),
        Function("minikv.course.chapters.ch04_paged_blocks.answers:before_the_sweep", "04.6"),
    ),
    in_engine=True,
    exercises=(
        Exercise(
            id="04.1",
            title="A pool of blocks",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="If a block is handed out twice, the texts of two requests mix. "
            "If a block is never given back, it is lost until the server restarts.",
            hints=(
                "All blocks have the same size, so any free one will do. Which attribute of "
                "`__init__` knows which blocks are free, and which one counts the holders?",
                "Allocate has two cases: a block is free, or none is. Release has three: the "
                "block is already free (or no block of the pool: `ref_count` raises), it has other "
                "holders, or this was the last one.",
                """allocate:
    if nothing is free: raise OutOfBlocks(1, 0)
    take the last block off the free list; its count becomes 1; return it
release:
    count = ref_count(block_id)          # raises for an unknown id
    if count is 0: raise ValueError
    the count becomes count - 1; if that is 0, put the block on the free list""",
            ),
            works="""\
Nothing is ever searched for. All blocks have one size, so any free block is as good as any
other, and the top of a stack will do: allocate and release take the same time in a pool of ten
blocks and of ten million. An operating system keeps its free page frames in lists for the same
reason. That is the advantage of a fixed size: no best fit, no gaps that are too small, no
compaction.

The count is for chapter 05, where several tables hold one block. A table that releases a block
need not know of the others: only the last release frees it.

Refusing a second release is not pedantry. Without it the block stands in the free list twice,
two requests get it, and the mistake shows far away from its cause. vLLM's pool refused, so in
2023 users saw "Double free!" (issue 1556) rather than each other's text. And -1 has to be refused
explicitly: to a Python list it means the last element, which may be another request's block.

Which free block comes next is up to the pool. Here it is the one freed last: the likeliest to be
in the processor's cache. vLLM's version 1 takes the one freed longest ago, because there a free
block may still hold a cached prefix, and the oldest of those is the one to lose first.""",
        ),
        Exercise(
            id="04.2",
            title="A table that grows",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="A table grows while its request runs. If the pool runs dry halfway through, "
            "a table that keeps the half it got can stop the whole engine.",
            hints=(
                "How many blocks must the table have afterwards, for all its tokens? How many "
                "does it have now?",
                "Three cases: the new tokens fit into the last block; blocks are needed and the "
                "pool has them; blocks are needed and the pool has too few. In the third, what "
                "have you already changed when you notice?",
                """if num_tokens is negative: raise ValueError
total = the table's tokens so far + num_tokens
needed = total / block_size, rounded up, - the blocks it has
if needed is more than the pool has free: raise OutOfBlocks(needed, free)
append `needed` blocks, one allocate each
only now: num_tokens of the table becomes total""",
            ),
            works="""\
The total decides, not the increment. Rounding up each increment would open a block for every
token; rounding up the total uses the last block's empty slots first, and at most block_size - 1
slots of a table are ever empty. `-(-total // block_size)` rounds up in whole numbers.

All or nothing protects the other requests. Two requests that each hold half of what they need can
hold the whole pool between them, and neither can ever continue: hold and wait, the textbook's
condition for a deadlock. A request that got nothing holds nothing more, and the scheduler can try
something else: evict a cached prefix, or preempt another request (chapters 06 and 07).

Checking first and taking afterwards is enough here, because one thread does both. Taking block by
block and giving all of it back on failure is right as well. vLLM's `KVCacheManager.allocate_slots`
checks first, too, and returns None.

`num_tokens` is what was asked for, not what the last block still has room for. When a decode opens
a block, the engine asks for all its slots at once, so it calls `grow` once in block_size steps.""",
        ),
        Exercise(
            id="04.3",
            title="Where a token goes",
            minutes=10,
            difficulty=2,
            kind="build",
            matters="One wrong slot, and a key and a value overwrite those of another token. "
            "Nothing crashes. A little later the text turns to nonsense.",
            hints=(
                "Take one position alone. Which logical block is it in, and at which place in "
                "that block? Only then look into the table.",
                "The position counts from the start of the sequence, not of the chunk. Try a "
                "chunk that begins in the middle of a block by hand.",
                """slots = []
for position from start up to, not including, end:
    index, offset = position divided by block_size, and the remainder
    physical = block_ids[index]
    append physical * block_size + offset
return slots""",
            ),
            works="""\
A position is split in two: its quotient by the block size picks an entry of the table, and its
remainder is the place in the block. A processor does the same with every address of a program;
pages there are powers of two in size, so it cuts the address in two instead of dividing.

One slot number serves all layers. Every layer has its own keys and values, and all are laid out
alike, so the mapping is computed once per step. (The engine does it one block at a time, in
`BatchBuilder._chunk_slots`; for decodes the scheduler just adds 1 to the slot of the step before,
until the block ends.)

The trap is where to count from. A chunk of a prompt, or a prompt whose beginning is cached, starts
at a position other than 0. An engine that counts from the chunk's own start overwrites the
sequence's first tokens, and prompts that fit into one chunk never show it.

vLLM 0.8.5 computes block_numbers * block_size + block_offsets for the whole batch in numpy
(`gpu_model_runner.py`); a small kernel, reshape_and_cache, then writes K and V to those slots.""",
        ),
        Exercise(
            id="04.4",
            title="Attention, one block at a time",
            minutes=40,
            difficulty=4,
            kind="build",
            matters="This loop is inside every paged attention kernel, and inside "
            "FlashAttention. Chapter 08 writes it once more, for a GPU.",
            hints=(
                "What do you have to carry from one block to the next, for each query head? It "
                "is three things, and none of them grows with the context.",
                "Per block: which of its slots are filled? Which keys does a query head see (heads "
                "of one group lie side by side)? Then two cases: the block's largest score is "
                "above the largest so far, or it isn't. One formula covers both.",
                """top = -inf, total = 0, out = 0      for each query head (out has D numbers)
for each block of the context:
    k, v = its filled slots;  scores = q . k / sqrt(D)
    new_top = max(top, largest score);  shrink = exp(top - new_top)
    weights = exp(scores - new_top)
    total = total * shrink + sum of weights
    out = out * shrink + weights . v;  top = new_top
return out / total""",
            ),
            works="""\
Nothing is approximated. Adding a number to all scores changes no softmax, so sums relative to the
old maximum and sums relative to the new one differ by a single factor, the same for every term:
e^(m - M). Only the order of the additions is different, so the results differ from naive attention
by rounding.

The factor is never above 1, and every exponent is 0 or less, so nothing overflows however large
the scores are. The start, m = -inf with empty sums, needs no special case: the first factor is
e^(-inf) = 0. (A block without a single visible key would need one: -inf - -inf is NaN. Here every
block has at least one token; a kernel that masks has to guard against it.)

For each query head D + 2 numbers are carried, however long the context is. They stay in registers
while K and V are read once. And two such triples can be merged by the same formula, so blocks can
be given to several processors and their results joined: that is split-KV.

The running maximum and sum are Milakov and Gimelshein's (2018), the rescaled sum of values Rabe and
Staats's (2021). FlashAttention (Dao et al., 2022) tiles contiguous K and V with them; reading the
tiles through a table is PagedAttention (Kwon et al., 2023).""",
        ),
        Exercise(
            id="04.5",
            title="Other words in company",
            minutes=15,
            difficulty=3,
            kind="debug",
            matters="One request at a time, on fresh memory, the tests pass. In production, one "
            "request reads a token that belongs to another.",
            hints=(
                "The same request is right alone and wrong beside others. Which memory of the "
                "others can it reach? Print which slots the last row of a small batch may see.",
                "A row sees keys 0, 1, 2, … up to a border. Work it out for a context of 5 tokens "
                "in blocks of 4: at which positions are those tokens, and which positions does the "
                "comparison let through? Then for a context of 8.",
                """context_len = 5:  tokens are at positions 0 1 2 3 4
visible should be:   T T T T T F F F
visible is:          T T T T T T F F     <- a slot that holds no token of this sequence
so: which comparison is true for 4 and false for 5?
(with a *position* instead of a length, the present one would be right)""",
            ),
            works="""\
A context of n tokens has positions 0 … n - 1, so key j is visible if j < n. With the query's
position p = n - 1 the same condition is j <= p. Both are in use, `TorchAttention` has the second,
and mixing them is the field's favourite off-by-one.

Why did nothing show alone? The slot after the newest token was never written, and a fresh pool is
all zeros: the key gives a score of 0, the value adds nothing, the output shrinks a little. Then
memory is reused, or tables are padded with block 0, and the slot holds another request's token.

It is more than a wrong word: one user's text now depends on what another user wrote.

Real engines have shipped it. In 2026 the Rust engine pegainfer let its page table run one block
ahead of the sequence at every block border (issue 291): zeros on a fresh pool, old keys and values
on a recycled block. Its golden test stayed green, because the pool was always fresh there.

So fill memory with values that show. This repository's tests fill whatever a sequence does not own
with huge numbers or with NaN, and run several sequences at once.""",
        ),
        Exercise(
            id="04.6",
            title="How large is a block?",
            minutes=10,
            difficulty=2,
            kind="predict",
            matters="If you run an engine, you choose its block size. Know what it does before "
            "you measure it.",
            hints=(
                "Only one block of a request is ever partly empty. Which one, and how empty is it "
                "at worst?",
                "A block is opened for a token, so it holds at least one. List the number of "
                "empty slots for 1, 2, … up to all tokens in the last block, and average.",
                """blocks       = 1300 / 16, rounded up
empty        = blocks * 16 - 1300
entries      = one for each block, and a block is a token
average(b)   = (0 + 1 + … + (b - 1)) / b
largest      = the last b of 1, 2, 4, 8, … with average(b) / (1300 + average(b)) < 0.04""",
            ),
            works="""\
The last block is the only one with empty slots, 0 to b - 1 of them, (b - 1) / 2 on average. So a
request of L tokens wastes about b / 2L of its slots: twice the block, twice the waste; twice the
length, half of it. The promise of "under 4 %" is a statement about lengths as much as about
paging: blocks of 16 keep it from about 180 tokens on.

The table has L / b entries, so it shrinks as blocks grow, and so does the work that is done once
per block: an entry to look up, a jump in memory, a round of the loop. From some size on there is
nothing left to gain, while the waste continues to grow. So the best size is the smallest that
reads fast enough.

Kwon et al. (2023, section 7.2) found 16 to 128 best for long chats (ShareGPT), 16 and 32 for
short ones (Alpaca), where larger blocks were longer than whole requests; vLLM's default on CUDA
is 16. Large blocks also have fewer chances to be shared: two prompts share only full blocks
(chapters 05 and 07).""",
        ),
    ),
)
