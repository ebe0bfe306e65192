"""Chapter 08: Triton kernels, from adding two vectors to split-KV attention over blocks."""

from minikv.course.harness.manifest import Bug, Chapter, Class, Exercise, Function

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

Where you are asked for a kernel, what Python calls stands under it: that makes the output and
starts the programs. A check always runs them in Triton's interpreter, on a machine with a GPU
too, so that a wrong one ends in a sentence and not in a crash; then it has a GPU's compiler look
at the text, which needs no GPU. To try them yourself, import `kernels` before anything else:
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
            matters="Every kernel begins with these five lines: who am I, what is mine, what of it "
            "exists, read it, write it. Forget the third, and you write over somebody's memory.",
            hints=(
                "All programs run the same text. What is the only thing that tells program 2 "
                "that it is not program 0?",
                "`tl.arange(0, TILE)` is 0, 1, … TILE - 1, all at once. What has to be added to "
                "it so that program 2 of tiles of 4 has 8, 9, 10, 11? Which of these exist? "
                "`x + element` is then a tile of pointers.",
                """p = tl.program_id(0)
element = the first element of program p, plus tl.arange(0, TILE)
mask = which of them are below size
tl.load both tiles with the mask;  add;  tl.store the sum to out + element, with the mask""",
            ),
            works="""\
A kernel says what one program does; the grid says how many there are. Nobody says in which order,
or how many at the same time: that is the GPU's business, and why the same text keeps a small GPU
busy and a large one. Programs cannot wait for each other, so each has elements of its own.

A program of Triton does not work on one number, as a thread of CUDA does, but on a tile: every
line is a whole row of numbers. Which thread holds which of them is the compiler's business.

Sizes of tiles are known when a kernel is compiled (`tl.constexpr`), and powers of two. So the last
tile reaches over the end nearly always, and a mask is no special case but the rule. It costs next
to nothing: the hardware does not send a load that is masked out.

Without it a GPU reads what lies behind the array, mostly without any error: memory comes in pages
that are larger than your array, and the rest of the page is somebody's. A wrong load is a wrong
number; a wrong store is a wrong number in somebody else's tensor.""",
        ),
        Exercise(
            id="08.2",
            title="A running softmax",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="This is the inside of FlashAttention: scores of a whole context never exist, "
            "only those of one tile. The last tile is where it goes wrong.",
            hints=(
                "It is the loop of exercise 04.4, for one query head. What was a block there is a "
                "tile here. Which three things are carried from tile to tile?",
                "Two masks, for two reasons. Keys that do not exist must not be read, and what "
                "stands in their place must not count. What score gives a weight of 0? And what "
                "must a value be, so that 0 times it is 0?",
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
It is chapter 04's formula, and the only thing new is where numbers live. The query, `acc` and two
scalars stay in registers from beginning to end. Of K and V one tile at a time is there. So every
key and value is read from memory once, and nothing is written but the result. Naive attention on a
GPU also writes its scores, and then its weights, and reads both back.

The mask of the load keeps the kernel inside its memory. The -inf keeps what is not there out of
the softmax: a score of 0 instead would be a weight of e^(0 - top), which is anything but 0 if real
scores are low.

And `other=0.0` is for the values. Without it a masked place may hold anything, and so does memory
behind the end; a weight of 0 is no help, for 0 * NaN is NaN. vLLM's Triton kernels read the tail of
the last block and trusted the weight of 0. In 2026 that tail held NaN, and on AMD's GPUs Whisper
wrote garbage (pull request 47305). The mended kernels do not load it.

The first tile is never all masked, for a context has a token. So `top` is finite after it, and
-inf - -inf, which is NaN, can only come up where a kernel begins with a tile of which it sees
nothing (08.5).""",
        ),
        Exercise(
            id="08.3",
            title="Through the block table",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="Paged attention is one more load: the block's id, before its keys. "
            "This kernel runs tinypy, in company, on blocks that lie anywhere.",
            hints=(
                "Take your kernel of 08.2, and let a tile be a block. What tells this program "
                "which sequence and head are its own? And what of the loop must change if tile i "
                "does not begin at i * BLOCK_SIZE?",
                "Three addresses. The query: row `sequence`, head `head`. The id of block i: where "
                "in a table of rows of `width`? The key: kv is (num_blocks, BLOCK_SIZE, 2, "
                "KV_HEADS, HEAD_DIM); how many numbers lie between two slots, and how many between "
                "a K and its V?",
                """sequence, head = program ids 0 and 1;  kv_head = head // (query heads a KV head)
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
Two kinds of positions: logical ones decide what is visible, physical ones where it lies. The mask
takes the first, the address the second, and no line needs both. Within a block slots lie side by
side, so one look into the table serves a whole tile; that is why a block is many tokens.

The table's row is as wide as the longest needs, and a shorter sequence's entries beyond its context
are padding. They are somebody's block, or none. The loop ends before them, since it counts the
blocks of its own context.

H programs for each sequence, all at once and none knowing of another: 8 sequences of 32 heads are
256 programs, for 132 multiprocessors of an H100. But all query heads of a group read the same keys
and values, each for itself (08.4). And one sequence alone has only 32 programs (08.5).

In the interpreter programs run one after the other. On a GPU they do not, and nothing here would
change: each writes a row of its own. The check has looked at that, and at every address.""",
        ),
        Exercise(
            id="08.4",
            title="A group in one product",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="Decoding is bound by reading K and V. Eight query heads that share a KV head "
            "need not read it eight times, and together they are a matrix, which is what tensor "
            "cores multiply.",
            hints=(
                "What is the same for all query heads of a group, and what has each of its own? "
                "Whatever each has of its own gets one more dimension.",
                "Scores become (ROWS, BLOCK_SIZE): the matrix of queries times that of keys, "
                "transposed. `top` and `total` become (ROWS,), `acc` (ROWS, HEAD_DIM). Which of "
                "your sums and maxima run over axis 1 now? And rows beyond the group: whose heads "
                "would they read and overwrite, without a mask?",
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
A block is read once for the whole group. That is what grouped-query attention was made for: the
bytes of K and V per step are GROUP times fewer than for as many heads with K and V of their own,
and a kernel that reads them once for each head gives it all back.

Why 16 rows for a group of 2? The tensor cores' instruction for float16 on Ampere multiplies 16 rows
at a time (mma.m16n8k16), so 16 cost what 2 do. Triton 3.3 refused fewer (issue 8426); 3.7 pads them
itself. What it still insists on is 16 for the dimension that is summed over: head_dim in the first
product, the block in the second. The interpreter insists on nothing, so your check has asked a
compiler. vLLM's Triton decode pads its groups to 16 in the same way.

"ieee" is for float32. By default `tl.dot` rounds float32 to tf32 on a GPU, with 10 bits behind the
point instead of 23, and no interpreter shows that. Full float32 is no work for tensor cores: they
come with 16 bits, and the same two lines. Float16 would be fine here; bfloat16, which models use,
gives wrong products in this interpreter. So these kernels keep to float32, where any mistake shows.

A padded row has zeros for a query, so its scores are 0 and its softmax harmless. Only its store has
to be masked: it would be the first head of the next group.""",
        ),
        Exercise(
            id="08.5",
            title="Split and join",
            minutes=40,
            difficulty=4,
            kind="build",
            matters="One user with a long context has as many programs as KV heads, and the rest "
            "of the GPU looks on. Split the context, and all of it reads.",
            hints=(
                "Your kernel of 08.4 needs two changes: where its loop begins and ends, and what "
                "it stores. What must be known of a split, besides its output, so that somebody "
                "else can join it with the others?",
                "Splits of 5 blocks by 4: two each, so 2, 2, 1 and 0. What are `top`, `total` and "
                "`acc` after a loop that never ran, and what do acc / total and log(total) make of "
                "them? And in the join: if the largest lse is subtracted, what weight has a split "
                "of -inf?",
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
multiplying by it undoes the division. It is the merge of two triples from 04.4, for any number.

Two kernels, since a program can't wait for another: the end of a launch is what all wait for. The
join reads SPLITS * (D + 1) numbers a head; beside thousands of tokens that is nothing, beside a
hundred it is more than what splitting saves. So kernels/ splits only contexts that are long
enough, and as many times as there is room on the GPU. Dao et al. (2023) call it Flash-Decoding.

An empty split is no mistake: lengths in a batch differ, and the grid is one for all. What it stores
has to be harmless. Its output may be anything finite; it is the weight of e^-inf = 0 that keeps it
out, and 0 * NaN would not. TileLang's example of flash decoding gave NaN in 2025, traced to
`lse_local_split - lse_max_local` (issue 328).

And it has to store. Scratch is not zero but whatever was there before, a split of another request,
say: a program that has nothing to do and returns at once leaves that for the join.""",
        ),
        Exercise(
            id="08.6",
            title="Right on this machine",
            minutes=20,
            difficulty=2,
            kind="debug",
            matters="Both pieces pass the tests that most people would write. One waits for a GPU "
            "that runs programs in another order, the other for a sequence to open a new block.",
            hints=(
                "The packing: which rows of `out` does the last block of a sequence write? Who "
                "else writes them, and who comes last here? The step: which of its inputs can "
                "change from one step to the next, and when does each of them?",
                "The packing: write down position, held and row for a sequence of 5 tokens in "
                "blocks of 4 that begins at row 0, and then the first rows of the next one. The "
                "step: three things happen to a block table while a sequence decodes; chapters 04 "
                "and 05 have two of them, and 06 has the third.",
                """gather_kernel: 5 tokens, blocks of 4, rows 0 to 4 of out are its own
    block 1 has positions 4 5 6 7 and writes rows 4 5 6 7;  held should be T F F F
replay: the table has a new entry when a block is opened, another entry when a block was shared
    and is copied, and other rows when the batch is another: even if lengths happen to fit
so: which line decides whether it is copied, and what would you have to know to be sure?""",
            ),
            works="""\
The last block is full of slots, not of tokens. In `out` sequences lie close together, so what is
copied beyond a sequence's end lands in the next one's first rows. Here program (1, 0) runs after
(0, 1) and puts them right. On a GPU both run at once, and either may come last: right today, wrong
under load. Only the last sequence has nobody behind it to clear up. FlashAttention's Triton linear
layer had its mask on the line above the store and did not pass it (pull request 2822, 2026): it
wrote past the end and over neighbouring tiles, differently from run to run.

The order of programs is the interpreter's, so no result shows such a race. The check has noted who
writes what: two programs for one element are a mistake whatever comes out.

A graph is a recording of addresses, and its inputs are what lies there. Everything that a step
reads must be put there in every step. "Tables rarely change" is true, and what it would save is
some kilobytes. A block table changes when a block is opened, when a shared block is copied, when
somebody leaves and another comes; none of that changes a shape. Nor is it enough to name another
tensor: a review in Alibaba's rtp-llm found a replay that gave `page_table` a new one, of which the
recording knew nothing, and no test in which a page fills up (pull request 1078, 2026).

Both need tests that do what production does: another order, a border crossed, a block replaced.""",
        ),
    ),
)
