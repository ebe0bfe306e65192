"""Chapter 03: bytes per token, published claims, and what reserving memory wastes."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="03",
    name="kv_memory",
    doc="KV memory: what a token costs, which published figures are wrong, what reserving wastes.",
    skeleton=(
        Function("minikv.course.chapters.ch03_kv_memory.memory:kv_bytes_per_token", "03.1"),
        Function(
            "minikv.course.chapters.ch03_kv_memory.memory:shape_of",
            Bug(
                "03.2",
                (
                    (
                        'text.get("num_key_value_heads") or heads',
                        "heads // 4  # four query heads share a KV head",
                    ),
                    ('text["hidden_size"] // heads', 'text["hidden_size"]'),
                ),
            ),
        ),
        Function("minikv.course.chapters.ch03_kv_memory.memory:decode_ceiling", "03.3"),
        Function("minikv.course.chapters.ch03_kv_memory.answers:judge_claims", "03.3"),
        Function("minikv.course.chapters.ch03_kv_memory.memory:slots_at", "03.4"),
        Function("minikv.course.chapters.ch03_kv_memory.memory:shares_over_lives", "03.4"),
        Function("minikv.course.chapters.ch03_kv_memory.answers:five_processes", "03.5"),
        Class(
            "minikv.course.chapters.ch03_kv_memory.memory:ContiguousMemory",
            write={"allocate": "03.6", "release": "03.6"},
        ),
    ),
    exercises=(
        Exercise(
            id="03.1",
            title="Bytes per token",
            minutes=10,
            difficulty=1,
            kind="build",
            matters="This one number decides how many people a machine can serve at once, and how "
            "long their chats may become.",
            hints=(
                "Take one layer and one KV head. Which two vectors does a token leave there, and "
                "how long are they? How often does that happen in the whole model?",
                "Two cases. With MHA, GQA and MQA count K and V, every layer, every KV head. The "
                "query heads do not matter, because queries are not kept. With a latent there are "
                "no heads: each layer keeps one vector of `latent_dim` numbers, for keys and "
                "values together.",
                """if there is a latent:
    numbers = layers × latent_dim
else:
    numbers = 2 × layers × KV heads × head_dim      # 2: K and V
return numbers × bytes_per_number""",
            ),
            works="""\
A query is used in its own step and forgotten. Keys and values are needed by every later token, so
only their heads count. That is the idea of multi-query attention (Shazeer, 2019): one KV head for
all query heads. Grouped-query attention (Ainslie et al., 2023) is in between, and loses little of
the quality of many heads. The cache shrinks by the size of the group, and so do the bytes that
each decode step has to read.

Multi-head latent attention (DeepSeek-V2, 2024) keeps the heads, and computes all of them from one
vector: a token leaves 512 numbers in each layer, from which every head computes its own key and
value. That computation can be folded into the query, but not with RoPE in between. So the position
is in a separate key of 64 numbers, shared by all heads.

vLLM computes the size of a block in the same two cases: `page_size_bytes` in
vllm/v1/kv_cache_interface.py of version 0.8.5 has a factor that is 1 with MLA and 2 without.

The formula leaves out some things: quantised caches store scales beside the numbers, a layer with
a sliding window stops growing, and a model on more GPUs than it has KV heads keeps copies.""",
        ),
        Exercise(
            id="03.2",
            title="A config, read wrongly",
            minutes=15,
            difficulty=2,
            kind="debug",
            matters="Its author tried it on one model, where it is right. Its figures for other "
            "models have been published.",
            hints=(
                "The formula is right: print the shapes themselves. Which of the five numbers is "
                "wrong for Llama-3.2-3B? Which for the 11B?",
                "Two assumptions are hidden in it. The config says how many query heads share a KV "
                "head; if it says nothing (or null), there are no groups at all. And a head dim "
                "that is not stated is a share of the hidden size, not all of it.",
                """text, heads = as they are
KV heads = "num_key_value_heads" of text, or heads if that is missing or null
head dim = "head_dim", else "v_head_dim", else hidden size // heads
latent = as it is""",
            ),
            works="""\
Llama-3.2-1B has 32 query heads on 8 KV heads, and so have the 8B and the language model of the
11B: a group of four is right for all of these. The 3B has 24 query heads on the same 8, and
24 // 4 is 6. Six KV heads in 28 layers make exactly the 84 KB that were published.

The configs of the 1B and the 3B state their head dim. That of the 11B does not, so the whole hidden
size, 4,096, was used where 128 belongs: 32 times too much, 5 MB per token. For four contexts of
128K that makes 2.5 TB: more than thirty GPUs of 80 GB for what fits on two.

The default for a missing field is the dangerous part of any such reader, because it is right for
the file that its author has at hand. LMCache's calculator used hidden size over heads for every
model and was wrong for Qwen3, whose files state another head dim (issue 688, 2025). The memory
script of LLMs-from-scratch used the number of KV heads as the size of a group (issue 922, 2025).

Check such code against the bytes that a cache really holds.""",
        ),
        Exercise(
            id="03.3",
            title="Published claims",
            minutes=20,
            difficulty=2,
            kind="predict",
            matters="Figures like these decide what hardware is bought.",
            hints=(
                "For a memory claim: compute the right figure first. What is the claim divided by "
                "it? For the speed: what has to be read from memory before one stream can have its "
                "next token?",
                "kv_bytes_per_token(shape_of(CONFIGS[…])) times tokens, with K = 1,024. Then make "
                "a mistake on purpose: `dataclasses.replace(shape, num_kv_heads=…)` is another "
                "shape. One decode step reads weights + batch × K and V, and gives `batch` tokens.",
                """ceiling = batch × bandwidth / (weights + batch × kv_bytes)

for each memory claim:
    right = tokens × bytes per token of the config
    if claim / right is between 0.9 and 1.1: None
    claim / right    4/3 for the 70B, 3/4 for the 3B, 32 for the 11B
    which of MISTAKES changes a factor of 2 × layers × KV heads × head dim × bytes by that much?
for the speed: is the ceiling of one stream at least the claim? If not, what has to be more?""",
            ),
            works="""\
The wrong figures are not random. 84 KB and 5 MB are what the broken reader of exercise 03.2 gives.
The pair of 4 and 16 GB is suspicious even without a config: with 64 query heads on 8 KV heads, MHA
takes 8 times what GQA takes, and here it is 4 times. Groups of four, and 64 layers in place of
80, give both figures exactly (as 2^30 bytes). Where two figures are published, try their ratio.

GB is 10^9 bytes on a disk, and about 2^30 in memory, where chips come in powers of two: 7 % apart.
Published figures use both. The 10 % allowed here covers that, and every "about".

The ceiling on speed is a roofline with one line. Decode reads every weight once per step, however
many sequences share the step. One stream of a 1B model in bf16 cannot exceed bandwidth over
weights, about 400 tokens per second here; the claim takes a batch of 5 at least. A batch shares
the reading of the weights, and the ceiling rises with it, but less and less once K and V, which
are not shared, outweigh the weights. So a throughput without its batch, its number format and its
context length says nothing. Quantised weights raise the ceiling as well, and so does speculative
decoding, which gets several tokens out of one reading.""",
        ),
        Exercise(
            id="03.4",
            title="Used, for the future, never",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Three kinds of waste have three different cures. First tell them apart.",
            hints=(
                "How many tokens are stored after the prefill? After one more step? How many when "
                "the request ends, given that the last token is never stored?",
                "A slot either holds a token now, or will before the request ends, or never will. "
                "With every step the first number grows by one, the second shrinks by one, the "
                "third stays. For the shares, add up the slots over all steps of all requests "
                "first, and divide once, at the end.",
                """final = prompt + output - 1
if final > reserved: raise ValueError with both numbers
used = prompt + step - 1
return used, final - used, reserved - final

for each request, for each step 1 … output:
    add its three numbers to three sums
divide each sum by all three together""",
            ),
            works="""\
Kwon et al. (2023) distinguish three kinds of waste. Slots reserved for the request's own future
are wasted only for now; but until then no other request can use them. Internal fragmentation is
the part that is never used, and before the request ends it cannot be told from the first kind.
External fragmentation lies between the reservations, and is not part of this exercise.

The cures differ. Against internal fragmentation it would help to know how long the answer will be,
but the model decides when to stop. Even a server that knew it, and reserved exactly what is
needed, would hold slots for the future, because contiguous memory has to be there from the
beginning. And reservations of many sizes leave holes of many sizes.

In the systems that the paper measured, only 20.4 % to 38.2 % of the KV memory held K and V of a
token. The figure for chat-like requests comes out higher here: long prompts fill slots at once, in
the prefill. It depends on the traffic, so compute it on yours.

Slots are summed over time, because a slot that is empty for 500 steps costs more than one that is
empty for 5. An average of each request's own percentage would hide the long requests.""",
        ),
        Exercise(
            id="03.5",
            title="Five processes",
            minutes=5,
            difficulty=2,
            kind="predict",
            matters="Enough memory is free, and the next request still cannot start.",
            hints=(
                "Draw five boxes in a row and cross out two. When do the two gaps make one?",
                "Two processes side by side leave one hole of 8, two apart leave two of 4. So "
                "count pairs of neighbours. For triples count the opposite: how many have no two "
                "neighbours in them?",
                """free = 2 × 4; the largest hole after B and D: neither touches the other
pairs = neighbours among A B C D E: AB, …
triples = 10 - those without neighbours
most = 4 × the most that can leave with no two side by side""",
            ),
            works="""\
A hole is as large as the neighbours that left it. Of ten pairs four are neighbours. Of ten triples
only A, C, E contains no neighbours. It leaves 12 KB free, three fifths of the memory, and 5 KB do
not fit.

Knuth (The Art of Computer Programming, volume 1, section 2.5) derived a rule for memory in which
pieces come and go at random: in the long run there are about half as many holes as pieces.

An operating system has two ways out. It can move the processes together, which means copying them
and correcting every pointer into them. Or it can give up the single piece: cut memory into pages
of one size, and keep a table that says where each page is. Then every free page is as good as any
other. After any of the ten pairs, 8 KB are free and 5 KB fit.

llama.cpp did the first for its KV cache from 2024 on (pull request 5691), and removed it in 2025
(15473), when tokens no longer had to lie side by side. vLLM did the second. Chapter 04 is about
that.""",
        ),
        Exercise(
            id="03.6",
            title="First fit, and holes that merge",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="This is the allocator that paging makes unnecessary. Write it once, and you "
            "know what paging saves.",
            hints=(
                "A hole of 7 gives a piece of 4. What is left, and where does it start? A piece "
                "between two holes is given back: how many holes are there then?",
                "`allocate`: the first hole in address order that is large enough shrinks from its "
                "front, or is removed if nothing is left. `release`: the piece becomes a hole. It "
                "may touch the hole before it, the one behind it, both or neither. Sorting all "
                "holes by address and joining those that touch covers all four cases.",
                """allocate: for each hole (start, room), by address:
    if room >= size:
        the hole becomes (start + size, room - size), or is removed if that is empty
        note the piece; return start
raise NoHole(size, largest hole, free)

release: if no piece starts there: raise ValueError, before anything is changed
remove the piece from `pieces`; add (start, its size) to the holes
sort them; join each with the one before if that one ends where it starts""",
            ),
            works="""\
Joining keeps memory usable. Without it holes only get smaller: they are cut and never grow, until
nothing large fits into a memory that is entirely free.

First fit is one policy of several. Best fit takes the smallest hole that is large enough, and
leaves slivers. A buddy system rounds sizes up to powers of two, so that neighbours are found by one
bit of the address; the price is internal fragmentation. Kwon et al. (2023) assumed a buddy
allocator for the systems that they compared with.

No policy prevents holes. A piece can move only by being copied, and its end is not known when it is
placed. PyTorch's allocator on a GPU has the same trouble with tensors. Its answer, expandable
segments, is a page table again: that of the GPU.

This allocator looks through all holes for every piece. With blocks of one size there is nothing to
look for: any free block will do, and taking one is O(1).""",
        ),
    ),
)
