"""Chapter 02: keep K and V, prefill once, append in place, and two bugs of chunks and prefixes."""

from minikv.course.harness.manifest import Bug, Chapter, Class, Exercise, Function

CHAPTER = Chapter(
    number="02",
    name="kv_cache",
    doc="KV cache: keep K and V, prefill once and decode, append in place, continue a prefix.",
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
                            "  # whatever the request before has left behind\n",
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
            matters="This is the whole idea of the chapter, and what `transformers` does when you "
            "say nothing else.",
            hints=(
                "Three tokens are cached and two come in. How many keys does each of the two new "
                "queries look through, and where are they?",
                "Two cases: this layer has kept nothing yet, or it has kept L tokens. In both, "
                "what you attend over and what you keep for the next call are the same two "
                "tensors. `naive_attention` knows where the queries stand: at the last T of the "
                "L positions. The layer's window goes to it too.",
                """if this layer has kept something:
    k = what it kept, then the new k      # joined along the tokens: (L + T, K, D)
    v = likewise
keep k and v as this layer's
return naive attention of q over k and v, with this layer's window""",
            ),
            works="""\
A token's key and value depend on the tokens up to it, never on later ones: that is what the
causal mask buys. Once computed they stay right for as long as the sequence lives. The query is
different. Only its own row of the result needs it, so it is used and forgotten; nobody keeps Q.

Every layer has a cache of its own, because each layer makes its keys and values from its own
input. K arrives here already turned by its position (RoPE, chapter 01), and stays so. A later
query is turned by its own position, and their product depends on the distance between the two.

The mask aside, attention is a sum over keys in no particular order: the position is in the key,
not in the row where it lies. Chapter 04 lives on that when it scatters the rows over blocks.

Shazeer, "Fast Transformer Decoding" (2019), writes this loop down and shows what it costs: not
arithmetic, but reading K and V again for each new token. In transformers 5.23 it is
`DynamicLayer.update` in cache_utils.py: two calls of torch.cat, as here.""",
        ),
        Exercise(
            id="02.2",
            title="Prefill once, then one token a step",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="The cache only keeps. That nothing is computed twice, and that every token "
            "stands at its own position, is up to the loop around it.",
            hints=(
                "What goes through the model in the first pass? In the second? And which of the "
                "new tokens never has to?",
                "Prefill and decode are the same pass with different tokens: first the whole "
                "prompt, then the one token that came last. The positions of a pass go on from "
                "what is cached when it begins. Which row of its logits says what comes next?",
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
Prefill and decode differ in one number, how many tokens are fed. The prompt is known, so its
tokens go through together and the weights are read once for all of them. A new token is known
only when the one before it has been through the whole model, so decode is one token a pass, and
no cache changes that. (Speculative decoding does, by guessing.)

The position of the next token is the number of tokens cached. Asking the cache, instead of
counting along, means that there is nothing to keep in step. It also makes the same loop right
after a cached prefix, and for the second message of a chat.

The last new token is returned and never fed, so afterwards the cache holds one token less than
prompt and answer together. Who continues the chat has to feed it first. A gap of one token there
moves all later positions by one: vllm-mlx had it in its prefix cache, and the text turned to
garbage for requests with a system prompt (pull request 311, 2026).

Only the last row goes into the logits here. The others were no use, and the output layer is the
largest matrix of this small model.""",
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
                "Add them up, by a loop or by the formula for 1 + 2 + … + n.",
                """steps = new_tokens - 1                # the last new token is never fed
in place = prompt_tokens + steps
concat = 0
for step from 1 to steps:
    concat = concat + prompt_tokens + step
return both""",
            ),
            works="""\
With P prompt tokens and s decode steps the tensors have P + 1, P + 2, … P + s tokens, together
s P + s (s + 1) / 2. The second part is the quadratic one: ten times the answer, a hundred times
the copies. In place it is P + s, and nothing is ever moved twice. It is the same with a Python
list: `a = a + [x]` copies, `a.append(x)` does not.

What this does not say is that generation with `torch.cat` takes quadratic time where the other
does not. Attention has to read all L cached tokens in every step anyway, so the bytes read grow
with the square too. Concatenating adds one more reading and one writing of the same bytes, about
three times the traffic for K and V. As long as the weights are most of what a step reads, you
will hardly see it on a clock. With long contexts and many sequences K and V are most of it.

There is a way between the two. A buffer that doubles when it is full copies each token about
once more, on average, and wastes at most half of its room. Python's lists and C++'s vectors
grow by a factor, too.""",
        ),
        Exercise(
            id="02.4",
            title="Write in place",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="No copies, no allocation while decoding, and an address that never changes. "
            "Every fast engine writes its cache in place.",
            hints=(
                "`attend` is called once for each layer in a pass. At which slot must the second "
                "layer write its first token? And the last layer?",
                "In this order: refuse what does not fit, before anything is changed; write K and "
                "V of the T tokens behind those that are cached; let the last layer, and no other, "
                "move the counter; attend over what is written and nothing behind it.",
                """start, end = num_tokens, num_tokens + T
if end is more than capacity: raise ValueError with both numbers
slots start … end - 1 of this layer: K in kv[layer, 0], V in kv[layer, 1]
if this is the last layer: num_tokens = end
return naive attention of q over slots 0 … end - 1, with this layer's window""",
            ),
            works="""\
A buffer and a counter. All layers of a pass write to the same slots, so the counter may move
only when the last of them has written. That makes a pass a transaction. If it dies halfway,
interrupted or out of memory, the counter still says what is complete, and the next pass writes
over the half that is there. Refusing before writing is the same care, one step earlier.

The storage comes from `torch.empty`: unwritten slots hold whatever was in that memory, perhaps
NaN. Slicing keeps them out. A mask alone would not: its weights there are exactly 0, and 0 times
NaN is NaN. `transformers` fills its StaticCache with zeros, and masks; in return the shapes are
the same in every step, which is what torch.compile and a captured CUDA graph want.

The price is the reservation. Nobody knows how long an answer will be, so the safe capacity is
the longest that is allowed, and most of it stays empty. Kwon et al. (2023) looked into the
serving systems of their day: 20.4 to 38.2 % of the reserved memory held K and V of a token.
Chapter 03 does that sum, and chapter 04 what they did about it.""",
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
                "A whole prompt is right, a single token is right. What have these two in common "
                "that a chunk after a prefix has not? Write down T and L of all three.",
                "Draw which keys the three queries of a chunk may see after a prefix of five. Then "
                "look up in PyTorch's documentation of `scaled_dot_product_attention` what "
                "`is_causal` does when the mask is not square: in which corner does it begin?",
                """query i of T stands at position L - T + i
so it sees key j exactly if j <= L - T + i          # T rows, L columns, True: visible
say so to the kernel: attn_mask instead of is_causal
(there is a function in minikv.attention that makes this mask)""",
            ),
            works="""\
`is_causal=True` begins its triangle in the upper left corner: query 0 sees key 0. That is right
when T = L, for a whole prompt. After a prefix the T queries stand at the *end* of the L keys, and
the triangle has to end in the lower right corner. With the wrong one the first query of a chunk
sees the first token of the prompt and nothing else, not even itself.

Two of three cases hide it. A whole prompt is square, and for a single token the author had
switched the mask off, because one query at the end sees everything. Only chunks of several
tokens after a prefix are left: chunked prefill, a prefix-cache hit, a chat's second message.

The kernels do not agree. PyTorch begins at the upper left (issue 108108 proposed to change that
in 2023, and it has stayed); FlashAttention did, too, and ends at the lower right since its version
2.1. ExecuTorch's reference cache had exactly this bug (pull request 21749), and the ONNX Attention
operator had it in its definition (pull request 8068), both mended in 2026.

What finds it is a test that cuts one prompt in every possible way and compares logits. A bool
mask costs T × L bytes; `torch.nn.attention.bias.causal_lower_right` says the same without it.""",
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
                "There are two faults. One shows in the very first request, the other only in "
                "those after it. For each: which tokens does the model see, and where does it "
                "believe they stand?",
                "A token stands at the position that it has in prefix + request. And what says how "
                "many of the cached tokens count? Not the tensors: a number.",
                """before the pass:  the cache counts the prefix, and nothing of the request before
the pass:         the request's T tokens
their positions:  num_prefix, num_prefix + 1, … num_prefix + T - 1""",
            ),
            works="""\
The rows of the earlier request are still in the storage; nothing has to be erased. The counter
says what counts, and setting it back is all that forgetting takes. The next request writes over
the old rows. Without it, a request reads its predecessor's as if they were its own prompt: one
user's text in another user's context.

Positions that begin again at 0 do not crash either. The keys of the prefix are turned for
positions 0, 1, 2, …; so are the queries of the request, so the model believes that both stand in
the same place. vllm-metal met it when it restored a cached prefix: K and V came back and the
offset did not (pull request 144, 2026).

A third mistake of this family no comparison of tokens finds: a counter of its own that is never
set back between requests. On an empty cache *all* positions are then too large by the same
number, RoPE only knows distances, and the tokens are right. Until, many requests later, a position
runs past the trained context, and the server dies of a request that never had a problem.

So positions are not counted over requests. They follow from how many tokens the cache holds when
a request begins, here always `num_prefix`, to which the counter has just been set back. And
logits after a hit are compared with logits without one.""",
        ),
    ),
)
