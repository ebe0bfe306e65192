"""Chapter 09: mistakes that readers make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake

MISTAKES = {
    "09.1": (
        Mistake(
            "sums in float64",
            edits={"attend_heads": (("score = np.float32(0)", "score = 0.0"),)},
            cause="a sum that starts as 0.0 is a float64: every product is widened before it is "
            "added, and half as many fit into a register",
            look="how each sum starts: np.float32(0)",
        ),
        Mistake(
            "writes Python for Numba",
            edits={"attend_heads": (
                ("num_seqs, heads, dim = q.shape\n", "num_seqs, heads, *rest = q.shape\n"
                 "    dim = rest[0]\n"),
            )},
            cause="Numba does not compile this Python: it knows numbers, arrays, tuples, loops, "
            "the functions of `math` and many of NumPy's",
            look="the line that the report names: write it with loops and plain numbers",
        ),
        Mistake(
            "has room for 16 scores",
            edits={"attend_heads": (("scores = np.empty(block_size", "scores = np.empty(16"),)},
            cause="the array for the scores of a block does not have one element per slot",
            look="how many slots does a block have here? See `kv.shape`",
        ),
        Mistake(
            "starts the maximum at a number",
            edits={"attend_heads": (("np.float32(-np.inf)", "np.float32(-100)"),)},
            cause="`top` starts at a number, and all scores of a context may be far below it: then "
            "every weight is 0, and so is `total`",
            look="what is below every score?",
        ),
        Mistake(
            "has room for 64 channels",
            edits={"attend_heads": (("acc = np.empty(dim", "acc = np.empty(64"),)},
            cause="`acc` does not have exactly one element per channel",
            look="how many channels does a vector have here? See `q.shape`",
        ),
        Mistake(
            "reads whole blocks",
            edits={"attend_heads": (
                ("filled = min(block_size, context - i * block_size)", "filled = block_size"),
            )},
            cause="all slots of the last block are read, tokens or not",
            look="how many slots of block i are filled: at most what is left of the context",
        ),
        Mistake(
            "rounds the blocks down",
            edits={"attend_heads": (("(context + block_size - 1) // block_size",
                                     "context // block_size"),)},
            cause="the number of blocks is rounded down, so a last block that is not full is never "
            "read",
            look="7 tokens in blocks of 4 need 2 blocks",
        ),
        Mistake(
            "runs one block too far",
            edits={"attend_heads": (("(context + block_size - 1) // block_size",
                                     "context // block_size + 1"),)},
            cause="the loop runs one block too far when the last block is full",
            look="how many blocks of 4 do 8 tokens need?",
        ),
        Mistake(
            "takes positions for slots",
            edits={"attend_heads": (("block = block_tables[s, i]", "block = i"),)},
            cause="block i of the sequence is taken for block i of the pool: the table is not used",
            look="what translates a logical block into a physical one?",
        ),
        Mistake(
            "forgets to shrink acc",
            edits={"attend_heads": (("acc[d] *= shrink", "acc[d] *= np.float32(1)"),)},
            cause="`acc` is not rescaled when a larger score comes",
            look="what is relative to the old maximum?",
        ),
        Mistake(
            "forgets to shrink total",
            edits={"attend_heads": (("                total *= shrink\n", ""),)},
            cause="`total` is not rescaled when a larger score comes",
            look="what is relative to the old maximum?",
        ),
        Mistake(
            "forgets the scale",
            edits={"attend_heads": (("scores[t] = score * scale", "scores[t] = score"),)},
            cause="the scores are not divided by sqrt(D)",
            look="the formula of attention: softmax(q k / sqrt(D)) v",
        ),
        Mistake(
            "subtracts no maximum",
            edits={"attend_heads": (
                ("math.exp(scores[t] - new_top)", "np.exp(scores[t])"),
                ("math.exp(top - new_top)", "1.0"),
            )},
            cause="`exp` is applied to the score itself: large scores overflow and low ones become "
            "0",
            look="what is subtracted from a score before `exp`?",
        ),
        Mistake(
            "takes head h modulo K",
            edits={"attend_heads": (("h // (heads // kv_heads)", "h % kv_heads"),)},
            cause="query heads of a group are neighbours: head h reads KV head h // (H // K), not "
            "h % K",
            look="which KV head does query head 1 of 4 read, if there are 2?",
        ),
        Mistake(
            "does not begin anew",
            edits={"attend_heads": (
                ("            top, total = np.float32(-np.inf), np.float32(0)\n"
                 "            acc[:] = 0\n",
                 "            if h == 0:\n"
                 "                top, total = np.float32(-np.inf), np.float32(0)\n"
                 "                acc[:] = 0\n"),
            )},
            cause="`top`, `total` and `acc` still hold the previous head's values: they are reset "
            "for each sequence only",
            look="what must be reset for each query head?",
        ),
        Mistake(
            "does not divide",
            edits={"attend_heads": (("= acc[d] / total", "= acc[d]"),)},
            cause="the weighted sum is not divided by the sum of the weights",
            look="what do the weights of a softmax add up to?",
        ),
        Mistake(
            "reads values where keys are",
            edits={"attend_heads": (("kv[block, t, 1, kv_head, d]", "kv[block, t, 0, kv_head, "
                                                                    "d]"),)},
            cause="the weighted sum adds up keys, not values: index 0 is K, index 1 is V",
            look="the third index of kv",
        ),
        Mistake(
            "keeps the old maximum",
            edits={"attend_heads": (("                top = new_top\n", ""),
                                    ("                new_top = top\n", "                "
                                                                        "new_top = "
                                                                        "np.float32(-np.inf)\n"))},
            cause="`top` is never set to the new maximum, so each block discards the blocks before "
            "it",
            look="the three things that are carried from block to block",
        ),
    ),
    "09.2": (
        Mistake(
            "starts the maximum at 0",
            edits={"attend_groups": (("top[:] = -np.inf", "top[:] = 0"),)},
            cause="`top` starts at 0, and all scores of a context may be far below it: then every "
            "weight is 0, and so is `total`",
            look="what is below every score?",
        ),
        Mistake(
            "has room for 4 heads",
            edits={"attend_groups": (
                ("np.empty(group, np.float32), np.empty(group, np.float32)",
                 "np.empty(4, np.float32), np.empty(4, np.float32)"),
                ("np.empty((group, dim)", "np.empty((4, dim)"),
            )},
            cause="`top`, `total` and `acc` do not have one element or row per query head of a "
            "group",
            look="how many query heads does a group have here? See the shapes of `out` and `kv`",
        ),
        Mistake(
            "reads a block for each head",
            edits={"attend_groups": (
                ("        for i in range((context + block_size - 1) // block_size):\n"
                 "            block = block_tables[s, i]\n"
                 "            filled = min(block_size, context - i * block_size)\n"
                 "            for g in range(group):\n"
                 "                h = kv_head * group + g\n",
                 "        for g in range(group):\n"
                 "            h = kv_head * group + g\n"
                 "            for i in range((context + block_size - 1) // block_size):\n"
                 "                block = block_tables[s, i]\n"
                 "                filled = min(block_size, context - i * block_size)\n"),
            )},
            cause="each query head walks through all blocks before the next begins, so a group "
            "fetches every block G times",
            look="which loop is the outer one, over blocks or over heads?",
        ),
        Mistake(
            "counts the heads of q",
            edits={"attend_groups": (("heads, dim = out.shape[1:]", "heads, dim = q.shape[1:]"),)},
            cause="all heads of `q` are taken for queries: only the first H are, and `out` says "
            "how many that is",
            look="the shape of `out`: (S, H, D)",
        ),
        Mistake(
            "shares one maximum",
            edits={"attend_groups": (
                ("                new_top = top[g]\n", "                new_top = top[0]\n"),
                ("math.exp(top[g] - new_top)", "math.exp(top[0] - new_top)"),
                ("                top[g] = new_top\n", "                top[0] = new_top\n"),
            )},
            cause="all query heads of a group share one maximum, though each has its own scores",
            look="what does each head of a group need for itself?",
        ),
        Mistake(
            "adds all heads up",
            edits={"attend_groups": (
                ("acc[g, d] += weight", "acc[0, d] += weight"),
                ("acc[g, d] / total[g]", "acc[0, d] / total[g]"),
            )},
            cause="all query heads of a group add to the same row of `acc`",
            look="the shape of `acc`: (G, D)",
        ),
        Mistake(
            "does not begin anew",
            edits={"attend_groups": (
                ("        total[:] = 0\n        acc[:] = 0\n", ""),
                ("        top[:] = -np.inf\n", "        if item == first:\n"
                 "            top[:] = -np.inf\n            total[:] = 0\n"
                 "            acc[:] = 0\n"),
            )},
            cause="`top`, `total` and `acc` still hold the previous item's values",
            look="what must be reset for each item?",
        ),
        Mistake(
            "counts by KV head first",
            edits={"attend_groups": (
                ("s, kv_head = item // kv_heads, item % kv_heads",
                 "s, kv_head = item % len(context_lens), item // len(context_lens)"),
            )},
            cause="item w is KV head w % K of sequence w // K, not the other way round",
            look="items 1 and 2 of 2 sequences with 2 KV heads",
        ),
        Mistake(
            "spreads a group over KV heads",
            edits={"attend_groups": (
                ("                h = kv_head * group + g\n",
                 "                h = g * kv_heads + kv_head\n"),
                ("out[s, kv_head * group + g, d]", "out[s, g * kv_heads + kv_head, d]"),
            )},
            cause="query heads of a group are neighbours: kv_head * G to kv_head * G + G - 1",
            look="which query heads belong to KV head 1, with 4 heads on 2?",
        ),
        Mistake(
            "does everything",
            edits={"attend_groups": (
                ("for item in range(first, last):", "for item in range(len(q) * kv_heads):"),
            )},
            cause="`first` and `last` are not used: the call does all items",
            look="which rows of `out` belong to this call?",
        ),
        Mistake(
            "includes the last",
            edits={"attend_groups": (
                ("for item in range(first, last):",
                 "for item in range(first, min(last + 1, len(q) * kv_heads)):"),
            )},
            cause="the call does item `last` as well, which belongs to the next piece",
            look="items `first` to `last` - 1",
        ),
        Mistake(
            "reads whole blocks",
            edits={"attend_groups": (
                ("filled = min(block_size, context - i * block_size)", "filled = block_size"),
            )},
            cause="all slots of the last block are read, tokens or not",
            look="how many slots of block i are filled: at most what is left of the context",
        ),
        Mistake(
            "writes a group's first row only",
            edits={"attend_groups": (
                ("        for g in range(group):\n            for d in range(dim):\n"
                 "                out",
                 "        for g in range(1):\n            for d in range(dim):\n"
                 "                out"),
            )},
            cause="only the first query head of each group is written",
            look="how many rows of `out` belong to an item?",
        ),
    ),
    "09.3": (
        Mistake(
            "counts items",
            sources={"share": """
def share(context_lens, kv_heads, num_pieces):
    items = len(context_lens) * kv_heads
    cuts = [items * i // num_pieces for i in range(num_pieces + 1)]
    return list(zip(cuts, cuts[1:]))
"""},
            cause="the pieces have equal numbers of items, not equal work: one of them gets the "
            "long contexts",
            look="the work of an item is the number of tokens that it reads",
        ),
        Mistake(
            "counts sequences",
            edits={"share": (
                ("np.repeat(np.asarray(context_lens), kv_heads)", "np.asarray(context_lens)"),
            )},
            cause="there is one item per sequence here: each sequence has K of them",
            look="how many items do 2 sequences with 2 KV heads have?",
        ),
        Mistake(
            "drops the rest",
            sources={"share": """
def share(context_lens, kv_heads, num_pieces):
    items = len(context_lens) * kv_heads
    each = items // num_pieces
    return [(i * each, (i + 1) * each) for i in range(num_pieces)]
"""},
            cause="the number of items per piece is rounded down, so the last items are in no "
                  "piece",
            look="7 items in 2 pieces",
        ),
        Mistake(
            "overlaps",
            edits={"share": (("zip(cuts, [*cuts[1:], len(work)], strict=True)",
                              "zip(cuts, [*(cut + 1 for cut in cuts[1:]), len(work)], "
                              "strict=True)"),)},
            cause="an item at a cut is in both pieces",
            look="a piece (first, last) ends before `last`",
        ),
        Mistake(
            "makes pieces of equal size from the longest",
            sources={"share": """
def share(context_lens, kv_heads, num_pieces):
    work = [n for n in context_lens for _ in range(kv_heads)]
    pieces, first, held = [], 0, 0
    for item, tokens in enumerate(work):
        held += tokens
        if held >= sum(work) / num_pieces:
            pieces.append((first, item + 1))
            first, held = item + 1, 0
    return pieces
"""},
            cause="there are not always `num_pieces` pieces, and the last items may be in none",
            look="what is left when the last piece is not full? How many pieces for one item?",
        ),
        Mistake(
            "puts empty pieces at 0",
            sources={"share": """
def share(context_lens, kv_heads, num_pieces):
    work = [n for n in context_lens for _ in range(kv_heads)]
    pieces, first, held = [], 0, 0
    for item, tokens in enumerate(work):
        held += tokens
        if held * num_pieces >= sum(work) * (len(pieces) + 1) and len(pieces) < num_pieces - 1:
            pieces.append((first, item + 1))
            first = item + 1
    pieces.append((first, len(work)))
    return pieces + [(0, 0)] * (num_pieces - len(pieces))
"""},
            cause="empty pieces are put at (0, 0), not where the piece before them ends",
            look="the pieces lie side by side: where does an empty one lie after the last item?",
        ),
        Mistake(
            "puts the rest into the first",
            sources={"share": """
def share(context_lens, kv_heads, num_pieces):
    items = len(context_lens) * kv_heads
    cuts = [0, *(max(0, items - num_pieces + i) for i in range(1, num_pieces)), items]
    return list(zip(cuts, cuts[1:]))
"""},
            cause="all pieces but one have a single item",
            look="the even share is total / num_pieces, in tokens",
        ),
    ),
    "09.4": (
        Mistake(
            "zeroes the weights twice",
            edits={"attend_piece": (
                ("            acc[:] = 0\n            for p in range(context):\n",
                 "            acc[:] = 0\n"
                 "            whole = (context + block_size - 1) // block_size * block_size\n"
                 "            scores[g, context:whole] = 0\n            for p in range(whole):\n"
                 "                if p >= context:\n                    scores[g, p] = 0\n"),
            )},
            cause="slots without a token are still read, and 0 times NaN is NaN",
            look="what is a weight of 0 times an old NaN?",
        ),
        Mistake(
            "stops one token early",
            edits={"attend_piece": (
                ("            acc[:] = 0\n            for p in range(context):\n",
                 "            acc[:] = 0\n"
                 "            for p in range(context - 1 if context % block_size else context):\n"),
            )},
            cause="the newest token's value is left out",
            look="positions 0 to context - 1 are tokens",
        ),
        Mistake(
            "reads full blocks only",
            edits={"attend_piece": (
                ("            acc[:] = 0\n            for p in range(context):\n",
                 "            acc[:] = 0\n"
                 "            for p in range(context // block_size * block_size):\n"),
            )},
            cause="a last block that is not full is left out altogether",
            look="positions 0 to context - 1 are tokens",
        ),
        Mistake(
            "still shares the room",
            edits={"decode_in_pieces": (
                ("np.empty((num_pieces, group, room), np.float32)", "np.zeros((group, room), "
                                                                    "np.float32)"),
                ("[(*arrays, own, first, last) for own, (first, last) in zip(scores, pieces, "
                 "strict=True)]",
                 "[(*arrays, scores, first, last) for first, last in pieces]"),
            )},
            cause="two calls still get the same scratch memory for their scores",
            look="for each array that a call gets: which other call gets it, and which calls write "
            "to it?",
        ),
        Mistake(
            "gives two pieces room and no more",
            edits={"decode_in_pieces": (
                ("[(*arrays, own, first, last) for own, (first, last) in zip(scores, pieces, "
                 "strict=True)]",
                 "[(*arrays, scores[i % 2], *piece) for i, piece in enumerate(pieces)]"),
            )},
            cause="there is scratch memory for two pieces: a third one gets the first one's",
            look="how many calls are there, and which scratch memory does call 2 get?",
        ),
        Mistake(
            "leaves NaN out",
            edits={"attend_piece": (
                ("            acc[:] = 0\n            for p in range(context):\n",
                 "            acc[:] = 0\n"
                 "            whole = (context + block_size - 1) // block_size * block_size\n"
                 "            scores[g, context:whole] = 0\n            for p in range(whole):\n"),
                ("                for d in range(dim):\n                    acc[d] +=",
                 "                for d in range(dim):\n"
                 "                    if math.isnan(kv[block, offset, 1, kv_head, d]):\n"
                 "                        continue\n                    acc[d] +="),
            )},
            cause="slots without a token are still read, and only NaN is left out: 0 times "
            "infinity is NaN, too",
            look="which slots does the loop over the values read?",
        ),
        Mistake(
            "erases the slots of others",
            edits={"attend_piece": (
                ("            acc[:] = 0\n            for p in range(context):\n",
                 "            acc[:] = 0\n"
                 "            whole = (context + block_size - 1) // block_size * block_size\n"
                 "            scores[g, context:whole] = 0\n"
                 "            for p in range(context, whole):\n"
                 "                kv[block_tables[s, p // block_size], p % block_size, 1, kv_head] "
                 "= 0\n            for p in range(whole):\n"),
            )},
            cause="attention writes to the cache: it may read K and V, but `out` is all that it "
            "may write",
            look="which array may a call write to?",
        ),
        Mistake(
            "makes the calls one after another",
            edits={"decode_in_pieces": (
                ("    scores = np.empty((num_pieces, group, room), np.float32)\n",
                 "    scores = np.empty((group, room), np.float32)\n"),
                ("    run(\n        attend_piece,\n        [(*arrays, own, first, last) for own, "
                 "(first, last) in zip(scores, pieces, strict=True)],\n    )\n",
                 "    for first, last in pieces:\n"
                 "        run(attend_piece, [(*arrays, scores, first, last)])\n"),
            )},
            cause="the pieces wait for each other, because each is given to a `run` of its own: "
            "none of them run side by side",
            look="one `run` gets all calls; what may they share then?",
        ),
        Mistake(
            "makes one piece of all",
            edits={"decode_in_pieces": (
                ("share(context_lens.tolist(), kv.shape[3], num_pieces)",
                 "[(0, len(q) * kv.shape[3])] * num_pieces"),
            )},
            cause="every call computes all items, so all calls write the same rows of `out`",
            look="which items does each call get?",
        ),
    ),
    "09.5": (
        Mistake(
            "reads the weights for each row",
            edits={"matmul": (
                ("    fours = rows // 4 * 4\n    for o in range(first, last):\n"
                 "        for row in range(0, fours, 4):\n", "    fours = 0\n"
                 "    for o in range(0):\n        for row in range(0, fours, 4):\n"),
                ("        for row in range(fours, rows):\n            total",
                 "    for row in range(rows):\n        for o in range(first, last):\n"
                 "            total"),
            )},
            cause="the loop over the rows of x is the outermost, so the whole weight is read again "
            "for each row",
            look="in which order are the loops nested?",
        ),
        Mistake(
            "forgets the rows left over",
            edits={"matmul": (
                ("        for row in range(fours, rows):", "        for row in range(fours, "
                                                           "fours):"),
            )},
            cause="the rows left over after the last four are not computed",
            look="5 rows: four at a time, and then?",
        ),
        Mistake(
            "leaves out rows below four",
            edits={"matmul": (
                ("        for row in range(fours, rows):",
                 "        for row in range(fours if fours else rows, rows):"),
            )},
            cause="if there are fewer than four rows, none is computed",
            look="what does the loop do for a single row?",
        ),
        Mistake(
            "always adds",
            edits={"matmul": (
                ("total + out[row, o] if add else total", "total + out[row, o]"),
                ("a + out[row, o] if add else a", "a + out[row, o]"),
                ("b + out[row + 1, o] if add else b", "b + out[row + 1, o]"),
                ("c + out[row + 2, o] if add else c", "c + out[row + 2, o]"),
                ("d + out[row + 3, o] if add else d", "d + out[row + 3, o]"),
            )},
            cause="the product is always added, so what was in `out` before is still in it",
            look="what must `out` hold if `add` is false?",
        ),
        Mistake(
            "never adds",
            edits={"matmul": (
                ("total + out[row, o] if add else total", "total"),
                ("a + out[row, o] if add else a", "a"),
                ("b + out[row + 1, o] if add else b", "b"),
                ("c + out[row + 2, o] if add else c", "c"),
                ("d + out[row + 3, o] if add else d", "d"),
            )},
            cause="`add` is not used: what was in `out` is overwritten",
            look="what must `out` hold if `add` is true?",
        ),
        Mistake(
            "adds for one row only",
            edits={"matmul": (
                ("b + out[row + 1, o] if add else b", "b"),
                ("c + out[row + 2, o] if add else c", "c"),
                ("d + out[row + 3, o] if add else d", "d"),
            )},
            cause="`add` is used for only some of the four rows",
            look="each of the four sums has its own row of `out`",
        ),
        Mistake(
            "computes all outputs",
            edits={"matmul": (("for o in range(first, last):", "for o in range(len(weight)):"),)},
            cause="`first` and `last` are not used: other pieces' columns are written, too",
            look="which columns of `out` belong to this call?",
        ),
        Mistake(
            "counts columns from 0",
            edits={"matmul": (
                ("out[row, o] = total + out[row, o] if add else total",
                 "out[row, o - first] = total + out[row, o - first] if add else total"),
            )},
            cause="the columns of `out` are counted from `first`, but `out` is the whole matrix",
            look="output o belongs in column o",
        ),
        Mistake(
            "has room for 16 rows",
            sources={"matmul": """
@compiled
def matmul(x, weight, out, add, first, last):
    rows, inputs = x.shape
    sums = np.empty(16, np.float32)
    for o in range(first, last):
        for row in range(rows):
            sums[row] = out[row, o] if add else np.float32(0)
        for i in range(inputs):
            for row in range(rows):
                sums[row] += weight[o, i] * x[row, i]
        for row in range(rows):
            out[row, o] = sums[row]
"""},
            cause="the array of sums does not have one element per row of x",
            look="how many rows does x have? See `x.shape`",
        ),
        Mistake(
            "multiplies row 0 four times",
            edits={"matmul": (
                ("b += w * x[row + 1, i]", "b += w * x[row, i]"),
                ("c += w * x[row + 2, i]", "c += w * x[row, i]"),
                ("d += w * x[row + 3, i]", "d += w * x[row, i]"),
            )},
            cause="all four sums use the same row of x",
            look="which row of x does the second sum belong to?",
        ),
    ),
    "09.6": (
        Mistake(
            "knows eps by heart",
            edits={"decode_step": (
                ("rms_norm(x, weights.norm_1[layer], weights.eps, normed)",
                 "rms_norm(x, weights.norm_1[layer], np.float32(1e-5), normed)"),
                ("rms_norm(x, weights.norm_2[layer], weights.eps, normed)",
                 "rms_norm(x, weights.norm_2[layer], np.float32(1e-5), normed)"),
                ("rms_norm(x, weights.norm, weights.eps, normed)",
                 "rms_norm(x, weights.norm, np.float32(1e-5), normed)"),
            )},
            cause="eps is written into the program, but each model has its own",
            look="the fields of `Weights`",
        ),
        Mistake(
            "has room for 64 sequences",
            edits={"decode_step": (
                ("    x = np.empty((num_seqs, hidden), np.float32)\n",
                 "    x = np.empty((64, hidden), np.float32)[:num_seqs]\n"),
            )},
            cause="an array has a fixed number of rows, but there may be more sequences",
            look="the rows of each array that you make: `num_seqs`",
        ),
        Mistake(
            "forgets the last norm",
            edits={"decode_step": (
                ("    rms_norm(x, weights.norm, weights.eps, normed)\n"
                 "    matmul(normed, weights.head",
                 "    matmul(x, weights.head"),
            )},
            cause="the head gets x as the last layer left it, not normalised",
            look="`Transformer.forward`: what does it return?",
        ),
        Mistake(
            "forgets a residual",
            edits={"decode_step": (
                ("weights.out[layer], x, True, 0, hidden)", "weights.out[layer], x, False, 0, "
                                                            "hidden)"),
            )},
            cause="attention's output replaces x instead of being added to it",
            look="what is added to x, and when?",
        ),
        Mistake(
            "forgets the MLP's residual",
            edits={"decode_step": (
                ("weights.down[layer], x, True, 0, hidden)", "weights.down[layer], x, False, "
                                                             "0, hidden)"),
            )},
            cause="the MLP's output replaces x instead of being added to it",
            look="what is added to x, and when?",
        ),
        Mistake(
            "attends before it writes",
            edits={"decode_step": (
                ("        rotate_and_write(by_head, weights.rope, positions, slots, kv[layer], 0, "
                 "num_seqs)\n", ""),
                ("attended, 0, num_seqs * kv_heads)\n",
                 "attended, 0, num_seqs * kv_heads)\n"
                 "        rotate_and_write(by_head, weights.rope, positions, slots, kv[layer], 0, "
                 "num_seqs)\n"),
            )},
            cause="attention runs before the new token's K and V are in their slots, and with "
            "queries that are not rotated",
            look="what must lie in the cache before attention reads it?",
        ),
        Mistake(
            "takes the keys for queries",
            edits={"decode_step": (
                ("attend_groups(by_head, blocks,",
                 "attend_groups(by_head[:, kv_heads:].copy(), blocks,"),
            )},
            cause="the heads that attention gets do not begin with the first query: a projection "
            "holds the queries first, then the keys, then the values",
            look="which heads of the projection are the queries?",
        ),
        Mistake(
            "always reads layer 0",
            edits={"decode_step": (
                ("blocks = kv[layer].reshape", "blocks = kv[0].reshape"),
            )},
            cause="every layer attends to the K and V of layer 0",
            look="which layer's slots are written, and which are read?",
        ),
        Mistake(
            "takes slots for positions",
            edits={"decode_step": (
                ("weights.rope, positions, slots, kv[layer]",
                 "weights.rope, slots % len(weights.rope), slots, kv[layer]"),
            )},
            cause="RoPE rotates by the slot, but a token's angle depends on its position",
            look="positions and slots are two different numbers",
        ),
        Mistake(
            "normalises once",
            edits={"decode_step": (
                ("        rms_norm(x, weights.norm_2[layer], weights.eps, normed)\n", ""),
            )},
            cause="the MLP gets what was normalised before attention: x has changed since",
            look="how many norms does a layer have?",
        ),
        Mistake(
            "swaps the norms",
            edits={"decode_step": (
                ("weights.norm_1[layer]", "weights.norm_B[layer]"),
                ("weights.norm_2[layer]", "weights.norm_1[layer]"),
                ("weights.norm_B[layer]", "weights.norm_2[layer]"),
            )},
            cause="the two norms of a layer are swapped",
            look="norm_1 comes before attention, norm_2 before the MLP",
        ),
        Mistake(
            "attends for the first sequence only",
            edits={"decode_step": (
                ("attended, 0, num_seqs * kv_heads)", "attended, 0, num_seqs)"),
            )},
            cause="there are S * K items, and only S of them are computed",
            look="what is an item of `attend_groups`?",
        ),
        Mistake(
            "repeats layer 0",
            edits={"decode_step": (
                ("weights.qkv[layer]", "weights.qkv[0]"), ("weights.out[layer]", "weights.out[0]"),
                ("weights.gate_up[layer]", "weights.gate_up[0]"),
                ("weights.down[layer]", "weights.down[0]"),
            )},
            cause="every layer uses the weights of layer 0",
            look="which of the arrays have a layer as their first index?",
        ),
    ),
}  # fmt: skip
