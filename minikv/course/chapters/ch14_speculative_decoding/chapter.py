"""Chapter 14: tokens that are guessed, verified together, and taken back."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

ANSWERS = "minikv.course.chapters.ch14_speculative_decoding.answers"

CHAPTER = Chapter(
    number="14",
    name="speculative_decoding",
    doc="Speculative decoding: drafts, their verification, and a block table that shrinks.",
    skeleton=(
        Function("minikv.speculative.acceptance:keep_equal", "14.1"),
        Class("minikv.blocks:BlockTable", write={"shrink": "14.2"}, show=("grow",)),
        Function(f"{ANSWERS}:propose_ngram", "14.3"),
        Function(
            f"{ANSWERS}:settle",
            Bug(
                "14.4",
                (
                    (
                        "full = num_computed // table.block_size",
                        "full = len(token_ids) // table.block_size",
                    ),
                ),
            ),
        ),
        Function("minikv.speculative.acceptance:rejection_sample", "14.5"),
        Function("minikv.speculative.acceptance:draw"),
        Function(f"{ANSWERS}:two_reports", "14.6"),
        Function(f"{ANSWERS}:expected_tokens", "14.7"),
        Function(f"{ANSWERS}:drafts_that_pay", "14.7"),
    ),
    exercises=(
        Exercise(
            id="14.1",
            title="Which drafts are kept",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="This loop decides what is written. Two engines shipped it with an error of "
            "one, and the text still looked fluent.",
            hints=(
                "Write the drafts and the target's tokens under each other. Which token of the "
                "target answers the question that the first draft guesses at?",
                "Count how many drafts equal the target's token at the same place, and stop at the "
                "first that does not. The target's token at that place is right in any case.",
                """kept = 0
while there is a draft number kept, and it equals token_ids[kept]:
    kept = kept + 1
return token_ids[0] … token_ids[kept]        # kept + 1 tokens""",
            ),
            works="""\
Row 0 of the step computes the newest token of the text, and the target draws token_ids[0] from it.
That is the token that would have come without speculation. The first draft is a guess at it. If the
guess was right, row 1 was computed after exactly the text that would have been there, so
token_ids[1] is the token that would have come next. And so on, up to the first wrong draft: the
rows behind it were computed after a text that does not exist.

So every token that is written is the target's own. A drafter may be wrong as often as it likes; the
text is that without speculation, at any temperature, as long as the random number of a position
belongs to the position and not to the step.

Two errors of one were shipped. In one engine (lattice, issue 243) the first draft was never
compared, so a draft of length 1 was always kept. In another (openvino.genai, pull request 4190) the
wrong draft was counted as kept and the token of the next row was written: words vanished from the
text. Neither raises an error. A comparison with the text without speculation finds both.""",
        ),
        Exercise(
            id="14.2",
            title="A table that shrinks",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="Wrong drafts took blocks. If one is not given back, the pool runs dry; if one "
            "too many is, another request overwrites a text in use.",
            hints=(
                "Blocks of 4, 9 tokens in blocks 7, 2, 5. Which blocks are still needed for 8, for "
                "7, for 4 and for 0 tokens?",
                "The number of blocks is that of `grow`, rounded up. Blocks beyond it go back to "
                "the pool with `release`, which knows whether others still hold them. Check the "
                "argument before you change anything.",
                """refuse num_tokens below 0 or above self.num_tokens
total = self.num_tokens - num_tokens
kept = total / block_size, rounded up
release every block from index kept on, the last one first
cut the list there; self.num_tokens = total""",
            ),
            works="""\
Taking back is one subtraction and, at the edge of a block, a release. No K and no V is erased: what
wrong drafts have written is beyond the length of the sequence, and the next step writes over it.
Attention never reads beyond the length.

`release` and not "free": the block may have another holder. In the engine a block of wrong drafts
has none, because drafts are only written to blocks of the sequence's own. A table that relies on
this would break on the day it is no longer true.

The errors that engines shipped are in the second place that knows the length. sglang-jax (issue
1147) set its length back and did not release: two pages were lost per request until the scheduler
aborted. TensorRT-LLM (pull request 16448) released the block and left its id in another list.
SGLang's version of the first (issue 13826) occurred with a page size above 1 only, which is why the
check has several sizes.""",
        ),
        Exercise(
            id="14.3",
            title="What came after, the last time",
            minutes=20,
            difficulty=2,
            kind="build",
            matters="This drafter has no weights and no training, and on text that is copied or "
            "edited it is hard to beat.",
            hints=(
                "The text is 7 8 1 7 8. Where else do 7 8 occur? What came after them there, and "
                "what after that?",
                "Try the places from the last one to the first; the occurrence must end before the "
                "last token, or it would be the end of the text itself. If the copy reaches the "
                "end of the text, the tokens to copy next are the drafts.",
                """text = a copy of token_ids
for place from len(text) - 1 down to width:
    if text[place - width : place] equals the last width tokens:
        most times: append text[place], text[place + 1], … to text
        return what was appended
return []""",
            ),
            works="""\
Code, tables, quotations and edits repeat themselves. If the last tokens occurred before, what
followed them is a good guess. Saxena (2023) called this prompt lookup; vLLM has it as "ngram",
llama.cpp as "ngram-simple".

The width is a bet. A short match is found often and is wrong often; a long one is rare and usually
right. vLLM's users measured that a minimum of 2 harmed tool calls (issue 40875). The engine's
drafter notes how often each length of match was right, and lets that decide what is verified.

A copy that goes on into its own drafts costs nothing and helps where text repeats: greedy text of a
small model often ends in a loop.

This function searches the whole text at each step. The engine keeps a dictionary from the last
tokens to the place behind them instead, as a compressor does, and follows a match while it stays
right. Suffix decoding (Oliaro et al., 2024) also searches the answers to earlier requests.""",
        ),
        Exercise(
            id="14.4",
            title="Published too early",
            minutes=15,
            difficulty=3,
            kind="debug",
            matters="A block in the prefix cache is read by everyone who sends the same prefix. If "
            "its K and V are not there yet, all of them attend to whatever is in its slots.",
            hints=(
                "The report names a block that the cache has. Of which of its tokens were K and V "
                "computed, and of which not yet?",
                "Nothing is wrong until the newest token is the last one of a block. When is its "
                "K and V computed?",
                """text of 8 tokens, blocks of 4; 7 are computed, the 8th is new
blocks that hold K and V of all their tokens: …
so: count full blocks of the computed tokens, not of the text""",
            ),
            works="""\
The text is always one token longer than what is computed: the newest token was drawn from the last
row, and its K and V come with the next step. A block is full for the cache when all its tokens are
*computed*, and verified.

The error shows only when the newest token ends a block, and only to a second request with the same
prefix that comes before the next step fills the slot. With speculation the gap is wider: drafts,
wrong ones too, are in blocks before anyone has verified them. vLLM published blocks when they were
scheduled, before K and V were written (issue 41838): requests of the same step attended to zeros,
and what was seen was an acceptance that sank over time.

The rule that engines have come to: one number says what is verified and computed, and whatever is
published, counted or saved asks that number. vLLM's scheduler caches at most `request.num_tokens`
for this reason. Here it is `num_computed`, and `engine.check()` compares what the cache holds with
it after each step.""",
        ),
        Exercise(
            id="14.5",
            title="Rejection sampling",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="More of the drafts that were drawn at random can be kept than by comparing, "
            "and the distribution of the text is still exactly the target's.",
            hints=(
                "Draw the two distributions as bars beside each other. Where q is higher, part of "
                "the drafts must be refused. Where p is higher, what is missing there?",
                "A draft x is kept with probability min(1, p(x) / q(x)). What is missing to p is "
                "max(p − q, 0), so a token in place of a refused draft comes from there. After the "
                "first refusal nothing more is written. `draw(p, number)` is given. Each number "
                "comes from `uniform()`, and is used once.",
                """for each place and its draft x:
    u = uniform()
    if u * q[place, x] < p[place, x]: write x, continue
    rest = max(p[place] - q[place], 0)
    write draw(rest / its sum, uniform()) and return
write draw(p[number of drafts], uniform()) and return""",
            ),
            works="""\
Take a token x. It is written if it was drafted and kept: q(x) · min(1, p(x) / q(x)) = min(p(x),
q(x)). Or if another draft was refused, which happens with probability 1 − Σ min(p, q), and x was
drawn from the rest: max(p(x) − q(x), 0) divided by the same 1 − Σ min(p, q). The sum of the two is
p(x) in both cases, whichever of p and q is higher. That is the whole proof (Leviathan et al., 2023;
Chen et al., 2023).

It keeps Σ min(p, q) of the drafts, where the comparison of 14.1 keeps Σ p q. For a draft that was
not drawn at random, as with n-grams, q is 1 at one token, and both are p of that token.

q must be the distribution that was really drawn from. If the drafter takes its likeliest token and
q is still its softmax, the text is biased. And each number must be fresh. Three engines used one
number twice (vLLM's pull request 54282 is one): the acceptance was right, the text was off by about
0.0125 in total variation, and no one who read it could see that.

The tokens are not those of a run without speculation; only their distribution is. A test must
therefore count many samples, where 14.1 could compare texts.""",
        ),
        Exercise(
            id="14.6",
            title="Two bug reports",
            minutes=15,
            difficulty=3,
            kind="predict",
            matters="Real reports call a right rule biased, and a biased one looks just as "
            "reasonable. You can compute which is which.",
            hints=(
                "For each engine and each of the three drafts: how likely is the draft, is it "
                "kept, and what is written if it is not?",
                "In engine 1 the token that is written is, in either case, the one that was drawn "
                "from p. In engine 2 look at how likely `a` is written.",
                """engine 1 keeps: the sum over x of p(x) q(x);  it writes a token drawn from p
engine 2 keeps: q(a);  it writes a with q(a) + (1 - q(a)) p(a), x with (1 - q(a)) p(x)
distance: half of the sum of |written - p|
rejection sampling keeps: the sum of min(p, q)""",
            ),
            works="""\
Engine 1 draws the token first, and then looks whether the draft equals it. Whatever the drafter
does, what is written is the token that was drawn from p. So it cannot be biased; it can only keep
few drafts. Two reports of 2026 call this rule biased (mlx-swift-lm 459, dflash 74).

Engine 2 looks at the draft first. A draft of `a` is kept always, not with probability p(a), and so
`a` is written too often. Another report (mlxcel 902) is about this rule, and it is right.

The difference is not visible in the code at a glance: both compare a draft with a token of the
target. Ask what is written when you leave the drafter out of the formula. If q does not vanish, the
rule is biased.""",
        ),
        Exercise(
            id="14.7",
            title="When to stop drafting",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="Each draft costs time whether it is right or not. Beyond some number the next "
            "one costs more than it gives, and at large batches that number is 0.",
            hints=(
                "With acceptance 0.5, how often is the third draft written? And what does a step "
                "with three drafts cost more than one with two?",
                "Draft number i is written if it and all before it are right: acceptance to the "
                "power i. Divide the expected tokens by the cost of the step, for every number of "
                "drafts that the table has.",
                """expected_tokens(k, a) = 1 + a + a² + … + a^k
for k = 0 … len(cost) - 1:  rate = expected_tokens(k, acceptance) / cost[k]
return the first k with the highest rate""",
            ),
            works="""\
The expected tokens of a step approach 1 / (1 − a): at a = 0.5 never more than 2. The cost grows by
each draft. So there is a best number, and it is often small.

Costs are not straight lines: a GPU's step over 16 tokens may cost no more than over 9, and one
over 17 twice as much. llama.cpp's cost of 2 tokens was once five times that of 1 on one kind of
machine (issue 4624), so that no draft below five could pay. A loop that stops at the first number
that is worse than the one before gets stuck at 0 there; so all numbers are compared.

The engine does this at each step (`minikv/speculative/decide.py`), with costs that it measures
while running, with a chance for each draft, and over all sequences of the batch: the drafts are
sorted by their chance, and the best number is taken. If nothing pays, a step is a plain step.

A high acceptance is not a high speed: a vLLM pull request (5131) raised the rate from 0.765 to
0.843 and the latency stayed about the same.""",
        ),
    ),
)
