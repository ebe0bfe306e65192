"""Chapter 12 as programs: two tiers, prefixes with gaps, links, disks that crash, sessions."""

import itertools
import json
import random
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import minikv
from minikv.course.chapters.ch12_tiers_and_sessions.given import (
    CrashingFolder,
    Interrupted,
    SmallMachine,
    evict_all,
    prefixes,
)
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.programs import blocks_of, go_on, scramble, under
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.tiers import load_session, save_session
from minikv.tiers.costs import Link, Prefill
from minikv.tiers.identity import SessionError, checksum_of, shapes_of

PROMPT = "class Queue:\n    def push(self, item):\n        self."


# ── 12.1 Down and back ────────────────────────────────────────────────────────

# A program is (blocks of device, blocks of host, steps). Steps, a block by its letter:
#     A+ A_ A= A?   it is on the device, on the host, on both, nowhere
#     A* A#         it has one more holder on the device, on the host
#     Ad Au Ak      down, up, up with keep; Ad! the copy fails, Ad^ it is interrupted

THERE = {"+": "on the device", "_": "on the host", "=": "on both tiers", "?": "nowhere"}


def told(machine: SmallMachine, text: str) -> dict:
    """Where a block's text can be read, by what its place says."""
    place = machine.places[text]
    seen: dict[str, object] = {}
    for name, block, texts, pool in (
        ("device", place.device, machine.device_texts, machine.device),
        ("host", place.host, machine.host_texts, machine.host),
    ):
        seen[f"{text} on the {name}:"] = None if block is None else texts[block]
        held = None if block is None else pool.ref_count(block)
        seen[f"holders of {text}'s block on the {name}:"] = held
    return seen


class Copying:
    """A machine's way up or down, noting whether both blocks are held while it copies."""

    def __init__(self, machine: SmallMachine, move, fails: type[BaseException] | None = None):
        pools = machine.device, machine.host
        self.pools = pools if move == machine.down else pools[::-1]
        self.move, self.fails = move, fails
        self.held: list[bool] = []

    def __call__(self, source: int, target: int) -> None:
        pairs = zip(self.pools, (source, target), strict=True)
        self.held.append(all(pool.ref_count(block) > 0 for pool, block in pairs))
        self.move(source, target)
        if self.fails is not None:
            raise self.fails("the copy failed")


FAILS: dict[str, tuple[type[BaseException] | None, str]] = {
    "": (None, ""),
    "!": (OSError, "; the copy fails"),
    "^": (Interrupted, "; the copy is interrupted"),
}


def afterwards(machine: SmallMachine, log: Log, copy: Copying) -> None:
    """All that can be seen when a block has moved, or has not."""
    log("", {"for each copy, are source and target held?": copy.held})
    for text in machine.places:
        log("", told(machine, text))
    free = {"free blocks of the device:": machine.device.num_free}
    log("", free | {"free blocks of the host:": machine.host.num_free})


def called(log: Log, text: str, function, *arguments) -> None:
    """`log.call`, also for what is no Exception."""
    try:
        log.call(text, function, *arguments)
    except Interrupted:
        log("it is interrupted")


def moves(mine, program, log: Log) -> None:
    """Pools make room by themselves."""
    num_device, num_host, steps = program
    machine = SmallMachine(num_device, num_host)
    scramble(machine.device)  # so that ids of both pools differ
    log(f"{num_device} blocks of device, {num_host} of host")
    for text, kind, *fails in steps.split():
        if kind in THERE:
            machine.put(text, device=kind in "+=", host=kind in "_=")
            log(f"{text} is {THERE[kind]}")
            continue
        place = machine.places[text]
        if kind in "*#":
            on_device = machine.device, place.device
            pool, block = on_device if kind == "*" else (machine.host, place.host)
            assert block is not None
            pool.acquire(block)
            log(f"{text} has another holder on the {'device' if kind == '*' else 'host'}")
            continue
        error, ends = FAILS["".join(fails)]
        copy = Copying(machine, machine.down if kind == "d" else machine.up, error)
        move, keep = (mine.demote, ()) if kind == "d" else (mine.promote, (kind == "k",))
        name = {"d": "demote {}", "u": "promote {}", "k": "promote {}, keep"}[kind].format(text)
        called(log, name + ends, move, place, machine.device, machine.host, copy, *keep)
        if log.events[-1].error is not None:
            log("it is refused")
        afterwards(machine, log, copy)


def random_ways(seed: int) -> tuple[int, int, str]:
    draw = random.Random(seed)
    names = "ABCDE"[: 3 + seed % 3]
    steps = [f"{name}+" for name in names]
    for _ in range(4 + seed // 6):
        steps.append(draw.choice(names) + draw.choice("duk"))
    return 2 + seed % 3, 1 + seed % 4, " ".join(steps)


LEFT = "the order: hold both blocks, copy, let the place say so, and only then release"
scenario("12.1", moves,
    Group("one block goes down", [(4, 2, "A+ Ad"), (4, 3, "X_ X# A+ Ad")], LEFT),
    Group("a block with other holders stays",
          [(4, 2, "A+ A* Ad"), (4, 2, "A= A* A* Ad"), (4, 1, "X_ X# A+ A* Ad")],
          "how many holders does the pool count for this block, and how many may there be?"),
    Group("a copy that is on the host already is used", [(4, 2, "A= Ad"), (4, 1, "A= Ad")],
          "what does place.host say, before anything is allocated or copied?"),
    Group("the host has no room: nothing happens",
          [(4, 1, "X_ X# A+ Ad"), (4, 2, "X_ X# Y_ Y# A+ Ad")],
          "what has been changed before `allocate` raises, and does the caller learn of it?"),
    Group("demote, the copy fails: nothing happens",
          [(4, 2, "A+ Ad!"), (4, 1, "A+ Ad!"), (4, 2, "A+ Ad^")],
          "which block was taken for the copy that failed?"),
    Group("nothing to move", under(3, 3)("A_ Ad", "A? Ad", "A+ Au", "A+ Ak", "A? Ak"),
          "which ids may be None?"),
    Group("one block comes back", [(2, 2, "A_ Au"), (2, 2, "A_ B+ Au"), (2, 3, "A_ C_ Au")], LEFT),
    Group("with keep, the copy on the host stays", [(2, 2, "A_ Ak"), (2, 3, "A_ C_ B+ Ak")],
          "how many holders has the block on the host afterwards?"),
    Group("the device has no room: nothing happens",
          [(1, 2, "A_ B+ B* Au"), (2, 2, "A_ B+ B* C+ C* Ak"), (1, 1, "A_ B+ B* Au")],
          "is what was held for the copy given back when `allocate` raises?"),
    Group("promote, the copy fails: nothing happens", under(2, 2)("A_ Au!", "A_ Ak!", "A_ Au^"),
          "which blocks were taken or held for the copy that failed?"),
    Group("making room on the device takes room on the host",
          [*under(1, 1)("A_ B+ Au", "A_ B+ Ak"), *under(1, 2)("A_ C_ B+ Au", "A_ C_ B+ Ak"),
          (2, 2, "A_ C_ B+ D+ Au")],
          "`device.allocate` may evict to the host, and the host's oldest block is the one that "
          "is about to be read"),
    Group("a block that is on both tiers", under(3, 3)("A= Au", "A= Ak"),
          "has anything to be copied?"),
    Group("down, back, and down again", [*under(2, 2)("A+ Ad Au Ad", "A+ Ad Ak Ad Ak",
          "A+ B+ Ad Bd Au Bu"), (2, 1, "A+ B+ Ad Bd")],
          "what does the first move leave behind when the second begins?"),
    Group("40 random sequences of moves", [random_ways(seed) for seed in range(40)],
          "which ids may be None, and what has to be on the device?"),
)  # fmt: skip


# ── 12.2 Gone, and found all the same ─────────────────────────────────────────

# Steps: "+ABC" stores the blocks A, AB and ABC; "!AB" lets every write of the block AB fail, "/AB"
# no longer; "?ABC" looks for the prefix ABC and loads what is found, "=ABC" only looks for it.


def tier_in_use(mine, program, log: Log) -> None:
    num_blocks, steps = program
    broken: set[str] = set()

    def write(memory: list, block: int, content: str) -> None:
        if content in broken:
            raise OSError("no space left")
        memory[block] = content

    tier = mine.HostTier(num_blocks, write)
    log(f"a host of {num_blocks} blocks")
    for step in steps.split():
        kind, names = step[0], prefixes(step[1:])
        if kind == "!":
            broken.add(step[1:])
            log(f"from now on {step[1:]} cannot be written")
        elif kind == "/":
            broken.discard(step[1:])
            log(f"{step[1:]} can be written again")
        elif kind == "+":
            log.call(f"store {', '.join(names)}", tier.store, names, names)
        else:
            log.call(f"find {', '.join(names) or 'no block'}", tier.find, names)
            if kind == "=":  # it looks, and takes nothing
                continue
            log.call(f"load {', '.join(names)}", tier.load, names)
            if log.events[-1].error is not None:
                log("it fails")
    log("at the end", {"free blocks:": tier.pool.num_free})


def random_tier(seed: int) -> tuple[int, str]:
    draw = random.Random(seed)
    texts = ["ABCD", "ABCE", "ABF", "GH", "GI"]
    steps = []
    for _ in range(5 + seed // 5):
        text = draw.choice(texts)
        text = text[: draw.randrange(1, len(text) + 1)]
        steps.append(draw.choice("+++??==!/") + text)
    return 3 + seed % 5, " ".join([*steps, "?ABCD", "?ABCE", "?GH"])


in_3, in_4 = under(3), under(4)
scenario("12.2", tier_in_use,
    Group("what is stored is found", [*in_4("+A ?A", "+ABC ?ABC ?AB ?ABD", "+ABC +ABD ?ABC ?ABD"),
          *in_3("?A +A ?AB")], "find: how many blocks from the first one on?"),
    Group("what is only looked for does not count as used",
          [*under(2)("+A +X =A +Y ?A ?X", "+A +X =A =A =X +Y ?A"), *in_3("+AB +X =ABC +Y ?AB ?X"),
          *in_3("+A +B +C +A +D ?A", "+A +X =Y = +Y ?A", "+ABC ?AB +X ?ABC")],
          "which of the methods changes the order of `blocks`?"),
    Group("what could not be written is not found",
          [*in_4("!A +A ?A", "+X !ABC +ABC ?ABC"), (2, "+AB +X !Y +Y ?Y"),
          *in_4("!AB +AB /AB +AB ?AB")],
          "store: which name is known at the moment when `write` raises?"),
    Group("a prefix with a gap", [*in_4("!AB +ABC ?ABC", "!A +ABC ?ABC", "!AC +ABC +ACD ?ACD"),
          *in_3("+ABC +X ?ABC", "+ABC ?ABC +XY ?ABC")],
          "are the next blocks tried after a write that failed? What is of use after a gap?"),
    Group("no block is lost", [*under(2)("!A +A +X +Y ?X ?Y", "!A +A +A +A +X ?X"),
          *in_3("!AB +ABC +ABC /AB +ABC ?ABC")],
          "which block was taken for what could not be written?"),
    Group("60 random hosts", [random_tier(seed) for seed in range(60)],
          "before the step that differs: which block was evicted, and what was still in use?"),
)  # fmt: skip


# ── 12.3 Fetch or compute ─────────────────────────────────────────────────────


def ms(value: float) -> str:
    return f"{1000 * value:g} ms"


def even(mine, program, log: Log) -> None:
    size, latency, bandwidth, start, rate = program
    log(
        f"{size:,} bytes per token; {ms(latency)} and {bandwidth / 1e6:g} MB/s; a step starts in "
        f"{ms(start)} and computes {rate:,} tokens per second"
    )
    link, prefill = Link(latency, bandwidth), Prefill(start, rate)
    log.call("break_even", mine.break_even, size, link, prefill)


def plan(mine, program, log: Log) -> None:
    """Times in ms: of a host's and a disk's latency and block, and of computing a block; tiers by
    their first letters."""
    host, disk, compute, tiers = program
    names = {"h": "host", "d": "disk", "r": "remote"}
    block_size, block_bytes = (16, 8, 32)[len(tiers) % 3], 1000
    remote = 2 * disk[0], disk[1]
    links = {
        name: Link(latency / 1000, block_bytes / (block / 1000))
        for name, (latency, block) in (("host", host), ("disk", disk), ("remote", remote))
    }
    log(
        f"{' '.join(names[one] for one in tiers) or 'no block'}; host {host[0]} + {host[1]} ms per "
        f"block, disk {disk[0]} + {disk[1]}, "
        f"{f'remote {remote[0]} + {remote[1]}, ' if 'r' in tiers else ''}"
        f"computing {compute} ms per block of {block_size} tokens"
    )
    prefill = Prefill(0.005, block_size / (compute / 1000))
    where = [names[one] for one in tiers]
    log.call(
        "blocks_to_fetch", mine.blocks_to_fetch, where, block_bytes, block_size, links, prefill
    )


def random_plan(seed: int):
    draw = random.Random(seed)
    tiers = "".join(draw.choice("hhd") for _ in range(1 + seed // 4))
    # Such numbers that no two counts of blocks take equally long.
    host = draw.choice([0, 1.37, 3.91]), draw.choice([0.29, 1.13, 5.77])
    disk = draw.choice([0.53, 7.19, 23.3]), draw.choice([0.71, 2.39, 8.61])
    return host, disk, draw.choice([1.03, 2.17, 4.49]), tiers


near = under((1, 1), (10, 2), 4)
ALL_TIERS = ["".join(one) for n in range(1, 4) for one in itertools.product("hd", repeat=n)]
scenario("12.3", even,
    Group("break even", [(50_000, 0.001, 1e9, 0.0, 10_000), (5_000, 0.002, 1e7, 0.0, 1_000),
          (5_000, 0.002, 1e7, 0.004, 1_000), (5_120, 0.0001, 2e9, 0.008, 12_000),
          (131_072, 0.01, 2.5e9, 0.02, 6_000)],
          "a token takes 1 / rate to compute, bytes / bandwidth to fetch: what is lost once?"),
    Group("a link that is too slow for any length",
          [(50_000, 0.001, 1e8, 0.0, 10_000), (10_000, 0.001, 1e8, 0.0, 10_000)],
          "what if a token takes as long to fetch as to compute, or longer?"),
    Group("without latency, or with little gain",
          [(5_000, 0.0, 1e7, 0.0, 1_000), (50_000, 0.0, 1e8, 0.0, 10_000),
          (0, 0.002, 1e7, 0.0, 1_000), (9_999, 0.001, 1e8, 0.0, 10_000),
          (50_000, 0.0, 1e6, 0.5, 1_000)], "from which length on, then?"),
)  # fmt: skip
scenario("12.3", plan,
    Group("no block", near(""), "an empty list"),
    Group("one tier", [*near("h"), *under((5, 1), (10, 2), 4)("h", "hh", "hhhh"),
          *near("ddd", "d" * 8), ((1, 5), (10, 2), 4, "hhh"), ((1, 0.1), (10, 2), 4, "hhh"),
          *near("h" * 300), ((1, 1), (59, 2), 4, "d" * 40), ((0, 5), (10, 2), 4, "hh"),
          ((19.5, 0.01), (10, 2), 4, "hhhhh"), ((20.5, 0.01), (10, 2), 4, "hhhhh")],
          "latency once, and what every block gains: the first block alone may not pay"),
    Group("two tiers", [*near("hhd", "hhdddddd"), *under((1, 1), (3, 6), 4)("hdh", "hdhhh"),
          ((1, 1), (3, 2), 4, "dh"), ((1, 1), (3.5, 2), 4, "dhd"),
          ((1, 1), (51, 2), 4, "d" + "h" * 20), ((0, 1), (0, 9), 4, "dhhhh"),
          ((0, 5), (9, 0.1), 4, "hhdd"), ((7, 0.1), (90, 3.9), 4, "hd" * 30)],
          "a block can be used only with all blocks before it, and each tier's latency is paid "
          "once"),
    Group("a third tier", under((1, 1), (5, 2), 4)("r" * 6, "r" * 4, "hrrrrr"),
          "whose names are in `links`?"),
    Group("equally long: the smaller number",
          [((3, 1), (10, 2), 4, "h"), ((6, 1), (9, 2), 4, "hh"), ((0, 4), (9, 2), 4, "hhh")],
          "what if fetching takes exactly as long?"),
    Group("all short hits, and 60 random ones",
          [*under((1.3, 1.1), (2.9, 2.3), 4.1)(*ALL_TIERS),
          *under((1.3, 4.7), (0.9, 0.3), 4.1)(*ALL_TIERS), *map(random_plan, range(60))],
          "add up both times by hand for this hit: which part is counted twice, or not at all?"),
)  # fmt: skip


# ── 12.4 Whole, or not there ──────────────────────────────────────────────────

OLD, NEW = b"yesterday's conversation", b"today's conversation, which is longer"
CALLED = {None: "no file", b"": "an empty file", OLD: "the old file", NEW: "the new file"}


def words(contents) -> list[str]:
    return sorted(CALLED.get(content, "a part of a file") for content in contents)


def on_a_disk(mine, program, log: Log) -> None:
    """(is there an old file?, what else lies there, what fails, and the data, if not NEW)."""
    has_old, others, fails, *more = program
    data = more[0] if more else NEW
    new = CALLED[data]
    files = ({"chat": OLD} if has_old else {}) | dict.fromkeys(others, OLD)
    folder = CrashingFolder(files, fails)
    old = "the old file" if has_old else "no file"
    besides = ", and another session" if others else ""
    ends = ""
    if fails is not None:
        ends = f"; {fails[0]} {'is interrupted' if fails[1] is Interrupted else 'fails'}"
    log(f"{old}{besides}{ends}")
    text = "save" if data else "save data of 0 bytes"
    called(log, text, mine.save, folder, "chat", data)
    steps = folder.steps
    left = set().union(*(names.get("chat", {None}) for _, names in steps[:-1]), set())
    wrong = sorted(set(words(left)) - {old, new})
    log("a crash on the way", {"may leave, besides the old and the new file:": wrong})
    if fails is None or fails[0] != "sync_folder":
        log("a crash afterwards", {"leaves:": words(folder.left_by_a_crash("chat"))})
        found = folder.names.get("chat")
        log("", {"what is read:": words([found.content if found else None])})
    rest = sorted(set(folder.names) - {"chat"})
    log("", {"other files:": len(rest), "the other session:": [name in rest for name in others]})


NAMES_LAST = "names and contents reach the disk in any order, unless something waits for it"
scenario("12.4", on_a_disk,
    Group("a crash on the way leaves the old file or the new one",
          [(False, (), None), (True, (), None)], NAMES_LAST),
    Group("other files stay", [(True, ("other",), None)],
          "can another file have its temporary name?"),
    Group("a disk that is full", [(True, (), ("write", OSError)), (False, (), ("write", OSError)),
          (True, ("other",), ("write", OSError))],
          "what is left behind, and does the caller learn of it?"),
    Group("any other step that fails", [(True, (), ("sync", OSError)),
          (True, (), ("rename", OSError)), (False, (), ("rename", OSError)),
          (True, (), ("sync_folder", OSError))],
          "what is left behind, whichever step fails, and does the caller learn of it?"),
    Group("an empty file is a file, too", [(False, (), None, b""), (True, (), None, b""),
          (True, (), ("sync", OSError), b"")],
          "which lines of yours look at the data? 0 bytes are data, too"),
    Group("interrupted", [(True, (), ("write", Interrupted)), (True, (), ("sync", Interrupted))],
          "is KeyboardInterrupt an Exception?"),
)  # fmt: skip


# ── 12.5 A session of this model ──────────────────────────────────────────────

EXPECTED = {
    "format": "minikv session", "version": "1", "model": "9f0c", "dtype": "float32",
    "stored": "float32", "block_size": "16",
}  # fmt: skip


def digest_of(mine, tensors: dict[str, torch.Tensor]) -> str:
    digest = sha256()
    mine.add_tensors(digest, tensors)
    return digest.hexdigest()


BASE = {
    "a": torch.tensor([[1.5, 2.0, 3.25], [4.0, 5.0, 6.0]]),
    "b": torch.tensor([0.5, -0.25]),
    "c": torch.tensor([7, 8, 9]),
}
NEXT = torch.tensor([1.5]).view(torch.int32).add(1).view(torch.float32)  # the last bit differs
OTHERS = {
    "the same tensors": BASE,
    "the same, listed in another order": dict(reversed(BASE.items())),
    "the same, laid out differently in memory": BASE | {"a": BASE["a"].T.contiguous().T},
    "a copy of them": {name: one.clone() for name, one in BASE.items()},
    "another number": BASE | {"b": torch.tensor([0.5, 0.25])},
    "another shape": BASE | {"a": BASE["a"].reshape(3, 2)},
    "a number whose last bit differs": BASE
    | {"a": torch.cat([NEXT, BASE["a"].flatten()[1:]]).view(2, 3)},
    "another dtype, the same bytes": BASE | {"b": BASE["b"].view(torch.int32)},
    "another dtype, the same numbers": BASE | {"c": BASE["c"].float()},
    "two names swapped": BASE | {"b": BASE["c"], "c": BASE["b"]},
    "another name": {"bb" if name == "b" else name: one for name, one in BASE.items()},
    "two numbers swapped": BASE | {"b": BASE["b"].flip(0)},
    "one tensor fewer": {name: BASE[name] for name in "ab"},
    "one tensor more": BASE | {"d": torch.zeros(0)},
    "numbers that move from one tensor to the next": {
        "a": BASE["a"],
        "b": torch.tensor([0.5]),
        "c": torch.tensor([-0.25]),
    },
    "another last tensor": BASE | {"c": torch.tensor([7, 8, 10])},
    "bytes that move over a name": {"a": BASE["a"].flatten()[:5], "b": BASE["b"], "c": BASE["c"]},
}


LETTERS = torch.tensor(list(b"wxyz"), dtype=torch.uint8)
PAIRS = {
    "integers that float32 does not tell apart": (
        {"a": torch.tensor([2**24])},
        {"a": torch.tensor([2**24 + 1])},
    ),
    "a tensor of another length, all empty": ({"a": torch.zeros(0, 3)}, {"a": torch.zeros(0, 4)}),
    "a number, against a list of one": ({"a": torch.tensor(1.5)}, {"a": torch.tensor([1.5])}),
    "NaN with other bits": (
        {"a": torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)},
        {"a": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)},
    ),
    "0 and -0": ({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}),
    "a capital": ({"a": torch.zeros(1)}, {"A": torch.zeros(1)}),
    "bfloat16 and float16 of the same bytes": (
        {"a": torch.ones(2).bfloat16()},
        {"a": torch.ones(2).bfloat16().view(torch.float16)},
    ),
    "long tensors whose last numbers differ": (
        {"a": torch.zeros(5000)},
        {"a": torch.cat([torch.zeros(4999), torch.ones(1)])},
    ),
}
# Two dictionaries each, whose parts are the same text if nothing says where each part ends.
JOINED = {
    "a name that goes on as a dtype": ({"a": LETTERS}, {"atorch.uint8": LETTERS}),
    "the tensors of a and b, against one named 'atorch.uint8[4]wxyzb'": (
        {"a": LETTERS, "b": LETTERS},
        {"atorch.uint8[4]wxyzb": LETTERS},
    ),
    "sizes that run together": ({"a": torch.zeros(110, 0)}, {"a": torch.zeros(1, 10, 0)}),
    "numbers that move on": (
        {"a": LETTERS, "b": LETTERS[:2]},
        {"a": LETTERS[:2], "b": torch.tensor(list(b"yzwx"), dtype=torch.uint8)},
    ),
}


class Fed:
    """A hash that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    def update(self, data) -> None:
        self.data += bytes(data)

    def __getattr__(self, name: str):
        return getattr(sha256(self.data), name)


def fed(mine, tensors: dict[str, torch.Tensor]) -> bytes:
    hashed = Fed()
    mine.add_tensors(hashed, tensors)
    return hashed.data


def imitation(mine) -> str | None:
    """The name of one tensor for which the hash is given the same bytes as for the two tensors
    "first" and "last"; None if there is none that contains all between their names."""
    both = fed(mine, {"first": LETTERS, "last": LETTERS})
    before, found, behind = fed(mine, {"last": LETTERS}).partition(b"last")
    if not found or not both.startswith(before) or not both.endswith(behind):
        return None
    try:
        name = both[len(before) : len(both) - len(behind)].decode()
    except UnicodeDecodeError:
        return None
    return name if fed(mine, {name: LETTERS}) == both else None


def imitates(mine, program, log: Log) -> None:
    """A name that goes on as the rest of its tensor, and as another tensor. Which name that is
    depends on what the reader's function writes between the parts."""
    log(f"two digests: of the tensors named first and last, and of one tensor whose name {program}")
    log.call("", fed, mine, {"first": LETTERS, "last": LETTERS}, see=False)
    if log.events[-1].error is None:
        name = imitation(mine)
        log("" if name is None else f"the name is {name!r}", {"are they equal?": name is not None})


def prints(mine, program, log: Log) -> None:
    log(f"two digests: of some tensors, and of {program}")
    first, second = (PAIRS | JOINED).get(program) or (BASE, OTHERS[program])
    found = [log.call("", digest_of, mine, one, see=False) for one in (first, second)]
    if log.events[-1].error is None:
        log("", {"are the digests equal?": found[0] == found[1]})


KV = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).view(2, 3, 2, 1, 2)
NAN = torch.tensor(torch.nan)
SAVED = {"tokens": torch.tensor([5, 6, 7]), "kv": KV}
TITLE = {"title": "a chat about queues"}
# A change of a session in words, of its fields and of its tensors: None takes one out. Then what is
# made to fit, so that only this can tell it: shapes and checksum, the checksum alone, or nothing.
BOTH, CHECKSUM, NOTHING = ("shapes", "checksum"), ("checksum",), ()
CHANGES: dict[str, tuple[str, dict, dict, tuple[str, ...]]] = {
    "": (", as it was saved", {}, {}, BOTH),
    "more": (" with one more field, title", TITLE, {}, BOTH),
    "kv=cut": (" whose kv has fewer tokens", {}, {"kv": KV[:, :2]}, CHECKSUM),
    "kv=float16": (" whose kv is in float16", {}, {"kv": KV.half()}, CHECKSUM),
    "kv=other shape": (" whose kv has another shape", {}, {"kv": KV.mT}, CHECKSUM),
    "kv=bit": (" in which one number of kv has changed", {}, {"kv": KV + (KV == 23)}, NOTHING),
    "without=kv": (" without the tensor kv", {}, {"kv": None}, CHECKSUM),
    "without=tokens": (" without the tensor tokens", {}, {"tokens": None}, CHECKSUM),
    "tokens=another": (
        " in which one token has changed", {}, {"tokens": torch.tensor([5, 6, 8])}, NOTHING,
    ),
    "tokens=fewer": (
        " with fewer tokens than num_tokens says", {}, {"tokens": torch.tensor([5, 6])}, BOTH,
    ),
    "header": (" with a field that was added after the checksum was made", TITLE, {}, NOTHING),
    "shapes": (" without the field shapes", {"shapes": None}, {}, CHECKSUM),
    "checksum": (" without the field checksum", {"checksum": None}, {}, NOTHING),
    "checksum=00ff": (" whose checksum is '00ff'", {"checksum": "00ff"}, {}, NOTHING),
    "checksum=empty": (" whose checksum is empty", {"checksum": ""}, {}, NOTHING),
    "shapes=text": (" whose shapes are no JSON", {"shapes": "{kv"}, {}, CHECKSUM),
    "shapes=empty": (" whose shapes are empty", {"shapes": ""}, {}, CHECKSUM),
    "shapes=null": (" whose shapes are null", {"shapes": "null"}, {}, CHECKSUM),
    "shapes=list": (" whose shapes are a list", {"shapes": "[1]"}, {}, CHECKSUM),
    "kv=nan": (" with NaN in kv", {}, {"kv": KV + NAN}, BOTH),
    "more tensors": (" with one more tensor", {}, {"title": torch.tensor([1])}, CHECKSUM),
}  # fmt: skip
OTHER_FIELDS = {
    "format": "another", "version": "2", "model": "77aa", "dtype": "float16", "stored": "int8",
    "block_size": "32", "num_tokens": "4",
}  # fmt: skip
for name, value in OTHER_FIELDS.items():
    CHANGES[f"{name}={value}"] = f" whose {name} is {value!r}", {name: value}, {}, BOTH
    CHANGES[name] = f" without the field {name}", {name: None}, {}, BOTH
for number in ("03", "3.0", " 3", "", "three"):
    CHANGES[f"num_tokens={number}"] = (
        f" whose num_tokens is {number!r}", {"num_tokens": number}, {}, BOTH,
    )  # fmt: skip
for number in ("3", "0", "None"):
    text = f" without the tensor tokens, whose num_tokens is the text {number!r}"
    CHANGES[f"no tokens={number}"] = text, {"num_tokens": number}, {"tokens": None}, BOTH


def changed(
    header: dict, tensors: dict, more: dict, others: dict, fits: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    tensors = {name: one.clone() for name, one in (tensors | others).items() if one is not None}
    header = {name: one for name, one in (header | more).items() if one is not None}
    if "shapes" in fits:
        header["shapes"] = json.dumps(shapes_of(tensors), sort_keys=True)
    if "checksum" in fits:
        header["checksum"] = checksum_of(header, tensors)
    return header, tensors


def read(mine, program, log: Log) -> None:
    words, more, others, fits = CHANGES[program]
    saved = changed(EXPECTED | {"num_tokens": "3"}, SAVED, {}, {}, BOTH)
    header, tensors = changed(*saved, more, others, fits)
    log(f"a session file{words}")
    try:
        log.call("check_session", mine.check_session, header, tensors, EXPECTED)
    finally:
        event = log.events[-1]
        if isinstance(event.error, SessionError):
            event.error, event.seen = None, {"result": "refused"}
        elif event.error is None:
            event.seen = {"result": "accepted"}


scenario("12.5", prints,
    Group("the same tensors", list(OTHERS)[:4],
          "does the order of names, or of numbers in memory, affect the digest?"),
    Group("any other tensors", [*list(OTHERS)[4:], *PAIRS],
          "names, dtypes, shapes and bytes: which of them is not in the digest?"),
    Group("parts that run together", list(JOINED),
          "in the bytes that the hash gets, where does a name end, and where does a shape?"),
)  # fmt: skip
scenario("12.5", imitates,
    Group("a name that imitates another tensor", ["contains what is written between these two"],
          "in the bytes that the hash gets, where does a name end? It may contain any text"),
)  # fmt: skip
scenario("12.5", read,
    Group("a good session", ["", "more", "kv=nan"], "what has to be equal, and what need not be?"),
    Group("of another engine", [f"{name}={OTHER_FIELDS[name]}" for name in EXPECTED],
          "every field of `expected`"),
    Group("a field that is missing", [*EXPECTED, "num_tokens"],
          "what is the value of a field that is not there?"),
    Group("tensors that are not those in the header",
          ["kv=cut", "kv=float16", "kv=other shape", "without=kv", "without=tokens", "shapes",
          "tokens=fewer", "num_tokens=4", "num_tokens=03", "num_tokens=3.0", "num_tokens= 3",
          "num_tokens=", "num_tokens=three", "shapes=text", "shapes=empty", "shapes=null",
          "shapes=list", "more tensors", "no tokens=3", "no tokens=0", "no tokens=None"],
          "shapes, then the number of tokens: what if the header has no such field?"),
    Group("damaged", ["checksum=empty", "kv=bit", "tokens=another", "checksum=00ff", "checksum",
          "header"], "the checksum is over header, tokens, K and V: what if there is none?"),
)  # fmt: skip


# ── tinypy on the reader's parts ──────────────────────────────────────────────

ONE_TOKEN = minikv.SamplingParams(max_tokens=1)


def small_engine(lm: minikv.LanguageModel) -> minikv.Engine:
    """12 blocks of device, and a host."""
    config = minikv.EngineConfig(
        num_blocks=12, host_blocks=24, max_batch_tokens=128, max_num_seqs=4, attention="torch"
    )
    return minikv.Engine(lm, config)


def evict_and_return(lm: minikv.LanguageModel) -> int:
    """A text is answered, evicted, and answered again. Returns how many blocks came back."""
    engine, prompt = small_engine(lm), lm.encode(PROMPT * 4)
    params = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
    engine.generate([prompt], ONE_TOKEN)
    evict_all(engine)
    [output] = engine.generate([prompt], params)
    engine.check()
    same_as_oracle(lm, prompt, output.token_ids)
    return engine.stats().tiers["host"].hits


@runs_model("12.1")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Blocks that go to the host and come back."""
    with (
        in_place_of("minikv.tiers.tiers:demote", mine.demote),
        in_place_of("minikv.tiers.tiers:promote", mine.promote),
    ):
        count = evict_and_return(lm)
    return f"{count} blocks of tinypy went to the host and came back: the oracle's 8 tokens."


@runs_model("12.2")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Real K and V in a host on which a write fails."""
    prompt = lm.encode(PROMPT * 3)
    blocks = blocks_of(lm, prompt, 8)
    names = [str(prompt[: 8 * end]) for end in range(1, len(blocks) + 1)]

    def write(memory: list, block: int, content: torch.Tensor) -> None:
        if content is blocks[3]:
            raise OSError("no space left")
        memory[block] = content.clone()

    tier = mine.HostTier(len(names), write)
    tier.store(names, blocks)
    found = tier.load(names)
    same_as_oracle(lm, prompt, go_on(lm, prompt, found))
    return f"{len(found)} of {len(names)} blocks came from your host: the oracle's 8 tokens."


@runs_model("12.3")
def _(mine, lm: minikv.LanguageModel) -> str:
    """The engine's own decision."""
    with in_place_of("minikv.tiers.tiers:blocks_to_fetch", mine.blocks_to_fetch):
        count = evict_and_return(lm)
    return f"your decision fetched {count} blocks from the host: the oracle's 8 tokens."


@runs_model("12.4", "12.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """A session, saved and loaded by another engine."""
    prompt = lm.encode(PROMPT * 3)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        home = "minikv.tiers.session"
        stack.enter_context(in_place_of(f"{home}:save", mine.save))
        stack.enter_context(in_place_of(f"{home}:check_session", mine.check_session))
        stack.enter_context(in_place_of("minikv.tiers.identity:add_tensors", mine.add_tensors))
        path = Path(folder) / "chat"
        saved = save_session(small_engine(lm), prompt, path)
        engine = small_engine(lm)
        token_ids = load_session(engine, path)
        params = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
        [output] = engine.generate([token_ids], params)
        rest = [file.name for file in path.parent.iterdir()]
    same_as_oracle(lm, prompt, output.token_ids)
    if rest != ["chat"]:
        raise AssertionError(f"the folder has {rest}")
    return f"a session of {saved.num_bytes:,} bytes came back: the oracle's 8 tokens."
