"""Chapter 12: mistakes that readers make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake, made

RIGHT = {
    "device alone": 0, "write-back, 80": 100, "on the device": 0, "write-through, 80": 0,
    "write-through, 120": 100, "random order": 50, "blocks written down": 10,
}  # fmt: skip


def guessed(key: str, number: float, name: str, cause: str, look: str) -> Mistake:
    """A wrong answer to exercise 12.1."""
    text = f"def what_two_tiers_find():\n    return {RIGHT | {key: number}!r}\n"
    return Mistake(name, cause, look, sources={"what_two_tiers_find": text})


# Where to look, if several mistakes are to be seen in one place.
LOOP = "which conversations are on the device when A's turn comes again?"
SUM = "how many different blocks do both tiers hold together?"
TAKEN = "which block was taken and is not needed now?"
BOTH = "who holds the two blocks while K and V are copied?"
HOST = "which block of the host is the oldest one when room has to be made there?"
PLACE = "when does the place change?"
KEPT = "what does `keep` mean for the block on the host?"
FIRST = "when is a name entered in the table?"
RUN = "the number of blocks from the first one on that are here"
GAIN = "1 / rate is what a token takes to compute, bytes / bandwidth what it takes to fetch"
ONCE = "which tiers have paid their latency already?"
PREFIX = "of which blocks is the answer made up?"
ORDER = "what may a crash leave between two steps?"
REST = "what is left behind if a step fails?"
DIGEST = "names, dtypes, shapes and bytes, each exactly once"
FIELDS = "what does the loop compare, and with what?"
WHOLE = "shapes, number of tokens, checksum: all three, in this order"

# Texts of the references that several mistakes change.
COPY_DOWN = """\
        try:
            copy(place.device, block_id)
        except BaseException:
            host.release(block_id)
            raise
"""
OUT = "    released, place.device = place.device, None\n    device.release(released)\n"
ONE_HOLDER = "place.device is None or device.ref_count(place.device) != 1"
HELD = "        host.acquire(place.host)\n        try:\n"
HELD_TO_THE_END = "        finally:\n            host.release(place.host)\n"
COPY_UP = """\
            try:
                copy(place.host, block_id)
            except BaseException:
                device.release(block_id)
                raise
"""
UP = (
    "            block_id = device.allocate()\n" + COPY_UP + "            place.device = block_id\n"
)
NOT_KEPT = """\
    if not keep:
        released, place.host = place.host, None
        host.release(released)
"""
WRITES = """\
        try:
            self.write(self.memory, block, content)
        except OSError:
            self.pool.release(block)
            continue
        self.blocks[name] = block
"""
COUNTS = """\
    count = 0
    while count < len(names) and names[count] in self.blocks:
        count += 1
    return count
"""
SAVES = """\
        folder.write(temporary, data)
        folder.sync(temporary)
        folder.rename(temporary, name)
"""
CLEANS = """\
    except BaseException:
        folder.remove(temporary)
        raise
"""

MISTAKES = {
    "12.1": (
        guessed(
            "device alone",
            50,
            "half fits",
            "half of the blocks fit, but never those that are asked for next",
            LOOP,
        ),
        guessed(
            "device alone", 100, "everything fits", "the 120 blocks do not fit the device", LOOP
        ),
        guessed(
            "device alone",
            100 * 50 / 60,
            "five of six",
            "one conversation in six is counted as a miss, but what comes next has always been "
            "evicted",
            LOOP,
        ),
        guessed(
            "write-back, 80",
            0,
            "twice nothing",
            "the tiers are looked at one by one, but together they have room for 140 blocks, each "
            "kept once",
            SUM,
        ),
        guessed(
            "write-back, 80",
            100 * 80 / 120,
            "as much as the host holds",
            "the host's share of all blocks is given: what the host lacks is on the device",
            SUM,
        ),
        guessed("write-back, 80", 50, "what fits the device", "the host is left out", SUM),
        guessed(
            "on the device",
            50,
            "the first tier finds its share",
            "the device holds half of the blocks, but it is the half that was used last",
            LOOP,
        ),
        guessed(
            "on the device",
            100,
            "fetched blocks are on the device",
            "blocks that were just fetched from the host are counted as found on the device",
            LOOP,
        ),
        guessed(
            "write-through, 80",
            100,
            "both sizes add up",
            "with write-through the blocks of "
            "the device are on the host, too: the sizes do not add up",
            SUM,
        ),
        guessed(
            "write-through, 80",
            100 * 80 / 120,
            "two thirds fit",
            "two thirds of the blocks fit, but never those that are asked for next",
            SUM,
        ),
        guessed(
            "write-through, 80",
            50,
            "half of them",
            "what is on the device is never what is asked for",
            LOOP,
        ),
        guessed(
            "write-through, 120",
            0,
            "write-through finds nothing",
            "120 blocks of host hold all 12 conversations",
            SUM,
        ),
        guessed("write-through, 120", 50, "the device's half", "the host holds all of them", SUM),
        guessed(
            "random order",
            0,
            "as in turns",
            "in random order, what comes next is not what was used longest ago",
            "how many conversations are on the device, of how many?",
        ),
        guessed(
            "random order",
            100 / 12,
            "one of twelve",
            "this is the chance of one particular conversation, but six are on the device",
            "how many conversations are on the device, of how many?",
        ),
        guessed(
            "random order",
            100,
            "all of them",
            "the device does not hold all 12 conversations",
            "how many conversations are on the device, of how many?",
        ),
        guessed(
            "blocks written down",
            0,
            "nothing is written",
            "10 blocks leave the device for the 10 that come, and are not on the host yet",
            "what has to leave the device, and does the host have it already?",
        ),
        guessed(
            "blocks written down",
            20,
            "up and down",
            "blocks that are fetched from the host are counted as well",
            "which direction does the question ask for?",
        ),
        guessed(
            "blocks written down",
            1,
            "one block",
            "a turn asks for 10 blocks",
            "how many blocks does a turn bring to the device?",
        ),
        guessed(
            "blocks written down",
            80 / 12,
            "a share of the host",
            "the host's blocks are shared out among the turns, but the number does not depend on "
            "the size of the host",
            "how many blocks does a turn bring to the device?",
        ),
        guessed(
            "blocks written down",
            60,
            "the whole device",
            "only as many blocks leave as come",
            "how many blocks does a turn bring to the device?",
        ),
    ),
    "12.2": (
        *made(
            "demote",
            (
                "releases before it copies",
                (
                    COPY_DOWN,
                    "        device.release(place.device)\n" + COPY_DOWN,
                    OUT,
                    "    place.device = None\n    if place.host is None:\n        pass\n",
                ),
                "the block on the device is released before it is copied: it may be given out and "
                "overwritten",
                BOTH,
            ),
            (
                "releases first of all",
                (
                    "    if place.host is None:\n",
                    "    device.release(place.device)\n    if place.host is None:\n",
                    OUT,
                    "    place.device = None\n",
                ),
                "the block on the device is released before room is found on the host: if there is "
                "none, it is lost",
                BOTH,
            ),
            (
                "never releases",
                (OUT, "    place.device = None\n"),
                "the block on the device is never released: the pool loses one with every demotion",
                "which pool has one block fewer than it should?",
            ),
            (
                "keeps saying device",
                (OUT, "    device.release(place.device)\n"),
                "the place still names the block on the device, which is free now",
                PLACE,
            ),
            (
                "takes it from others",
                (ONE_HOLDER, "place.device is None"),
                "a block with other holders is demoted, although they still read it",
                "device.ref_count, before anything else",
            ),
            (
                "counts the holders too late",
                (
                    ONE_HOLDER,
                    "place.device is None",
                    OUT,
                    "    if device.ref_count(place.device) != 1:\n"
                    '        raise ValueError("in use")\n' + OUT,
                ),
                "the holders are counted only after the copy: a block that is refused has been "
                "copied all the same",
                "device.ref_count, before anything else",
            ),
            (
                "takes what is not there",
                (ONE_HOLDER, "place.device is not None and device.ref_count(place.device) != 1"),
                "a block that is not on the device is not refused",
                "which ids may be None?",
            ),
            (
                "copies once more",
                ("    if place.host is None:\n        block_id", "    if True:\n        block_id"),
                "a block that is on the host already is given a second host block, and the first "
                "is lost",
                "what does place.host say before anything is copied?",
            ),
            (
                "keeps the new block",
                ("            host.release(block_id)\n            raise\n", "            raise\n"),
                "if the copy fails, the block taken on the host is not given back",
                TAKEN,
            ),
            (
                "is not interrupted",
                ("except BaseException:", "except Exception:"),
                "if the copy is interrupted, the block taken on the host is not given back: "
                "KeyboardInterrupt is not an Exception",
                "what else can `copy` raise?",
            ),
            (
                "says so too early",
                (
                    "        try:\n            copy(place.device, block_id)\n",
                    "        place.host = block_id\n        try:\n"
                    "            copy(place.device, block_id)\n",
                ),
                "the place names the block on the host before the copy is made, and still does if "
                "the copy fails",
                PLACE,
            ),
            (
                "swallows the error",
                (
                    "            host.release(block_id)\n            raise\n",
                    "            host.release(block_id)\n            return\n",
                ),
                "the error of the copy does not reach the caller",
                "what comes after the release?",
            ),
            (
                "swallows a full host",
                (
                    "        block_id = host.allocate()\n",
                    "        if host.num_free == 0:\n            return\n"
                    "        block_id = host.allocate()\n",
                ),
                "a full host raises no error here, though nothing was moved",
                "OutOfBlocks",
            ),
            (
                "forgets to copy",
                (COPY_DOWN, ""),
                "K and V are not copied: the block on the host holds what was there before",
                "what is `copy` for?",
            ),
            (
                "copies the wrong way",
                ("copy(place.device, block_id)", "copy(block_id, place.device)"),
                "the two blocks are handed to `copy` in the wrong order",
                "copy(from, to)",
            ),
            (
                "holds it twice",
                (
                    "        place.host = block_id\n",
                    "        host.acquire(block_id)\n        place.host = block_id\n",
                ),
                "the block on the host has two holders, but only the place names it",
                "how many holders has a block after `allocate`?",
            ),
            (
                "gives the block to the wrong pool",
                ("    device.release(released)\n", "    host.release(released)\n"),
                "a block of the device is released in the host's pool",
                "which pool does this id belong to?",
            ),
        ),
        *made(
            "promote",
            (
                "reads what is not held",
                (HELD, "        try:\n", HELD_TO_THE_END, "        finally:\n            pass\n"),
                "the block on the host is not held while room is made on the device: it may be "
                "evicted, and another block's keys are copied",
                HOST,
            ),
            (
                "holds it for ever",
                (HELD_TO_THE_END, "        finally:\n            pass\n"),
                "the block on the host is held once more and never released: it can never be "
                "evicted again",
                "which holder is not needed after the copy?",
            ),
            (
                "lets go only if all went well",
                (
                    HELD + UP + HELD_TO_THE_END,
                    "        host.acquire(place.host)\n"
                    + UP.replace("            ", "        ", 1).replace(
                        "\n            ", "\n        "
                    )
                    + "        host.release(place.host)\n",
                ),
                "if the device has no room or the copy fails, the block on the host stays held",
                "finally",
            ),
            (
                "never gives the host's block back",
                (NOT_KEPT, ""),
                "the block on the host is kept even without `keep`",
                KEPT,
            ),
            (
                "never keeps",
                ("    if not keep:\n", "    if True:\n"),
                "the block on the host is given back although `keep` is set",
                KEPT,
            ),
            (
                "keep means the opposite",
                ("    if not keep:\n", "    if keep:\n"),
                "the meaning of `keep` is reversed",
                KEPT,
            ),
            (
                "still says host",
                (NOT_KEPT, "    if not keep:\n        host.release(place.host)\n"),
                "the place still names the block on the host, which is free now",
                PLACE,
            ),
            (
                "says so without releasing",
                (NOT_KEPT, "    if not keep:\n        place.host = None\n"),
                "the block on the host is forgotten and never released: the host loses one block "
                "each time",
                "which pool has one block fewer than it should?",
            ),
            (
                "needs no host",
                (
                    "    if place.host is None:\n        raise",
                    "    if place.host is None and place.device is None:\n        raise",
                ),
                "a block that is on the device alone is not refused",
                "which ids may be None?",
            ),
            (
                "nothing to do on both",
                (
                    "    if place.device is None:\n",
                    "    if place.device is not None:\n        return\n"
                    "    if place.device is None:\n",
                ),
                "nothing is done with a block that is on both tiers: without `keep`, the copy on "
                "the host must go even if nothing was copied",
                "what is left to do for a block that is on the device already?",
            ),
            (
                "fetches once more",
                ("    if place.device is None:\n", "    if True:\n"),
                "a block that is on the device already is given a second device block",
                "place.device",
            ),
            (
                "refuses what is on both",
                (
                    "    if place.host is None:\n        raise",
                    "    if place.host is None or place.device is not None:\n        raise",
                ),
                "a block that is on both tiers is refused, but it only has to leave the host",
                "what is left to do for a block that is on the device already?",
            ),
            (
                "loses the new block",
                (
                    "            except BaseException:\n                device.release(block_id)\n"
                    "                raise\n",
                    "            except BaseException:\n                raise\n",
                ),
                "if the copy fails, the block taken on the device is not given back",
                TAKEN,
            ),
            (
                "is not interrupted on the way up",
                ("            except BaseException:", "            except Exception:"),
                "if the copy is interrupted, the block taken on the device is not given back: "
                "KeyboardInterrupt is not an Exception",
                "what else can `copy` raise?",
            ),
            (
                "says device too early",
                (COPY_UP, "            place.device = block_id\n" + COPY_UP),
                "the place names the block on the device before the copy is made, and still does "
                "if the copy fails",
                PLACE,
            ),
            (
                "releases the source first",
                (
                    "        host.acquire(place.host)\n",
                    "        host.acquire(place.host)\n        if not keep:\n"
                    "            host.release(place.host)\n",
                    NOT_KEPT,
                    "    if not keep:\n        place.host = None\n",
                ),
                "the place's own hold on the host's block is released before the copy: if the copy "
                "fails, the block is lost",
                BOTH,
            ),
            (
                "forgets to copy up",
                (COPY_UP, ""),
                "K and V are not copied: the block on the device holds what was there before",
                "what is `copy` for?",
            ),
            (
                "copies the wrong way up",
                ("copy(place.host, block_id)", "copy(block_id, place.host)"),
                "the two blocks are handed to `copy` in the wrong order",
                "copy(from, to)",
            ),
        ),
    ),
    "12.3": (
        *made(
            "HostTier.store",
            (
                "enters the name first",
                (
                    WRITES,
                    "        self.blocks[name] = block\n        try:\n"
                    "            self.write(self.memory, block, content)\n"
                    "        except OSError:\n            continue\n",
                ),
                "the name is known before the block is written, and stays if that fails: another "
                "block's content is found under it",
                FIRST,
            ),
            (
                "loses the block",
                (
                    "            self.pool.release(block)\n            continue\n",
                    "            continue\n",
                ),
                "the block of a failed write is not given back: each failure makes the host one "
                "block smaller",
                "which pool has the block now, and which name?",
            ),
            (
                "stops at a failure",
                (
                    "            continue\n        self.blocks",
                    "            return\n        self.blocks",
                ),
                "after one failed write the next blocks are not tried, but a later store may fill "
                "the gap, and then they are of use",
                "what becomes of the next names?",
            ),
            (
                "passes the error on",
                (
                    "            self.pool.release(block)\n            continue\n",
                    "            self.pool.release(block)\n            raise\n",
                ),
                "the error of a failed write reaches the caller, but a cache can do without a "
                "block",
                "one that cannot be written is left out",
            ),
            (
                "releases the block and keeps the name",
                (
                    "        except OSError:\n"
                    "            self.pool.release(block)\n            continue\n"
                    "        self.blocks[name] = block\n",
                    "            self.blocks[name] = block\n        except OSError:\n"
                    "            self.pool.release(block)\n            self.blocks[name] = block\n",
                ),
                "the block is given back, but the name still refers to it: later two names will "
                "share one block",
                "what does a failed write leave in `blocks`?",
            ),
            (
                "writes again",
                ("        if name in self.blocks:\n            continue\n", ""),
                "a block that is here already is stored once more, and its first block is lost",
                "what if the name is known?",
            ),
            (
                "evicts the newest",
                ("self.blocks.popitem(last=False)", "self.blocks.popitem()"),
                "the most recently used block is forgotten, not the least recently used one",
                "popitem(last=False)",
            ),
            (
                "forgets without releasing",
                (
                    "self.pool.release(self.blocks.popitem(last=False)[1])",
                    "self.blocks.popitem(last=False)",
                ),
                "a block is forgotten, but not given back to the pool",
                "who holds it now?",
            ),
            (
                "evicts nothing",
                (
                    "            self.pool.release(self.blocks.popitem(last=False)[1])\n",
                    "            return\n",
                ),
                "a full host stores nothing more, but it has to evict its oldest block",
                "if no block is free",
            ),
        ),
        *made(
            "HostTier.find",
            (
                "counts beyond a gap",
                (COUNTS, "    return sum(name in self.blocks for name in names)\n"),
                "blocks after a gap are counted, but they cannot be used without those before them",
                RUN,
            ),
            (
                "finds the last one",
                (
                    COUNTS,
                    "    return max((i + 1 for i, name in enumerate(names) if name in "
                    "self.blocks), "
                    "default=0)\n",
                ),
                "the last block that is here is taken for the end of the prefix, gaps or not",
                RUN,
            ),
            (
                "all or nothing",
                (
                    COUNTS,
                    "    return len(names) if all(name in self.blocks for name in names) else 0\n",
                ),
                "a prefix is found as a whole or not at all, but its beginning is of use, too",
                RUN,
            ),
            (
                "one too many",
                ("    return count\n", "    return min(count + 1, len(names))\n"),
                "the first missing block is counted, too",
                RUN,
            ),
            (
                "one too few",
                ("count < len(names) and", "count < len(names) - 1 and"),
                "the last block is never found",
                RUN,
            ),
            (
                "starts at the second",
                ("    count = 0\n", "    count = 1\n"),
                "the first block counts as found, whether it is here or not",
                RUN,
            ),
            (
                "stops after one gap",
                (
                    COUNTS,
                    "    missing = [i for i, name in enumerate(names) if name not in self.blocks]\n"
                    "    return missing[0] if missing else 0\n",
                ),
                "a prefix without a gap counts as not found",
                "what if no name is missing?",
            ),
            (
                "returns at a gap only",
                (
                    COUNTS,
                    "    for count, name in enumerate(names):\n"
                    "        if name not in self.blocks:\n            return count\n",
                ),
                "`find` returns nothing if all names are here",
                "what comes after the loop?",
            ),
            (
                "is there or not",
                (COUNTS, "    return int(bool(names) and names[0] in self.blocks)\n"),
                "at most one block is found",
                RUN,
            ),
        ),
    ),
    "12.4": (
        *made(
            "break_even",
            (
                "fetches for nothing",
                (
                    "gain = 1 / prefill.rate - bytes_per_token / link.bandwidth",
                    "gain = 1 / prefill.rate",
                ),
                "the time to fetch the bytes is left out",
                GAIN,
            ),
            (
                "bandwidth upside down",
                ("bytes_per_token / link.bandwidth", "link.bandwidth / bytes_per_token"),
                "the bandwidth is divided by the bytes: that is tokens per second, not seconds per "
                "token",
                GAIN,
            ),
            (
                "rate is no time",
                ("1 / prefill.rate", "prefill.rate"),
                "the rate is used as a time: a token takes 1 / rate",
                GAIN,
            ),
            (
                "pays the start",
                ("link.latency / gain", "(link.latency - prefill.start) / gain"),
                "the start of a step is counted as saved, but a step runs either way",
                "is a token computed after a full hit?",
            ),
            (
                "pays the start as well",
                ("link.latency / gain", "(link.latency + prefill.start) / gain"),
                "the start of a step is counted as a cost of fetching, but it is paid either way",
                "is a token computed after a full hit?",
            ),
            (
                "is below zero",
                ('    if gain <= 0:\n        return float("inf")\n', ""),
                "a link that is slower than computing never breaks even: the answer is neither "
                "negative nor an error",
                "what if gain is 0 or less?",
            ),
            (
                "never breaks even",
                (
                    '    if gain <= 0:\n        return float("inf")\n',
                    "    if gain <= 0:\n        return 0.0\n",
                ),
                "a link that is too slow is said to break even at 0 tokens, but it never does",
                "what if gain is 0 or less?",
            ),
            (
                "gain zero is an error",
                ("gain <= 0", "gain < 0"),
                "if fetching is as fast per token as computing, the latency is never earned back",
                "what if gain is exactly 0?",
            ),
            (
                "multiplies",
                ("link.latency / gain", "link.latency * gain"),
                "the latency is multiplied by the gain: how many gains make up for it?",
                GAIN,
            ),
            (
                "in whole tokens",
                ("return link.latency / gain", "return int(link.latency / gain)"),
                "the length is cut to a whole number",
                "the length at which both take equally long",
            ),
            (
                "pays for fetching alone",
                (
                    "return link.latency / gain",
                    "return link.latency / (bytes_per_token / link.bandwidth)",
                ),
                "the latency is compared with the time to fetch, and computing is left out",
                GAIN,
            ),
        ),
        *made(
            "blocks_to_fetch",
            (
                "knows two tiers",
                ("links[tier]", 'links["host" if tier == "host" else "disk"]'),
                "every tier that is not the host is taken for the disk",
                "whose names are in `links`?",
            ),
            (
                "blocks of 16",
                ("block_size / prefill.rate", "16 / prefill.rate"),
                "a block is taken for 16 tokens: `block_size` is not used",
                "how many tokens does a block save?",
            ),
            (
                "looks at 16 blocks",
                ("enumerate(tiers, 1)", "enumerate(tiers[:16], 1)"),
                "only the first blocks are looked at: the rest of a long hit is never fetched",
                "how many blocks may a hit have?",
            ),
            (
                "stops at the first loss",
                (
                    "        if saved > best_saved:\n            best, best_saved = count, saved\n",
                    "        if saved > best_saved:\n            best, best_saved = count, saved\n"
                    "        else:\n            break\n",
                ),
                "the search stops at the first block that does not pay, but later ones may earn "
                "the latency back",
                "does the first block of a tier have to pay for the latency alone?",
            ),
            (
                "all or nothing",
                (
                    "        if saved > best_saved:\n"
                    "            best, best_saved = count, saved\n    return best\n",
                    "    return len(tiers) if saved > 0 else 0\n",
                ),
                "all blocks are fetched or none, but a part may take the least time",
                "which counts are compared?",
            ),
            (
                "latency for each block",
                (
                    "        if tier not in used:\n            used.add(tier)\n"
                    "            saved -= link.latency\n",
                    "        saved -= link.latency\n",
                ),
                "every block pays the latency, but it comes once per tier",
                ONCE,
            ),
            (
                "latency once for all",
                (
                    "        if tier not in used:\n            used.add(tier)\n",
                    "        if not used:\n            used.add(tier)\n",
                ),
                "only the first tier pays its latency",
                ONCE,
            ),
            (
                "latency when the tier changes",
                (
                    "        if tier not in used:\n",
                    "        if list(used) != [tier]:\n            used.clear()\n",
                ),
                "the latency is paid again whenever the tier changes",
                ONCE,
            ),
            (
                "no latency",
                ("            saved -= link.latency\n", "            pass\n"),
                "the latencies are left out",
                ONCE,
            ),
            (
                "picks single blocks",
                (
                    "    for count, tier in enumerate(tiers, 1):\n"
                    "        link = links[tier]\n"
                    "        saved += block_size / prefill.rate - block_bytes / link.bandwidth\n",
                    "    for count, tier in enumerate(tiers, 1):\n        link = links[tier]\n"
                    "        gain = block_size / prefill.rate - block_bytes / link.bandwidth\n"
                    "        if gain <= 0:\n            continue\n        saved += gain\n",
                ),
                "blocks that do not pay are skipped without their cost, but later blocks cannot be "
                "used without them",
                PREFIX,
            ),
            (
                "takes more when equal",
                ("saved > best_saved", "saved >= best_saved"),
                "of two numbers with the same time the larger one is taken",
                "of several the smallest",
            ),
            (
                "counts the paying blocks",
                (
                    "    return best\n",
                    "    return sum(block_size / prefill.rate > block_bytes / links[t].bandwidth "
                    "for t in tiers)\n",
                ),
                "the blocks that pay by themselves are counted: latencies and gaps are left out",
                PREFIX,
            ),
            (
                "tokens are not blocks",
                ("block_size / prefill.rate", "1 / prefill.rate"),
                "the time to compute one token is taken for that of a block",
                "how many tokens does a block have?",
            ),
            (
                "a step is saved",
                ("    saved = best_saved = 0.0\n", "    saved, best_saved = prefill.start, 0.0\n"),
                "the start of a step is counted as saved, but a step runs either way",
                "is a token computed after a full hit?",
            ),
            (
                "one too few",
                ("best, best_saved = count, saved", "best, best_saved = count - 1, saved"),
                "the answer is one block too small",
                "a count or an index?",
            ),
            (
                "forgets the best",
                ("            best, best_saved = count, saved\n", "            best = count\n"),
                "every count that saves anything replaces the best one",
                "with what is a new count compared?",
            ),
        ),
    ),
    "12.5": made(
        "save",
        (
            "nothing to write",
            (
                "    temporary = name + TEMPORARY\n",
                "    if not data:\n        return\n    temporary = name + TEMPORARY\n",
            ),
            "data of 0 bytes is not written, so the old file stays",
            "what must the file hold after `save` of 0 bytes?",
        ),
        (
            "in place",
            (SAVES, "        folder.write(name, data)\n        folder.sync(name)\n"),
            "the file is written in place: a crash leaves half of it, and the old one is gone",
            "what may a crash leave of a file that is being written?",
        ),
        (
            "no sync before the rename",
            ("        folder.sync(temporary)\n", ""),
            "the content is not on the disk when the file gets its name: a crash may leave the new "
            "name on an empty file",
            ORDER,
        ),
        (
            "sync after the rename",
            (
                "        folder.sync(temporary)\n        folder.rename(temporary, name)\n",
                "        folder.rename(temporary, name)\n        folder.sync(name)\n",
            ),
            "the content is synced only after the rename: in between a crash may leave the new "
            "name "
            "on an empty file",
            ORDER,
        ),
        (
            "no sync of the folder",
            ("    folder.sync_folder()\n", ""),
            "the new name may not be on the disk when `save` returns: a crash brings back the "
            "state before `save`",
            "when are the names on the disk?",
        ),
        (
            "folder instead of file",
            ("        folder.sync(temporary)\n", "        folder.sync_folder()\n"),
            "the folder is synced before the rename, and the content never is",
            "which sync is for names, and which for contents?",
        ),
        (
            "folder too early",
            (
                "        folder.rename(temporary, name)\n",
                "        folder.sync_folder()\n        folder.rename(temporary, name)\n",
                "        raise\n    folder.sync_folder()\n",
                "        raise\n",
            ),
            "the folder is synced before the rename, and not after it: a crash brings back the "
            "state before `save`",
            "when are the names on the disk?",
        ),
        (
            "removes the old one",
            (
                "        folder.rename(temporary, name)\n",
                "        folder.remove(name)\n        folder.rename(temporary, name)\n",
            ),
            "the old file is removed first: a crash before the rename leaves none",
            "what does rename do with a file of that name?",
        ),
        (
            "leaves the temporary file",
            (CLEANS, "    except BaseException:\n        raise\n"),
            "the temporary file is left behind if a step fails",
            REST,
        ),
        (
            "is not interrupted",
            ("except BaseException:", "except Exception:"),
            "the temporary file is left behind if the work is interrupted: KeyboardInterrupt is "
            "not an Exception",
            REST,
        ),
        (
            "only full disks",
            (
                "        folder.write(temporary, data)\n",
                "        pass\n",
                "    try:\n",
                "    try:\n        folder.write(temporary, data)\n    except OSError:\n"
                "        folder.remove(temporary)\n        raise\n    try:\n",
                CLEANS,
                "    except ZeroDivisionError:\n        raise\n",
            ),
            "the temporary file is removed if writing fails, but not if a later step does",
            REST,
        ),
        (
            "swallows the error",
            (
                CLEANS,
                "    except BaseException:\n        folder.remove(temporary)\n        return\n",
            ),
            "the error does not reach the caller, who takes the session for saved",
            "what comes after `remove`?",
        ),
        (
            "removes the session",
            (
                CLEANS,
                "    except BaseException:\n        folder.remove(temporary)\n"
                "        folder.remove(name)\n        raise\n",
            ),
            "the old file is removed if a step fails",
            "which file is no longer wanted?",
        ),
        (
            "one name for all",
            ("    temporary = name + TEMPORARY\n", '    temporary = "other"\n'),
            "the temporary name is the name of another file, which is overwritten",
            "can another file have this name?",
        ),
        (
            "writes it twice",
            (
                "        folder.rename(temporary, name)\n",
                "        folder.write(name, data)\n        folder.sync(name)\n"
                "        folder.remove(temporary)\n",
            ),
            "the file itself is written in place after all: a crash leaves half of it",
            "which operation changes a name at once and completely?",
        ),
    ),
    "12.6": (
        *made(
            "add_tensors",
            (
                "in any order",
                ("sorted(tensors.items())", "tensors.items()"),
                "the digest depends on the order in which tensors are listed",
                "what decides the order of a dictionary?",
            ),
            (
                "no names",
                (
                    "[name, str(tensor.dtype), list(tensor.shape)]",
                    "[str(tensor.dtype), list(tensor.shape)]",
                ),
                "names are not in the digest: swapped weights are not noticed",
                DIGEST,
            ),
            (
                "no dtypes",
                ("[name, str(tensor.dtype), list(tensor.shape)]", "[name, list(tensor.shape)]"),
                "dtypes are not in the digest: the same bytes may be other numbers",
                DIGEST,
            ),
            (
                "no shapes",
                ("[name, str(tensor.dtype), list(tensor.shape)]", "[name, str(tensor.dtype)]"),
                "shapes are not in the digest: the same bytes may be another matrix",
                DIGEST,
            ),
            (
                "no numbers",
                ("        digest.update(bytes_of(tensor))\n", ""),
                "the numbers are not in the digest: fine-tuned weights have the same names and "
                "shapes",
                "which changes of a model leave names and shapes as they are?",
            ),
            (
                "the sum is enough",
                ("bytes_of(tensor)", "str(float(tensor.double().sum())).encode()"),
                "only the sum of each tensor is in the digest: changes that leave the sum as it is "
                "are not noticed",
                "all bytes",
            ),
            (
                "rounds",
                ("bytes_of(tensor)", "bytes_of(tensor.float().bfloat16())"),
                "the numbers are rounded before they are hashed: a small change is not noticed",
                "bit by bit",
            ),
            (
                "as it lies in memory",
                ("bytes_of(tensor)", "bytes(tensor.untyped_storage())"),
                "the memory is hashed as it is: the same numbers may be stored in another order",
                "`bytes_of` makes a tensor contiguous",
            ),
            (
                "nothing between the parts",
                (
                    "json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()",
                    'f"{name}{tensor.dtype}{list(tensor.shape)}".encode()',
                ),
                "name, dtype and shape are joined without separators, so a name can contain the "
                "text of a whole tensor, and two sets of tensors have one digest",
                "where does a name with brackets and commas end? JSON puts it in quotes",
            ),
            (
                "nothing around the name",
                (
                    "json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()",
                    'f"{name} {tensor.dtype} {tuple(tensor.shape)}\\n".encode()',
                ),
                "nothing says where a name ends: a name can contain whatever separates the parts, "
                "and so the text of a whole tensor",
                "JSON puts a name in quotes and escapes the quotes in it",
            ),
            (
                "sizes without separators",
                (
                    "list(tensor.shape)]",
                    '"".join(map(str, tensor.shape))]',
                ),
                "the sizes of a shape are joined without separators: (1, 10) and (110,) look alike",
                "which shapes have the text 1100?",
            ),
            (
                "the first tensor",
                (
                    "        digest.update(bytes_of(tensor))\n",
                    "        digest.update(bytes_of(tensor))\n        break\n",
                ),
                "only the first tensor is hashed",
                "the loop",
            ),
        ),
        *made(
            "check_session",
            (
                "a missing field is fine",
                ("if header.get(name) != value:", "if name in header and header[name] != value:"),
                "a file that lacks a field is not refused",
                "what is the value of a field that is not there?",
            ),
            (
                "a missing field is an error",
                ("if header.get(name) != value:", "if header[name] != value:"),
                "a file that lacks a field ends in KeyError",
                "header.get",
            ),
            *(
                (
                    f"no {name} is an error",
                    (f'header.get("{name}") != {value}:', f'header["{name}"] != {value}:'),
                    f"a file that lacks the field {name} ends in KeyError",
                    f'header.get("{name}")',
                )
                for name, value in (
                    ("shapes", "found"),
                    ("num_tokens", "str(num_tokens)"),
                    ("checksum", "checksum_of(header, tensors)"),
                )
            ),
            (
                "the model is enough",
                (
                    "    for name, value in expected.items():\n",
                    "    for name, value in list(expected.items())[:3]:\n",
                ),
                "only the first fields are compared: another dtype or layout is accepted",
                FIELDS,
            ),
            (
                "every field has to be known",
                (
                    "    found = json.dumps",
                    "    if set(header) - set(expected) - {'shapes', 'num_tokens', 'checksum'}:\n"
                    "        raise SessionError('a field that nobody asked for')\n"
                    "    found = json.dumps",
                ),
                "a file with an additional field is refused, though every expected field is equal",
                "which fields have to be equal?",
            ),
            (
                "compares no model",
                (
                    "        if header.get(name) != value:\n",
                    '        if name != "model" and header.get(name) != value:\n',
                ),
                "the model is not compared: K and V of other weights are accepted",
                FIELDS,
            ),
            (
                "shapes not compared",
                ('if header.get("shapes") != found:', "if False:"),
                "shapes and dtypes are not compared",
                WHOLE,
            ),
            (
                "no tokens are 0 tokens",
                (
                    'num_tokens = tensors["tokens"].numel() if "tokens" in tensors else None\n',
                    'num_tokens = tensors["tokens"].numel() if "tokens" in tensors else 0\n',
                ),
                "a file without tokens is taken for one of 0 tokens",
                "a tensor that is missing is not the same as an empty one",
            ),
            (
                "no count",
                (
                    'if num_tokens is None or header.get("num_tokens") != str(num_tokens):',
                    "if False:",
                ),
                "the number of tokens is not compared",
                WHOLE,
            ),
            (
                "the count is a number",
                (
                    'if num_tokens is None or header.get("num_tokens") != str(num_tokens):',
                    'if header.get("num_tokens") != num_tokens:',
                ),
                "a string is compared with a number: no session is ever accepted",
                "what kind of values does a header have?",
            ),
            (
                "no checksum",
                ('if header.get("checksum") != checksum_of(header, tensors):', "if False:"),
                "the checksum is not compared: flipped bits are read as keys",
                WHOLE,
            ),
            (
                "a file without one",
                (
                    'if header.get("checksum") != checksum_of(header, tensors):',
                    'if "checksum" in header and '
                    'header["checksum"] != checksum_of(header, tensors):',
                ),
                "a file without a checksum is accepted: a damaged one may have lost it",
                "what if the field is missing?",
            ),
            (
                "counts what is not there",
                (
                    'num_tokens = tensors["tokens"].numel() if "tokens" in tensors else None\n',
                    'num_tokens = tensors["tokens"].numel()\n',
                    '    if header.get("shapes") != found:',
                    '    tensors["kv"], tensors["tokens"]\n    if header.get("shapes") != found:',
                ),
                "a file without one of its tensors ends in KeyError",
                "which tensors does a broken file have?",
            ),
        ),
    ),
}
