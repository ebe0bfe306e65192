"""Chapter 02: keep keys and values, prefill once, append in place, and fix two bugs of chunks and
prefixes."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="02",
    name="kv_cache",
    doc="KV cache: keep keys and values, prefill once, append in place, continue a prefix.",
    skeleton=(
        Class("minikv.kv_cache:ConcatCache", write={"attend": "02.1"}),
        Function("minikv.course.chapters.ch02_kv_cache.answers:generate_with_cache", "02.2"),
        Function("minikv.course.chapters.ch02_kv_cache.answers:tokens_written", "02.3"),
        Class("minikv.kv_cache:PreallocatedCache", write={"attend": "02.4"}),
        Function(
            "minikv.course.chapters.ch02_kv_cache.answers:fused_attention",
            Bug(
                "02.5",
                (
                    (
                        "    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)\n",
                        "    is_chunk = len(q) > 1  # a single query is the last and sees all\n",
                    ),
                    ("attn_mask=mask", "is_causal=is_chunk"),
                ),
            ),
        ),
        Class(
            "minikv.course.chapters.ch02_kv_cache.answers:SharedPrefix",
            write={
                "logits": Bug(
                    "02.6",
                    (
                        (
                            "    self.cache.num_tokens = self.num_prefix"
                            "  # forget the request before\n",
                            "",
                        ),
                        ("self.num_prefix + torch.arange", "torch.arange"),
                    ),
                )
            },
        ),
    ),
    exercises=(
        Exercise(
            id="02.1",
            title="Append by concatenation",
            minutes=10,
            difficulty=1,
            kind="build",
            matters="This is the whole idea of the chapter, and the default in `transformers`.",
            hints=(
                "Three tokens are cached and two come in. Which keys does each of the two new "
                "queries see, and where are they kept?",
                "There are two cases: this layer has kept nothing yet, or it has kept L tokens. In "
                "both, the tensors that you attend over are the ones that you keep for the next "
                "call. `naive_attention` takes the queries to stand at the last positions. Pass "
                "it the layer's window too.",
                """if this layer has kept something:
    k = what it kept, then the new k      # joined along the tokens: (L + T, K, D)
    v = likewise
keep k and v as this layer's
return naive attention of q over k and v, with this layer's window""",
            ),
            works="""\
A token's key and value depend on the tokens up to it, never on later ones: that is what the
causal mask buys. Once computed, they stay right for as long as the sequence lives. The query is
different: only its own row of the result needs it, so it is used once and need not be kept.

Every layer has its own cache, because each layer makes its keys and values from its own input.
Keys arrive here already rotated by their positions (RoPE, chapter 01), and are kept that way. A
later query is rotated by its own position, and the product depends on their distance.

Apart from the mask, attention is a sum over keys in any order: the position is in the key itself,
not in the row where it is stored. Chapter 04 relies on that when it scatters the rows over blocks.

Shazeer, "Fast Transformer Decoding" (2019), writes this loop down and shows what it costs: not
arithmetic, but reading all keys and values again for each new token. In transformers 5.23 it is
`DynamicLayer.update` in cache_utils.py: two calls of torch.cat, as here.""",
        ),
        Exercise(
            id="02.2",
            title="Prefill once, then one token per step",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="The cache only stores. The loop around it must compute nothing twice and put "
            "every token at its own position.",
            hints=(
                "What goes through the model in the first pass? In the second? And which of the "
                "new tokens never has to?",
                "Prefill and decode are the same pass with different tokens: first the whole "
                "prompt, then the newest token alone. The positions of a pass continue from what "
                "is cached when it begins. Which row of its logits says what comes next?",
                """fed = the prompt
max_tokens times:
    start = tokens in the cache
    positions = start, start + 1, … one for each token of fed
    hidden = one pass over fed at these positions, with cache.attend
    new token = the likeliest after the last row of hidden; note it
    fed = that token alone
return what was noted""",
            ),
            works="""\
Prefill and decode differ in one number: how many tokens are fed. The prompt is known, so its
tokens go through together, and the weights are read once for all of them. A new token is known
only after the one before it has been through the whole model, so decode is one token per pass,
and no cache changes that. (Speculative decoding does, by guessing.)

The position of the next token is the number of cached tokens. If you ask the cache instead of
counting yourself, no second counter can get out of step. The same loop is then right after a
cached prefix, and for the second message of a chat.

The last new token is returned and never fed, so the cache ends up with one token less than prompt
and answer together. To continue the chat, feed that token first. If you forget it, all later
positions are off by one: vllm-mlx had this bug in its prefix cache, and the text turned to garbage
for requests with a system prompt (pull request 311, 2026).

Only the last row is turned into logits here. The others are not needed, and the output layer is
the largest matrix of this small model.""",
        ),
        Exercise(
            id="02.3",
            title="What appending moves",
            minutes=5,
            difficulty=2,
            kind="predict",
            matters="A cost that grows with the square of the length does not show in a test of "
            "twenty tokens.",
            hints=(
                "How many passes does decode make for n new tokens? How many tokens are there "
                "in the tensor that `torch.cat` makes in the first of them? In the last?",
                "In place is the easier half: count the tokens that are fed. For torch.cat, write "
                "down the lengths of the tensors it makes: each is one longer than the one before. "
                "Add them up, with a loop or with the formula for 1 + 2 + … + n.",
                """steps = new_tokens - 1                # the last new token is never fed
in place = prompt_tokens + steps
concat = 0
for step from 1 to steps:
    concat = concat + prompt_tokens + step
return both""",
            ),
            works="""\
With P prompt tokens and s decode steps, the tensors have P + 1, P + 2, … P + s tokens, together
s P + s (s + 1) / 2. The second term is quadratic: ten times the answer, a hundred times the
copies. In place it is P + s, and nothing is written twice. Python lists behave the same way:
`a = a + [x]` copies, `a.append(x)` does not.

This does not mean that generation takes quadratic time with `torch.cat` and linear time without.
Attention reads all L cached tokens in every step anyway, so the bytes read grow with the square
too. Concatenation reads the same bytes once more and writes them once, about three times the
traffic. As long as weights are most of what a step reads, a clock hardly shows it. With long
contexts and many sequences, keys and values are most of it.

There is a middle way. A buffer that doubles when it is full copies each token about once more, on
average, and leaves at most half of its room empty. Python's lists and C++'s vectors grow by a
factor too.""",
        ),
        Exercise(
            id="02.4",
            title="Write in place",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="No copies, no allocation while decoding, and an address that never changes: "
            "every fast engine writes its cache in place.",
            hints=(
                "`attend` is called once per layer in a pass. At which slot must the second layer "
                "write its first token? And the last layer?",
                "In this order: refuse what does not fit, before you change anything; write the "
                "keys and values of the T tokens behind the cached ones; let the last layer, and "
                "no other, move the counter; attend over the written slots and nothing more.",
                """start, end = num_tokens, num_tokens + T
if end is more than capacity: raise ValueError with both numbers
slots start … end - 1 of this layer: keys in kv[layer, 0], values in kv[layer, 1]
if this is the last layer: num_tokens = end
return naive attention of q over slots 0 … end - 1, with this layer's window""",
            ),
            works="""\
The cache is a buffer and a counter. All layers of a pass write to the same slots, so the counter
may move only after the last layer has written. That makes a pass a transaction: if it fails
halfway, interrupted or out of memory, the counter still says what is complete, and the next pass
overwrites the rest. Refusing before writing follows the same principle.

The storage comes from `torch.empty`, so unwritten slots hold whatever was in that memory, perhaps
NaN. Slicing keeps them out. A mask alone would not: the weights there are exactly 0, and 0 times
NaN is NaN. `transformers` fills its StaticCache with zeros and masks them; in return the shapes
are the same in every step, as torch.compile and captured CUDA graphs require.

The price is the reservation. The length of an answer is not known in advance, so the safe capacity
is the longest that is allowed, and most of it stays empty. Kwon et al. (2023) measured the serving
systems of their day: 20.4 to 38.2 % of the reserved memory held keys and values of tokens. Chapter
03 reproduces that figure, and chapter 04 builds their remedy.""",
        ),
        Exercise(
            id="02.5",
            title="A chunk after a prefix",
            minutes=10,
            difficulty=3,
            kind="debug",
            matters="Long prompts come in chunks, and the second message of a chat is a chunk "
            "after a prefix. In between, the mask is not square.",
            hints=(
                "A whole prompt is right, a single token is right, a chunk after a prefix is not. "
                "What is different about its mask? Write down T and L for all three.",
                "Draw which keys the three queries of a chunk may see after a prefix of five. Then "
                "look up in PyTorch's documentation of `scaled_dot_product_attention` what "
                "`is_causal` does when the mask is not square: in which corner does it begin?",
                """query i of T stands at position L - T + i
so it sees key j exactly if j <= L - T + i          # T rows, L columns, True: visible
pass this mask to the kernel: attn_mask instead of is_causal
(a function in minikv.attention makes it)""",
            ),
            works="""\
`is_causal=True` starts its triangle in the upper left corner: query 0 sees key 0. That is right
when T = L, for a whole prompt. After a prefix, the T queries stand at the *end* of the L keys, and
the triangle must end in the lower right corner. With the wrong corner, the first query of a chunk
sees the first token of the prompt and nothing else, not even itself.

Two of three cases hide the bug. The mask of a whole prompt is square, and for a single token the
author had switched the mask off, because one query at the end sees everything. The bug shows only
in chunks of several tokens after a prefix: chunked prefill, a prefix-cache hit, a chat's second
message.

Kernels do not agree on the corner. PyTorch starts at the upper left (issue 108108 proposed to
change that in 2023, and it has stayed). FlashAttention used to, and has ended at the lower right
since version 2.1. ExecuTorch's reference cache had exactly this bug (pull request 21749), and the
ONNX Attention operator had it in its definition (pull request 8068); both were fixed in 2026.

A test finds it that cuts one prompt in every possible way and compares logits. A bool mask costs
T × L bytes; `torch.nn.attention.bias.causal_lower_right` expresses it without a tensor.""",
        ),
        Exercise(
            id="02.6",
            title="The request after the first",
            minutes=15,
            difficulty=3,
            kind="debug",
            matters="A wrong answer here looks like the model's own fault, or shows one user "
            "another user's text.",
            hints=(
                "There are two bugs. One shows in the very first request, the other only in later "
                "ones. For each: which tokens does the model see, and at which positions?",
                "A token stands at the position that it has in prefix + request. And what says how "
                "many of the cached tokens count? Not the tensors: a number.",
                """before the pass:  the cache counts the prefix, and no earlier request
the pass:         the request's T tokens
their positions:  num_prefix, num_prefix + 1, … num_prefix + T - 1""",
            ),
            works="""\
The rows of the earlier request are still in the storage, and nothing has to be erased. The counter
says which rows count, so resetting it is enough; the next request overwrites the old rows. Without
the reset, a request reads its predecessor's rows as if they were its own prompt: one user's text
in another user's context.

Positions that start again at 0 do not crash either. The keys of the prefix are rotated for
positions 0, 1, 2, …; so are the queries of the request, so to the model both stand in the same
place. vllm-metal had this bug when it restored a cached prefix: the keys and values came back, and
the offset did not (pull request 144, 2026).

A third bug of this family escapes every comparison of tokens: a position counter that is not reset
between requests. On an empty cache, *all* positions are then too large by the same number. RoPE
only knows distances, so the tokens are right, until much later a position exceeds the trained
context, and the server crashes on an ordinary request.

So do not count positions across requests. They follow from how many tokens the cache holds when
a request begins: here always `num_prefix`, to which the counter has just been reset. And test by
comparing the logits after a cache hit with the logits without one.""",
        ),
    ),
)
