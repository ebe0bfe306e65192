"""Chapter 11 as programs: slots, turned keys, shifted contexts, rolling buffers, moves."""

import dataclasses
import random
from string import ascii_lowercase
from typing import Any

import torch

import minikv
from minikv.course.chapters.ch11_ring_cache.given import filled, layout_of, ring_on
from minikv.course.judge.checking import (
    in_place_of,
    plain,
    runs_model,
    same_as_oracle,
    tinypy,
    witness,
)
from minikv.course.judge.programs import under
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.ring import (
    ALL,
    Move,
    RingCache,
    SelfExtendCache,
    SelfExtendRing,
    defragment,
    generate_in_parallel,
    generate_with_ring,
    with_config,
)
from minikv.ring.cells import FREE, OutOfCells
from minikv.ring.shift import turn

PROMPT = "class Queue:\n    def push(self, item):\n        self."


def name_of(seq: int) -> str:
    return "every sequence" if seq == ALL else chr(ord("A") + seq)


def tried(log: Log, text: str, function, *arguments, see: bool = True) -> Any:
    """`log.call`, and a word where the call was refused, so that the story goes on."""
    found = log.call(text, function, *arguments, see=see)
    if log.events[-1].error is not None:
        log("it is refused")
    return found


# ── 11.1 Find a slot ──────────────────────────────────────────────────────────


def slots(mine, program, log: Log) -> None:
    layout, head, num_tokens = program
    cells = filled(mine.Cells(len(layout)), layout, head)
    log(f"cells {layout}, head at {head}")
    log.call(f"find_slot({num_tokens})", cells.find_slot, num_tokens)
    error = log.events[-1].error
    log("", {"head afterwards:": cells.head, "cells afterwards:": layout_of(cells)})
    log("", {"positions afterwards:": cells.positions, "shifts afterwards:": cells.shifts})
    if isinstance(error, OutOfCells):
        told = [error.needed, error.free, error.longest_run]
        log("", {"OutOfCells says needed, free, longest_run:": told})


def traffic(mine, program, log: Log) -> None:
    """Steps: A+3 places three tokens of A, A- removes A, A<2 takes its last two tokens back."""
    num_cells, steps = program
    cells = mine.Cells(num_cells)
    log(f"a ring of {num_cells} cells")
    for step in steps.split():
        seq, count = ord(step[0]) - ord("A"), int(step[2:] or 0)
        end = cells.seq_pos_max(seq) + 1
        if step[1] == "+":
            text = f"{count} tokens of {step[0]} are placed"
            tried(log, text, cells.place, list(range(end, end + count)), [seq] * count)
        elif end > 0:
            cells.seq_rm(seq, max(0, end - count) if step[1] == "<" else 0)
            log(f"{step[0]} loses {'its last ' + str(count) if step[1] == '<' else 'all'}")
        log("", {"cells:": layout_of(cells), "head:": cells.head})


def random_traffic(seed: int) -> tuple[int, str]:
    draw = random.Random(seed)
    steps = []
    for _ in range(6 + seed // 3):
        name = draw.choice("ABC")
        kind = draw.choice("+++++<-")
        steps.append(f"{name}{kind}{draw.randrange(1, 6) if kind != '-' else ''}")
    return 8 + seed % 9, " ".join(steps)


def random_layouts(count: int) -> list[tuple[str, int, int]]:
    draw = random.Random(11)
    found = []
    for size in (4, 6, 9, 13):
        for _ in range(count // 4):
            share = draw.random()
            cells = "".join(
                "." if draw.random() < share else draw.choice("AB") for _ in range(size)
            )
            found.append((cells, draw.randrange(size), draw.randrange(1, size + 1)))
    return found


scenario("11.1", slots,
    Group("an empty ring, and one that is filled in front",
          [("....", 0, 1), ("....", 0, 4), ("AA....", 2, 3), ("AA....", 0, 3), ("A.....", 1, 5)],
          "which cells does a run that begins at `head` take?"),
    Group("holes that are too small are passed over",
          [("A.A..A...", 0, 2), ("A.A..A...", 0, 3), (".A.A.A..", 0, 2), (".AAA....", 0, 2)],
          "all cells of the run have to be free, not only the first"),
    Group("from the head on, then once from the beginning",
          [("..AA..", 4, 2), ("..AA..", 5, 2), ("...A.A", 4, 2), ("....AA", 4, 1),
          ("..AA.A", 3, 2)],
          "where does the search begin, and where does it continue after the last cell?"),
    Group("no run continues past the end", [("...A..", 4, 3), (".AA...", 5, 1), (".AAA..", 4, 3),
          ("A.AA..", 4, 2)], "start + num_tokens against num_cells"),
    Group("a run may begin before the head and extend past it",
          [("......", 3, 5), ("A.....", 3, 4), ("A.....", 3, 5), ("......", 5, 6)],
          "where have runs been tried when the search gives up?"),
    Group("no run: OutOfCells, though cells may be free",
          [("AAAA", 0, 1), ("A.A.", 0, 2), (".A.A", 3, 2), (".AA.", 0, 2), ("AB..", 2, 3)],
          "what happens after the last start has been tried?"),
    Group("what can never fit is refused", [("....", 0, 5), ("....", 0, 0), ("....", 0, -1),
          ("AAAA", 0, 5)],
          "a number that no ring of this size can hold: would it help to wait for free cells?"),
    Group("120 random rings", random_layouts(120),
          "which starts were tried before the one that is right, and why was that passed over?"),
)  # fmt: skip
scenario("11.1", traffic,
    Group("40 random traces of batches that come and go",
          [random_traffic(seed) for seed in range(40)],
          "where does `head` stand when the batch that differs comes?"),
)  # fmt: skip


# ── 11.2 Turn a key further ────────────────────────────────────────────────────────


def keys_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def by_hand(mine, program, log: Log) -> None:
    pair, degrees = program
    k = torch.tensor([[pair]])  # (1, 1, 2)
    text = f"the pair {pair}, moved by 1 at {degrees} degrees per position"
    turned = log.call(
        text, mine.turn, k, torch.tensor([1]), torch.tensor([degrees * torch.pi / 180]), see=False
    )
    found = [round(x, 3) + 0.0 for x in plain(turned.flatten())] if is_tensor(turned) else turned
    log(text, {"": found})
    log("", {"k afterwards": k})


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def turns(mine, program, log: Log) -> None:
    shape, deltas, dtype, *layout = program
    k = keys_of(shape, dtype)
    if layout:  # as the model hands them over: heads in front of cells in memory
        k = k.transpose(-2, -3).contiguous().transpose(-2, -3)
    frequencies = 10_000.0 ** -(torch.arange(0, shape[-1], 2) / shape[-1])
    moved = torch.tensor(deltas)
    log(f"k {tuple(shape)}, {str(dtype).removeprefix('torch.')}, deltas {deltas}")
    result = log.call("turn", mine.turn, k.detach(), moved, frequencies, see=False)
    if not is_tensor(result):
        log("turn", {"what is returned:": result})
        return
    seen: dict[str, Any] = {"dtype": str(result.dtype), "shape": list(result.shape)}
    if dtype == torch.float32:
        seen["keys:"] = result
    elif result.shape == k.shape:
        a, b = k.double().chunk(2, -1)
        angles = moved.double()[:, None, None] * frequencies.double()
        exact = torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        )
        rounding = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
        off = (result.double() - exact).abs()
        seen["as close as one rounding allows:"] = bool(
            (off <= rounding * exact.abs() + 1e-5).all()
        )
    log("turn", seen)


def there_and_back(mine, program, log: Log) -> None:
    shape, steps = program
    k = keys_of(shape, torch.float32)
    frequencies = 10_000.0 ** -(torch.arange(0, shape[-1], 2) / shape[-1])
    now = k.clone()
    for step in steps:
        deltas = torch.full((shape[-3],), step)
        now = log.call(f"moved by {step}", mine.turn, now, deltas, frequencies, see=False)
        if not is_tensor(now):
            return
    log("", {f"after moves that sum to {sum(steps)}:": now})


HEADS_FIRST = "heads first"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
scenario("11.2", by_hand,
    Group("one pair of channels, by hand", [([1.0, 0.0], 90), ([0.0, 1.0], 90), ([1.0, 0.0], 30),
          ([3.0, 4.0], 180), ([2.0, 1.0], -90)], "(a, b) becomes (a cos − b sin, b cos + a sin)"),
)  # fmt: skip
scenario("11.2", turns,
    Group("several pairs: channel i with channel i + D/2",
          [((1, 1, 4), [1], F32), ((1, 1, 8), [3], F32), ((1, 1, 64), [10], F32)],
          "which two channels make a pair, and which frequency has each pair?"),
    Group("each cell by its own delta, all its heads alike",
          [((2, 1, 4), [1, 5], F32), ((3, 2, 4), [4, 0, -4], F32), ((2, 2, 4), [1, 5], F32),
          ((5, 2, 16), [-1, -2, 0, 7, 100], F32)],
          "deltas belong to the third dimension from the end"),
    Group("layers in front, and no move at all",
          [((3, 2, 2, 4), [6, -2], F32), ((5, 4, 2, 8), [0, 0, 0, 0], F32),
          ((2, 1, 3, 4), [9], F32)], "dimensions before (N, K, D) are left as they are"),
    Group("another layout in memory, and sizes of 1 and 0",
          [((3, 2, 4), [1, 5, -2], F32, HEADS_FIRST), ((2, 3, 2, 8), [9, 1, 4], BF16, HEADS_FIRST),
          ((1, 1, 1, 2), [3], F32), ((2, 0, 2, 4), [], F32), ((1, 3, 1, 4), [1, 2, 3], F16)],
          "which of your lines ask for memory in one piece, or for more than one of something?"),
    Group("float16 and bfloat16: rounded once, at the end",
          [((2, 1, 8), [300, -300], F16), ((2, 1, 8), [300, -300], BF16),
          ((4, 2, 64), [1, 50, -77, 512], BF16)],
          "compute in float32, and go back to the dtype of k in the last line"),
    Group("far away", [((1, 1, 2), [100_000], F32), ((2, 1, 8), [-77_777, 1_000_000], F32),
          ((1, 2, 8), [30_000_001], F32), ((1, 1, 4), [-(2**31) + 7], F32)],
          "how many digits does an angle of 100,000 have in float32?"),
)  # fmt: skip
scenario("11.2", there_and_back,
    Group("moves add up", [((2, 1, 4), (5, -5)), ((2, 1, 4), (3, 4)), ((3, 2, 16), (-7, 3, 4)),
          ((1, 1, 8), (1,) * 9), ((0, 2, 4), (3,))], "a move back has to undo a move forward"),
)  # fmt: skip


# ── 11.3 The context shift ────────────────────────────────────────────────────

# A program is (cells in the ring, steps). Steps: "A+8" places 8 tokens; "A>B5" gives A's first 5
# to B as well; "A!4" a context shift that keeps 4; "A!4,3" one that discards 3; "A/2,5" drops
# positions 2 to 4; "A-2,5" only removes them; "A:4" divides all positions by 4.


def share(cells, step: str, log: Log) -> None:
    """ "A>B5" gives A's first 5 to B as well, "A>B2,5" positions 2 to 4."""
    source, target, (p0, p1) = step[0], step[2], [0, *map(int, step[3:].split(","))][-2:]
    cells.seq_cp(ord(source) - ord("A"), ord(target) - ord("A"), p0, p1)
    log(f"{target} shares the first {p1} of {source}" if p0 == 0 else
        f"{target} shares positions {p0} to {p1 - 1} of {source}")  # fmt: skip


def append(cells, seq: int, count: int) -> list[int]:
    """The cells of the next tokens of a sequence."""
    end = cells.seq_pos_max(seq) + 1
    return cells.place(list(range(end, end + count)), [seq] * count)


def a_move(cells, seq: int, kind: str, rest: str) -> tuple:
    """ "~" and "2,5,-1" are seq_add of positions 2 to 4, "%" is seq_div: in words, and a call."""
    p0, p1, by = rest.split(",")
    move, word = (cells.seq_add, "add") if kind == "~" else (cells.seq_div, "div")
    text = f"seq_{word}({name_of(seq)}, {p0}, {p1 or None}, {by})"
    return text, move, seq, int(p0), int(p1) if p1 else None, int(by)


def lose(cells, step: str, log: Log) -> None:
    """ "A-2,5" removes A's positions 2 to 4."""
    p0, p1 = map(int, step[2:].split(","))
    cells.seq_rm(ord(step[0]) - ord("A"), p0, p1)
    log(f"{step[0]} loses positions {p0} to {p1 - 1}")


def shifts(mine, program, log: Log) -> None:
    num_cells, steps = program
    cells = mine.Cells(num_cells)
    log(f"a ring of {num_cells} cells")
    for step in steps.split():
        seq, kind, rest = ord(step[0]) - ord("A"), step[1], step[2:]
        if kind == "+":
            append(cells, seq, int(rest))
            log(f"{step[0]} gets {rest} tokens")
        elif kind == ">":
            share(cells, step, log)
        elif kind == "-":
            lose(cells, step, log)
        elif kind == ":":
            cells.seq_div(seq, 0, None, int(rest))
            log(f"the positions of {step[0]} are divided by {rest}")
        elif kind == "/":
            p0, p1 = map(int, rest.split(","))
            tried(log, f"drop({step[0]}, {p0}, {p1})", cells.drop, seq, p0, p1, see=False)
        else:
            keep, _, gone = rest.partition(",")
            n_discard = int(gone) if gone else None
            text = f"context_shift of {step[0]}, n_keep {keep}"
            text += "" if n_discard is None else f", n_discard {gone}"
            tried(log, text, mine.context_shift, cells, int(keep), seq, n_discard)
        log(
            "",
            {
                "positions:": shown_positions(cells),
                "cells:": layout_of(cells),
                "keys to be turned by": dict_of(cells.shifts),
            },
        )


def shown_positions(cells) -> list[int | str]:
    return ["." if position == FREE else position for position in cells.positions]


def dict_of(shifts: list[int]) -> dict[int, int]:
    return {cell: shift for cell, shift in enumerate(shifts) if shift}


def random_shifts(seed: int) -> tuple[int, str]:
    draw = random.Random(seed)
    steps, tokens = [], {"A": draw.randrange(3, 9), "B": draw.randrange(0, 5)}
    steps += [f"{name}+{count}" for name, count in tokens.items() if count]
    if seed % 3 == 0:
        first = draw.choice((0, 0, draw.randrange(tokens["A"])))
        steps.append(f"A>C{first},{draw.randrange(first, tokens['A']) + 1}")
    for _ in range(3 + seed // 12):
        name = draw.choice("AAB")
        if draw.random() < 0.5:
            steps.append(f"{name}!{draw.randrange(0, 5)}")
        elif draw.random() < 0.5:
            steps.append(f"{name}!{draw.randrange(0, 4)},{draw.randrange(1, 6)}")
        else:
            p0 = draw.randrange(0, 5)
            steps.append(f"{name}/{p0},{p0 + draw.randrange(0, 4)}")
        steps.append(f"{name}+{draw.randrange(1, 3)}")
    return 40, " ".join(steps)


in_8, in_16 = under(8), under(16)
scenario("11.3", shifts,
    Group("a gap is closed", [*in_8("A+6 A/1,3", "A+6 A/0,2", "A+6 A/2,3"), (12, "A+9 A/3,8")],
          "what stands at p1 stands at p0 afterwards"),
    Group("nothing follows, or nothing is left, or nothing goes",
          in_8("A+6 A/4,6", "A+6 A/2,9", "A+6 A/0,6", "A+6 A/3,3", "A+6 A/6,8"),
          "is there a token from p1 on?"),
    Group("half of what is not kept", [*in_8("A+8 A!0", "A+8 A!2", "A+8 A!1"), *in_16("A+9 A!4"),
          *in_8("A+4 A!2", "A+8 A!2,1", "A+8 A!2,6", "A+8 A-2,4 A!0", "A+8 A:4 A!0")],
          "n_keep, then n_discard, then what remains"),
    Group("shift, continue, shift again", [(8, "A+8 A!2 A+3 A!2"), (8, "A+8 A!0 A+4 A!0 A+4 A!0"),
          (6, "A+6 A!1,1 A+1 A!1,1")], "moves of a key add up until it is turned"),
    Group("other sequences stay as they are",
          in_16("A+6 B+6 A!2", "B+3 A+8 B!1 A!0", "A+6 B+2 A/1,4"),
          "whose cells are removed and moved?"),
    Group("shared cells: kept, or given up, but never moved for one sequence alone",
          [*in_16("A+8 A>B3 A!3", "A+8 A>B4 A!0", "A+8 A>B6 A!2", "A+8 A>B8 A!2"),
          *in_16("A+8 A>B5 A/2,4", "A+8 A>B8 B!0", "A+8 A>B6,8 A!2", "A+8 A>B3,5 A/1,3"),
          *in_16("A+8 A>B7,8 A/0,2", "A+8 A>B2,4 A!4", "A+9 A>B4,6 A/4,6")],
          "check whether a cell is shared before anything is removed"),
    Group("what is impossible is refused, and changes nothing",
          [*in_8("A+2 A!1,1", "A+8 A!7", "A+8 A!8", "A+8 A!9", "A+8 A!-1", "A+8 A!2,7"),
          *in_8("A+8 A!2,0", "A+4 B!0", "A+6 A/4,2")],
          "half of what is left would be nothing: n_keep is too large"),
    Group("60 random traces", [random_shifts(seed) for seed in range(60)],
          "at the step that differs: was the cell moved before, or is it shared?"),
    Group("a ring of 3,000 cells", [(3000, "A+2900 A!4 A+9 A/100,1200")],
          "how deep may a function call itself, and how many cells may there be?"),
)  # fmt: skip


# ── 11.4 A buffer that rolls ──────────────────────────────────────────────────


def config_of(windows: tuple[int | None, ...], head_dim: int) -> minikv.ModelConfig:
    return dataclasses.replace(
        tinypy().config,
        num_layers=len(windows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        windows=windows,
    )


def seen_by(weights: torch.Tensor) -> list[int]:
    return [place for place, weight in enumerate(plain(weights)) if weight > 1e-6]


def masks(mine, program, log: Log) -> None:
    query, key, window = program
    text = f"in_window, queries at {query}, keys at {key}, window {window}"
    found = log.call(
        text, mine.in_window, torch.tensor(query), torch.tensor(key), window, see=False
    )
    log(text, {"": plain(found.int()) if is_tensor(found) else found})


def rolls(mine, program, log: Log) -> None:
    """Every value is a unit vector that names its position, and all scores are equal: what comes
    out of attention says which positions were seen."""
    windows, chunks = program
    total = sum(chunks)
    cache = mine.RollingCache(config_of(windows, 32), None, total)
    log(f"windows {windows}, cells {cache.sizes}")
    done = 0
    for count in chunks:
        positions = list(range(done, done + count))
        text = f"tokens {positions[0]} to {positions[-1]}" if count > 1 else f"token {done}"
        v = torch.eye(32)[positions].unsqueeze(1)  # (T, 1, D)
        zero = torch.zeros_like(v)
        seen: dict[str, Any] = {}
        for layer in range(len(windows)):
            out = log.call("" if layer else text, cache.attend, layer, zero, zero, v, see=False)
            if not is_tensor(out):
                return
            rows = zip(positions, out[:, 0], strict=True)
            seen |= {f"layer {layer}, token {p} sees": seen_by(row) for p, row in rows}
        done += count
        log(text, seen)
        for size in dict.fromkeys(cache.sizes):
            found = log.call("", cache.held, size, see=False)
            log(text, {f"positions in a buffer of {size}:": plain(found)})
            log(text, {"they are": str(getattr(found, "dtype", type(found)))})
        log("", {"num_tokens": cache.num_tokens})
        log("", {"layers of the chunk that `_chunk` still holds:": len(cache._chunk)})


def attended(mine, program, log: Log) -> None:
    """Random queries, keys and values: the numbers themselves."""
    windows, chunks, seed, dtype = program
    cache = mine.RollingCache(config_of(windows, 4), None, sum(chunks), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    log(f"windows {windows}, chunks of {list(chunks)}, buffers of {dtype}")
    for count in chunks:
        for layer in range(len(windows)):
            q, k, v = torch.randn(3, count, 1, 4, generator=generator)
            out = log.call("", cache.attend, layer, q, k, v, see=False)
            log(f"layer {layer}, {cache.num_tokens} tokens before", {"out:": out})


def random_chunks(seed: int) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    draw = random.Random(seed)
    window = draw.randrange(1, 7)
    chunks = tuple(draw.randrange(1, window + 1) for _ in range(draw.randrange(3, 9)))
    return (window, draw.choice((None, window + 2))), chunks[: 32 // window]


scenario("11.4", masks,
    Group("which queries see which keys", [([0], [0], 1), ([3], [0, 1, 2, 3, 4], None),
          ([10], [2], None), ([3], [0, 1, 2, 3], 2), ([6, 7], [4, 5, 2, 3, 6, 7], 4),
          ([5, 6], [4, 1, 2, 3, 5, 6], 1), ([2**30], [2**30 - 2, 2**30 - 1, 2**30, 2**30 + 1], 2)],
          "not later than the query, and the last `window` positions, its own included"),
)  # fmt: skip
scenario("11.4", rolls,
    Group("until the window is full", [((4,), (1,)), ((4,), (1, 1, 1)), ((4,), (3,)),
          ((4,), (2, 2)), ((1,), (1, 1, 1))], "a buffer that is not full has fewer cells in use"),
    Group("one token at a time, over the edge",
          [((4,), (4, 1)), ((4,), (1,) * 7), ((3,), (3, 1, 1, 1, 1)), ((4,), (4, 1, 1, 1, 1, 1))],
          "position mod W: which token does the new one replace?"),
    Group("chunks that cross the edge", [((4,), (3, 3)), ((4,), (4, 4)), ((4,), (2, 4, 3)),
          ((5,), (3, 5, 4, 1, 2))],
          "a query sees the last W positions, whether they are in the buffer or in the chunk"),
    Group("buffers of two sizes", [((4, None), (4, 4)), ((None, 3), (2, 3, 1)),
          ((2, 4), (2, 2, 2, 1)), ((3, 5), (3,) * 4)],
          "each layer has its own buffer and its own window"),
    Group("24 random chunkings", [random_chunks(seed) for seed in range(24)],
          "which tokens does the buffer hold before the chunk that differs?"),
)  # fmt: skip
scenario("11.4", attended,
    Group("the numbers of attention, too", [((4,), (4, 3, 1), 1, torch.float32),
          ((3, None), (3, 3, 2), 2, torch.float32), ((2, 5), (2, 1, 2, 2, 1), 3, torch.float32),
          ((2,), (1, 1, 1), 4, torch.bfloat16)], "K and V of one token lie in one cell"),
)  # fmt: skip


# ── 11.5 Moves that close the holes ───────────────────────────────────────────


def moves(mine, program, log: Log) -> None:
    text = f"cells {program}" if len(program) < 100 else f"{len(program):,} cells"
    is_used = [letter != "." for letter in program]
    found = log.call(text, mine.plan_moves, is_used, see=False)
    found = plain(found)
    if not isinstance(found, list) or not all(isinstance(m, list) and len(m) == 3 for m in found):
        log(text, {"what is returned:": found})
        return
    cells, wrong = list(program), ""
    for source, target, length in found:
        taken = cells[target : target + length]
        going = cells[source : source + length]
        if taken != ["."] * length or "." in going or len(going) != length:
            wrong = f"{source, target, length} does not move {length} cells in use to free ones"
            break
        cells[target : target + length] = going
        cells[source : source + length] = ["."] * length
    if len(cells) < 100 or wrong:
        log(text, {"afterwards:": wrong or "".join(cells)})
    log(text, {"moves (source, target, length):": found})


def random_cells(seed: int) -> str:
    draw = random.Random(seed)
    share, size = draw.random(), 3 + seed // 4
    return "".join(
        chr(ord("a") + place % 26) if draw.random() < share else "." for place in range(size)
    )


scenario("11.5", moves,
    Group("nothing to do", ("", "....", "abcd", "abc..", "a"),
          "which used cells have to move, if no hole is in front?"),
    Group("one hole", (".a", "a.b", "ab.c", "a.bc", ".abcd", "a...b", "ab.cd.."),
          "which cell is the first that has to move?"),
    Group("a run into a run: one move", ("..ab", "a...bcd", "ab....cdef", "...abcdef", "..abcd",
          "." * 20 + ascii_lowercase[:20]),
          "both sources and targets are neighbours: the same move, one cell longer"),
    Group("holes or data in pieces", ("a.b.cd", ".a.b.c", "...a.bc", "..a..b", ".a..bc", "a..b.c.d",
          "a.b..c.d..e"), "a move ends where its sources or its targets have a gap"),
    Group("80 random rings", tuple(map(random_cells, range(80))),
          "the first move that differs: where is the first hole, and which cells are behind it?"),
    Group("rings of thousands of cells", ("." * 2500 + "a" * 2500, ".a" * 2500, "a" * 5000,
          "a." * 2000 + "ab"),
          "how deep may a function call itself, and how many cells may there be?"),
)  # fmt: skip


# ── 11.6 Right positions, wrong keys ──────────────────────────────────────────

# Steps: "A+8" places 8 tokens; "A~2,6,-1" moves positions 2 to 5 by -1, "A%2,6,3" divides them by
# 3, with "" for no end; "A>B5" gives A's first 5 to B as well; "*" in place of A means all; "step"
# turns the keys.


def debts(mine, program, log: Log) -> None:
    cells = mine.Cells(40)
    turned_to: dict[int, int] = {}  # by cell: the position that its key is turned to
    for step in program.split():
        if step == "step":
            for cell in turned_to:
                turned_to[cell] += cells.shifts[cell]
            cells.shifts = [0] * cells.num_cells
            log("a step turns the keys")
            used = [cell for cell, position in enumerate(cells.positions) if position != FREE]
            log("", {"keys are turned to": [turned_to[cell] for cell in used]})
            continue
        seq, kind, rest = -1 if step[0] == "*" else ord(step[0]) - ord("A"), step[1], step[2:]
        if kind == "+":
            for cell in append(cells, seq, int(rest)):
                turned_to[cell] = cells.positions[cell]
            log(f"{rest} tokens of {step[0]}")
            continue
        if kind == ">":
            share(cells, step, log)
            continue
        tried(log, *a_move(cells, seq, kind, rest))
        log("", {"positions:": [p for p in cells.positions if p != FREE]})


def random_debts(seed: int) -> str:
    draw = random.Random(seed)
    steps = [f"A+{draw.randrange(4, 12)}"]
    for _ in range(3 + seed // 10):
        kind = draw.random()
        p0 = draw.randrange(0, 6)
        if kind < 0.4:
            steps.append(f"A~{p0},,{draw.randrange(-p0, 9)}")
        elif kind < 0.7:
            steps.append(f"A%{draw.choice((0, p0))},,{draw.randrange(1, 6)}")
        else:
            steps.append("step")
    return " ".join([*steps, "step"])


scenario("11.6", debts,
    Group("one move, then a step", ("A+8 A~4,,5 step", "A+8 A~0,,3 step A~3,,-3 step",
          "A+3 B+3 *~0,,2 step", "A+3 B+3 A~0,,2 step", "B+2 A+6 A>C3 A~0,,2 step",
          "A+4 A~0,0,3 step", "A+6 *~3,,-2 step"),
          "shifts: by how much the key is still to be turned"),
    Group("two moves, then a step", ("A+4 A~0,,10 A~0,,-3 step", "A+8 A~4,,8 A~12,,-8 step",
          "A+5 A~2,,2 A~4,,2 A~6,,2 step", "A+6 A~4,,6 A~2,4,3 step"),
          "what was to be turned before the second move?"),
    Group("a division, then a step", ("A+8 A%0,,2 step", "A+8 A%4,,4 step", "A+9 A%0,,3 step",
          "A+6 A%2,4,2 step", "A+4 B+4 B%0,,2 step", "A+4 B+4 *%0,,2 step",
          "A+4 A~2,,8 A+2 A%10,12,2 step", "A+4 A%0,0,2 step", "A+8 A%3,,2 step",
          "A+9 A~4,,3 A%7,,3 step", "A+7 A%1,6,4 step"),
          "which way does the key have to be turned?"),
    Group("a move, a division, a step: as SelfExtend does it",
          ("A+8 A~4,,4 A%8,,2 step", "A+4 A%0,,2 step A+4 A~2,,2 A%4,,2 step",
          "A+6 A~0,,6 A%9,,3 step"), "how much is still to be turned after both?"),
    Group("division rounds down, and may be refused",
          ("A+7 A%0,,2", "A+7 A%3,,2", "A+7 *%3,,2", "A+7 A%3,,1 step", "A+7 A%0,,0", "A+4 C%0,,2",
          "A+1 A%0,,-2", "B+2 A+6 A>C3 A%0,,2 step"),
          "the first line of `seq_div`: which divisors are refused?"),
    Group("50 random traces", [random_debts(seed) for seed in range(50)],
          "at the step that differs: what was still owed from an earlier call?"),
)  # fmt: skip


# ── 11.7 Keys that are never turned ───────────────────────────────────────────

# A program is (dtype, steps). Steps: "A+8" places 8 tokens and stores their keys, "AB+3" 3 of A and
# 3 of B together; "A~2,6,-1" moves positions 2 to 5 by -1, "A%2,6,3" divides them by 3, with "" for
# no end; "A-2,4" removes positions 2 and 3: the next tokens take these cells first. "step" is what
# happens before a step; "read" looks at the keys of all cells in use; "kept" at what is stored.


def unturned(mine, program, log: Log) -> None:
    dtype, steps = program
    config = dataclasses.replace(
        tinypy().config, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, windows=(None,) * 2
    )
    ring = mine.UnturnedRing(config, 16, contiguous=False, dtype=dtype)
    log(f"a ring of 16 cells, {str(dtype).removeprefix('torch.')}")
    draw = torch.Generator().manual_seed(5)
    for step in steps.split():
        used = [cell for cell, position in enumerate(ring.positions) if position != FREE]
        if step == "read":
            for layer, num_read in enumerate((ring.used_max, ring.num_read)):
                text = f"keys({layer}, {num_read})"
                found = log.call(text, ring.keys, layer, num_read, see=False)
                if not is_tensor(found):
                    return
                log("", {"keys are": [list(found.shape), str(found.dtype)]})
                log(f"keys of layer {layer} are read", {"keys:": found[used]})
                log("", {"all keys are finite:": bool(found.isfinite().all())})
            continue
        if step == "kept":
            log("what is kept of layer 0", {"keys:": ring.k[0, used].float()})
            continue
        if step == "step":
            found = log.call("apply_shifts()", ring.apply_shifts, see=False)
            log("", {"shifts:": ring.shifts})
            log("", {"what is kept of layer 0, afterwards:": ring.k[0, used].float()})
            log("", {"returned:": found})
            continue
        if "+" in step:
            letters, count = step.split("+")
            owners = [ord(letter) - ord("A") for letter in letters for _ in range(int(count))]
            positions = [
                ring.seq_pos_max(seq) + 1 + place % int(count) for place, seq in enumerate(owners)
            ]
            cells = ring.place(positions, owners)
            at = torch.tensor(positions)
            for layer in range(2):
                raw = torch.randn(len(cells), 2, 4, generator=draw)
                k = turn(raw, at, ring.frequencies)  # as the model does
                log.call(f"store({layer}, {cells}, k)", ring.store, layer, cells, k, see=False)
            continue
        seq, kind = ord(step[0]) - ord("A"), step[1]
        if kind == "-":
            lose(ring, step, log)
            continue
        log.call(*a_move(ring, seq, kind, step[2:]), see=False)


scenario("11.7", unturned,
    Group("what is kept is not turned", [(F32, "A+1 kept"), (F32, "A+4 kept"),
          (F32, "A+3 B+2 kept"), (BF16, "A+3 kept"), (F32, "A+5 A-1,3 B+4 kept")],
          "which turn takes a key from position p to position 0?"),
    Group("without a move, keys are read as the model made them",
          [(F32, "A+1 read"), (F32, "A+4 read"), (F32, "A+3 B+4 A+2 read"), (F32, "A+3 AB+2 read"),
          (F32, "A+5 A-1,3 read B+4 read")], "turn each key to the position of its cell"),
    Group("after a move they are read where their cells stand",
          [(F32, "A+4 A~0,,5 read"), (F32, "A+6 A~3,,-2 read"), (F32, "A+8 A%0,,2 read kept"),
          (F32, "A+8 A~4,,6 A%4,,2 A~5,,1 read"), (F32, "A+4 read A-2,4 A+2 read")],
          "`positions`, as they are when the keys are read"),
    Group("nothing is turned before a step, and reading changes nothing",
          [(F32, "A+4 step read"), (F32, "A+4 A~0,,3 step kept read"),
          (F32, "A+4 A~0,,3 read read kept"), (F32, "A+4 read A~0,,3 read A~1,,2 read"),
          (F32, "A+4 A~0,,3 step A~0,,-3 step kept read")],
          "what is left for `apply_shifts` to do?"),
    Group("half precision: rounded once, when it is stored",
          [(BF16, "A+1 read"), (BF16, "A+6 read"), (BF16, "A+6 A~0,,9 step A~0,,-9 step read kept"),
          (F16, "A+6 A~2,,7 read"), (BF16, "A+4 A~0,,300 read")],
          "turn in float32; which of the two results goes into the cache?"),
)  # fmt: skip


# ── tinypy on the reader's part ───────────────────────────────────────────────


@runs_model("11.1")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Three texts side by side in one ring."""
    shared, ends = lm.encode(PROMPT), [lm.encode(text) for text in ("items", "_get", "push")]
    cache = ring_on(mine.Cells)(lm.config, 96)
    for prompt, new in zip(ends, generate_in_parallel(lm, cache, shared, ends, 12), strict=True):
        same_as_oracle(lm, shared + prompt, new)
    return "tinypy wrote 3 texts of 12 tokens in one ring of 96 cells: the oracle's tokens."


@runs_model("11.2")
def _(mine, lm: minikv.LanguageModel) -> str:
    """A text that was computed 100 positions too far to the right."""
    prompt = lm.encode(PROMPT)
    with in_place_of("minikv.ring.cache:turn", mine.turn):
        cache = RingCache(lm.config, 64)
        cache.decode(lm, prompt[:-1], list(range(100, 99 + len(prompt))), [0] * (len(prompt) - 1))
        cache.seq_add(0, 0, None, -100)
        new = generate_with_ring(lm, cache, prompt[-1:], 12)
    same_as_oracle(lm, prompt, new)
    return "tinypy's keys were moved by -100 positions, and it went on with the oracle's 12 tokens."


@runs_model("11.3")
def _(mine, lm: minikv.LanguageModel) -> str:
    """More text than the ring has cells."""
    prompt, expected = lm.encode(PROMPT), RingCache(lm.config, 48)
    wanted = generate_with_ring(lm, expected, prompt, 100, n_keep=4)
    with in_place_of("minikv.ring.generate:context_shift", mine.context_shift):
        cache = ring_on(mine.Cells)(lm.config, 48)
        found = generate_with_ring(lm, cache, prompt, 100, n_keep=4)
    witness(found)
    if found != wanted:
        raise AssertionError(f"{lm.decode(found)!r} is not the reference's {lm.decode(wanted)!r}")
    before = 48 - len(prompt)
    same_as_oracle(lm, prompt, found[:before])
    return f"tinypy wrote 100 tokens in 48 cells; the first {before} are the oracle's."


@runs_model("11.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    """A window of 16, and more text than that."""
    cache, prompt = mine.RollingCache(lm.config, 16), lm.encode(PROMPT)
    with in_place_of("minikv.ring.window:in_window", mine.in_window):
        new = [int(cache.append(lm, prompt)[-1].argmax())]
        while len(new) < 24:
            new.append(int(cache.append(lm, new[-1:])[-1].argmax()))
    same_as_oracle(with_config(lm, window=16), prompt, new)
    return (
        "tinypy wrote 24 tokens with 16 cells per layer: those of the oracle with a window of 16."
    )


@runs_model("11.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """A ring with holes in front, closed."""
    prompt = lm.encode(PROMPT)
    cache = RingCache(lm.config, 96)
    for i, token_id in enumerate(prompt):  # in turns with another text
        cache.decode(lm, [token_id, 5], [i, i], [0, 1])
    cache.seq_rm(1)

    def plan_moves(is_used: list[bool]) -> list[Move]:  # of tuples, too
        return [Move(*move) for move in mine.plan_moves(is_used)]

    with in_place_of("minikv.ring.defrag:plan_moves", plan_moves):
        before, moved, after = cache.used_max, defragment(cache), cache.used_max
    new = generate_with_ring(lm, cache, lm.encode(" return"), 12)
    same_as_oracle(lm, prompt + lm.encode(" return"), new)
    return (
        f"{moved} cells moved: the last used one was {before - 1}, then {after - 1}. "
        "The tokens are the oracle's."
    )


@runs_model("11.6")
def _(mine, lm: minikv.LanguageModel) -> str:
    """SelfExtend in the ring, against two attentions with one softmax."""
    text = lm.encode(PROMPT) * 3
    ring = SelfExtendRing(ring_on(mine.Cells)(lm.config, 128), 4, 16)
    two = SelfExtendCache(lm.config, 128, 4, 16, "steps")
    found, expected = ring.append(lm, text), two.append(lm, text)
    witness(found.argmax(-1))
    off = float((found - expected).abs().max())
    if off > 1e-3:
        raise AssertionError(f"logits are {off:.2g} away from those of two attentions")
    return f"SelfExtend on {len(text)} tokens: at most {off:.0e} from the logits of two attentions."


@runs_model("11.7")
def _(mine, lm: minikv.LanguageModel) -> str:
    """A text that was computed 100 positions too far to the right, in keys that never turn."""
    prompt = lm.encode(PROMPT)
    cache = mine.UnturnedRing(lm.config, 64)
    cache.decode(lm, prompt[:-1], list(range(100, 99 + len(prompt))), [0] * (len(prompt) - 1))
    cache.seq_add(0, 0, None, -100)
    new = generate_with_ring(lm, cache, prompt[-1:], 12)
    same_as_oracle(lm, prompt, new)
    return (
        "tinypy's text was moved by -100 positions, no kept key was turned: the oracle's 12 tokens."
    )
