"""Chapter 11: the mistakes that readers make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake

MISTAKES = {
    "11.1": (
        Mistake(
            "begins at the front",
            edits={"Cells.find_slot": (("start, tested = self.head, 0", "start, tested = 0, 0"),)},
            cause="the search begins at cell 0, not at `head`",
            look="where does the search begin?",
        ),
        Mistake(
            "never wraps",
            edits={"Cells.find_slot": (
                ("            start, tested = 0, tested + self.num_cells - start\n"
                 "            continue\n", "            break\n"),
            )},
            cause="the search stops at the end of the buffer: the cells before `head` are not "
            "tried",
            look="what happens when start + num_tokens is past the end?",
        ),
        Mistake(
            "wraps inside a run",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    for i in range(self.num_cells):
        start = (self.head + i) % self.num_cells
        run = [(start + j) % self.num_cells for j in range(num_tokens)]
        if all(self.positions[cell] == FREE for cell in run):
            return start
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="a run continues past the end of the buffer, at its beginning",
            look="K of a batch is written as one slice: can it be in two pieces?",
        ),
        Mistake(
            "leaves the last cell out",
            edits={"Cells.find_slot": (
                ("if end > self.num_cells:", "if end >= self.num_cells:"),
            )},
            cause="a run that ends with the last cell is not found",
            look="start + num_tokens may be equal to num_cells",
        ),
        Mistake(
            "looks at the first cell",
            edits={"Cells.find_slot": (("for i in range(start, end) if", "for i in [start] if"),)},
            cause="only the first cell of the run is looked at: the others may be in use",
            look="how many cells have to be free?",
        ),
        Mistake(
            "counts free cells",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    order = [*range(self.head, self.num_cells), *range(self.head)]
    free = [i for i in order if self.positions[i] == FREE]
    if len(free) < num_tokens:
        raise OutOfCells(num_tokens, len(free), self.longest_run)
    return free[0]
'''},
            cause="free cells are counted wherever they are, but they have to lie in one run",
            look="A.A. has two free cells; is there room for two tokens?",
        ),
        Mistake(
            "jumps from run to run",
            edits={"Cells.find_slot": (
                ("        tested += taken[-1] + 1 - start  # no run begins at or before a taken "
                 "cell inside it\n        start = taken[-1] + 1\n",
                 "        tested += num_tokens\n        start = end\n"),
            )},
            cause="after a run that is not free, the search skips num_tokens cells: a run that "
            "begins among them is missed",
            look="where does the search continue after a taken cell?",
        ),
        Mistake(
            "stops at the head",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    for low, high in ((self.head, self.num_cells), (0, self.head)):
        for start in range(low, high - num_tokens + 1):
            if all(self.positions[i] == FREE for i in range(start, start + num_tokens)):
                return start
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="a run that begins before `head` and extends past it is missed",
            look="the second part of the search: where does its last run begin, and where may that "
            "run end?",
        ),
        Mistake(
            "moves the head",
            edits={"Cells.find_slot": (
                ("        if not taken:\n            return start\n",
                 "        if not taken:\n            self.head = start\n"
                 "            return start\n"),
            )},
            cause="the search moves `head`, though nothing has been placed yet",
            look="`place` moves the head, when the cells are taken",
        ),
        Mistake(
            "takes the cells",
            edits={"Cells.find_slot": (
                ("        if not taken:\n            return start\n",
                 "        if not taken:\n            self.head = (start + num_tokens) % "
                 "self.num_cells\n            return start\n"),
            )},
            cause="`head` is moved to the end of the run, but the search must change nothing",
            look="who moves the head, and when?",
        ),
        Mistake(
            "returns the cells",
            edits={"Cells.find_slot": (
                ("        if not taken:\n            return start\n",
                 "        if not taken:\n            return list(range(start, end))\n"),
            )},
            cause="a list of cells is returned, not the first of them",
            look="what comes after `return`?",
        ),
        Mistake(
            "gives none back",
            edits={"Cells.find_slot": (
                ("    raise OutOfCells(num_tokens, self.num_free, self.longest_run)\n",
                 "    return None\n"),
            )},
            cause="if there is no run, nothing is raised: the caller continues with None",
            look="the last line",
        ),
        Mistake(
            "gives minus one back",
            edits={"Cells.find_slot": (
                ("    raise OutOfCells(num_tokens, self.num_free, self.longest_run)\n",
                 "    return -1\n"),
            )},
            cause="if there is no run, -1 is returned, and cell -1 is the last cell",
            look="the last line",
        ),
        Mistake(
            "checks no number",
            edits={"Cells.find_slot": (
                ('    require_int("num_tokens", num_tokens, 1, self.num_cells)\n', ""),
            )},
            cause="a number of tokens that no ring of this size can hold, or no number at all, is "
            "not refused",
            look="after OutOfCells a caller can wait for free cells; would that help here?",
        ),
        Mistake(
            "takes position 0 for free",
            edits={"Cells.find_slot": (("self.positions[i] != FREE", "self.positions[i] > 0"),)},
            cause="the cell of a token at position 0 counts as free",
            look="which number stands for a free cell?",
        ),
        Mistake(
            "fits best",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    best = None
    start = 0
    while start < self.num_cells:
        end = start
        while end < self.num_cells and self.positions[end] == FREE:
            end += 1
        if end - start >= num_tokens and (best is None or end - start < best[1]):
            best = start, end - start
        start = end + 1
    if best is None:
        raise OutOfCells(num_tokens, self.num_free, self.longest_run)
    return best[0]
'''},
            cause="the smallest run that fits is taken, not the first one from `head` on",
            look="which of several runs?",
        ),
        Mistake(
            "counts the run across the end",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    run = 0
    for i in [*range(self.head, self.num_cells), *range(self.num_cells)]:
        run = run + 1 if self.positions[i] == FREE else 0
        if run == num_tokens:
            return i - num_tokens + 1
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="the count of a run continues from the last cell to the first, so its start is "
            "below 0",
            look="what has to happen to the count at the end of the buffer?",
        ),
        Mistake(
            "swaps the numbers of the error",
            edits={"Cells.find_slot": (
                ("OutOfCells(num_tokens, self.num_free, self.longest_run)",
                 "OutOfCells(self.num_free, num_tokens, self.longest_run)"),
            )},
            cause="the numbers in OutOfCells are not those of this search",
            look="OutOfCells(needed, free, longest_run)",
        ),
        Mistake(
            "marks the cells",
            edits={"Cells.find_slot": (
                ("        if not taken:\n            return start\n",
                 "        if not taken:\n            self.positions[start:end] = [0] * num_tokens\n"
                 "            return start\n"),
            )},
            cause="the search writes into `positions`, but it must change nothing",
            look="who takes the cells, and when?",
        ),
        Mistake(
            "begins after the head",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    for start in [*range(self.head + 1, self.num_cells), *range(self.head + 1)]:
        run = self.positions[start : start + num_tokens]
        if run == [FREE] * num_tokens:
            return start
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="the search begins one cell after `head`",
            look="is `head` itself tried first?",
        ),
        Mistake(
            "takes a slice for a run",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    for start in [*range(self.head, self.num_cells), *range(self.head)]:
        if all(position == FREE for position in self.positions[start : start + num_tokens]):
            return start
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="at the end of the buffer the slice is shorter than the run: a run that does not "
            "fit counts as free",
            look="how long is positions[start : start + num_tokens] at the last cell?",
        ),
        Mistake(
            "gives up at the first hole",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    for start in [*range(self.head, self.num_cells), *range(self.head)]:
        if self.positions[start] == FREE:
            if self.positions[start : start + num_tokens] == [FREE] * num_tokens:
                return start
            break
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="only the first free cell is tried: if its run is too short, the search gives up",
            look="what happens after a hole that is too small?",
        ),
        Mistake(
            "needs a longer run",
            edits={"Cells.find_slot": (
                ("    start, tested = self.head, 0\n",
                 "    if self.longest_run <= num_tokens:\n"
                 "        raise OutOfCells(num_tokens, self.num_free, self.longest_run)\n"
                 "    start, tested = self.head, 0\n"),
            )},
            cause="a run of exactly num_tokens cells is taken to be too short",
            look="`longest_run` may be equal to num_tokens",
        ),
        Mistake(
            "counts what it has not tried",
            edits={"Cells.find_slot": (("        start = taken[-1] + 1\n",
                                        "        start = taken[0] + 1\n"),)},
            cause="beginnings are counted as tried that were not, and the search ends too early",
            look="`tested` and `start` have to go on by the same number",
        ),
        Mistake(
            "leaves the next cell out",
            edits={"Cells.find_slot": (("        start = taken[-1] + 1\n",
                                        "        start = taken[-1] + 2\n"),)},
            cause="the cell after a taken one is not tried as the beginning of a run",
            look="where does the search continue after a taken cell?",
        ),
        Mistake(
            "begins after the last used cell",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    for start in [self.used_max, *range(self.num_cells - num_tokens + 1)]:
        if self.positions[start : start + num_tokens] == [FREE] * num_tokens:
            return start
    raise OutOfCells(num_tokens, self.num_free, self.longest_run)
'''},
            cause="the cells after the last used one are tried first, wherever `head` is",
            look="where does the search begin?",
        ),
        Mistake(
            "takes the longest run",
            sources={"Cells.find_slot": '''
def find_slot(self, num_tokens):
    require_int("num_tokens", num_tokens, 1, self.num_cells)
    longest, first, run = 0, 0, 0
    for i, position in enumerate(self.positions):
        run = run + 1 if position == FREE else 0
        if run > longest:
            longest, first = run, i + 1 - run
    if longest < num_tokens:
        raise OutOfCells(num_tokens, self.num_free, longest)
    return first
'''},
            cause="the longest run is taken, not the first one from `head` on",
            look="which of several runs?",
        ),
        Mistake(
            "needs one free cell",
            edits={"Cells.find_slot": (
                ("        if not taken:", "        if len(taken) < num_tokens:"),
            )},
            cause="a run counts as free if any of its cells is",
            look="how many cells have to be free?",
        ),
    ),
    "11.2": (
        Mistake(
            "rounds the cosines",
            edits={"turn": (
                ("angles.cos().float(), angles.sin().float()",
                 "angles.cos().to(k.dtype), angles.sin().to(k.dtype)"),
            )},
            cause="cosine and sine are rounded to the dtype of k, and the result once more",
            look="what is rounded before the last line?",
        ),
        Mistake(
            "angles in float32",
            edits={"turn": (
                ("deltas.double()[:, None] * frequencies.double().to(deltas.device)",
                 "deltas.float()[:, None] * frequencies.to(deltas.device)"),
            )},
            cause="the angles are float32, and a large one has no digits left after the decimal "
            "point",
            look="delta times frequency: in which dtype?",
        ),
        Mistake(
            "turns the other way",
            edits={"turn": (("torch.cat([-sin, sin], -1)", "torch.cat([sin, -sin], -1)"),)},
            cause="the keys are turned the wrong way: later means earlier",
            look="the signs of the sines: (a cos − b sin, b cos + a sin)",
        ),
        Mistake(
            "pairs neighbours",
            sources={"turn": '''
def turn(k, deltas, frequencies):
    angles = deltas[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = k.float()[..., 0::2], k.float()[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(k.dtype)
'''},
            cause="channels 2i and 2i + 1 are turned together; here a pair is i and i + D/2",
            look="which two channels make a pair? (GGUF files of Llama have the other layout.)",
        ),
        Mistake(
            "interleaves the angles",
            edits={"turn": (
                ("torch.cat([cos, cos], -1)", "cos.repeat_interleave(2, -1)"),
                ("torch.cat([-sin, sin], -1)",
                 "torch.cat([-sin, sin], -1).repeat_interleave(2, -1)[..., :k.shape[-1]]"),
            )},
            cause="the angles are in the order of another layout: the two channels of a pair are "
            "not turned by the same angle",
            look="channel i and channel i + D/2 have one angle",
        ),
        Mistake(
            "forgets the minus",
            edits={"turn": (("torch.cat([-sin, sin], -1)", "torch.cat([sin, sin], -1)"),)},
            cause="both sines have a plus sign: this is not a rotation, and lengths change",
            look="one of the two sines has a minus sign",
        ),
        Mistake(
            "swaps sine and cosine",
            edits={"turn": (
                ("angles.cos().float(), angles.sin().float()",
                 "angles.sin().float(), angles.cos().float()"),
            )},
            cause="sine and cosine are swapped: a delta of 0 does not leave the keys alone",
            look="what is the cosine of 0?",
        ),
        Mistake(
            "one delta for all",
            edits={"turn": (("deltas.double()[:, None]", "deltas.double()[:1, None]"),)},
            cause="all cells are turned by the delta of the first",
            look="deltas has one number per cell",
        ),
        Mistake(
            "one frequency for all",
            edits={"turn": (
                ("frequencies.double().to(deltas.device)",
                 "frequencies[:1].double().expand_as(frequencies)"),
            )},
            cause="all pairs of channels are turned by the same angle",
            look="frequencies has one number per pair",
        ),
        Mistake(
            "gives the angles to the heads",
            edits={"turn": (
                ("torch.cat([cos, cos], -1)[:, None]", "torch.cat([cos, cos], -1)"),
                ("torch.cat([-sin, sin], -1)[:, None]", "torch.cat([-sin, sin], -1)"),
            )},
            cause="the angles are laid along the heads instead of the cells",
            look="(N, D) against (N, K, D): which dimension is missing, and where?",
        ),
        Mistake(
            "forgets how far",
            edits={"turn": (("deltas.double()[:, None]", "deltas.double().sign()[:, None]"),)},
            cause="every key is turned by one position, however far it moved",
            look="angle = delta · frequency",
        ),
        Mistake(
            "only goes on",
            edits={"turn": (("deltas.double()[:, None]", "deltas.double().abs()[:, None]"),)},
            cause="a negative delta turns the key forward",
            look="a shift moves keys back",
        ),
        Mistake(
            "turns in place",
            edits={"turn": (
                ("    return rotate(k.float(), cos, sin).to(k.dtype)\n",
                 "    return k.copy_(rotate(k.float(), cos, sin))\n"),
            )},
            cause="the caller's keys are changed, too",
            look="the result is a new tensor",
        ),
        Mistake(
            "stays in float32",
            edits={"turn": (
                ("return rotate(k.float(), cos, sin).to(k.dtype)",
                 "return rotate(k.float(), cos, sin)"),
            )},
            cause="the result is float32, whatever came in",
            look="the last line",
        ),
        Mistake(
            "computes in half precision",
            sources={"turn": '''
def turn(k, deltas, frequencies):
    angles = deltas[:, None].to(k.dtype) * frequencies.to(k.dtype)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = k.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
'''},
            cause="the angles are computed in the dtype of k: in half precision they are off by "
            "much more than a rounding",
            look="how many digits does bfloat16 have for an angle of 300?",
        ),
        Mistake(
            "takes degrees",
            edits={"turn": (("angles.cos().float(), angles.sin().float()",
                             "angles.deg2rad().cos().float(), angles.deg2rad().sin().float()"),)},
            cause="the angle is taken for degrees",
            look="frequencies are radians per position",
        ),
        Mistake(
            "turns the first half",
            sources={"turn": '''
def turn(k, deltas, frequencies):
    angles = deltas[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = k.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b], -1).to(k.dtype)
'''},
            cause="only the first half of the channels is turned",
            look="both channels of a pair change",
        ),
        Mistake(
            "uses what it has just changed",
            sources={"turn": '''
def turn(k, deltas, frequencies):
    angles = deltas[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = k.float().chunk(2, -1)
    a = a * cos - b * sin
    b = b * cos + a * sin
    return torch.cat([a, b], -1).to(k.dtype)
'''},
            cause="the second channel is computed from the first one's new value",
            look="keep the old a until b is computed",
        ),
    ),
    "11.3": (
        Mistake(
            "leaves the gap",
            edits={"Cells.drop": (
                ("    if self.seq_pos_max(seq) >= p1:\n"
                 "        self.seq_add(seq, p1, None, p0 - p1)\n", ""),
            )},
            cause="the rest is not moved: a gap stays, and no position becomes free at the end",
            look="what happens to the positions from p1 on?",
        ),
        Mistake(
            "moves first",
            sources={"Cells.drop": '''
def drop(self, seq, p0, p1):
    self._require_own(seq, self.cells_of(seq, require_int("p1", p1, p0)))
    if self.seq_pos_max(seq) >= p1:
        self.seq_add(seq, p1, None, p0 - p1)
    self.seq_rm(seq, p0, p1)
'''},
            cause="the rest is moved onto positions that are still taken",
            look="which comes first, removing or moving?",
        ),
        Mistake(
            "moves forward",
            edits={"Cells.drop": (("None, p0 - p1)", "None, p1 - p0)"),)},
            cause="the rest is moved forward, away from the gap",
            look="the sign of the move",
        ),
        Mistake(
            "moves to the beginning",
            edits={"Cells.drop": (("None, p0 - p1)", "None, -p1)"),)},
            cause="the rest is moved to position 0, not to p0",
            look="by how much: what stood at p1 stands at p0 afterwards",
        ),
        Mistake(
            "leaves the last one behind",
            edits={"Cells.drop": (
                ("self.seq_add(seq, p1, None, p0 - p1)",
                 "self.seq_add(seq, p1, self.seq_pos_max(seq), p0 - p1)"),
            )},
            cause="the last token is not moved: the end of a range is not part of it",
            look="p1 of a range is the first position that does not belong to it",
        ),
        Mistake(
            "expects a rest",
            edits={"Cells.drop": (("    if self.seq_pos_max(seq) >= p1:\n        self.seq_add",
                                   "    self.seq_add"),)},
            cause="if nothing follows the gap, or nothing is left at all, there is nothing to "
            "move: that must not raise",
            look="is there a token from p1 on?",
        ),
        Mistake(
            "asks too late",
            edits={"Cells.drop": (
                ('    self._require_own(seq, self.cells_of(seq, require_int("p1", p1, p0)))\n', ""),
            )},
            cause="tokens are removed before it is known that the rest can be moved: after the "
            "error the sequence has a gap",
            look="check first whether a token from p1 on is shared",
        ),
        Mistake(
            "refuses a shared prefix",
            edits={"Cells.drop": (
                ('self.cells_of(seq, require_int("p1", p1, p0))',
                 'self.cells_of(seq, 0, require_int("p1", p1, p0)) + self.cells_of(seq, p1)'),
            )},
            cause="every shared cell is refused, but only a move is impossible: a shared cell may "
            "be kept, or removed from this sequence alone",
            look="which cells are moved?",
        ),
        Mistake(
            "removes it for all",
            edits={"Cells.drop": (("self.seq_rm(seq, p0, p1)", "self.seq_rm(-1, p0, p1)"),)},
            cause="the range is removed from every sequence",
            look="whose tokens are discarded?",
        ),
        Mistake(
            "moves all",
            edits={"Cells.drop": (("self.seq_add(seq, p1", "self.seq_add(-1, p1"),)},
            cause="the tokens of every sequence are moved",
            look="whose tokens are moved?",
        ),
        Mistake(
            "turns no key",
            sources={"Cells.drop": '''
def drop(self, seq, p0, p1):
    self._require_own(seq, self.cells_of(seq, require_int("p1", p1, p0)))
    self.seq_rm(seq, p0, p1)
    if seq in self.seq_ids:
        for cell in self.cells_of(seq, p1):
            self.positions[cell] -= p1 - p0
'''},
            cause="the positions are changed and `shifts` is not: no key will be turned",
            look="which method of the cells moves a range and records that in `shifts`?",
        ),
        Mistake(
            "discards half of everything",
            edits={"context_shift": (("left // 2 if n_discard", "end // 2 if n_discard"),)},
            cause="half of all tokens is discarded; it is half of those that are not kept",
            look="half of what?",
        ),
        Mistake(
            "rounds up",
            edits={"context_shift": (("left // 2 if n_discard", "-(-left // 2) if n_discard"),)},
            cause="half of an odd number is rounded up",
            look="left // 2",
        ),
        Mistake(
            "keeps nothing",
            edits={"context_shift": (
                ("cache.drop(seq, n_keep, n_keep + n_discard)", "cache.drop(seq, 0, n_discard)"),
            )},
            cause="the first tokens are discarded, though they must be kept",
            look="at which position does the range begin?",
        ),
        Mistake(
            "discards the end",
            edits={"context_shift": (
                ("cache.drop(seq, n_keep, n_keep + n_discard)",
                 "cache.drop(seq, end - n_discard, end)"),
            )},
            cause="the newest tokens are discarded, and the oldest stay",
            look="the oldest tokens come right after those that are kept",
        ),
        Mistake(
            "keeps one more",
            edits={"context_shift": (
                ("cache.drop(seq, n_keep, n_keep + n_discard)",
                 "cache.drop(seq, n_keep + 1, n_keep + n_discard + 1)"),
            )},
            cause="one token too many is kept: the range begins at n_keep, counted from 0",
            look="the first n_keep positions are 0 … n_keep - 1",
        ),
        Mistake(
            "takes the number for a position",
            edits={"context_shift": (
                ("cache.drop(seq, n_keep, n_keep + n_discard)",
                 "cache.drop(seq, n_keep, max(n_keep, n_discard))"),
            )},
            cause="n_discard is a number of tokens, and is used as the position where they end",
            look="n_keep + n_discard",
        ),
        Mistake(
            "shifts for ever",
            edits={"context_shift": (
                ("    if left < 2:\n"
                 '        raise ValueError(f"n_keep: {n_keep} of {end} positions leave too little '
                 'to discard half of")\n', ""),
                ('require_int("n_discard", n_discard, 1, left)', "min(n_discard, left)"),
            )},
            cause="an n_keep that leaves nothing to discard is accepted: no cell becomes free, and "
            "the caller shifts for ever",
            look="what is n_discard if n_keep is the whole sequence?",
        ),
        Mistake(
            "takes any number",
            edits={"context_shift": (
                ('require_int("n_discard", n_discard, 1, left)', "n_discard"),
            )},
            cause="an n_discard below 1, or above the number of tokens after n_keep, is not "
            "refused",
            look="how many tokens can be discarded at most?",
        ),
        Mistake(
            "counts tokens",
            edits={"context_shift": (
                ("end = cache.seq_pos_max(seq) + 1", "end = len(cache.cells_of(seq, 0, None))"),
            )},
            cause="tokens are counted, not positions: after seq_rm in the middle, or after "
            "seq_div, the two differ",
            look="the last position of the sequence",
        ),
        Mistake(
            "takes one of one",
            edits={"context_shift": (("if left < 2:", "if left < 2 and n_discard is None:"),)},
            cause="with n_discard, one position after n_keep is taken for enough",
            look="how many positions must follow the first n_keep?",
        ),
        Mistake(
            "asks about what goes",
            edits={"Cells.drop": (
                ("self._require_own(seq, self.cells_of(seq, require_int(\"p1\", p1, p0)))",
                 "self._require_own(seq, self.cells_of(seq, p0, require_int(\"p1\", p1, p0)))\n"
                 "    self._require_own(seq, self.cells_of(seq, p1))"),
            )},
            cause="a shared cell that is only removed is refused: it stays with its other owners",
            look="which cells are moved, and which are only removed?",
        ),
        Mistake(
            "does not listen",
            edits={"context_shift": (
                ('left // 2 if n_discard is None else require_int("n_discard", n_discard, 1, left)',
                 "left // 2"),
            )},
            cause="half is discarded, whatever n_discard says",
            look="the case in which n_discard is given",
        ),
        Mistake(
            "returns what is left",
            edits={"context_shift": (("    return n_discard\n", "    return left - n_discard\n"),)},
            cause="the number of remaining tokens is returned, not the number of discarded ones",
            look="what comes after `return`?",
        ),
        Mistake(
            "returns nothing",
            edits={"context_shift": (("    return n_discard\n", ""),)},
            cause="the number of discarded tokens is not returned",
            look="what comes after `return`?",
        ),
        Mistake(
            "counts from the last position",
            edits={"context_shift": (("seq_pos_max(seq) + 1", "seq_pos_max(seq)"),)},
            cause="the number of positions is taken to be the last position: one is missing",
            look="how many positions are 0 … 7?",
        ),
    ),
    "11.4": (
        Mistake(
            "sees the future",
            edits={"in_window": (
                ("(distance >= 0) if window is None else (distance >= 0) & (distance < window)",
                 "(distance > -len(distance) - 99) if window is None else distance < window"),
            )},
            cause="a query sees later tokens of its chunk",
            look="the mask: not later than the query",
        ),
        Mistake(
            "window of one more",
            edits={"in_window": (("(distance < window)", "(distance <= window)"),)},
            cause="the window is one token too long",
            look="the last `window` positions, the query's own included",
        ),
        Mistake(
            "window without itself",
            edits={"in_window": (("(distance < window)", "(distance < window - 1)"),)},
            cause="the window is one token too short",
            look="the last `window` positions, the query's own included",
        ),
        Mistake(
            "does not see itself",
            edits={"in_window": (
                ("(distance >= 0) if window is None else (distance >= 0) &",
                 "(distance > 0) if window is None else (distance > 0) &"),
            )},
            cause="a query does not see its own key",
            look="not later than its own position: equal is allowed",
        ),
        Mistake(
            "has no window",
            edits={"in_window": (
                ("(distance >= 0) if window is None else (distance >= 0) & (distance < window)",
                 "distance >= 0"),
            )},
            cause="the window is left out of the mask: the later queries of a chunk see tokens "
            "that have left their window",
            look="the buffer holds the window of the chunk's first query",
        ),
        Mistake(
            "limits by the keys",
            edits={"in_window": (
                ("(distance >= 0) if window is None else (distance >= 0) & (distance < window)",
                 "(distance >= 0) & (distance < (window or len(key)))"),
            )},
            cause="without a window the number of keys is taken for one",
            look="if window is None, there is no limit",
        ),
        Mistake(
            "subtracts the wrong way",
            edits={"in_window": (("query[:, None] - key", "key - query[:, None]"),)},
            cause="the distance has the wrong sign",
            look="query − key: how far back a key is",
        ),
        Mistake(
            "needs a window",
            edits={"in_window": (
                ("(distance >= 0) if window is None else (distance >= 0) & (distance < window)",
                 "(distance >= 0) & (distance < window)"),
            )},
            cause="a layer without a window has None, which is not a number",
            look="what is the mask if window is None?",
        ),
        Mistake(
            "keys along the rows",
            edits={"in_window": (("query[:, None] - key  # (T, N)",
                                  "query - key[:, None]  # (T, N)"),)},
            cause="the mask has one row per key; it needs one per query",
            look="(T, N): which of the two gets the extra dimension?",
        ),
        Mistake(
            "holds them in order",
            edits={"RollingCache.held": (
                ("    return last - (last - cell) % size\n",
                 "    return last + 1 - len(cell) + cell\n"),
            )},
            cause="the positions are given in the order of the text; cell c holds a position that "
            "is c modulo size",
            look="after the buffer has wrapped, which cell holds the oldest token?",
        ),
        Mistake(
            "never wraps",
            edits={"RollingCache.held": (
                ("    return last - (last - cell) % size\n", "    return cell\n"),
            )},
            cause="cell c is said to hold position c, even after it was overwritten",
            look="which positions are c modulo size, and which of them is the last one?",
        ),
        Mistake(
            "is one ahead",
            edits={"RollingCache.held": (
                ("    last = self.num_tokens - 1\n", "    last = self.num_tokens\n"),
            )},
            cause="the last position is num_tokens - 1: here it is one too many",
            look="three tokens stand at 0, 1 and 2",
        ),
        Mistake(
            "gives the empty cells, too",
            edits={"RollingCache.held": (
                ("torch.arange(min(size, self.num_tokens))", "torch.arange(size)"),
            )},
            cause="the empty cells of a buffer that is not full yet get positions below 0",
            look="how many cells are in use after num_tokens tokens?",
        ),
        Mistake(
            "goes one round too few",
            edits={"RollingCache.held": (
                ("    return last - (last - cell) % size\n",
                 "    return last // size * size + cell\n"),
            )},
            cause="cells after the newest one are given positions that do not exist yet",
            look="a cell that is not overwritten in this round holds the previous round's token",
        ),
        Mistake(
            "writes in front",
            edits={"RollingCache.write": (
                ("positions % kv.shape[1]", "(positions - positions[0]) % kv.shape[1]"),
            )},
            cause="every chunk is written to the front of the buffer, from cell 0",
            look="which cell does a position belong to?",
        ),
        Mistake(
            "one size for all",
            edits={"RollingCache.write": (("positions % kv.shape[1]",
                                           "positions % self.chunk_size"),)},
            cause="all buffers are written as if they had the size of the smallest",
            look="each layer's buffer has its own number of cells",
        ),
        Mistake(
            "does not wrap when it writes",
            edits={"RollingCache.write": (
                ("positions % kv.shape[1]", "positions.clamp(max=kv.shape[1] - 1)"),
            )},
            cause="beyond the end every token is written to the last cell",
            look="position mod W",
        ),
        Mistake(
            "pushes along",
            edits={"RollingCache.write": (
                ("        kv[:, positions % kv.shape[1]] = chunk.to(kv.dtype)\n",
                 "        used = kv[:, : min(self.num_tokens, kv.shape[1])]\n"
                 "        moved = torch.cat([used, chunk.to(kv.dtype)], 1)[:, -kv.shape[1] :]\n"
                 "        kv[:, : moved.shape[1]] = moved\n"),
            )},
            cause="the whole buffer is shifted: cell c does not hold a position that is c modulo "
            "size, and every step moves all K and V",
            look="one token arrives and one leaves: how many cells have to be written?",
        ),
        Mistake(
            "loses what goes past the end",
            sources={"RollingCache.write": '''
def write(self, positions):
    for kv, chunk in zip(self.kv, self._chunk):
        start = int(positions[0]) % kv.shape[1]
        fits = min(len(positions), kv.shape[1] - start)
        kv[:, start : start + fits] = chunk[:, :fits].to(kv.dtype)
    self.num_tokens += len(positions)
    self._chunk = []
'''},
            cause="the part of a chunk that goes past the end of the buffer is not written at its "
            "beginning",
            look="`write`: into which cell does each position go?",
        ),
        Mistake(
            "writes in the chunk's dtype",
            edits={"RollingCache.write": (("chunk.to(kv.dtype)", "chunk"),)},
            cause="the chunk is written as it is, but the buffer may have another dtype",
            look="`chunk.to(kv.dtype)`",
        ),
        Mistake(
            "writes keys",
            edits={"RollingCache.write": (
                ("        kv[:, positions % kv.shape[1]] = chunk.to(kv.dtype)\n",
                 "        kv[0, positions % kv.shape[1]] = chunk[0].to(kv.dtype)\n"),
            )},
            cause="keys are written and values are not",
            look="the first dimension of a buffer: K and V",
        ),
        Mistake(
            "holds the chunk",
            edits={"RollingCache.write": (
                ("    self.num_tokens += len(positions)\n    self._chunk = []\n",
                 "    self.num_tokens += len(positions)\n"),
            )},
            cause="`_chunk` still holds K and V of the step, so their memory is not freed until "
            "the next step",
            look="what is a chunk needed for once it lies in the buffers?",
        ),
        Mistake(
            "counts nothing",
            edits={"RollingCache.write": (("    self.num_tokens += len(positions)\n", ""),)},
            cause="num_tokens stays as it is: the next chunk gets the same positions",
            look="what else changes when a chunk is written?",
        ),
        Mistake(
            "counts what fits",
            edits={"RollingCache.write": (
                ("    self.num_tokens += len(positions)\n",
                 "    self.num_tokens = min(self.num_tokens + len(positions), self.chunk_size)\n"),
            )},
            cause="num_tokens stops at the window, so the positions stop growing",
            look="num_tokens is the length of the text, not of the buffer",
        ),
        Mistake(
            "computes in floats",
            edits={"in_window": (
                ("query[:, None] - key", "query[:, None].float() - key.float()"),
            )},
            cause="positions are rounded to floats: far ones are not told apart",
            look="positions are integers",
        ),
        Mistake(
            "holds floats",
            edits={"RollingCache.held": (
                ("    return last - (last - cell) % size\n",
                 "    found = torch.zeros(len(cell))\n"
                 "    found[:] = last - (last - cell) % size\n    return found\n"),
            )},
            cause="the positions are not an int64 tensor",
            look="which dtype does torch.zeros have, if none is given?",
        ),
        Mistake(
            "swaps keys and values",
            edits={"RollingCache.write": (
                ("] = chunk.to(kv.dtype)", "] = chunk.flip(0).to(kv.dtype)"),
            )},
            cause="keys are written where values belong, and values where keys belong",
            look="the first dimension of a buffer and of a chunk: K, then V",
        ),
        Mistake(
            "writes the first layer",
            edits={"RollingCache.write": (
                ("zip(self.kv, self._chunk, strict=True)", "zip(self.kv[:1], self._chunk[:1])"),
            )},
            cause="only the first layer's buffer is written",
            look="self.kv and self._chunk have an item for each layer",
        ),
        Mistake(
            "writes layers with a window",
            edits={"RollingCache.write": (
                ("        kv[:, positions % kv.shape[1]] = chunk.to(kv.dtype)\n",
                 "        if kv.shape[1] == self.chunk_size:\n"
                 "            kv[:, positions % kv.shape[1]] = chunk.to(kv.dtype)\n"),
            )},
            cause="only the smallest buffers are written",
            look="layers of any size, with a window or without one",
        ),
        Mistake(
            "empties the chunk first",
            edits={"RollingCache.write": (
                ("    for kv, chunk in zip(self.kv, self._chunk, strict=True):\n",
                 "    self._chunk = []\n    for kv, chunk in zip(self.kv, self._chunk):\n"),
            )},
            cause="nothing is written: `_chunk` is empty before it is read",
            look="the order: write, then empty",
        ),
        Mistake(
            "counts first",
            edits={"RollingCache.write": (
                ("    for kv, chunk in", "    first = self.num_tokens + len(positions)\n"
                 "    for kv, chunk in"),
                ("positions % kv.shape[1]",
                 "torch.arange(first, first + len(positions)) % kv.shape[1]"),
            )},
            cause="the chunk is written as if it stood T positions later, after itself",
            look="`positions` says where the tokens stand",
        ),
        Mistake(
            "wraps at the chunk",
            edits={"RollingCache.write": (("% kv.shape[1]", "% len(positions)"),)},
            cause="positions are taken modulo the length of the chunk",
            look="modulo which number does a position become a cell?",
        ),
        Mistake(
            "counts the chunk alone",
            edits={"RollingCache.write": (
                ("self.num_tokens += len(positions)", "self.num_tokens = len(positions)"),
            )},
            cause="num_tokens is the length of the last chunk, not of the text",
            look="num_tokens grows by T",
        ),
    ),
    "11.5": (
        Mistake(
            "pushes everything together",
            sources={"plan_moves": '''
def plan_moves(is_used):
    moves, to = [], 0
    for source, used in enumerate(is_used):
        if used:
            if source != to:
                moves.append(Move(source, to, 1))
            to += 1
    return moves
'''},
            cause="everything after the first hole is moved forward; only the cells from u on have "
            "to move, where u is the number of used cells",
            look="which used cells lie in front already?",
        ),
        Mistake(
            "pushes runs together",
            sources={"plan_moves": '''
def plan_moves(is_used):
    moves, to = [], 0
    for source, used in enumerate(is_used):
        if not used:
            continue
        last = moves[-1] if moves else None
        if last and (source, to) == (last.source + last.length, last.target + last.length):
            moves[-1] = Move(last.source, last.target, last.length + 1)
        elif source != to:
            moves.append(Move(source, to, 1))
        to += 1
    return moves
'''},
            cause="everything is pushed together in order: cells below u move, too",
            look="which cells are the data?",
        ),
        Mistake(
            "takes the last first",
            edits={"plan_moves": (
                ("zip(data, holes, strict=True)", "zip(reversed(data), holes, strict=True)"),
            )},
            cause="the last cell goes to the first hole: neighbours are separated, and the moves "
            "are short",
            look="both in order",
        ),
        Mistake(
            "never joins",
            edits={"plan_moves": (
                ("if (source, target) == (last.source + last.length, last.target + last.length):",
                 "if False:"),
            )},
            cause="every cell is a move of its own",
            look="when do two pairs make one move?",
        ),
        Mistake(
            "joins by the sources",
            edits={"plan_moves": (
                ("if (source, target) == (last.source + last.length, last.target + last.length):",
                 "if source == last.source + last.length:"),
            )},
            cause="a move is extended although its targets have a gap: it overwrites a cell in use",
            look="sources are neighbours; are the targets?",
        ),
        Mistake(
            "joins by the targets",
            edits={"plan_moves": (
                ("if (source, target) == (last.source + last.length, last.target + last.length):",
                 "if target == last.target + last.length:"),
            )},
            cause="a move is extended although its sources have a gap: it moves a free cell",
            look="targets are neighbours; are the sources?",
        ),
        Mistake(
            "forgets the length",
            edits={"plan_moves": (
                ("if (source, target) == (last.source + last.length, last.target + last.length):",
                 "if (source, target) == (last.source + 1, last.target + 1):"),
            )},
            cause="no move gets longer than 2 cells: the next pair is compared with the move's "
            "first cell",
            look="where does a move of three cells end?",
        ),
        Mistake(
            "loses the second of a run",
            edits={"plan_moves": (
                ("moves[-1] = last._replace(length=last.length + 1)", "pass"),
            )},
            cause="a pair that continues a move is dropped",
            look="what changes in the last move?",
        ),
        Mistake(
            "ends at the last used cell",
            edits={"plan_moves": (
                ("    end = sum(is_used)\n",
                 "    end = max((i for i, used in enumerate(is_used) if used), default=-1) + 1\n"),
                ("zip(data, holes, strict=True)", "zip(data, holes, strict=False)"),
            )},
            cause="no cell is ever moved",
            look="holes lie before u, data from u on; u is the number of used cells, not the place "
            "of the last one",
        ),
        Mistake(
            "fills every free cell",
            edits={"plan_moves": (
                ("    holes = [i for i in range(end) if not is_used[i]]\n",
                 "    holes = [i for i in range(len(is_used)) if not is_used[i]]\n"),
                ("zip(data, holes, strict=True)", "zip(data, holes, strict=False)"),
                ("    data = [i for i in range(end, len(is_used)) if is_used[i]]\n",
                 "    data = [i for i in range(len(is_used)) if is_used[i]]\n"),
            )},
            cause="cells that lie in front already are moved as well",
            look="which used cells have to move?",
        ),
        Mistake(
            "swaps from and to",
            edits={"plan_moves": (
                ("moves.append(Move(source, target, 1))", "moves.append(Move(target, source, 1))"),
                ("if (source, target) == (last.source + last.length, last.target + last.length):",
                 "if (target, source) == (last.source + last.length, last.target + last.length):"),
            )},
            cause="source and target are swapped: a hole is moved onto a token",
            look="Move(source, target, length)",
        ),
        Mistake(
            "names the end",
            edits={"plan_moves": (
                ("    return moves\n",
                 "    return [(m.source, m.source + m.length, m.target) for m in moves]\n"),
            )},
            cause="a move is source, target and length, not source, end and target",
            look="what are the three numbers?",
        ),
        Mistake(
            "starts one too late",
            edits={"plan_moves": (
                ("for i in range(end, len(is_used)) if is_used[i]",
                 "for i in range(end + 1, len(is_used)) if is_used[i]"),
                ("zip(data, holes, strict=True)", "zip(data, holes, strict=False)"),
            )},
            cause="a used cell at u is taken to lie in front",
            look="cells 0 … u - 1 are in front",
        ),
        Mistake(
            "needs a move",
            edits={"plan_moves": (
                ("last = moves[-1] if moves else Move(-1, -1, 0)", "last = moves[-1]"),
            )},
            cause="`moves` is empty before the first move",
            look="what is moves[-1] at the beginning?",
        ),
        Mistake(
            "loses the last move",
            sources={"plan_moves": '''
def plan_moves(is_used):
    end = sum(is_used)
    holes = [i for i in range(end) if not is_used[i]]
    data = [i for i in range(end, len(is_used)) if is_used[i]]
    moves, start = [], 0
    for i in range(1, len(holes)):
        if (data[i], holes[i]) != (data[i - 1] + 1, holes[i - 1] + 1):
            moves.append(Move(data[start], holes[start], i - start))
            start = i
    return moves
'''},
            cause="the last move is never added: a move is added only when the next one begins",
            look="which pairs are left when the loop ends?",
        ),
        Mistake(
            "counts from zero",
            edits={"plan_moves": (
                ("moves.append(Move(source, target, 1))", "moves.append(Move(source, target, 0))"),
                ("(last.source + last.length, last.target + last.length)",
                 "(last.source + last.length + 1, last.target + last.length + 1)"),
            )},
            cause="every move is one cell too short",
            look="how long is a move of one pair?",
        ),
        Mistake(
            "looks back at the first move",
            edits={"plan_moves": (("last = moves[-1] if", "last = moves[0] if"),)},
            cause="a pair is compared with the first move: no later move gets longer than 1 cell",
            look="which move may a pair continue?",
        ),
        Mistake(
            "breaks if both have a gap",
            edits={"plan_moves": (
                ("if (source, target) == (last.source + last.length, last.target + last.length):",
                 "if source == last.source + last.length or target == last.target + last.length:"),
            )},
            cause="a move is extended although its sources, or its targets, have a gap",
            look="sources *and* targets have to be neighbours",
        ),
        Mistake(
            "fills them in place",
            edits={"plan_moves": (
                ("        last = moves[-1]",
                 "        is_used[target], is_used[source] = True, False\n"
                 "        last = moves[-1]"),
            )},
            cause="the caller's `is_used` is changed",
            look="a plan moves nothing yet",
        ),
        Mistake(
            "leaves the last hole out",
            edits={"plan_moves": (
                ("for i in range(end) if not", "for i in range(end - 1) if not"),
                ("zip(data, holes, strict=True)", "zip(data, holes, strict=False)"),
            )},
            cause="a hole at u - 1 is not filled",
            look="cells 0 … u - 1 are in front",
        ),
        Mistake(
            "cuts what does not fit",
            sources={"plan_moves": '''
def plan_moves(is_used):
    def runs(cells):
        found = []
        for cell in cells:
            if found and found[-1][-1] == cell - 1:
                found[-1].append(cell)
            else:
                found.append([cell])
        return found
    end = sum(is_used)
    holes = runs(i for i in range(end) if not is_used[i])
    data = runs(i for i in range(end, len(is_used)) if is_used[i])
    return [Move(a[0], b[0], min(len(a), len(b))) for a, b in zip(data, holes)]
'''},
            cause="what is left of a run that does not fit into its hole is not moved",
            look="a run may fill several holes, and a hole may take several runs",
        ),
        Mistake(
            "leaves the last cell out",
            edits={"plan_moves": (
                ("range(end, len(is_used)) if", "range(end, len(is_used) - 1) if"),
                ("zip(data, holes, strict=True)", "zip(data, holes, strict=False)"),
            )},
            cause="the last cell of the ring is not moved",
            look="where do the data end?",
        ),
    ),
    "11.6": (
        Mistake(
            "fixes the division alone",
            edits={"Cells._move": (
                ("self.shifts[cell] += to - self.positions[cell]",
                 "self.shifts[cell] = to - self.positions[cell]"),
            )},
            cause="a second move replaces what was still to be turned: only the last move counts",
            look="`_move`: what was in `shifts` before?",
        ),
        Mistake(
            "fixes the move alone",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        before = self.positions[cell]
        self.positions[cell] //= d
        self.shifts[cell] += before - self.positions[cell]
    return len(cells)
'''},
            cause="a division turns the keys the wrong way: positions get smaller, and keys are "
            "turned forward",
            look="`seq_div`: new minus old, or old minus new?",
        ),
        Mistake(
            "turns both the wrong way",
            edits={"Cells._move": (
                ("self.shifts[cell] += to - self.positions[cell]",
                 "self.shifts[cell] += self.positions[cell] - to"),
            )},
            cause="every key is turned the wrong way, after a move and after a division",
            look="positive means later: new minus old",
        ),
        Mistake(
            "divides the debt",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        self.positions[cell] //= d
        self.shifts[cell] //= d
    return len(cells)
'''},
            cause="the pending shift is divided, and the move of the division itself is missing",
            look="by how much does the position change?",
        ),
        Mistake(
            "forgets the turn of a division",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        self.positions[cell] //= d
    return len(cells)
'''},
            cause="after a division no key is turned",
            look="a division moves a key as well",
        ),
        Mistake(
            "subtracts after the change",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        self.positions[cell] //= d
        self.shifts[cell] += self.positions[cell] // d - self.positions[cell]
    return len(cells)
'''},
            cause="the old position is read after it was changed",
            look="keep the old position before you divide",
        ),
        Mistake(
            "rounds to the nearest",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    return self._move(seq, p0, p1, lambda position: round(position / d))
'''},
            cause="positions are rounded to the nearest, not down",
            look="positions // d",
        ),
        Mistake(
            "adds the target",
            edits={"Cells._move": (
                ("self.shifts[cell] += to - self.positions[cell]", "self.shifts[cell] += to"),
            )},
            cause="the new position is added to `shifts`, not the distance to it",
            look="shifts says how far, not where to",
        ),
        Mistake(
            "notes it after the move",
            edits={"Cells._move": (
                ("        self.shifts[cell] += to - self.positions[cell]\n"
                 "        self.positions[cell] = to\n",
                 "        self.positions[cell] = to\n"
                 "        self.shifts[cell] += to - self.positions[cell]\n"),
            )},
            cause="the distance is computed after the position has changed: it is always 0",
            look="the order of the two lines",
        ),
        Mistake(
            "takes a divisor of nothing",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    return self._move(seq, p0, p1, lambda position: position // max(d, 1))
'''},
            cause="a divisor below 1 is no longer refused",
            look="the first line of `seq_div`",
        ),
        Mistake(
            "replaces in the division",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        before = self.positions[cell]
        self.positions[cell] //= d
        self.shifts[cell] = self.positions[cell] - before
    return len(cells)
'''},
            cause="a division replaces what was still to be turned",
            look="`seq_div`: what was in `shifts` before?",
        ),
        Mistake(
            "notes it, and is refused",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    for cell in cells:
        self.shifts[cell] += self.positions[cell] // d - self.positions[cell]
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        self.positions[cell] //= d
    return len(cells)
'''},
            cause="a division that is refused has changed `shifts`",
            look="every check comes before the first change",
        ),
        Mistake(
            "checks no division",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    for cell in cells:
        before = self.positions[cell]
        self.positions[cell] //= d
        self.shifts[cell] += self.positions[cell] - before
    return len(cells)
'''},
            cause="a division is no longer refused where two tokens would come to one position, or "
            "another sequence's token would move along",
            look="`_require_can_move`",
        ),
        Mistake(
            "divides for every sequence",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    self.cells_of(seq, p0, p1)
    return self._move(-1, p0, p1, lambda position: position // d)
'''},
            cause="the positions of all sequences are divided",
            look="`seq`",
        ),
        Mistake(
            "does not know all",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    chosen = [cell for cell in self.cells_of(seq, p0, p1) if seq in self.sequences[cell]]
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in chosen})
    for cell in chosen:
        before = self.positions[cell]
        self.positions[cell] //= d
        self.shifts[cell] += self.positions[cell] - before
    return len(chosen)
'''},
            cause="if seq is ALL, nothing is divided",
            look="`cells_of` knows ALL",
        ),
        Mistake(
            "divides up to the end",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    return self._move(seq, p0, None, lambda position: position // d)
'''},
            cause="a division ignores `p1`: positions after the range are divided, too",
            look="p0 <= position < p1",
        ),
        Mistake(
            "lets shared tokens move",
            edits={"Cells._move": (
                ("self._require_can_move(seq, targets)", "self._require_can_move(-1, targets)"),
            )},
            cause="a token that belongs to another sequence, too, is moved for one of them",
            look="whose sequence does `_require_can_move` ask for?",
        ),
        Mistake(
            "divides one by one",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    for cell in cells:
        position = self.positions[cell]
        self.seq_add(seq, position, position + 1, position // d - position)
    return len(cells)
'''},
            cause="each token is moved by itself, and refused where its neighbour stands already",
            look="the tokens of a group come to one position together",
        ),
        Mistake(
            "rounds up",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    return self._move(seq, p0, p1, lambda position: -(-position // d))
'''},
            cause="positions are rounded up, not down",
            look="positions // d",
        ),
        Mistake(
            "only turns on",
            edits={"Cells._move": (
                ("self.shifts[cell] += to - self.positions[cell]",
                 "self.shifts[cell] += abs(to - self.positions[cell])"),
            )},
            cause="the distance has lost its sign: every key is turned forward",
            look="positive means later, negative means earlier",
        ),
        Mistake(
            "divides from p0 on",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    return self._move(seq, p0, p1, lambda position: p0 + (position - p0) // d)
'''},
            cause="the distance from `p0` is divided, not the position",
            look="positions // d",
        ),
        Mistake(
            "forgives the debt",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    for cell in cells:
        self.positions[cell] //= d
        self.shifts[cell] = 0
    return len(cells)
'''},
            cause="a division sets `shifts` to 0, though no key has been turned",
            look="who turns the keys, and when?",
        ),
        Mistake(
            "notes a move, and is refused",
            edits={"Cells._move": (
                ("    self._require_can_move(seq, targets)\n",
                 "    for cell, to in targets.items():\n"
                 "        self.shifts[cell] += to - self.positions[cell]\n"
                 "    self._require_can_move(seq, targets)\n"),
                ("        self.shifts[cell] += to - self.positions[cell]\n"
                 "        self.positions[cell] = to\n",
                 "        self.positions[cell] = to\n"),
            )},
            cause="a move that is refused has changed `shifts`",
            look="every check comes before the first change",
        ),
        Mistake(
            "checks no move",
            edits={"Cells._move": (("    self._require_can_move(seq, targets)\n", ""),)},
            cause="a move is no longer refused where two tokens would come to one position, or "
            "another sequence's token would move along",
            look="`_require_can_move`",
        ),
        Mistake(
            "moves for every sequence",
            edits={"Cells._move": (
                ("self.cells_of(seq, p0, p1)", "self.cells_of(-1, p0, p1)"),
                ("self._require_can_move(seq, targets)", "self._require_can_move(-1, targets)"),
            )},
            cause="the tokens of all sequences are moved",
            look="`seq`",
        ),
        Mistake(
            "moves up to the end",
            edits={"Cells._move": (("self.cells_of(seq, p0, p1)", "self.cells_of(seq, p0)"),)},
            cause="`_move` ignores `p1`: positions after the range are moved, too",
            look="p0 <= position < p1",
        ),
        Mistake(
            "takes 0 for no end",
            edits={"Cells._move": (
                ("self.cells_of(seq, p0, p1)", "self.cells_of(seq, p0, p1 or None)"),
            )},
            cause="p1 = 0 is taken for no end: the range is empty, and all is moved",
            look="None is no end; 0 is",
        ),
        Mistake(
            "checks nothing for all",
            edits={"Cells._move": (
                ("    self._require_can_move(seq, targets)\n",
                 "    if seq >= 0:\n        self._require_can_move(seq, targets)\n"),
            )},
            cause="if seq is ALL, nothing is refused, though two tokens would come to one position",
            look="`_require_can_move` knows ALL",
        ),
        Mistake(
            "forgives what stays",
            sources={"Cells.seq_div": '''
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    cells = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
    before, shifts = self.positions[:], self.shifts
    self.shifts = [0] * self.num_cells
    for cell in cells:
        self.positions[cell] //= d
        self.shifts[cell] = shifts[cell] + self.positions[cell] - before[cell]
    return len(cells)
'''},
            cause="a division forgets what the cells outside the range have still to be turned",
            look="which shifts may a division change?",
        ),
    ),
    "11.7": (
        Mistake(
            "keeps them turned",
            edits={"UnturnedRing.store": (
                ("shift.turn(k.float(), -positions, self.frequencies).to(self.k.dtype)",
                 "k.to(self.k.dtype)"),
            )},
            cause="keys are stored as the model turned them, and turned once more when they are "
            "read",
            look="`store`: which turn takes a key back to position 0?",
        ),
        Mistake(
            "turns on instead of back",
            edits={"UnturnedRing.store": (("k.float(), -positions", "k.float(), positions"),)},
            cause="before it is stored, a key is turned to twice its position",
            look="the sign of the positions in `store`",
        ),
        Mistake(
            "turns by the cell",
            edits={"UnturnedRing.store": (
                ("torch.tensor([self.positions[cell] for cell in cells])",
                 "torch.tensor(list(cells))"),
            )},
            cause="a key is turned back by the number of its cell, not by its position",
            look="B's first token stands at position 0, in another cell",
        ),
        Mistake(
            "turns them once and for all",
            edits={"UnturnedRing.keys": (
                ("    return shift.turn(self.k[layer, :num_read].float(), positions, "
                 "self.frequencies)\n",
                 "    known = vars(self).setdefault('known', {})\n"
                 "    if (layer, num_read) not in known:\n"
                 "        known[layer, num_read] = shift.turn(\n"
                 "            self.k[layer, :num_read].float(), positions, self.frequencies)\n"
                 "    return known[layer, num_read]\n"),
            )},
            cause="keys that were turned once are returned again, though their cells have moved "
            "since",
            look="what may change between two reads?",
        ),
        Mistake(
            "reads what is kept",
            edits={"UnturnedRing.keys": (
                ("shift.turn(self.k[layer, :num_read].float(), positions, self.frequencies)",
                 "self.k[layer, :num_read].float()"),
            )},
            cause="keys are read as they are stored, all as if at position 0",
            look="`keys`: where does each cell stand?",
        ),
        Mistake(
            "turns back again",
            edits={"UnturnedRing.keys": (
                (".float(), positions, self", ".float(), -positions, self"),
            )},
            cause="keys are turned the wrong way when they are read",
            look="the sign of the positions in `keys`",
        ),
        Mistake(
            "turns by the shift",
            edits={"UnturnedRing.keys": (("self.positions[:num_read]", "self.shifts[:num_read]"),)},
            cause="keys are turned by how far their cells have moved, not to where they stand",
            look="what is kept stands at position 0",
        ),
        Mistake(
            "turns in the cache",
            edits={"UnturnedRing.keys": (
                ("    return shift.turn(self.k[layer, :num_read].float(), positions, "
                 "self.frequencies)\n",
                 "    self.k[layer, :num_read] = shift.turn(self.k[layer, :num_read].float(), "
                 "positions, self.frequencies)\n    return self.k[layer, :num_read].float()\n"),
            )},
            cause="`keys` writes the turned keys back: the next read turns them again",
            look="`keys` changes nothing that is kept",
        ),
        Mistake(
            "still turns before a step",
            sources={"UnturnedRing.apply_shifts": '''
def apply_shifts(self):
    return RingCache.apply_shifts(self)
'''},
            cause="before a step the stored keys of moved cells are turned, as in a ring that "
            "keeps them turned; `keys` then turns them again",
            look="does a move change what is kept?",
        ),
        Mistake(
            "keeps the debts",
            edits={"UnturnedRing.apply_shifts": (("self.shifts = [0] * self.num_cells", "pass"),)},
            cause="`shifts` still says that keys are to be turned",
            look="all of `self.shifts` are 0 after `apply_shifts`",
        ),
        Mistake(
            "reads in half precision",
            edits={"UnturnedRing.keys": (
                ("shift.turn(self.k[layer, :num_read].float(), positions, self.frequencies)",
                 "shift.turn(self.k[layer, :num_read], positions, self.frequencies).float()"),
            )},
            cause="keys are rounded once more when they are read",
            look="float32 before the turn, not after it",
        ),
        Mistake(
            "turns the whole buffer",
            edits={"UnturnedRing.keys": (
                ("self.positions[:num_read]", "self.positions"),
                ("self.k[layer, :num_read]", "self.k[layer]"),
            )},
            cause="the keys of all cells are returned, not those of the first num_read",
            look="`num_read`",
        ),
        Mistake(
            "rounds before the turn",
            edits={"UnturnedRing.store": (
                ("k.float(), -positions", "k.to(self.k.dtype).float(), -positions"),
            )},
            cause="keys are rounded before they are turned back, and once more afterwards",
            look="turn in float32; which of the two results goes into the cache?",
        ),
        Mistake(
            "one position for all",
            edits={"UnturnedRing.store": (
                ("torch.tensor([self.positions[cell] for cell in cells])",
                 "torch.tensor([self.positions[cells[0]]] * len(cells))"),
            )},
            cause="all keys of a batch are turned back by the position of the first",
            look="each cell has its own position",
        ),
        Mistake(
            "counts on from the first",
            edits={"UnturnedRing.store": (
                ("torch.tensor([self.positions[cell] for cell in cells])",
                 "self.positions[cells[0]] + torch.arange(len(cells))"),
            )},
            cause="positions are counted on from the batch's first token, but a batch may mix "
            "sequences",
            look="each cell has its own position",
        ),
        Mistake(
            "stores one slice",
            edits={"UnturnedRing.store": (
                ("self.k[layer, cells]", "self.k[layer, cells[0] : cells[0] + len(cells)]"),
            )},
            cause="the keys go into one run of cells, but `cells` may have gaps",
            look="these cells: are they always neighbours?",
        ),
        Mistake(
            "reads positions of one slice",
            edits={"UnturnedRing.store": (
                ("torch.tensor([self.positions[cell] for cell in cells])",
                 "torch.tensor(self.positions[cells[0] : cells[0] + len(cells)])"),
            )},
            cause="the positions are read from one run of cells, but `cells` may have gaps",
            look="these cells: are they always neighbours?",
        ),
        Mistake(
            "reads used cells alone",
            sources={"UnturnedRing.keys": '''
def keys(self, layer, num_read):
    used = [cell for cell in range(num_read) if self.positions[cell] != FREE]
    positions = torch.tensor([self.positions[cell] for cell in used])
    return shift.turn(self.k[layer, used].float(), positions, self.frequencies)
'''},
            cause="the keys of free cells are left out: row i is no longer cell i",
            look="(num_read, K, D), free cells included",
        ),
        Mistake(
            "remembers by the positions",
            sources={"UnturnedRing.keys": '''
def keys(self, layer, num_read):
    positions = tuple(self.positions[:num_read])
    known = vars(self).setdefault("known", {})
    if (layer, positions) not in known:
        known[layer, positions] = shift.turn(
            self.k[layer, :num_read].float(), torch.tensor(positions), self.frequencies)
    return known[layer, positions]
'''},
            cause="keys that were turned once are returned again, though others have been stored "
            "at the same positions",
            look="what may change between two reads?",
        ),
        Mistake(
            "fills free cells with NaN",
            edits={"UnturnedRing.keys": (
                ("    return shift.turn(self.k[layer, :num_read].float(), positions, "
                 "self.frequencies)\n",
                 "    found = shift.turn(self.k[layer, :num_read].float(), positions, "
                 "self.frequencies)\n    found[positions == FREE] = torch.nan\n"
                 "    return found\n"),
            )},
            cause="the keys of free cells are not finite",
            look="0 times NaN is NaN",
        ),
        Mistake(
            "reads as of the last step",
            edits={"UnturnedRing.keys": (
                ("torch.tensor(self.positions[:num_read])",
                 "torch.tensor(self.positions[:num_read]) - torch.tensor(self.shifts[:num_read])"),
            )},
            cause="keys are turned to where their cells stood before they moved",
            look="`positions`, as they are now",
        ),
        Mistake(
            "counts the moved cells",
            sources={"UnturnedRing.apply_shifts": '''
def apply_shifts(self):
    moved = sum(shift != 0 for shift in self.shifts)
    self.shifts = [0] * self.num_cells
    return moved
'''},
            cause="the cells that have moved are counted, though none of their keys is turned",
            look="how many keys were turned?",
        ),
        Mistake(
            "turns to the cell",
            edits={"UnturnedRing.keys": (
                ("torch.tensor(self.positions[:num_read])", "torch.arange(num_read)"),
            )},
            cause="keys are turned to the number of their cell, not to its position",
            look="`positions`",
        ),
        Mistake(
            "rounds the frequencies",
            edits={"UnturnedRing.keys": (
                ("positions, self.frequencies", "positions, self.frequencies.to(self.k.dtype)"),
            )},
            cause="the frequencies are rounded to the cache's dtype: far keys are turned by wrong "
            "angles",
            look="turn in float32: angles, too",
        ),
    ),
}  # fmt: skip
