"""Chapter 10: K and V in 8 and 4 bits, and attention that reads them as they are."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

ANSWERS = "minikv.course.chapters.ch10_quantised_kv.answers"
FORMATS = "minikv.quant.formats"

CHAPTER = Chapter(
    number="10",
    name="quantised_kv",
    doc="Quantised K and V: codes and scales, along which axis, and attention that reads them.",
    skeleton=(
        Function(f"{FORMATS}:quantise_int8", "10.1"),
        Function(f"{FORMATS}:dequantise_int8", "10.1"),
        Function(f"{FORMATS}:logit_bound", "10.1"),
        Function(f"{ANSWERS}:int4_along", "10.2"),
        Function(f"{ANSWERS}:better_axis", "10.2"),
        Function(f"{FORMATS}:pack", "10.3"),
        Function(f"{FORMATS}:unpack", "10.3"),
        Function(f"{ANSWERS}:attend_int8", "10.4"),
        Class(
            f"{ANSWERS}:Int8Blocks",
            write={
                "copy": Bug(
                    "10.5",
                    (
                        (
                            "self.scales[name][target] = self.scales[name][source].clone()",
                            "self.scales[name][target] = self.scales[name][source]",
                        ),
                    ),
                )
            },
        ),
        Function(f"{ANSWERS}:before_the_crossover", "10.6"),
    ),
    exercises=(
        Exercise(
            id="10.1",
            title="A ruler for a vector",
            minutes=20,
            difficulty=2,
            kind="build",
            matters="All 8-bit integer formats are variations of these three lines. If one of the "
            "lines is wrong, the cache still looks plausible.",
            hints=(
                "The largest number of the vector, without its sign, should land on mark 127 or "
                "just below. So how far apart are two marks? And which number is stored for that "
                "distance?",
                "The scale is stored in bfloat16, which has 8 significant bits. If it is rounded "
                "down there, the largest number lies beyond mark 127. `round_up` avoids that. "
                "Compute the codes with the stored scale, not with the exact one. For "
                "`logit_bound`: each of the D products is off by at most |q| times the error.",
                """scale = round_up(largest |x| of each vector / 127)      # shape (...)
step = scale as float32, at least TINY, with one more dimension at the end
codes = x / step, rounded to the nearest integer, as int8
x^ = codes as float32 times scale as float32, with one more dimension at the end

logit_bound = sum over D of |q| * k_error, divided by the root of D""",
            ),
            works="""\
A number between two marks is at most half a step from the nearer one: |x - x^| <= scale / 2. This
requires two things. No number may lie beyond the last mark, so the scale is rounded up. And codes
must be read with the ruler that they were measured with, so they are computed with the stored
scale.

Every number of the vector has the same bound, whether it is large or small. That is the price of
one ruler: a number below scale / 2 becomes 0.

Why 127 and not 128? int8 has the codes -128 to 127, and a symmetric ruler leaves the first unused.
0 stays exactly 0. The asymmetric ruler of int4 cannot afford to leave marks unused; it stores where
it begins, and 0 need not be on a mark.

The bound on a logit follows from the triangle inequality, and is reached only if every error has
the worst sign. Errors of random sign add up like a random walk, so the real change is usually a
fraction of the bound. But a test can rely on the bound.

vLLM's per-token-head formats and llama.cpp's q8_0 do the same with other groups: q8_0 has a
scale in float16 for every 32 numbers.""",
        ),
        Exercise(
            id="10.2",
            title="Choose the axis",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="The codes take the same bytes either way, but the choice of numbers that share"
            " a scale decides how much is lost.",
            hints=(
                "`quantise_int4` looks at the last dimension of what it is given. Which dimension "
                "has to be last for lines along the tokens?",
                "Swap dimension `dim` with the last, quantise, dequantise, swap back. With "
                "dim = -1 that changes nothing. For the choice: one number per axis, the mean of "
                "the squared differences from x.",
                """int4_along:
    lines = x with dimensions dim and -1 swapped
    read = dequantise_int4(codes, scale, low of quantise_int4(lines))
    return read with the same two dimensions swapped back

better_axis:
    by_token, by_channel = mean of (int4_along(x, dim) - x) squared, for dim -1 and -2
    return -2 if by_channel is smaller, else -1""",
            ),
            works="""\
A scale has to cover the range of the numbers that share it. If one channel is large in all tokens,
each token's ruler is stretched by that channel, and the other channels get coarse marks. By
channel, the large numbers share a ruler only with each other, and the other channels keep fine
marks.

K has such channels: RoPE turns pairs of channels, some of them so slowly that their mean stays
large. KIVI (Liu et al., 2024) and KVQuant (Hooper et al., 2024) found this at about the same time,
and both store K by channel. The price is waiting: a channel's scale is known only when the last
token of its block has arrived, so the newest tokens stay in full precision for a while.

An asymmetric ruler helps here, too. A channel whose numbers are all near 10 needs marks near 10,
and a symmetric ruler spends most of its marks between -10 and 9.

The squared error of the numbers is not yet the quality of the answers. An error in K goes through
a softmax, an error in V does not. So the notebook also measures the model's predictions.""",
        ),
        Exercise(
            id="10.3",
            title="Two numbers per byte",
            minutes=10,
            difficulty=2,
            kind="build",
            matters="PyTorch calculates with no element smaller than a byte. Without packing, int4 "
            "takes the memory of int8.",
            hints=(
                "A byte has 8 bits. If one code takes the lower 4, what has to happen to the "
                "other so that it takes the upper 4?",
                "Shifting left by 4 bits multiplies by 16. `|` puts the two together. Reading: "
                "`& 15` keeps the lower 4 bits, `>> 4` moves the upper 4 down. Which channels "
                "share a byte? Not neighbours: i and i + D / 2.",
                """pack:
    first, second = the first and the second half of the channels
    return first | second << 4
unpack:
    return the lower 4 bits of all bytes, then the upper 4 bits of all bytes, joined""",
            ),
            works="""\
Four bits hold 0 to 15, and two codes fill a byte without a gap. With uint8 the shift right brings
in zeros; with int8 it would copy the sign, and codes of 8 and more would come back negative.

Which two channels share a byte is a convention; reader and writer must agree on it. Neighbours look
natural, but then the lower bits of all bytes hold every second channel. With halves, the lower bits
of all bytes are the first half of the channels, in order, and the upper bits the second: a kernel
that loads 32 bytes gets two contiguous pieces of 32 channels, and multiplies each by its piece of
q. llama.cpp's q4_0 has the same order within its blocks of 32.

A wrong convention is not visible in shapes, dtypes or sizes: channels of q are multiplied by the
wrong channels of K.""",
        ),
        Exercise(
            id="10.4",
            title="Attention that reads codes",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="If K and V are first converted to floats, each step writes and reads more "
            "bytes than it saves.",
            hints=(
                "It is the loop of exercise 04.4 over blocks. Where can the scale of a key be "
                "multiplied, so that the key itself never has to be? And the scale of a value?",
                "q . (scale * code) = scale * (q . code): compute the scores with codes, then "
                "multiply each score by the scale of its token, before the maximum is taken. For "
                "values multiply the weights of the tokens by their scales, but only where "
                "they meet V: the sum of the weights has no scale.",
                """q as (K, G, D), times D^-0.5; top = -inf, total = 0, out = 0 for each query head
for each block with tokens in it:
    filled = how many of its slots hold tokens
    scores = q @ codes of its keys, transposed, as float         # (K, G, filled)
    scores = scores * their k_scale                              # (K, 1, filled)
    new_top, shrink, weights as in the formula
    total = total * shrink + the sum of weights
    out = out * shrink + (weights * their v_scale) @ codes of its values, as float
    top = new_top
return out / total as (H, D)""",
            ),
            works="""\
The scale of a token is the same for all of its channels, so it can be moved out of the sum: one
multiplication per score instead of 64 per key. This works because all the products that the sum
adds up share one scale. For values the sum runs over tokens, so each weight is multiplied by the
scale of its token.

K by channel, as in int4, needs a different trick: q is multiplied by the scales of the channels,
once per block, and the zero points add q . low to every score of the block. Each of the two layouts
has a cheap place for the scales.

The sum of the weights must not include the scales, which are part of V and not of the softmax.

Each block is converted to floats on its own, in cache or in registers, and is not written back. So
only codes and scales travel to and from memory. A compiled kernel has the same loop, and there
fewer bytes become less time. In plain PyTorch every line is a call that writes its result, so the
loop here shows what is computed, and not how fast it can be.""",
        ),
        Exercise(
            id="10.5",
            title="A fork that shares scales",
            minutes=15,
            difficulty=3,
            kind="debug",
            matters="A block consists of codes and scales. If only one of the two is really "
            "copied, samples overwrite each other again, and less visibly than in chapter 05.",
            hints=(
                "Copy block 0 to block 1, then write a token with large numbers to block 1. Read "
                "block 0 before and after. Are its codes the same? Are its scales?",
                "Two lines in `copy` look alike, but `codes` is one tensor for all blocks and "
                "`scales` is a list. What does `=` do to an element of each? "
                "After `blocks = Int8Blocks(2, 2, 1, 4)` and `blocks.copy(0, 1)`, try "
                "`blocks.scales['k'][0] is blocks.scales['k'][1]`.",
                """codes[target] = codes[source]      writes numbers into the memory of a tensor
scales[target] = scales[source]    puts the same tensor into the list a second time
afterwards both blocks write their scales into that one tensor
what makes a second tensor with the same numbers? or writes into the one that is there?""",
            ),
            works="""\
Assigning to an index of a tensor copies numbers. Assigning to an index of a list copies a
reference. The two lines look alike and do different things. So the two blocks shared a tensor of
scales, and the last write to either block won.

The symptom is quiet. A key comes back too long or too short, its direction unchanged, so its
score is off by a factor. Some samples then draw other tokens, others do not. Greedy samples hide it
completely: all of them write the same scale.

In the engine everything that is needed to read a block is indexed by the block's id: codes, scales,
zero points. One loop over these tensors copies them, for copy-on-write and for swapping out and in,
so a new part cannot be forgotten. `QuantisedStore.copy_to` in minikv/quant/store.py is that loop.

Data that is kept beside the blocks, and not in them, has to be moved by every feature that moves
blocks. Each of these features can forget it.""",
        ),
        Exercise(
            id="10.6",
            title="Where the smaller cache becomes faster",
            minutes=15,
            difficulty=2,
            kind="predict",
            matters="Fewer bytes do not always mean less time. Below some context length, int8 "
            "costs more than it saves.",
            hints=(
                "What does int8 save per token of context, in µs? What does it cost per step? The "
                "weights are read either way: do they move the crossover?",
                "int8 takes 5,120 / 4 bytes for the numbers, and 2 bytes for every 64 of them. At "
                "the crossover, extra time = batch · context · bytes saved / speed. For the "
                "quotients, write down both steps in full.",
                """small = 1280 + 2 × (1280 / 64)
crossover(batch) = (45 + 50 × batch) / (batch × (5120 - small) / 20000)
times at 4,096 = (800 + 4096 × 5120 / 20000) / (800 + 95 + 4096 × small / 20000)
times at most: only what grows with the context is left
slowest reading: small / x = 5120 / 20""",
            ),
            works="""\
The extra cost of a step is fixed and the saving grows with the context, so the two lines cross. The
weights are in both, and do not move the crossover. But they decide how much is gained beyond it:
while the weights take most of a step, a smaller K and V gains little.

In a batch each sequence saves its own bytes, and the fixed part is shared. So the crossover comes
earlier. A server with many long contexts gains most.

The quotient stays below 4 because of the scales, and approaches 3.88 only if a step reads hardly
anything but K and V. If a kernel needs longer to convert a code than memory needs to deliver four
bytes, the two lines never cross. That is why int8 in plain PyTorch, where every conversion writes a
float tensor, saves memory and no time.

All the figures here are invented. The notebook measures them where it can.""",
        ),
    ),
)
