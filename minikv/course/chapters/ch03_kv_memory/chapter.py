"""Chapter 03: bytes a token, published claims, and what reserving memory wastes."""

from minikv.course.harness.manifest import Bug, Chapter, Class, Exercise, Function

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
            title="Bytes a token",
            minutes=10,
            difficulty=1,
            kind="build",
            matters="This one number decides how many people a machine can serve at once, and how "
            "long their chats may become.",
            hints=(
                "Take one layer and one KV head. Which two vectors does a token leave there, and "
                "how long are they? Now how often does that happen in the whole model?",
                "Two cases. With MHA, GQA and MQA count K and V, every layer, every KV head; the "
                "query heads do not come into it, for nobody keeps a query. With a latent there "
                "are no heads: each layer keeps one vector of `latent_dim` numbers, and that one "
                "vector stands for keys and values together.",
                """if there is a latent:
    numbers = layers × latent_dim
else:
    numbers = 2 × layers × KV heads × head_dim      # 2: K and V
return numbers × bytes_per_number""",
            ),
            works="""\
A query is used in its own step and forgotten. Keys and values are asked for by every later
token, so only their heads count. That is the idea of multi-query attention (Shazeer, 2019): one
KV head for all query heads. Grouped-query attention (Ainslie et al., 2023) stands between, and
lost little of the quality of many heads. The cache shrinks by the size of the group, and so do
the bytes that each decode step has to read.

Multi-head latent attention (DeepSeek-V2, 2024) keeps the heads and shares what they are made
of: a token leaves one vector of 512 numbers in each layer, from which every head computes its own
key and value. RoPE would stand in the way of folding that computation into the query, so the
position travels in a separate key of 64 numbers, shared by all heads.

vLLM computes the size of a block in the same two cases: `page_size_bytes` in
vllm/v1/kv_cache_interface.py of version 0.8.5 has a factor that is 1 with MLA and 2 without.

What the formula leaves out: quantised caches carry scales beside the numbers, a layer with a
sliding window stops growing, and a model on more GPUs than it has KV heads keeps copies.""",
        ),
        Exercise(
            id="03.2",
            title="A config, read wrongly",
            minutes=15,
            difficulty=2,
            kind="debug",
            matters="Its author tried it on the model at hand, where it is right. The figures that "
            "it gives for other models have been published.",
            hints=(
                "The formula is not at fault: print the shapes themselves. Which of the five "
                "numbers is wrong for Llama-3.2-3B? Which for the 11B?",
                "Two assumptions hide in there. How many query heads share a KV head is for the "
                "config to say, and where it says nothing (or null) there are no groups at all. "
                "And a head dim that is not stated is a share of the hidden size, not all of it.",
                """text, heads = as they are
KV heads = "num_key_value_heads" of text, or heads if that is missing or null
head dim = "head_dim", else "v_head_dim", else hidden size // heads
latent = as it is""",
            ),
            works="""\
Llama-3.2-1B has 32 query heads on 8 KV heads, and so have the 8B and the language model of the
11B: a group of four is right for all of these. The 3B has 24 query heads on the same 8, and
24 // 4 is 6. Six KV heads in 28 layers make exactly the 84 KB that were published.

The files of the 1B and the 3B state their head dim. That of the 11B does not, so all 4,096 of the
hidden size went in where 128 should have been: 32 times too much, 5 MB a token. For four contexts
of 128K that makes the 2.5 TB: more than thirty GPUs of 80 GB for what fits on two.

The default for a missing field is the dangerous part of any such reader, because it is right for
the file that one has in front of one. LMCache's calculator took hidden size over heads for every
model and was wrong for Qwen3, whose files state another head dim (issue 688, 2025). The memory
script of LLMs-from-scratch took the number of KV heads for the size of a group (issue 922, 2025).

Check such code where it can be checked: against the bytes that a cache really holds.""",
        ),
        Exercise(
            id="03.3",
            title="Published claims",
            minutes=20,
            difficulty=2,
            kind="predict",
            matters="Figures like these decide what hardware is bought.",
            hints=(
                "For the memory claims: which config, how many tokens, how many contexts? For the "
                "speed: what has to be read from memory before one stream can have its next token?",
                "kv_bytes_per_token(shape_of(CONFIGS[…])) times tokens, with K = 1,024. With MHA "
                "the shape has as many KV heads as query heads (`dataclasses.replace`). One decode "
                "step reads weights + batch × K and V, and gives `batch` tokens. The weights of "
                "the 1B: llama_parameters of its config, two bytes each.",
                """ceiling = batch × bandwidth / (weights + batch × kv_bytes)

for each memory claim:
    figure = contexts × tokens × bytes a token
    verdict = "right" if figure / said is between 0.9 and 1.1, else "wrong"
one = ceiling of the 1B's weights at BANDWIDTH
"1B speed": one, "impossible" if the claim is more than that
"1B batch": the smallest whole batch with batch × one at least the claim""",
            ),
            works="""\
The wrong ones are not random. 84 KB and 5 MB are what exercise 03.2 gives before it is mended.
The pair of 4 and 16 GB betrays itself without a config: with 64 query heads on 8 KV heads, MHA
takes 8 times what GQA takes, and here it is 4 times. Groups of four, and 64 layers in place of
80, give both figures exactly (as 2^30 bytes). Where two figures are published, try their ratio.

GB is 10^9 bytes to those who sell memory and often 2^30 to those who allocate it: 7 % apart. That
is within the 10 % allowed here, and part of every "about".

The ceiling on speed is a roofline with one line. Decode reads every weight once a step, however
many sequences share the step. One stream of a 1B model in bf16 cannot pass bandwidth over weights,
about 400 tokens a second here. A batch shares the reading, and the ceiling rises with it, but less
and less once K and V, which nobody shares, outweigh the weights. So a throughput without its batch,
its number format and its context length says nothing. Quantised weights raise the ceiling as well,
and so does speculative decoding, which gets several tokens out of one reading.""",
        ),
        Exercise(
            id="03.4",
            title="Used, for the future, never",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Three kinds of waste have three different cures; first tell them apart.",
            hints=(
                "How many tokens are stored after the prefill? After one more step? How many when "
                "the request ends, given that the last token is never stored?",
                "A slot that is held has one of three fates: it holds a token now, it will before "
                "the request ends, or it never will. Over a life of `output` steps the first grows "
                "by one a step, the second shrinks by one, the third stays. For the shares, add up "
                "slots over all steps of all requests first, and divide once, at the end.",
                """final = prompt + output - 1
if final > reserved: raise ValueError with both numbers
used = prompt + step - 1
return used, final - used, reserved - final

for each request, for each step 1 … output:
    add its three numbers to three sums
divide each sum by all three together""",
            ),
            works="""\
Kwon et al. (2023) tell the three apart like this. Slots reserved for the request's own future are
waste only for now; but as long as they wait, nobody else can use them. Internal fragmentation is
the part that is never used, and nobody knows it to be so before the request ends. External
fragmentation, the third, lies between the reservations, and this exercise doesn't see it.

The cures differ. Against the internal part it helps to know how long the answer will be, which
nobody does: the model decides when to stop. Even an oracle that reserves exactly what is needed
still holds the future, because contiguous memory has to be there from the beginning. And
reservations of many sizes leave holes of many sizes.

In the systems of their day, the paper says, only 20.4 % to 38.2 % of the KV memory held K and V of
a token. Your figure for chat-like requests comes out higher: long prompts fill slots at once, in
the prefill. What counts is the shape of the traffic, so compute it on your own.

Slots are summed over time, because memory is rented: a slot empty for 500 steps costs more than
one empty for 5. An average of each request's own percentage would hide the long ones.""",
        ),
        Exercise(
            id="03.5",
            title="Five processes",
            minutes=5,
            difficulty=2,
            kind="predict",
            matters="Enough memory is free, and the next request still cannot start.",
            hints=(
                "Draw five boxes in a row and cross out two. When do the gaps make one gap?",
                "Two processes side by side leave one hole of 8, two apart leave two of 4. So "
                "count pairs of neighbours. For triples count the other way round: how many have "
                "no two neighbours in them?",
                """free = 2 × 4; the largest hole after B and D: neither touches the other
pairs = neighbours among A B C D E: AB, …
triples = 10 - those without neighbours
most = 4 × the most that can leave with no two side by side""",
            ),
            works="""\
A hole is as large as the neighbours that left together. Of ten pairs four are neighbours. Of ten
triples only A, C, E has no neighbours in it, and that one leaves 12 KB free, three fifths of the
memory, in which 5 KB find no place.

Knuth (The Art of Computer Programming, volume 1, section 2.5) derived a rule for memory in which
pieces come and go at random: in the long run there are about half as many holes as pieces.

An operating system has two ways out. It can move the processes together, which means to copy
them, and to mend everything that points into them. Or it can stop asking for one piece: cut
memory into pages of one size, and keep a table that says where each page went. Then every free
page is as good as any other. After any of the ten pairs, 8 KB are free and 5 KB fit.

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
                "A hole of 7 gives a piece of 4. What is left, and where does it start? A piece is "
                "given back between two holes: how many holes are there then?",
                "`allocate`: the first hole in address order that is large enough; it shrinks from "
                "its front, or goes away if nothing is left. `release`: the piece becomes a hole. "
                "It may touch the hole before it, the one behind it, both or neither. Sorting all "
                "holes by address and joining those that touch covers all four.",
                """allocate: for each hole (start, room), by address:
    if room >= size:
        the hole becomes (start + size, room - size), or goes if that is empty
        note the piece; return start
raise NoHole(size, largest hole, free)

release: if no piece starts there: raise ValueError, before anything is changed
take the piece's note away; add (start, its size) to the holes
sort them; join each with the one before if that one ends where it starts""",
            ),
            works="""\
Joining is what keeps memory usable. Without it the holes only ever get smaller: each is cut by
those that fit, and none grows, until nothing large fits into a memory that is entirely free.

First fit is one policy among several. Best fit takes the smallest hole that will do and leaves
slivers. A buddy system rounds sizes up to powers of two, so that neighbours are found by one bit
of the address; it pays for that with internal waste. Kwon et al. (2023) assumed a buddy allocator
for the systems that they compared with.

No policy helps against the holes as such. A piece can move only by being copied, and nobody knows
how long it will stay where it is put. PyTorch's allocator
on a GPU has the same trouble with tensors. Its answer, expandable segments, is a page table once
more: that of the GPU.

This allocator looks through all holes for every piece. With blocks of one size there is nothing
to look for: any free block will do, and taking one is O(1).""",
        ),
    ),
)
