"""Chapter 08: Triton kernels, from adding two vectors to split-KV attention over blocks."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

ANSWERS = "minikv.course.chapters.ch08_triton_paged_attention.answers"
UP_TO_THE_BLOCKS_END = (
    (
        "    held = position < context\n",
        "    held = position < tl.cdiv(context, BLOCK_SIZE) * BLOCK_SIZE\n",
    ),
)
TABLES_OF_A_NEW_BATCH_ONLY = (
    (
        "    self.block_tables[:num_seqs, :width] = block_tables\n",
        "    # One token further: the same sequences as before, so their tables are in place.\n"
        "    if not torch.equal(context_lens, self.context_lens[:num_seqs] + 1):\n"
        "        self.block_tables[:num_seqs, :width] = block_tables\n",
    ),
)

CHAPTER = Chapter(
    number="08",
    name="triton_paged_attention",
    needs="triton",
    doc="""\
Triton kernels, each the one before plus one idea: from adding two vectors to attention over
blocks, with grouped heads and split contexts.

Below each kernel that you write is the function that Python calls: it allocates the output and
starts the programs. A check always runs your kernels in Triton's interpreter, on a machine with a
GPU too, so that a wrong one ends in a sentence and not in a crash; then it compiles them for a
GPU, which works without one. To try them yourself, import `minikv_kernels` before anything else:
without a GPU that turns the interpreter on.
""",
    skeleton=(
        Function(f"{ANSWERS}:add_kernel", "08.1"),
        Function(f"{ANSWERS}:add"),
        Function(f"{ANSWERS}:attend_kernel", "08.2"),
        Function(f"{ANSWERS}:attend"),
        Function(f"{ANSWERS}:decode_kernel", "08.3"),
        Function(f"{ANSWERS}:decode"),
        Function(f"{ANSWERS}:packed_kernel", "08.4"),
        Function(f"{ANSWERS}:decode_packed"),
        Function(f"{ANSWERS}:split_kernel", "08.5"),
        Function(f"{ANSWERS}:join_kernel", "08.5"),
        Function(f"{ANSWERS}:decode_split"),
        Function(f"{ANSWERS}:gather_kernel", Bug("08.6", UP_TO_THE_BLOCKS_END)),
        Function(f"{ANSWERS}:gather"),
        Class(
            f"{ANSWERS}:CapturedDecode", write={"replay": Bug("08.6", TABLES_OF_A_NEW_BATCH_ONLY)}
        ),
    ),
    in_engine=True,
    decodes=(("08.5", "decode_split"), ("08.4", "decode_packed"), ("08.3", "decode")),
    exercises=(
        Exercise(
            id="08.1",
            title="A tile for each program",
            minutes=15,
            difficulty=1,
            kind="build",
            matters="Every kernel begins with these five lines: who am I, which elements are mine, "
            "which of them exist, read, write. Forget the third and you write to memory that is "
            "not yours.",
            hints=(
                "All programs run the same code. What is the only thing that distinguishes "
                "program 2 from program 0?",
                "`tl.arange(0, TILE)` is 0, 1, … TILE - 1, all at once. What must you add to it "
                "so that program 2, in tiles of 4, has 8, 9, 10, 11? Which of these exist? "
                "`x + element` is then a tile of pointers.",
                """p = tl.program_id(0)
element = the first element of program p, plus tl.arange(0, TILE)
mask = which of them are below size
tl.load both tiles with the mask;  add;  tl.store the sum to out + element, with the mask""",
            ),
            works="""\
A kernel says what one program does; the grid says how many there are. Neither says in which order
they run, or how many at the same time. The GPU decides that, which is why the same code keeps both
a small GPU and a large one busy. Programs can't wait for each other, so each has its own elements.

A Triton program does not work on one number, as a CUDA thread does, but on a tile: every line
handles a whole row of numbers. The compiler decides which thread holds which of them.

Tile sizes are powers of two, and known when a kernel is compiled (`tl.constexpr`). So the last tile
nearly always reaches past the end, and a mask is not a special case but the rule. It costs next to
nothing: the hardware does not send a load that is masked out.

Without it a GPU reads what lies after the array, mostly without any error: memory comes in pages
that are larger than your array, and other tensors share the page. A wrong load is a wrong number; a
wrong store is a wrong number in another tensor.""",
        ),
        Exercise(
            id="08.2",
            title="A running softmax",
            minutes=45,
            difficulty=3,
            kind="build",
            matters="This is the core of FlashAttention: only the scores of one tile exist at a "
            "time. Kernels go wrong in the last tile.",
            hints=(
                "It is the loop of exercise 04.4, for one query head, with the addresses and masks "
                "of `mean_kernel`. What was a block there is a tile here. Which three things are "
                "carried from tile to tile?",
                "You need two masks, for two reasons. Keys that do not exist must not be read, and "
                "what stands in their place must not count. What score gives a weight of 0? And "
                "what must a value be, so that 0 times it is 0?",
                """query = q's HEAD_DIM numbers;  top = -inf;  total = 0.0;  acc = HEAD_DIM zeros
for start in range(0, context, TILE):
    key = start + 0 … TILE - 1;  held = key < context
    load keys and values, (TILE, HEAD_DIM): key[:, None] * HEAD_DIM + column[None, :];  other=0.0
    scores = sum(query * keys, over columns) * scale, and -inf where not held
    new_top = max(top, largest score);  shrink = exp(top - new_top)
    weights = exp(scores - new_top)
    total = total * shrink + sum of weights
    acc = acc * shrink + sum(weights[:, None] * values, over keys);  top = new_top
store acc / total""",
            ),
            works="""\
It is chapter 04's formula; only the place where the numbers live is new. The query, `acc` and two
scalars stay in registers from beginning to end. Of K and V, one tile is there at a time. So every
key and value is read from memory once, and only the result is written. Naive attention on a GPU
also writes its scores, and then its weights, and reads both back.

The mask of the load keeps the kernel inside its memory. The -inf keeps the missing keys out of the
softmax: with a score of 0 instead, each would have a weight of e^(0 - top), which is far from 0 if
the real scores are low.

And `other=0.0` is for the values. Without it a masked place may hold anything, and so may memory
past the end; a weight of 0 does not help, because 0 * NaN is NaN. vLLM's Triton kernels read the
tail of the last block and relied on the weight of 0. In 2026 that tail held NaN, and on AMD GPUs
Whisper wrote garbage (pull request 47305). The fixed kernels do not load it.

The first tile is never fully masked, because a context has at least one token. So `top` is finite
after it. The difference -inf - -inf, which is NaN, can only arise where a kernel begins with a tile
of which it sees nothing (08.5).""",
        ),
        Exercise(
            id="08.3",
            title="Through the block table",
            minutes=35,
            difficulty=3,
            kind="build",
            begins=("decode_kernel", "attend_kernel"),
            matters="Paged attention is one more load: the block's id, before its keys. This kernel"
            " runs tinypy on blocks scattered over the pool.",
            hints=(
                "Take your kernel from 08.2, and let a tile be a block. What tells this program "
                "which sequence and head it works for? And what must change in the loop if tile i "
                "does not begin at i * BLOCK_SIZE?",
                "There are three addresses. The query: row `sequence`, head `head`. The id of "
                "block i: where, in a table of rows of `width`? The key: kv is (num_blocks, "
                "BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM); how many numbers lie between two slots, and "
                "how many between a K and its V?",
                """sequence, head = program ids 0 and 1;  kv_head = head // (heads per KV head)
query = load q at (sequence * HEADS + head) * HEAD_DIM + column
context = load context_lens + sequence
for i in range(0, tl.cdiv(context, BLOCK_SIZE)):
    block = load block_tables + sequence * width + i
    held = i * BLOCK_SIZE + offset < context        # logical positions, for the mask
    slot = block * BLOCK_SIZE + offset              # physical ones, for the address
    K begins at ((slot * 2 + 0) * KV_HEADS + kv_head) * HEAD_DIM, V at ((slot * 2 + 1) * …
    … and then as in 08.2;  store to out where the query was in q""",
            ),
            works="""\
There are two kinds of positions. Logical positions decide what is visible; physical positions say
where it lies. The mask uses the first, the address the second, and no line needs both. Within a
block, slots lie side by side, so one lookup in the table serves a whole tile; that is why a block
holds many tokens.

A row of the table is as wide as the longest sequence needs, and a shorter sequence's entries past
its context are padding: another sequence's block, or none. The loop ends before them, because it
counts the blocks of its own context.

Each sequence has H programs, all at once and independent of each other: 8 sequences of 32 heads are
256 programs, for the 132 multiprocessors of an H100. But all query heads of a group read the same
keys and values, each for itself (08.4). And one sequence alone has only 32 programs (08.5).

In the interpreter, programs run one after another. On a GPU they do not, and nothing here would
change: each writes its own row. The check has looked at that, and at every address.""",
        ),
        Exercise(
            id="08.4",
            title="A group in one product",
            minutes=40,
            difficulty=4,
            kind="build",
            begins=("packed_kernel", "decode_kernel"),
            matters="Query heads that share a KV head need not each read it, and together they form"
            " a matrix, which tensor cores multiply.",
            hints=(
                "What is the same for all query heads of a group, and what does each have for "
                "itself? Whatever each has for itself gets one more dimension.",
                "Scores become (ROWS, BLOCK_SIZE): the matrix of queries times that of keys, "
                "transposed. `top` and `total` become (ROWS,), `acc` (ROWS, HEAD_DIM). Which of "
                "your sums and maxima run over axis 1 now? And without a mask, whose heads would "
                "the rows past the group read and overwrite?",
                """member = 0 … ROWS - 1
its row of q: (sequence * KV_HEADS + kv_head) * GROUP + member
queries = load (ROWS, HEAD_DIM), masked by member < GROUP, other=0.0
top = (ROWS,) of -inf;  total = (ROWS,) of 0;  acc = (ROWS, HEAD_DIM) of 0    # tl.full, tl.zeros
for each block, keys and values as before:
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    -inf where not held[None, :];  new_top = max(top, max of scores over axis 1)
    shrink (ROWS,);  weights = exp(scores - new_top[:, None]);  total over axis 1
    acc = acc * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
store acc / total[:, None], masked as the queries""",
            ),
            works="""\
A block is read once for the whole group. That is what grouped-query attention was made for: a step
reads GROUP times fewer bytes of K and V than if each query head had its own, and a kernel that
reads them once per query head loses all of that again.

Why 16 rows for a group of 2? On Ampere the tensor cores' instruction for float16 multiplies 16 rows
at a time (mma.m16n8k16), so 16 rows cost what 2 do. Triton 3.3 refused fewer (issue 8426); 3.7 pads
them itself. It still insists on at least 16 for the dimension that is summed over: head_dim in the
first product, the block in the second. The interpreter insists on nothing, so your check has asked
a compiler. vLLM's Triton decode kernel pads its groups to 16 in the same way.

"ieee" is for float32. By default `tl.dot` rounds float32 to tf32 on a GPU, with a mantissa of 10
bits instead of 23, and no interpreter shows that. Full float32 does not use the tensor cores at
all; with 16-bit numbers the same two lines do. Float16 would work here, but bfloat16, which most
models use, gives wrong products in this interpreter. So these kernels stay with float32, where any
mistake shows.

A padded row has a query of zeros, so its scores are 0 and its softmax is harmless. Only its store
has to be masked: it would overwrite the first head of the next group.""",
        ),
        Exercise(
            id="08.5",
            title="Split and join",
            minutes=60,
            difficulty=4,
            kind="build",
            begins=("split_kernel", "packed_kernel"),
            matters="A single user with a long context keeps only as many programs busy as there "
            "are KV heads. Split the context, and all of the GPU reads.",
            hints=(
                "Your kernel from 08.4 needs two changes: where its loop begins and ends, and what "
                "it stores. What must another kernel know of a split, besides its output, to join "
                "it with the others?",
                "5 blocks in 4 splits: 2, 2, 1 and 0 blocks. What are `top`, `total` and `acc` "
                "after a loop that never ran, and what are acc / total and log(total) then? And in "
                "the join: if you subtract the largest lse, what is the weight of a split with "
                "-inf?",
                """split_kernel: as packed_kernel, and program id 2 is the split
    blocks = cdiv(context, BLOCK_SIZE);  share = cdiv(blocks, SPLITS)
    for i from split * share up to the smaller of (split + 1) * share and blocks: as before
    some = total, and 1 where that is 0
    partial: acc / some, at ((sequence's head) * SPLITS + split) * HEAD_DIM + column
    lse: top + log(some), at (sequence's head) * SPLITS + split;  both masked by member < GROUP
join_kernel: a row's SPLITS numbers of lse, and (SPLITS, HEAD_DIM) of partial
    weights = exp(lse - largest lse)
    store sum(weights[:, None] * partial, over splits) / sum of weights""",
            ),
            works="""\
A split's output is a softmax over its own tokens, and lse says how much that softmax weighs. The
join is a softmax again, of lse, over the splits: e^lse is the sum that the split has divided by, so
multiplying by it undoes the division. It is the merge of two triples from 04.4, for any number of
them.

There are two kernels because a program can't wait for another: only the end of a launch is a point
that all have reached. The join reads SPLITS * (D + 1) numbers per head. For a context of thousands
of tokens that is negligible; for a hundred it is more than splitting saves. So kernels/ splits only
contexts that are long enough, and into as many splits as the GPU has room for. Dao et al. (2023)
call it Flash-Decoding.

An empty split is not an error: lengths in a batch differ, and one grid serves all of them. What it
stores has to be harmless. Its output may be anything finite, because its weight of e^-inf = 0 keeps
it out; 0 * NaN would not be 0. TileLang's example of flash decoding gave NaN in 2025, traced to
`lse_local_split - lse_max_local` (issue 328).

And it has to store. Scratch memory is not zero. It holds whatever was there before, such as a split
of another request, and a program that finds nothing to do and returns at once leaves that for the
join.""",
        ),
        Exercise(
            id="08.6",
            title="Right on this machine",
            minutes=20,
            difficulty=2,
            kind="debug",
            matters="One of these functions fails when a GPU runs programs in another order, the "
            "other when a sequence opens a new block.",
            hints=(
                "Packing: which rows of `out` does the last block of a sequence write? Which other "
                "program writes them, and which comes last here? The step: which of its inputs can "
                "change from one step to the next, and when does each of them?",
                "Packing: write down position, held and row for a sequence of 5 tokens in blocks "
                "of 4 that begins at row 0, and then the first rows of the next one. The step: "
                "three things can change the table that a row of the batch has; chapters 04 and 05 "
                "show two of them, and 06 shows the third.",
                """gather_kernel: 5 tokens, blocks of 4, rows 0 to 4 of out are its own
    block 1 has positions 4 5 6 7 and writes rows 4 5 6 7;  held should be T F F F
replay: the table has a new entry when a block is opened, another when a shared block is
    copied, and different rows when the batch changes: even if the lengths happen to fit
so: which line decides whether the table is copied, and what would you have to know to be sure?""",
            ),
            works="""\
The last block has a slot in every place, but not a token. In `out` sequences lie close together, so
what is copied past a sequence's end lands in the first rows of the next one. Here program (1, 0)
runs after (0, 1) and overwrites them with the right values. On a GPU both run at once, and either
may come last: right today, wrong under load. Only after the last sequence does no program repair
the damage. FlashAttention's Triton linear layer had its mask on the line above the store and did
not pass it (pull request 2822, 2026): it wrote past the end and over neighbouring tiles,
differently from run to run.

The interpreter always uses the same order of programs, so no result shows such a race. The check
has recorded which program writes what: two programs that write one element are an error, whatever
the result.

A graph is a recording of addresses, and its inputs are whatever lies there. Everything that a step
reads must be copied there at every step. "Tables rarely change" is true, and relying on it would
save some kilobytes. But a block table changes when a block is opened, when a shared block is
copied, and when one sequence leaves and another takes its row; none of that changes a shape. Nor is
it enough to assign another tensor: a review in Alibaba's rtp-llm found a replay that gave
`page_table` a new tensor, of which the recording knew nothing, and no test in which a page fills up
(pull request 1078, 2026).

Both need tests that do what production does: another order, a crossed boundary, a new block.""",
        ),
    ),
)
