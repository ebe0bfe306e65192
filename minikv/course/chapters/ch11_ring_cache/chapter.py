"""Chapter 11: cells, keys that move, a context that shifts, a window that rolls, holes."""

from minikv.course.exercises.manifest import Bug, Chapter, Class, Exercise, Function

REPLACES_THE_SHIFT = (
    (
        "        self.shifts[cell] += to - self.positions[cell]\n",
        "        self.shifts[cell] = to - self.positions[cell]\n",
    ),
)
TURNS_THE_WRONG_WAY = (
    (
        "    return self._move(seq, p0, p1, lambda position: position // d)\n",
        "    cells = self.cells_of(seq, p0, p1)\n"
        "    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})\n"
        "    for cell in cells:\n"
        "        before = self.positions[cell]\n"
        "        self.positions[cell] //= d\n"
        "        self.shifts[cell] += before - self.positions[cell]\n"
        "    return len(cells)\n",
    ),
)

CHAPTER = Chapter(
    number="11",
    name="ring_cache",
    doc="The ring cache: cells, keys that move, a context that shifts, a window that rolls.",
    skeleton=(
        Class(
            "minikv.ring.cells:Cells",
            write={
                "find_slot": "11.1",
                "seq_div": Bug("11.6", TURNS_THE_WRONG_WAY),
                "_move": Bug("11.6", REPLACES_THE_SHIFT),
                "drop": "11.3",
            },
            show=(),
        ),
        Function("minikv.ring.shift:turn", "11.2"),
        Function("minikv.ring.generate:context_shift", "11.3"),
        Function("minikv.ring.attention:in_window", "11.4"),
        Class(
            "minikv.ring.window:RollingCache",
            write={"held": "11.4", "write": "11.4"},
            show=("attend", "attend_over"),
        ),
        Function("minikv.ring.defrag:plan_moves", "11.5"),
        Class(
            "minikv.course.chapters.ch11_ring_cache.answers:UnturnedRing",
            write={"store": "11.7", "keys": "11.7", "apply_shifts": "11.7"},
        ),
    ),
    exercises=(
        Exercise(
            id="11.1",
            title="Find a slot",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="This search is the cache's allocator. If it misses a free run, a request is "
            "rejected; if it returns a cell in use, a token of another sequence is "
            "overwritten.",
            hints=(
                "Write down every cell at which a run could begin, in the order in which they are "
                "tried. How many are there, and which of them come too close to the end?",
                "Two things end the search: a run whose cells are all free, or no beginning left "
                "to try. A run may begin before `head` and extend past it. It may not extend past "
                "the end of the buffer.",
                """refuse a number below 1 or above num_cells
for start in: head, head + 1, …, num_cells - 1, and then 0, 1, …, head - 1:
    if start + num_tokens > num_cells: continue with the next start
    if all of the cells start … start + num_tokens - 1 are free: return start
raise OutOfCells(num_tokens, self.num_free, self.longest_run)""",
            ),
            works="""\
The head is only a hint: it says where free cells are likely. A text that grows finds its next cell
at once, because `head` is right after the last one. Without it nothing would be wrong, but
every step would search the used front of the buffer again.

The reference does not try every cell: if a run contains a taken cell, no free run can
begin at or before that cell, so the search continues after the last taken one. Each cell is looked
at about once.

The search changes nothing: the caller (`place`) writes positions and sequences only after it has
succeeded. So a batch that does not fit leaves no trace, and can be tried again with fewer tokens,
or after a shift.

The search asks for a *run*, because llama.cpp wrote the K of a batch as one slice. So 10 free cells
in 10 holes cannot hold 2 tokens. Paged blocks have no such problem: any free block does. Since
July 2025 llama.cpp writes K and V by index (pull request 14285), and any free cells
do; that is `find_cells` in minikv/ring/cells.py. A run is still asked for in some places: in
December 2025 a saved state could not be restored into a ring with holes (17982).""",
        ),
        Exercise(
            id="11.2",
            title="Turn a key further",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="A key that moves to another position is not computed again. It is turned, "
            "which costs six operations per pair of channels instead of a pass through the model.",
            hints=(
                "A key at position p was turned by p times the frequency, in each pair of "
                "channels. It should look as if it had been turned by (p + delta) times the "
                "frequency. What is missing?",
                "The pairs are channels i and i + D/2. A pair (a, b) turned by an angle is "
                "(a cos − b sin, b cos + a sin). Each cell has an angle per pair, the same for "
                "all of its heads. Mind the shapes: deltas belong to the third dimension from "
                "the end.",
                """angles (N, D / 2) = deltas[:, None] * frequencies, both in float64
cos, sin = those of the angles, in float32, (N, 1, D / 2): the 1 is for the heads
a, b = the two halves of k in float32, (…, N, K, D / 2) each
out = a cos - b sin and b cos + a sin, joined along the last dimension
return out in the dtype of k""",
            ),
            works="""\
Two turns in a plane add up. The key at position p + delta is R(p + delta) k = R(delta) R(p) k, and
R(p) k is what the cache holds. So the key moves without the hidden state that it was made from.

V is not turned by RoPE, so V does not change. A shift touches only K, half of the cache.

What moves is the position, and nothing else. The key was computed from a hidden state that had
attended to the tokens before it. If some of these are gone, a key computed from scratch would be
different. The section on what is lost measures the difference.

Each turn rounds. In float32 ten thousand turns of a key leave an error that no logit shows; in
bfloat16, which has 8 bits, each turn of a stored key adds one more rounding. Two remedies: gather
shifts and turn once by their sum, as the engine does, or keep K unturned and turn it at every read.
llama.cpp's authors weighed both before the first line was written (issue 2060, June 2023), and keep
K turned: reading is what a decode step spends its time on.

In GGUF files of Llama models the channels of a pair are neighbours, (2i, 2i + 1); in those of Qwen2
or Gemma they are half a head apart, as here. Turning the pairs of one layout in a cache of the
other raises no error.""",
        ),
        Exercise(
            id="11.3",
            title="The context shift",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="The buffer is full, and the text continues in the same memory, without "
            "computing it again.",
            hints=(
                "Three pieces: what is kept, what is discarded, what remains. Which positions "
                "has each, before and after? What has to happen first, so that no two tokens "
                "ever stand at one position?",
                "`drop`: remove p0 … p1 - 1, then move the rest by p0 - p1. Two things can go "
                "wrong: nothing remains to be moved, or what remains belongs to another sequence, "
                "too. Check for the second before anything is removed. `context_shift`: half of "
                "what is not kept, and refuse if that is nothing.",
                """drop:  refuse p1 < p0
    for each cell of seq from p1 on: refuse if another sequence owns it, too
    seq_rm(seq, p0, p1)
    if seq still has a token at p1 or later: seq_add(seq, p1, None, p0 - p1)
context_shift:  left = (last position + 1) - n_keep
    refuse n_keep below 0, and left below 2: half of that would be nothing
    n_discard = left // 2 if None, else it must be 1 … left
    drop n_keep … n_keep + n_discard - 1;  return n_discard""",
            ),
            works="""\
A shift could discard one token; llama.cpp discards half of what is not kept. Half means that a
shift is rare: with 2,048 cells, once in about a thousand tokens. Its cost, one turn of the
remaining keys in all layers, is spread over as many steps. The price is that the context varies
between half of the buffer and all of it.

`n_keep` protects the beginning: a system prompt, or, as Xiao et al. (2023) found, just the first
four tokens, on which many models put the attention that has nothing else to go to. llama.cpp had
this as `n_keep` before the paper had a name for it (issue 3440).

The order matters. A move onto positions that are still taken would make two tokens claim one
position. And a check after the removal comes too late: the caller gets an error and a sequence with
a gap. So every check comes before the first change.

n_keep has to leave something. In November 2023 a llama.cpp server was sent a prompt longer than
its buffer, and n_keep was set to the prompt's length. It printed "context shift" without end
(issue 3969). LLamaSharp kept one token too many for months, because an early version of
llama.cpp's example had `n_keep + 1` (its pull request 714).""",
        ),
        Exercise(
            id="11.4",
            title="A buffer that rolls",
            minutes=30,
            difficulty=4,
            kind="build",
            matters="A model with a sliding window needs only W cells per layer. But the order of "
            "the cells is no longer the order of the tokens, and the mask must know.",
            hints=(
                "Window 4, six tokens stored. Which positions lie in cells 0, 1, 2, 3? Then "
                "write down for a chunk at positions 6 and 7 which of all these positions each "
                "of the two may see.",
                "`held`: of all positions below `num_tokens` that are c modulo size, the last "
                "one; a buffer that is not full yet has fewer cells in use. Mask: not later than "
                "the query, and fewer than W back. `write`: each layer has a buffer of its own "
                "size.",
                """held(size):  for each cell c that has been written, so c < num_tokens:
    the largest position below num_tokens with position % size == c
    (last - (last - c) % size, where last = num_tokens - 1)
in_window:  distance = query[:, None] - key                       # (T, N)
    distance >= 0,  and distance < window, if there is one
write(positions):  for each layer's buffer (2, size, K, D) and chunk (2, T, K, D):
    buffer[:, positions % size] = chunk, in the dtype of the buffer
    num_tokens grows by T;  self._chunk is an empty list again""",
            ),
            works="""\
`held` is the whole bookkeeping: a formula instead of a table. A cell's position follows from its
number and the length of the text, so nothing has to be stored, found or freed. This is the cheapest
allocator in the course, and it works because exactly one token leaves for each one that arrives.

A chunk of T tokens cannot be written first and attended to afterwards: its last tokens would
overwrite what its first ones still see. So attention runs over the old buffer and the chunk side by
side, and the buffer is written when all layers are done. Prompts longer than the window are
prefilled in chunks of at most W tokens.

The window is exact. A query sees the last W tokens, as the oracle with the same window does, and
every token equals the oracle's. But W tokens per layer is not W tokens of text: a token in layer 2
has attended to tokens whose layer-1 state attended W further back. After n layers a token depends
on up to n · (W − 1) tokens before it, none of which need be kept.

What is overwritten is gone. A rolling buffer cannot take back more tokens than it has room for:
engines that reuse a prefix, or undo a rejected draft of speculative decoding, have to keep more
cells than the window or compute the prompt again. llama.cpp does the second unless started with
`--swa-full`.

Mistral 7B has W = 4,096 in all layers. Gemma 3 and gpt-oss have windows in some layers only, and
their caches have two sizes.""",
        ),
        Exercise(
            id="11.5",
            title="Moves that close the holes",
            minutes=20,
            difficulty=3,
            kind="build",
            matters="Ten free cells in ten holes cannot hold a batch of two, and attention reads "
            "the buffer up to its last used cell. Defragmentation solves both.",
            hints=(
                "u cells are used. Where will they all lie afterwards? So which cells are the "
                "holes that have to be filled, and which used cells have to move? Compare the two "
                "numbers.",
                "Pair the first hole with the first cell to be moved, the second with the second. "
                "Two pairs make one move if the sources are neighbours *and* the targets are.",
                """u = number of used cells
holes = free cells below u;  data = used cells from u on      # equally many
moves = []
for source, target in pairs of (data, holes), in order:
    if the last move ends right before source, and its target right before target:
        make it longer by one
    else: append Move(source, target, 1)
return moves""",
            ),
            works="""\
If u cells are used and all lie in front, they lie in cells 0 … u - 1. A free cell below u is a
hole, a used cell from u on has to move, and there are equally many of both. So the number of cells
that move is as small as it can be: no used cell below u is touched.

Pushing everything together in order would move nearly all of the buffer for one hole at the front.
The order of the cells means nothing to attention, because each cell knows its position. This plan
makes use of that.

Runs matter because each move is a copy in every layer, and a copy of 30 cells costs about as much
to start as a copy of one. llama.cpp bounded the moves per call, since each was a node in its
compute graph.

Is it worth it? It was, as long as a batch needed one run of cells. When K and V could be written by
index (ggml_set_rows, pull request 14285), any free cells did, and defragmentation left llama.cpp in
August 2025 (15473). It had not been harmless: one build wrote garbage from the first
defragmentation on (issue 12253), another crashed when one followed a context shift (12259), a third
counted more holes than data (14059). `contiguous=False` in this engine is the new way; the notebook
measures both.""",
        ),
        Exercise(
            id="11.6",
            title="Right positions, wrong keys",
            minutes=15,
            difficulty=3,
            kind="debug",
            matters="Every position in the cache is right, and every test of positions passes. But "
            "the keys are turned to other positions.",
            hints=(
                "The engine turns a key by what `shifts` says. For each line of the report "
                "that fails: by how much should the key be turned, and by how much is it turned?",
                "There are two bugs. One shows only if a cell moves twice before the engine turns "
                "anything. The other shows whenever positions are divided.",
                """a cell at position 10, moved by -4, then by -3, before a step:
    it stands at 3, its key is turned to 10, so shifts must be …
a cell at position 10, divided by 2:
    it stands at 5, its key is turned to 10, so shifts must be …
in general: shifts = where it stands now - where its key is turned to""",
            ),
            works="""\
`shifts[i]` is the cell's position minus the position that its key is turned to. Each move adds new
− old to it, and a turn by `shifts[i]` sets it back to 0.

The first bug replaced the pending shift with the last move. llama.cpp had it for a month: "the
position is cumulative, but the delta maintains the value of the last shift" (issue 3825, October
2023, fixed in pull request 3835). One shift between two steps works. Two do not.

The second one adds old − new where it should add new − old. llama.cpp's `pos_div` has this sign
since its cells were rewritten in 2025; `pos_add`, a few lines above it, has the right one. Run
on a build of October 2026 with tinypy's weights, the keys after `seq_div` were 8.1 away from the
right rotation and 0.015 from the one with the wrong sign.

Why did it stay unnoticed? SelfExtend is the only user of `seq_div`, the option is rare, and text
with wrongly turned keys is not garbage: the nearest tokens, which matter most, have exact
positions. The quality is worse than it could be, and no test knows how good it could be.

The fix is not only a sign. Two copies of one rule became one: `seq_add` and `seq_div` differ in
the new position and in nothing else, so both call `_move`. And the test compares keys with keys
computed at the new position; a test that compares positions cannot find either bug.""",
        ),
        Exercise(
            id="11.7",
            title="Keys that are never turned",
            minutes=15,
            difficulty=2,
            kind="build",
            matters="Keys that are turned again and again accumulate errors. In another design a "
            "move costs nothing; the cost is paid when keys are read.",
            hints=(
                "Which turn brings a key from position p back to position 0? And which one takes "
                "it from 0 to where its cell stands now?",
                "`self.positions` has both: where the cell stands when the key is stored, and, "
                "later, where it stands when it is read. So what is left for `shifts` to say?",
                """store:  positions of these cells, as a tensor
    keep turn(k in float32, -positions, frequencies), in the dtype of self.k
keys:  positions of the first num_read cells
    return turn(what is kept, in float32, positions, frequencies)
apply_shifts:  all shifts are 0;  return 0, for no key is turned""",
            ),
            works="""\
RoPE's turns add up, and so they can be taken back: R(-p) R(p) k is k. `store` undoes what the model
did. An engine built this way from the start would not let the model turn keys at all.

Now a position is a number in a list, and nothing else depends on it. `seq_add` and `seq_div` are
done when they return. `shifts` has nothing to remember, so neither bug of 11.6 can be written. A
key is rounded once, when it is stored, whatever happens to its position later.

The price: a decode step turns every key that it reads, in every layer, where `RingCache` turns a
key once when it is made and once more when it moves. That is about six operations per pair of
channels, compared with four for its score with one query head.""",
        ),
    ),
)
