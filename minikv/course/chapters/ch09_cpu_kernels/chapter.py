"""Chapter 09: kernels for a CPU, from the loop over blocks to a decode step as one program."""

from minikv.course.exercises.manifest import Bug, Chapter, Exercise, Function

ANSWERS = "minikv.course.chapters.ch09_cpu_kernels.answers"
WHOLE_BLOCKS = (
    (
        "            acc[:] = 0\n            for p in range(context):\n",
        "            acc[:] = 0\n"
        "            # Whole blocks: no end in the middle, and a weight of 0 adds nothing.\n"
        "            whole = (context + block_size - 1) // block_size * block_size\n"
        "            scores[g, context:whole] = 0\n"
        "            for p in range(whole):\n",
    ),
)
ROOM_FOR_ALL = (
    (
        "    scores = np.empty((num_pieces, group, room), np.float32)\n",
        "    scores = np.empty((group, room), np.float32)  # once: allocating takes time\n",
    ),
    (
        "        [(*arrays, own, first, last) for own, (first, last) in "
        "zip(scores, pieces, strict=True)],\n",
        "        [(*arrays, scores, first, last) for first, last in pieces],\n",
    ),
)

CHAPTER = Chapter(
    number="09",
    name="cpu_kernels",
    needs="numba",
    doc="""\
Kernels for a CPU, compiled by Numba: attention that walks the block table, one query head at a
time and then a group at a time, in pieces for threads; a matrix product; a decode step as one
program.

`@compiled` makes a function a kernel: Numba compiles it when it is first called. A check first runs
your kernels as plain Python, on small arrays, so that a wrong index gives a message and not a
crash; then it compiles them. Unless stated otherwise, numbers are float32 and arrays are
contiguous.
""",
    skeleton=(
        Function(f"{ANSWERS}:attend_heads", "09.1"),
        Function(f"{ANSWERS}:decode"),
        Function(f"{ANSWERS}:attend_groups", "09.2"),
        Function(f"{ANSWERS}:decode_by_group"),
        Function(f"{ANSWERS}:share", "09.3"),
        Function(f"{ANSWERS}:decode_in_threads"),
        Function(f"{ANSWERS}:attend_piece", Bug("09.4", WHOLE_BLOCKS)),
        Function(f"{ANSWERS}:decode_in_pieces", Bug("09.4", ROOM_FOR_ALL)),
        Function(f"{ANSWERS}:matmul", "09.5"),
        Function(f"{ANSWERS}:decode_step", "09.6"),
    ),
    in_engine=True,
    decodes=(("09.2", "decode_by_group"), ("09.1", "decode")),
    exercises=(
        Exercise(
            id="09.1",
            title="The loop, compiled",
            minutes=30,
            difficulty=2,
            kind="build",
            matters="Chapter 04's loop over blocks was the right algorithm, but far too slow in "
            "Python. Written with plain numbers and compiled, it beats the gathered copy that the "
            "engine made instead.",
            hints=(
                "Take `blockwise_attention` of 04.4 and write out what each tensor operation "
                "does: three loops around it (sequences, query heads, blocks), and inside them "
                "loops over the tokens of a block and over the head dim. What is carried from "
                "block to block?",
                "For each block: the scores of its filled slots and their maximum; then shrink "
                "`total` and `acc`; then the weights, and the weighted values. How many slots "
                "are filled in block i of a context? And which KV head does query head h read?",
                """for s in range(S):  for h in range(H):
    top, total, acc = np.float32(-np.inf), np.float32(0), zeros of D float32
    for i in range(blocks of context_lens[s], rounded up):
        block = block_tables[s, i];  filled = the smaller of block_size and what is left
        for t in range(filled):  scores[t] = scale * sum over d of q[s, h, d] * kv[block, t, 0, …]
        new_top = the largest of top and scores
        shrink = np.float32(math.exp(top - new_top));  total *= shrink;  acc *= shrink
        for t in range(filled):
            weight = np.float32(math.exp(scores[t] - new_top));  total += weight
            for d in range(D):  acc[d] += weight * kv[block, t, 1, kv_head, d]
        top = new_top
    out[s, h] = acc / total""",
            ),
            works="""\
The algorithm is unchanged. What is gone is the interpreter: in Python every `*` looks up the types
of its operands, allocates an object for the result, and counts references. Numba infers the types
once, from the arguments of the first call, and hands LLVM a loop over plain float32.

LLVM then computes the innermost loops several numbers at a time (SIMD). It can, because the head
dim is contiguous, nothing in the loop branches, and `compiled` allows another order of additions.
The dot product is a sum, and 16 lanes add in a different order from the one you wrote. Without that
permission LLVM adds one product after another, to give exactly the digits that you asked for.

`np.float32(0)` matters, because a Python 0.0 is a float64. With it, every product is widened before
it is added, and half as many numbers fit into a register. The check looks for this.

Nothing is gathered. The engine's attention in PyTorch copies K and V of every sequence into one
padded tensor, reads the copy, and throws it away: each byte is read, written and read again. Here
it is read once for each query head. That is still more than needed (09.2).""",
        ),
        Exercise(
            id="09.2",
            title="K and V once for a group",
            minutes=25,
            difficulty=3,
            kind="build",
            begins=("attend_groups", "attend_heads"),
            matters="The query heads of a group read the same keys. All of them should use a block "
            "while it is in the processor's cache. Each read from memory that you avoid leaves "
            "bandwidth for something else.",
            hints=(
                "Your kernel from 09.1 finishes one query head before it begins the next. Which "
                "two loops must change places, so that a block is finished before the next one "
                "is touched?",
                "What you carried from block to block for one head, you now carry for G heads: "
                "`top` and `total` become arrays of G, `acc` one of (G, D). Reset them for "
                "each item. Item w: sequence w // K, KV head w % K; its query heads are "
                "kv_head * G to kv_head * G + G - 1.",
                """top, total = G float32 each;  acc = (G, D) float32;  scores = block_size float32
for item in range(first, last):
    s, kv_head = item // K, item % K
    top[:] = -np.inf;  total[:] = 0;  acc[:] = 0
    for i in range(blocks of context_lens[s]):
        block, filled as in 09.1
        for g in range(G):
            h = kv_head * G + g
            … as in 09.1, with top[g], total[g], acc[g] …
    for g in range(G):  out[s, kv_head * G + g] = acc[g] / total[g]""",
            ),
            works="""\
A GPU's program can put a block into on-chip memory. A CPU's program cannot: it has caches, which
keep what was used last. So all that a kernel can do is use the same data again soon. A block of
tinypy is 8 KiB of K and V for one KV head; a first-level cache has 32 KiB or more. After the first
query head has read the block, the others find it there.

Whether you see it in tokens per second depends on where K and V would have come from otherwise.
tinypy's contexts fit into the second-level cache, which is fast enough to feed one core, so the
gain is small; with long contexts and many sequences it approaches G. The check therefore counts
fetches, which do not depend on the machine.

`first` and `last` cost nothing and make the kernel divisible. Items may read the same data, but
write different rows of `out`. So any set of items may be computed at any time, in any order, on any
thread, and the result is the same to the last bit, because the order of additions within an item
does not change.

The engine's own `attend_decode` (minikv/cpu/kernels.py) has these loops. It also has sliding
windows, products of eight keys and two query heads at a time, and an `exp` written as arithmetic,
because the library's handles one number at a time.""",
        ),
        Exercise(
            id="09.3",
            title="Pieces for threads",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="A step ends when its last thread ends. If one thread has the long contexts, "
            "the others wait for it.",
            hints=(
                "Two pieces with the same number of items: what goes wrong if one context is 900 "
                "tokens and the others are 10?",
                "Lay the items side by side, each as wide as its context. Where, in tokens, is the "
                "ideal cut between piece i - 1 and piece i? Cut between the two items where that "
                "is nearest.",
                """work = for each item w, context_lens[w // kv_heads]
cuts = [0]
for i in 1 … num_pieces - 1:
    ideal = total work * i / num_pieces
    cut = the first item whose middle lies at `ideal` or past it (all items, if there is none)
    add it to cuts
pieces are the gaps between neighbouring cuts, the last one ends at the number of items""",
            ),
            works="""\
Each cut is at most half an item away from the ideal one, so no piece is longer than the even share
by more than one item. Better divisions exist, but finding one takes longer than it saves, because
this function runs at every step.

Whether a thread pays off depends on what it costs. Waking one and learning that it is done takes
tens of microseconds, about as long as all of tinypy's attention in a layer at batch 1. So a thread
pays off only when its share of the work takes longer than waking it. On a busy machine there may be
no free core for it. This is why more threads often make a small model slower.

In a decode step the work of attention grows with the tokens that it reads, so tokens are a good
measure. In a prefill they are not: there it grows with queries times keys.

`nogil` is what lets threads help: a compiled kernel does not hold Python's global lock while it
runs. The pieces share no memory that is written, so they need no lock of their own either
(09.4).""",
        ),
        Exercise(
            id="09.4",
            title="Sometimes NaN, sometimes wrong",
            minutes=25,
            difficulty=3,
            kind="debug",
            matters="Both bugs usually stay hidden: one needs an old NaN in a slot, the other "
            "needs two threads that use the same memory at the same time. Tests on fresh memory "
            "with one thread never see either.",
            hints=(
                "The first symptom is NaN although every token's K and V is finite. Which slots "
                "hold NaN here, and do they hold tokens? The second bug needs two pieces: what do "
                "they share?",
                "What is 0 times NaN? And in the second function: for each array that a call gets, "
                "ask who writes it, who reads it, and whether two calls get the same memory.",
                """attend_piece: the loop over the values runs to the end of the last block.
    Slots after the context belong to no token; a weight of 0 does not make NaN a 0.
    How far did the loop over the keys go?
decode_in_pieces: `scores` is scratch memory, and every call writes all of it.
    Two calls at the same time overwrite each other's scores. How much do num_pieces need?""",
            ),
            works="""\
Zero times NaN is NaN, and so is zero times infinity. Multiplying by 0 is not a mask. Chapter 08 had
the same bug in a GPU kernel. Here it comes from an attempt to help the compiler: loops without a
ragged end are indeed faster. To have such a loop, make the memory safe (write zeros into the slots
when a block is handed out). Otherwise stop at the end of the context; nearly all blocks are full,
so that costs little.

The second bug is a race: two threads use the same memory, at least one of them writes, and nothing
orders them. Its symptom depends on timing. With one thread the result is right. With two it is
right as long as one has finished with the scores before the other writes its own, which on a busy
machine may be nearly always. A test that runs it a thousand times proves nothing. To prove
something, look at which call writes what: no element may be written by one call and read or written
by another. That is what the check does. It also plays one interleaving, always the same, so that
you can see the damage.

The compiler detects neither bug. A lock would be a bad fix for the second, because pieces that wait
for each other do not run in parallel. Give each piece its own scratch memory.

A milder form is false sharing: two threads write different numbers that happen to lie in one cache
line, of 64 bytes. Nothing is wrong then, but the line travels between the cores at every write. The
notebook measures it.""",
        ),
        Exercise(
            id="09.5",
            title="Weights once for a batch",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="Most of the bytes that a decode step reads are weights. Reading them once for "
            "8 sequences costs an eighth of reading them once for each.",
            hints=(
                "Three loops: outputs, rows of x, inputs. In which order does a row of the weight "
                "stay in the cache until it is no longer needed?",
                "Outputs outside, then rows of x, then inputs. That passes. To be fast, load a "
                "weight into a variable and multiply it by four rows of x before the next one: "
                "four sums, in four variables. What happens to the rows that are left over, and "
                "what to `out` if `add` is false?",
                """for o in range(first, last):
    for row in range(0, S rounded down to fours, 4):
        a = b = c = d = np.float32(0)
        for i in range(inputs):
            w = weight[o, i]
            a += w * x[row, i];  b += w * x[row + 1, i];  …
        out[row, o] = a + out[row, o] if add else a;  …
    for row in range(the rest):  one sum, as above""",
            ),
            works="""\
A dot product needs two loads for each multiplication and addition. With four rows at once, each
weight is loaded once for all four: five loads for four products, and four sums that do not wait for
each other. Within one sum each addition waits for the one before, about four cycles, while the
processor could begin two additions per cycle. Independent sums keep it busy.

Libraries go further: 4 × 4 or 6 × 16 sums at a time, tiles that fit each cache, weights stored in
the order in which they are read. oneDNN and MKL choose among such kernels by shape and processor,
and at 32 rows no loop that leaves the registers to the compiler comes near them. The engine assigns
registers explicitly: minikv/cpu/tiles.py keeps 12 × 32 sums in vectors of 16. At one row there is
nothing to reuse, and every program waits for the same bytes. There the loop above is as good as
any, and it needs no call from Python. The notebook measures all three.

With `first` and `last` the outputs can be divided among threads; each thread then reads its own
part of the weights.""",
        ),
        Exercise(
            id="09.6",
            title="A decode step as one program",
            minutes=45,
            difficulty=4,
            kind="build",
            matters="A step of a small model consists of a hundred small operations, and starting "
            "one from Python takes longer than computing it. Compiled into one program, the step "
            "starts once.",
            hints=(
                "You have all the pieces: `matmul` and `attend_groups` are yours, `rms_norm`, "
                "`rotate_and_write` and `silu_mul` are the engine's, imported at the top of the "
                "file. `minikv/model.py` says in which order: `project`, then attention, then "
                "`mix`. What is added to x, and when?",
                "All arrays that a layer fills can be allocated once, before the loop. The cache "
                "comes as slots: (N, num_slots, 2, K, D). `rotate_and_write` wants those of one "
                "layer; `attend_groups` wants them as blocks, which is a reshape. The queries "
                "come first in the projection, where `attend_groups` looks for them. And what "
                "must be in the cache before attention reads it?",
                """x[s, i] = embedding[token_ids[s], i]
for layer in range(N):
    rms_norm(x, norm_1[layer]) -> normed;  matmul(normed, qkv[layer]) -> qkv
    by_head = qkv.reshape(S, H + 2 * K, D)
    rotate_and_write(by_head, rope, positions, slots, kv[layer], 0, S)
    blocks = kv[layer].reshape(num_slots // block_size, block_size, 2, K, D)
    attend_groups(by_head, blocks, block_tables, context_lens, attended, 0, S * K)
    matmul(attended as (S, H * D), out[layer]) -> x, added
    rms_norm(x, norm_2[layer]) -> normed;  matmul(normed, gate_up[layer]) -> gate_up
    silu_mul(gate_up, mixed, 0, inner);  matmul(mixed, down[layer]) -> x, added
rms_norm(x, norm) -> normed;  matmul(normed, head) -> logits""",
            ),
            works="""\
The step computes as much as before. What is gone is everything between the operations: a Python
call, the choice of a kernel by dtype and device, the allocation of a result, reference counts. That
is a few microseconds per operation, and a step has more than a hundred. In a larger model the
arithmetic outweighs it; tinypy at batch 1 spends most of its time on it.

The idea is that of the CUDA graph of chapter 08: what every step does in the same way should be
started once. A graph records what the host has started. Here the host's program itself is compiled,
so it can also loop, branch and read the batch size.

The order follows the residual stream: each layer adds to x twice. K and V must be in their slots
before attention, because a token attends to itself. And positions are not slots: positions
determine the rotation of RoPE, slots are places in memory.

The price is rigidity. This step handles Llama without biases, in float32. Any other architecture
needs another program, or a fallback to the general one; the engine has both. And the sampler, the
scheduler and the detokeniser are still Python: the shorter the step, the larger their share.""",
        ),
    ),
)
