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
from minikv.blocks import BlockPool
from minikv.course.chapters.ch12_tiers_and_sessions.given import (
    CrashingFolder,
    Interrupted,
    SmallMachine,
    evict_all,
    prefixes,
)
from minikv.course.chapters.ch12_tiers_and_sessions.tier_rates import WriteBack, WriteThrough
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.scenarios import Group, Log, numbers, scenario
from minikv.kv_cache import PreallocatedCache
from minikv.tiers.costs import Link, Prefill
from minikv.tiers.identity import SessionError, checksum_of, shapes_of

PROMPT = "class Queue:\n    def push(self, item):\n        self."


# ── 12.1 What two tiers find ──────────────────────────────────────────────────

numbers(
    "12.1",
    "what_two_tiers_find",
    {
        "device alone": (
            "found on the device alone, in per cent",
            "when A's turn comes again, which conversations are on the device?",
        ),
        "write-back, 80": (
            "found with write-back, in per cent",
            "how many different blocks do both tiers hold together?",
        ),
        "on the device": (
            "found on the device, in per cent",
            "does a host below it change what the device holds?",
        ),
        "write-through, 80": (
            "found with write-through and 80 blocks, in per cent",
            "how many different blocks do both tiers hold together?",
        ),
        "write-through, 120": (
            "found with write-through and 120 blocks, in per cent",
            "how many different blocks do both tiers hold together?",
        ),
        "random order": (
            "found on the device in random order, in per cent",
            "how many conversations are on the device, of how many?",
        ),
        "blocks written down": (
            "blocks that a turn writes to the host",
            "how many blocks have to leave the device for the ten that come?",
        ),
    },
    near=0.005,
)


# ── 12.2 Down and back ────────────────────────────────────────────────────────


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


def hold(pool: BlockPool, block: int | None) -> None:
    """One more holder."""
    assert block is not None
    pool.acquire(block)


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


def copy_that(fails: type[BaseException] | None) -> str:
    """How the copy ends, if not well."""
    if fails is None:
        return ""
    return f"; the copy {'is interrupted' if issubclass(fails, Interrupted) else 'fails'}"


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


def ways_down(mine, program, log: Log) -> None:
    """(holders on the device besides the cache, blocks of the host, of them in use, has a copy on
    the host already, error of the copy)."""
    others, size, used, has_copy, fails = program
    machine = SmallMachine(4, size)
    first = machine.device.allocate()  # so that ids of both pools differ
    for i in range(used):
        hold(machine.host, machine.put(f"X{i}", host=True).host)  # in use: is not evicted
    place = machine.put("A", device=True, host=has_copy)
    machine.device.release(first)
    for _ in range(others):
        hold(machine.device, place.device)
    log(
        f"A is on the device{' and on the host' if has_copy else ''}, with {1 + others} "
        f"holder{'s' if others else ''}; "
        f"{machine.host.num_free} of {size} blocks of the host are free{copy_that(fails)}"
    )
    copy = Copying(machine, machine.down, fails)
    called(log, "demote", mine.demote, place, machine.device, machine.host, copy)
    afterwards(machine, log, copy)


def nowhere(mine, program, log: Log) -> None:
    """A block that is not where it should move from."""
    name, on, *keep = program
    machine = SmallMachine(3, 3)
    place = machine.put("A", device=on == "device", host=on == "host")
    log(f"A is {f'on the {on} alone' if on else 'nowhere'}")
    move, function = (machine.down, mine.demote) if name == "demote" else (machine.up, mine.promote)
    copy = Copying(machine, move)
    text = f"{name}{', keep' if True in keep else ''}"
    called(log, text, function, place, machine.device, machine.host, copy, *keep)
    afterwards(machine, log, copy)


def ways_up(mine, program, log: Log) -> None:
    """(blocks of the device, texts on it, in use?, blocks of the host, texts on it, keep, error).
    The first text of the host is the one that is promoted."""
    num_device, on_device, in_use, num_host, on_host, keep, fails = program
    machine = SmallMachine(num_device, num_host)
    for text in on_host:
        machine.put(text, host=True)
    for text in on_device:
        place = machine.put(text, device=True)
        if in_use:
            hold(machine.device, place.device)
    log(
        f"device: {', '.join(on_device) or 'empty'}, {machine.device.num_free} free; host: "
        f"{', '.join(on_host)}, {machine.host.num_free} free; keep={keep}{copy_that(fails)}"
    )
    text = on_host[0]
    copy = Copying(machine, machine.up, fails)
    place = machine.places[text]
    called(log, f"promote {text}", mine.promote, place, machine.device, machine.host, copy, keep)
    afterwards(machine, log, copy)


def both(mine, program, log: Log) -> None:
    """A block that is on both tiers is promoted."""
    machine = SmallMachine(3, 3)
    machine.host.allocate()
    place = machine.put("A", device=True, host=True)
    log(f"A is on both tiers; keep={program}")
    copy = Copying(machine, machine.up)
    called(log, "promote A", mine.promote, place, machine.device, machine.host, copy, program)
    afterwards(machine, log, copy)


def back_and_forth(mine, program, log: Log) -> None:
    """Steps: d down, u up, k up with keep, of the block named; pools make room by themselves."""
    num_device, num_host, steps = program
    machine = SmallMachine(num_device, num_host)
    log(f"{num_device} blocks of device, {num_host} of host")
    for step in steps.split():
        text, kind = step[0], step[1:]
        if kind == "+":
            machine.put(text, device=True)
            log(f"{text} is computed")
            continue
        place = machine.places[text]
        if kind == "d":
            copy = Copying(machine, machine.down)
            called(log, f"demote {text}", mine.demote, place, machine.device, machine.host, copy)
        else:
            copy = Copying(machine, machine.up)
            called(
                log, f"promote {text}{', keep' if kind == 'k' else ''}", mine.promote, place,
                machine.device, machine.host, copy, kind == "k",
            )  # fmt: skip
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
scenario(
    "12.2",
    ways_down,
    Group("one block goes down", [(0, 2, 0, False, None), (0, 3, 1, False, None)], look=LEFT),
    Group(
        "a block with other holders stays",
        [(1, 2, 0, False, None), (2, 2, 0, True, None), (1, 1, 1, False, None)],
        look="how many holders does the pool count for this block, and how many may there be?",
    ),
    Group(
        "a copy that is on the host already is used",
        [(0, 2, 0, True, None), (0, 1, 0, True, None)],
        look="has anything to be copied, or allocated?",
    ),
    Group(
        "the host has no room: nothing happens",
        [(0, 1, 1, False, None), (0, 2, 2, False, None)],
        look="what has been changed before `allocate` raises?",
    ),
    Group(
        "demote, the copy fails: nothing happens",
        [(0, 2, 0, False, OSError), (0, 1, 0, False, OSError), (0, 2, 0, False, Interrupted)],
        look="which block was taken for the copy that failed?",
    ),
)
scenario(
    "12.2",
    nowhere,
    Group(
        "nothing to move",
        [
            ("demote", "host"), ("demote", ""), ("promote", "device", False),
            ("promote", "device", True), ("promote", "", True),
        ],
        look="which ids may be None?",
    ),
)  # fmt: skip
scenario(
    "12.2",
    ways_up,
    Group(
        "one block comes back",
        [
            (2, "", False, 2, "A", False, None),
            (2, "B", False, 2, "A", False, None),
            (2, "", False, 3, "AC", False, None),
        ],
        look=LEFT,
    ),
    Group(
        "with keep, the copy on the host stays",
        [(2, "", False, 2, "A", True, None), (2, "B", False, 3, "AC", True, None)],
        look="how many holders has the block on the host afterwards?",
    ),
    Group(
        "the device has no room: nothing happens",
        [
            (1, "B", True, 2, "A", False, None),
            (2, "BC", True, 2, "A", True, None),
            (1, "B", True, 1, "A", False, None),
        ],
        look="is what was held for the copy given back when `allocate` raises?",
    ),
    Group(
        "promote, the copy fails: nothing happens",
        [
            (2, "", False, 2, "A", False, OSError),
            (2, "", False, 2, "A", True, OSError),
            (2, "", False, 2, "A", False, Interrupted),
        ],
        look="which blocks were taken or held for the copy that failed?",
    ),
    Group(
        "making room on the device takes room on the host",
        [
            (1, "B", False, 1, "A", False, None),
            (1, "B", False, 2, "AC", False, None),
            (2, "BD", False, 2, "AC", False, None),
            (1, "B", False, 1, "A", True, None),
            (1, "B", False, 2, "AC", True, None),
        ],
        look="`device.allocate` may evict to the host, and the host's oldest block is the one that "
        "is about to be read",
    ),
)
scenario(
    "12.2",
    both,
    Group("a block that is on both tiers", [False, True], look="has anything to be copied?"),
)
scenario(
    "12.2",
    back_and_forth,
    Group(
        "down, back, and down again",
        [
            (2, 2, "A+ Ad Au Ad"),
            (2, 2, "A+ Ad Ak Ad Ak"),
            (2, 1, "A+ B+ Ad Bd"),
            (2, 2, "A+ B+ Ad Bd Au Bu"),
        ],
        look="what does the first move leave behind when the second begins?",
    ),
    Group(
        "40 random sequences of moves",
        [random_ways(seed) for seed in range(40)],
        look="the lines above: which?",
    ),
)


# ── 12.3 Gone, and found all the same ─────────────────────────────────────────

# Steps: "+ABC" stores the blocks A, AB and ABC; "!AB" lets every write of the block AB fail, "/AB"
# no longer; "?ABC" looks for the prefix ABC and loads what is found.


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
            log.call(f"find {', '.join(names)}", tier.find, names)
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
        steps.append(draw.choice("+++??!/") + text)
    return 3 + seed % 5, " ".join([*steps, "?ABCD", "?ABCE", "?GH"])


scenario(
    "12.3",
    tier_in_use,
    Group(
        "what is stored is found",
        [(4, "+A ?A"), (4, "+ABC ?ABC ?AB ?ABD"), (4, "+ABC +ABD ?ABC ?ABD"), (3, "?A +A ?AB")],
        look="find: how many blocks from the first one on?",
    ),
    Group(
        "what could not be written is not found",
        [
            (4, "!A +A ?A"),
            (4, "+X !ABC +ABC ?ABC"),
            (2, "+AB +X !Y +Y ?Y"),
            (4, "!AB +AB /AB +AB ?AB"),
        ],
        look="store: which name is known at the moment when `write` raises?",
    ),
    Group(
        "a prefix with a gap",
        [
            (4, "!AB +ABC ?ABC"),
            (4, "!A +ABC ?ABC"),
            (4, "!AC +ABC +ACD ?ACD"),
            (3, "+ABC +X ?ABC"),
            (3, "+ABC ?ABC +XY ?ABC"),
        ],
        look="find: a block after a gap is of no use",
    ),
    Group(
        "no block is lost",
        [
            (2, "!A +A +X +Y ?X ?Y"),
            (2, "!A +A +A +A +X ?X"),
            (3, "!AB +ABC +ABC /AB +ABC ?ABC"),
        ],
        look="which block was taken for what could not be written?",
    ),
    Group("60 random hosts", [random_tier(seed) for seed in range(60)], look="the lines above"),
)


# ── 12.4 Fetch or compute ─────────────────────────────────────────────────────


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
    """Times in ms: of a host's and a disk's latency and block, and of computing a block."""
    tiers, host, disk, compute = program
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
    return tiers, host, disk, draw.choice([1.03, 2.17, 4.49])


ALL_TIERS = ["".join(one) for n in range(1, 4) for one in itertools.product("hd", repeat=n)]
scenario(
    "12.4",
    even,
    Group(
        "break even",
        [
            (50_000, 0.001, 1e9, 0.0, 10_000),
            (5_000, 0.002, 1e7, 0.0, 1_000),
            (5_000, 0.002, 1e7, 0.004, 1_000),
            (5_120, 0.0001, 2e9, 0.008, 12_000),
            (131_072, 0.01, 2.5e9, 0.02, 6_000),
        ],
        look="what is gained with every token, and what is lost once?",
    ),
    Group(
        "a link that is too slow for any length",
        [(50_000, 0.001, 1e8, 0.0, 10_000), (10_000, 0.001, 1e8, 0.0, 10_000)],
        look="what if a token takes as long to fetch as to compute, or longer?",
    ),
    Group("without latency", [(5_000, 0.0, 1e7, 0.0, 1_000)], look="from which length on, then?"),
)
scenario(
    "12.4",
    plan,
    Group("no block", [("", (1, 1), (10, 2), 4)], look="an empty list"),
    Group(
        "one tier",
        [
            ("h", (1, 1), (10, 2), 4),
            ("h", (5, 1), (10, 2), 4),
            ("hh", (5, 1), (10, 2), 4),
            ("hhhh", (5, 1), (10, 2), 4),
            ("ddd", (1, 1), (10, 2), 4),
            ("d" * 8, (1, 1), (10, 2), 4),
            ("hhh", (1, 5), (10, 2), 4),
            ("h" * 300, (1, 1), (10, 2), 4),
            ("d" * 40, (1, 1), (59, 2), 4),
        ],
        look="latency once, and what every block gains: the first block alone may not pay",
    ),
    Group(
        "two tiers",
        [
            ("hhd", (1, 1), (10, 2), 4),
            ("hhdddddd", (1, 1), (10, 2), 4),
            ("hdh", (1, 1), (3, 6), 4),
            ("hdhhh", (1, 1), (3, 6), 4),
            ("dh", (1, 1), (3, 2), 4),
            ("dhd", (1, 1), (3.5, 2), 4),
            ("d" + "h" * 20, (1, 1), (51, 2), 4),
        ],
        look="a block can be used only with all blocks before it, and each tier's latency is paid "
        "once",
    ),
    Group(
        "a third tier",
        [("r" * 6, (1, 1), (5, 2), 4), ("r" * 4, (1, 1), (5, 2), 4), ("hrrrrr", (1, 1), (5, 2), 4)],
        look="whose names are in `links`?",
    ),
    Group(
        "equally long: the smaller number",
        [("h", (3, 1), (10, 2), 4), ("hh", (6, 1), (9, 2), 4), ("hhh", (0, 4), (9, 2), 4)],
        look="what if fetching takes exactly as long?",
    ),
    Group(
        "all short hits, and 60 random ones",
        [
            *((one, (1.3, 1.1), (2.9, 2.3), 4.1) for one in ALL_TIERS),
            *((one, (1.3, 4.7), (0.9, 0.3), 4.1) for one in ALL_TIERS),
            *map(random_plan, range(60)),
        ],
        look="the lines above: which of them fails?",
    ),
)


# ── 12.5 Whole, or not there ──────────────────────────────────────────────────

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
scenario(
    "12.5",
    on_a_disk,
    Group(
        "a crash on the way leaves the old file or the new one",
        [(False, (), None), (True, (), None)],
        look=NAMES_LAST,
    ),
    Group("other files stay", [(True, ("other",), None)], look="which files does `save` "
    "change?"),
    Group(
        "a disk that is full",
        [(True, (), ("write", OSError)), (False, (), ("write", OSError)),
         (True, ("other",), ("write", OSError))],
        look="what is left behind, and does the caller learn of it?",
    ),
    Group(
        "any other step that fails",
        [(True, (), ("sync", OSError)), (True, (), ("rename", OSError)),
         (False, (), ("rename", OSError)), (True, (), ("sync_folder", OSError))],
        look="what is left behind, and does the caller learn of it?",
    ),
    Group(
        "an empty file is a file, too",
        [(False, (), None, b""), (True, (), None, b""), (True, (), ("sync", OSError), b"")],
        look="which lines of yours look at the data?",
    ),
    Group(
        "interrupted",
        [(True, (), ("write", Interrupted)), (True, (), ("sync", Interrupted))],
        look="is KeyboardInterrupt an Exception?",
    ),
)  # fmt: skip


# ── 12.6 A session of this model ──────────────────────────────────────────────

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
        "a": BASE["a"], "b": torch.tensor([0.5]), "c": torch.tensor([-0.25])
    },
    "another last tensor": BASE | {"c": torch.tensor([7, 8, 10])},
    "bytes that move over a name": {"a": BASE["a"].flatten()[:5], "b": BASE["b"], "c": BASE["c"]},
}  # fmt: skip


LETTERS = torch.tensor(list(b"wxyz"), dtype=torch.uint8)
PAIRS = {
    "integers that float32 does not tell apart": (
        {"a": torch.tensor([2**24])},
        {"a": torch.tensor([2**24 + 1])},
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


def session() -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    kv = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).view(2, 3, 2, 1, 2)
    tensors = {"tokens": torch.tensor([5, 6, 7]), "kv": kv}
    header = dict(EXPECTED) | {"num_tokens": "3"}
    return sealed(header, tensors), tensors


def sealed(header: dict[str, str], tensors: dict[str, torch.Tensor], keep=()) -> dict[str, str]:
    """With shapes and checksum that fit, but for those in `keep`."""
    header = dict(header)
    if "shapes" not in keep:
        header["shapes"] = json.dumps(shapes_of(tensors), sort_keys=True)
    if "checksum" not in keep:
        header["checksum"] = checksum_of(header, tensors)
    return header


def changed(kind: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The session after one change. The rest fits, so that only this can tell it."""
    header, tensors = session()
    what, _, value = kind.partition("=")
    if what in EXPECTED or what == "num_tokens":
        if value:
            header[what] = value
        else:
            del header[what]
        return sealed(header, tensors), tensors
    if what == "more":
        header["title"] = "a chat about queues"
        return sealed(header, tensors), tensors
    if what == "checksum":
        header["checksum"] = value
        if not value:
            del header["checksum"]
    elif what == "shapes":
        del header["shapes"]
        header = sealed(header, tensors, keep=["shapes"])
    elif what == "kv":
        kv = tensors["kv"].clone()
        if value == "bit":
            kv[1, 2, 1, 0, 1] += 1
        elif value == "cut":
            kv = kv[:, :2]
        elif value == "float16":
            kv = kv.half()
        elif value == "other shape":
            kv = kv.view(2, 3, 2, 2, 1)
        tensors["kv"] = kv
        if value != "bit":
            header = sealed(header, tensors, keep=["shapes"])
    elif what == "tokens":
        tensors["tokens"] = torch.tensor([5, 6, 8] if value == "another" else [5, 6])
        if value == "fewer":
            header = sealed(header, tensors)
    elif what == "header":
        header["title"] = "changed after the checksum was made"
    elif what == "without":
        del tensors[value]
        header = sealed(header, tensors, keep=["shapes"])
    elif what == "no tokens":
        del tensors["tokens"]
        header = sealed(header | {"num_tokens": value}, tensors)
    return header, tensors


CHANGED = {
    "": ", as it was saved",
    "more": " with one more field, title",
    "kv=cut": " whose kv has fewer tokens",
    "kv=float16": " whose kv is in float16",
    "kv=other shape": " whose kv has another shape",
    "kv=bit": " in which one number of kv has changed",
    "without=kv": " without the tensor kv",
    "without=tokens": " without the tensor tokens",
    "tokens=another": " in which one token has changed",
    "tokens=fewer": " with fewer tokens than num_tokens says",
    "header": " with a field that was added after the checksum was made",
}


def described(kind: str) -> str:
    """A change of a session file, in words."""
    what, equals, value = kind.partition("=")
    if kind in CHANGED:
        return CHANGED[kind]
    if what == "no tokens":
        return f" without the tensor tokens, whose num_tokens is the text {value!r}"
    return f" whose {what} is {value!r}" if equals else f" without the field {what}"


def read(mine, program, log: Log) -> None:
    header, tensors = changed(program) if program else session()
    log(f"a session file{described(program)}")
    try:
        log.call("check_session", mine.check_session, header, tensors, EXPECTED)
    finally:
        event = log.events[-1]
        if isinstance(event.error, SessionError):
            event.error, event.seen = None, {"result": "refused"}
        elif event.error is None:
            event.seen = {"result": "accepted"}


scenario(
    "12.6",
    prints,
    Group(
        "the same tensors",
        list(OTHERS)[:4],
        look="does the order of names, or of numbers in memory, affect the digest?",
    ),
    Group(
        "any other tensors",
        [*list(OTHERS)[4:], *PAIRS],
        look="names, dtypes, shapes and bytes: which of them is not in the digest?",
    ),
    Group(
        "parts that run together",
        list(JOINED),
        look="in the bytes that the hash gets, where does a name end, and where does a shape?",
    ),
)
scenario(
    "12.6",
    imitates,
    Group(
        "a name that imitates another tensor",
        ["contains what is written between these two"],
        look="in the bytes that the hash gets, where does a name end? It may contain any text",
    ),
)
scenario(
    "12.6",
    read,
    Group("a good session", ["", "more"], look="what has to be equal, and what need not be?"),
    Group(
        "of another engine",
        [f"{name}={value}" for name, value in (
            ("format", "another"), ("version", "2"), ("model", "77aa"), ("dtype", "float16"),
            ("stored", "int8"), ("block_size", "32"))],
        look="every field of `expected`",
    ),
    Group(
        "a field that is missing", [*EXPECTED, "num_tokens"],
        look="what is the value of a field that is not there?",
    ),
    Group(
        "tensors that are not those in the header",
        ["kv=cut", "kv=float16", "kv=other shape", "without=kv", "without=tokens", "shapes",
         "tokens=fewer", "num_tokens=4", "no tokens=3", "no tokens=0", "no tokens=None"],
        look="shapes, then the number of tokens",
    ),
    Group(
        "damaged", ["kv=bit", "tokens=another", "checksum=00ff", "checksum", "header"],
        look="the checksum is over header, tokens, K and V",
    ),
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
    """The loop of conversations, simulated."""
    answers = mine.what_two_tiers_find()
    loop = [[10 * c + i for i in range(10)] for c in range(12)]
    for name, kind, host in (
        ("device alone", WriteBack, 0),
        ("write-back, 80", WriteBack, 80),
        ("write-through, 80", WriteThrough, 80),
        ("write-through, 120", WriteThrough, 120),
    ):
        tiers = kind(60, host)
        found = [sum(tiers.serve(ids)) for ids in loop * 5][12:]
        if abs(answers[name] - 10 * sum(found) / len(found)) > 1:
            raise AssertionError(f"{name}: {answers[name]}, the simulation finds otherwise")
    return "48 turns of 12 conversations, simulated in four ways, found what you predicted."


@runs_model("12.2")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Blocks that go to the host and come back."""
    with (
        in_place_of("minikv.tiers.tiers:demote", mine.demote),
        in_place_of("minikv.tiers.tiers:promote", mine.promote),
    ):
        count = evict_and_return(lm)
    return f"{count} blocks of tinypy went to the host and came back: the oracle's 8 tokens."


@runs_model("12.3")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Real K and V in a host on which writes fail."""
    prompt, size = lm.encode(PROMPT * 3), 8
    whole = PreallocatedCache(lm.config, 256)
    lm.logits(prompt, whole)
    names = [str(prompt[: end + size]) for end in range(0, len(prompt) - size, size)]
    blocks = [whole.kv[:, :, i * size : (i + 1) * size] for i in range(len(names))]
    fails = {names[3]}

    def write(memory: list, block: int, content: torch.Tensor) -> None:
        if any(content is blocks[names.index(name)] for name in fails):
            raise OSError("no space left")
        memory[block] = content.clone()

    tier = mine.HostTier(len(names), write)
    tier.store(names, blocks)
    found = tier.load(names)
    cache = PreallocatedCache(lm.config, 256)
    for i, block in enumerate(found):
        cache.kv[:, :, i * size : (i + 1) * size] = block
    cache.num_tokens = len(found) * size
    new = [int(lm.logits(prompt[cache.num_tokens :], cache)[-1].argmax())]
    while len(new) < 8:
        new.append(int(lm.logits(new[-1:], cache)[-1].argmax()))
    same_as_oracle(lm, prompt, new)
    return f"{len(found)} of {len(names)} blocks came from your host: the oracle's 8 tokens."


@runs_model("12.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    """The engine's own decision."""
    with in_place_of("minikv.tiers.tiers:blocks_to_fetch", mine.blocks_to_fetch):
        count = evict_and_return(lm)
    return f"your decision fetched {count} blocks from the host: the oracle's 8 tokens."


@runs_model("12.5", "12.6")
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
        saved = small_engine(lm).save_session(prompt, path)
        engine = small_engine(lm)
        token_ids = engine.load_session(path)
        params = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
        [output] = engine.generate([token_ids], params)
        rest = [file.name for file in path.parent.iterdir()]
    same_as_oracle(lm, prompt, output.token_ids)
    if rest != ["chat"]:
        raise AssertionError(f"the folder has {rest}")
    return f"a session of {saved.num_bytes:,} bytes came back: the oracle's 8 tokens."
