"""Chapter 13: mistakes that readers make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake, made

RIGHT = {
    "one worker, 13": 100, "round robin, 12": 100, "round robin, 13": 0, "by prefix, 13": 100,
    "shared store, 13": 100, "blocks fetched": 10, "random, second turn": 25,
    "random, third turn": 43.75, "8 workers, second": 12.5,
}  # fmt: skip


def guessed(key: str, number: float, name: str, cause: str, look: str) -> Mistake:
    """A wrong answer to exercise 13.5."""
    text = f"def what_many_caches_find():\n    return {RIGHT | {key: number}!r}\n"
    return Mistake(name, cause, look, sources={"what_many_caches_find": text})


# Where to look, if several mistakes are to be seen in one place.
ENDS = "where does one thing end in the bytes, and the next begin?"
TYPE = "which two salts look alike when they are printed?"
EXACT = "`type(salt) in (…)`: the exact type, not a subclass of it"
PROCESS = "`hash` of a string is a different number in each process, and easy to collide"
CLAIM = "only the blocks before the first that the store does not claim"
COME = "what has come, in order; the first entry that is not good ends the prefix"
TIMES = "link.seconds(all bytes) against the time to compute the same blocks"
DOWN = "both calls of the store may raise OSError"
ALIVE = "a worker that lacks a block is out for all that follow"
LEAST = "least_loaded(), with its own hits if it has any, else 0"
UNIT = "load minus tokens held; both are tokens"
TIES = "of workers with equal differences, the least `sent`, and then the lowest number"
WHOLE_PROMPT = "the limit of (num_tokens - 1) // block_size belongs to what is returned"
NOTHING = "a worker above the bound: a candidate with 0 blocks if it is the least loaded one"
OVER = "`sent` of a worker against bound times the mean of all, with this prompt"
WRITER = "who may still write into the blocks?"
LOST = "which call will ever say that this transfer is over?"
WHOLE = "how many blocks were begun, and how many written?"
LOOP = "which conversations come to one worker, and how many blocks are they?"

TRIAL = "after the wait one caller goes through, and the others only when it has reported"
DOUBLE = "first, twice as long, twice as long, …, at most `most`: where is it doubled?"
WAS = "what was it before this call?"

SHA_JSON = "hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()"
PACKED = 'hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()'
COUNT = "next((i for i, is_here in enumerate(here) if not is_here), len(names))"
PAYS = "count == 0 or link.seconds(count * block_bytes) >= count * block_seconds"
CANDIDATES = "{one: n for one, n in self.hits(names).items() if self.sent[one] <= most}"
SCORE = "self.loads[one] - hits[one] * self.block_size"
KEY = f"({SCORE}, self.sent[one], one)"
STAYS = """\
    transfer.wanted = False
    if transfer.complete:
        self.forget(number)
"""
JUDGED = "transfer.wanted and num_written == len(transfer.blocks)"

REFUSES = "        if self.clock() < self._next_trial:\n            return False\n"
REST = """\
        if was_open:  # its trial has lengthened the wait already
            self._next_trial = self.clock() + self.wait
        else:
            self._lengthen()
"""

MISTAKES = {
    "13.1": (
        *made(
            "identity_of",
            (
                "joins with a rare character",
                (
                    "json.dumps(facts, sort_keys=True).encode()",
                    '"\\0".join(one for pair in sorted(facts.items()) for one in pair).encode()',
                ),
                "names and values are joined with a character that a value may hold, too",
                ENDS,
            ),
            (
                "joins without marks",
                (
                    "json.dumps(facts, sort_keys=True).encode()",
                    '"".join(k + v for k, v in sorted(facts.items())).encode()',
                ),
                "names and values are joined without a separator: letters can move from one to the "
                "next",
                ENDS,
            ),
            (
                "joins with commas",
                (
                    "json.dumps(facts, sort_keys=True).encode()",
                    '",".join(k + ":" + v for k, v in sorted(facts.items())).encode()',
                ),
                "a separator between two facts may also occur in a value, so one fact can look "
                "like two",
                ENDS,
            ),
            (
                "joins with an equals sign",
                (
                    "json.dumps(facts, sort_keys=True).encode()",
                    '";".join(f"{k}={v}" for k, v in sorted(facts.items())).encode()',
                ),
                "`=` and the sign between two facts may also occur in a value",
                ENDS,
            ),
            (
                "joins with line ends",
                (
                    "json.dumps(facts, sort_keys=True).encode()",
                    '"\\n".join(f"{k}\\n{v}" for k, v in sorted(facts.items())).encode()',
                ),
                "a line end between two facts may also occur in a value",
                ENDS,
            ),
            (
                "not sorted",
                ("sort_keys=True", "sort_keys=False"),
                "the identity depends on the order in which the facts are listed: two engines with "
                "the same facts do not find each other's blocks",
                "is the order of a dictionary one of the facts?",
            ),
            (
                "values alone",
                ("json.dumps(facts, sort_keys=True)", "json.dumps(sorted(facts.values()))"),
                "the names of the facts are left out: swapped values are not noticed",
                "what says which value is which?",
            ),
            (
                "names alone",
                ("json.dumps(facts, sort_keys=True)", "json.dumps(sorted(facts))"),
                "the values of the facts are left out",
                "what differs between two models?",
            ),
            (
                "Python's hash",
                (SHA_JSON, 'str(hash(json.dumps(facts, sort_keys=True))).encode().rjust(32, b"0")'),
                "`hash` gives another number in every process, and it is made for dictionaries, "
                "not against attackers",
                PROCESS,
            ),
            (
                "text instead of bytes",
                (".digest()", ".hexdigest().encode()"),
                "an identity has 32 bytes; these are its 64 hexadecimal digits",
                "digest, or hexdigest?",
            ),
        ),
        *made(
            "block_name",
            (
                "three bytes per token",
                (
                    f"return {PACKED}",
                    'return hashlib.sha256(parent + b"".join(one.to_bytes(3, "little") '
                    "for one in token_ids)).digest()",
                ),
                "a token gets three bytes, which have no room for ids from 2**24 on",
                "what is the largest token id?",
            ),
            (
                "digits that run together",
                (f"return {PACKED}",
                 'return hashlib.sha256(parent + "".join(map(str, token_ids)).encode()).digest()'),
                "the tokens' digits are joined without a separator: [1, 23] is [12, 3]",
                ENDS,
            ),
            (
                "two bytes per token",
                (f"return {PACKED}",
                 'return hashlib.sha256(parent + b"".join((one % 65536).to_bytes(2, "little") '
                 "for one in token_ids)).digest()"),
                "a token gets two bytes: tokens that differ by 65,536 are the same",
                "how large is the largest token id?",
            ),
            (
                "one byte per token",
                (f"return {PACKED}",
                 "return hashlib.sha256(parent + bytes(one % 256 for one in token_ids)).digest()"),
                "a token gets one byte: tokens that differ by 256 are the same",
                "how large is the largest token id?",
            ),
            (
                "as many bytes as it takes",
                (f"return {PACKED}",
                 'return hashlib.sha256(parent + b"".join(one.to_bytes(max(1, '
                 '(one.bit_length() + 7) // 8), "big") for one in token_ids)).digest()'),
                "a token gets as many bytes as it needs, so its end cannot be found",
                ENDS,
            ),
            (
                "no parent",
                ("hashlib.sha256(parent + ", "hashlib.sha256("),
                "the parent is left out: the same tokens after another beginning get this name",
                "K and V of a token depend on all tokens before it",
            ),
            (
                "the sum of the tokens",
                (PACKED,
                 'hashlib.sha256(parent + struct.pack("<q", sum(token_ids))).digest()'),
                "the tokens are added up, so their order and much else is lost",
                "every token in its place",
            ),
            (
                "a polynomial",
                (PACKED,
                 'hashlib.sha256(parent + struct.pack("<q", sum(31 ** (len(token_ids) - 1 - i) * '
                 "one for i, one in enumerate(token_ids)) % 2**62)).digest()"),
                "a polynomial in 31: 31 more in one token and 1 less in the one before it, and the "
                "name is the same",
                "every token in its place, before anything is computed from them",
            ),
            (
                "sorted tokens",
                ("*token_ids)", "*sorted(token_ids))"),
                "the tokens are sorted, so their order is lost",
                "is a b the same as b a?",
            ),
            (
                "Python's hash of the block",
                (f"return {PACKED}", "return (hash((parent, tuple(token_ids))) % 2**64)"
                 '.to_bytes(32, "big")'),
                "`hash` of a block gives another number in every process, and collisions can be "
                "computed",
                PROCESS,
            ),
        ),
        *made(
            "spell",
            (
                "str of the salt",
                ('f"{type(salt).__name__}:{salt!r}"', "str(salt)"),
                "`str` of the salt: the number 1 and the text \"1\" are one tenant",
                TYPE,
            ),
            (
                "repr of the salt",
                (
                    "        parts = [spell(one) for one in salt]\n"
                    "        known = [part for part in parts if part is not None]\n"
                    "        return f\"({','.join(known)})\" if len(known) == len(parts) "
                    "else None\n",
                    "        return repr(salt)\n",
                ),
                "`repr` of a tuple prints whatever its parts print: objects by their address, or "
                "as anything",
                "what if something in the tuple has no spelling?",
            ),
            (
                "anything goes",
                (
                    "    return None\n",
                    '    return f"{type(salt).__name__}:{salt!r}"\n',
                ),
                "what has no fixed spelling gets one: its address, or an order that changes",
                "what does an object print in another process?",
            ),
            (
                "no brackets",
                ("f\"({','.join(known)})\"", "','.join(known)"),
                "a tuple has no beginning and no end: (\"a\", (\"b\",)) is ((\"a\",), \"b\")",
                ENDS,
            ),
            (
                "strings without quotes",
                ("{salt!r}", "{salt!s}"),
                "strings have no quotes: a comma in a string looks like one of the tuple's",
                ENDS,
            ),
            (
                "leaves out what it cannot spell",
                (
                    "f\"({','.join(known)})\" if len(known) == len(parts) else None",
                    "f\"({','.join(known)})\"",
                ),
                "a part of a tuple without a spelling is left out: tenants that differ only in it "
                "share blocks",
                "what if one part is None?",
            ),
            (
                "None is no salt",
                ("salt is None or type(salt)", "type(salt)"),
                "None has no spelling here, but it is the salt of all requests that set none",
                "the list of salts in the docstring",
            ),
            (
                "instances of subclasses",
                (
                    "type(salt) in (str, bytes, int, bool, float)",
                    "isinstance(salt, str | bytes | int | float)",
                ),
                "`isinstance` takes instances of subclasses too, such as members of an enum: "
                "their class decides what they print",
                EXACT,
            ),
            (
                "a boolean is an integer",
                (
                    "    if salt is None or type",
                    "    if isinstance(salt, int):\n"
                    '        return f"int:{int(salt)}"\n'
                    "    if salt is None or type",
                ),
                "`isinstance(True, int)` is True: the salts True and 1 get one spelling",
                EXACT,
            ),
            (
                "Python's hash of the salt",
                ('f"{type(salt).__name__}:{salt!r}"', "str(hash(salt))"),
                "`hash` of a salt gives another number in every process; 1, 1.0 and True have the "
                "same one, and so have -1 and -2",
                PROCESS,
            ),
        ),
    ),
    "13.2": made(
        "fetch_prefix",
        (
            "asks for 16 blocks at most",
            ("store.get_many(names[:count])", "store.get_many(names[: min(count, 16)])"),
            "only the first blocks are asked for, though fetching all that the store has would be "
            "sooner",
            "how many blocks may a prefix have?",
        ),
        (
            "believes in blocks behind a gap",
            (COUNT, "sum(here)"),
            "all blocks that the store claims are counted, wherever they are, but those after a "
            "gap cannot be used",
            CLAIM,
        ),
        (
            "asks for everything",
            ("store.get_many(names[:count])", "store.get_many(names)"),
            "blocks that the store does not claim, or not in a run, are asked for as well",
            CLAIM,
        ),
        (
            "skips what did not come",
            ("        if entry is None:\n            break\n",
             "        if entry is None:\n            continue\n"),
            "a block that did not come is skipped, and those after it are taken: they would be "
            "read at the wrong place",
            COME,
        ),
        (
            "skips what is refused",
            ("        except EntryError:\n            break\n",
             "        except EntryError:\n            continue\n"),
            "a refused entry is skipped, and those after it are taken: they would be read at the "
            "wrong place",
            COME,
        ),
        (
            "all or nothing",
            ("        except EntryError:\n            break\n",
             "        except EntryError:\n            return []\n"),
            "one bad entry throws away the good ones before it",
            COME,
        ),
        (
            "all or nothing came",
            ("        if entry is None:\n            break\n",
             "        if entry is None:\n            return []\n"),
            "one missing entry throws away the good ones before it",
            COME,
        ),
        (
            "passes the refusal on",
            ("        except EntryError:\n            break\n",
             "        except EntryError:\n            raise\n"),
            "an entry that is refused is an error here, but it is only a miss",
            COME,
        ),
        (
            "unpacks nothing",
            ("contents.append(unpack(entry, name))", "contents.append(entry)"),
            "entries are used as they are: nothing checks which block they belong to",
            "what does `unpack` return, and what does it refuse?",
        ),
        (
            "trusts what it said",
            ("        if entry is None:\n            break\n", ""),
            "an entry that did not come is passed to `unpack`, because the store had claimed it",
            COME,
        ),
        (
            "always fetches",
            (PAYS, "count == 0"),
            "nothing checks whether computing would be sooner",
            TIMES,
        ),
        (
            "forgets the latency",
            ("link.seconds(count * block_bytes)", "count * block_bytes / link.bandwidth"),
            "the link's latency is left out",
            TIMES,
        ),
        (
            "pays the latency for each block",
            ("link.seconds(count * block_bytes)", "count * link.seconds(block_bytes)"),
            "the latency is paid for every block, but the blocks come with one call",
            TIMES,
        ),
        (
            "counts all blocks as gained",
            (">= count * block_seconds", ">= len(names) * block_seconds"),
            "the time to compute all blocks is compared, but the others are computed either way",
            TIMES,
        ),
        (
            "fetches if it takes as long",
            ("link.seconds(count * block_bytes) >=", "link.seconds(count * block_bytes) >"),
            "blocks are fetched even if that takes exactly as long as computing them",
            "the docstring says sooner: what if both take equally long?",
        ),
        (
            "asks about nothing",
            ("    if not names:\n        return []\n", ""),
            "`contains` is called although there is no block to ask for",
            "which calls are of no use?",
        ),
        (
            "fails with the store",
            ("    except OSError:\n        return []\n", "    except ZeroDivisionError:\n"
             "        return []\n"),
            "a store that does not answer is an error here, but it should be a miss",
            DOWN,
        ),
        (
            "one question per block",
            ("        here = store.contains(names)\n",
             "        here = [store.contains([name])[0] for name in names]\n"),
            "the store is asked about each block separately: every question is a round trip",
            "one round trip for the whole prefix",
        ),
    ),
    "13.3": (
        *made(
            "ByPrefix.hits",
            (
                "counts wherever",
                (
                    "        alive = set(holders) if alive is None else alive & holders\n",
                    "        alive = set(holders)\n",
                ),
                "a worker that holds a later block counts, though it lacks one before it",
                ALIVE,
            ),
            (
                "any holder",
                ("else alive & holders", "else alive | holders"),
                "the sets of workers are joined, so a worker that lacks the block stays in",
                ALIVE,
            ),
            (
                "counts from 0",
                ("enumerate(names, 1)", "enumerate(names)"),
                "the hits are one too few: a worker that holds the first block has 1 hit",
                "how many blocks is a hit on the first one?",
            ),
            (
                "goes on behind a gap",
                (
                    "        if not alive:\n            break\n",
                    "        if not alive:\n            alive = None\n"
                    "            continue\n",
                ),
                "after a block that no worker holds, later blocks count again",
                ALIVE,
            ),
            (
                "all workers",
                (
                    "    hits: dict[int, int] = {}\n",
                    "    hits: dict[int, int] = dict.fromkeys(range(len(self.loads)), 0)\n",
                ),
                "workers that hold nothing are in the result with 0 blocks",
                "which workers are left out?",
            ),
            (
                "changes who holds what",
                ("self.holders.get(name, set())", "self.holders.setdefault(name, set())"),
                "a question about a block enters it into `holders`",
                "does a question change anything?",
            ),
            (
                "narrows the router's own set",
                (
                    "        alive = set(holders) if alive is None else alive & holders\n",
                    "        alive = holders if alive is None else alive\n"
                    "        alive &= holders\n",
                ),
                "`&=` works in place, on a set that belongs to `holders`: workers are lost from it",
                "does a question change anything?",
            ),
            (
                "takes the set itself",
                (
                    "set(holders) if alive is None else alive & holders",
                    "holders if alive is None else alive",
                ),
                "the first block's holders are taken for those of all blocks",
                ALIVE,
            ),
        ),
        *made(
            "ByPrefix.choose",
            (
                "the longest hit wins",
                (KEY, "(-hits[one], self.loads[one], one)"),
                "the longest prefix wins, however many tokens wait at its worker",
                UNIT,
            ),
            (
                "the shortest queue wins",
                (KEY, "(self.loads[one], self.sent[one], one)"),
                "the shortest queue wins, whatever the worker holds",
                UNIT,
            ),
            (
                "blocks against tokens",
                ("hits[one] * self.block_size,", "hits[one],"),
                "blocks are subtracted from tokens: a hit hardly counts",
                UNIT,
            ),
            (
                "no bound",
                (CANDIDATES, "self.hits(names)"),
                "the bound is not applied: one worker may get every prompt for its prefixes",
                OVER,
            ),
            (
                "the mean without this prompt",
                ("(sum(self.sent) + num_tokens)", "sum(self.sent)"),
                "the mean leaves this prompt out: at the beginning it is too low, and a holder is "
                "above the bound",
                OVER,
            ),
            (
                "holders alone",
                (
                    "    hits.setdefault(self.least_loaded(), 0)\n",
                    "    if not hits:\n        hits[self.least_loaded()] = 0\n",
                ),
                "only workers that hold the prefix are candidates, however long their queues are",
                LEAST,
            ),
            (
                "the least loaded holds nothing",
                (
                    "    hits.setdefault(self.least_loaded(), 0)\n",
                    "    hits[self.least_loaded()] = 0\n",
                ),
                "the least loaded worker's own hits are thrown away",
                LEAST,
            ),
            (
                "believes nothing",
                ("    self.stored(worker, names)\n", ""),
                "the router does not note that the worker will hold the prompt",
                "self.stored(worker, names), after the choice",
            ),
            (
                "notes the last block alone",
                ("self.stored(worker, names)", "self.stored(worker, names[-1:])"),
                "the worker is noted for the last block alone: a hit begins with the first one",
                "self.stored(worker, names), after the choice",
            ),
            (
                "notes the least loaded one",
                ("self.stored(worker, names)", "self.stored(self.least_loaded(), names)"),
                "the prompt is noted for the least loaded worker, which need not be the chosen one",
                "self.stored(worker, names), after the choice",
            ),
            (
                "nothing left to compute",
                ("min(hits[worker], (num_tokens - 1) // self.block_size)", "hits[worker]"),
                "a prompt that is held whole is said to need no computing, but at least one token "
                "is computed",
                "what does a prompt of 8 tokens in 2 held blocks of 4 leave to compute?",
            ),
            (
                "returns tokens",
                (
                    "min(hits[worker], (num_tokens - 1) // self.block_size)",
                    "min(hits[worker] * self.block_size, num_tokens - 1)",
                ),
                "the second number is in blocks, not in tokens",
                "what does `route` do with it?",
            ),
            (
                "ties go by number",
                (KEY, f"({SCORE}, one)"),
                "among equals the lowest number gets the prompt, not the one with the least sent",
                TIES,
            ),
            (
                "ties go to the first",
                (KEY, SCORE),
                "among equals the one that comes first in the dictionary gets the prompt",
                TIES,
            ),
            (
                "ties go by load",
                (KEY, f"({SCORE}, self.loads[one], one)"),
                "among equals the one with the least load gets the prompt, not the one with the "
                "least sent",
                TIES,
            ),
            (
                "ties go by hits",
                (KEY, f"({SCORE}, -hits[one], one)"),
                "among equals the one with the most hits gets the prompt, not the one with the "
                "least sent",
                TIES,
            ),
            (
                "ties go to the most sent",
                (KEY, f"({SCORE}, -self.sent[one], one)"),
                "among equals the one with the most sent gets the prompt, not the one with the "
                "least",
                TIES,
            ),
            (
                "ties go to the highest number",
                (KEY, f"({SCORE}, self.sent[one], -one)"),
                "among equals with equal `sent`, the highest number gets the prompt, not the "
                "lowest",
                TIES,
            ),
            (
                "tokens held, but for the last",
                (KEY, "(self.loads[one] - min(hits[one] * self.block_size, num_tokens - 1), "
                 "self.sent[one], one)"),
                "in the comparison, the tokens held are cut to num_tokens - 1: only the number "
                "that is returned has a limit",
                WHOLE_PROMPT,
            ),
            (
                "the limit in the comparison",
                (KEY, "(self.loads[one] - min(hits[one], (num_tokens - 1) // self.block_size) "
                 "* self.block_size, self.sent[one], one)"),
                "in the comparison, the blocks held are cut to (num_tokens - 1) // block_size: "
                "only the number that is returned has a limit",
                WHOLE_PROMPT,
            ),
            (
                "returns what the bound took",
                (
                    "    most = ", "    held = self.hits(names)\n    most = ",
                    "min(hits[worker], ", "min(held.get(worker, 0), ",
                ),
                "a worker above the bound is chosen as the least loaded one, and its hits are "
                "returned: it counts as one that holds nothing, in the number as well",
                NOTHING,
            ),
            (
                "the least loaded is above the bound",
                (
                    "    hits.setdefault(self.least_loaded(), 0)\n",
                    "    least = self.least_loaded()\n"
                    "    hits.setdefault(least, self.hits(names).get(least, 0))\n",
                ),
                "the least loaded worker gets its hits even above the bound: it counts as one that "
                "holds nothing, in the comparison and in the number",
                NOTHING,
            ),
            (
                "nobody above the bound",
                (
                    "self.least_loaded(), 0",
                    "min((one for one, sent in enumerate(self.sent) if sent <= most), key=lambda "
                    "one: (self.loads[one], self.sent[one]), default=0), 0",
                ),
                "a worker above the bound gets no prompt at all: it only loses the credit for its "
                "prefixes, and as the least loaded it may still be chosen",
                NOTHING,
            ),
            (
                "below the bound",
                ("<= most", "< most"),
                "a worker exactly at the bound counts as one above it",
                OVER,
            ),
            (
                "this prompt on each worker",
                ("self.sent[one] <= most", "self.sent[one] + num_tokens <= most"),
                "this prompt is added to each worker's `sent`: it belongs only to the mean",
                OVER,
            ),
            (
                "the bound of the queues",
                ("self.sent[one] <= most", "self.loads[one] <= most",
                 "sum(self.sent)", "sum(self.loads)"),
                "the bound is applied to `loads`: with little traffic all are 0, and no worker is "
                "above it",
                OVER,
            ),
            (
                "the sum for the mean",
                (" / len(self.sent)", ""),
                "the bound is a multiple of the sum, not of the mean: almost no worker is above it",
                OVER,
            ),
            (
                "looks after it has noted",
                (
                    "    return worker, min(hits[worker], ",
                    "    return worker, min(self.hits(names).get(worker, 0), ",
                ),
                "the hits are looked up after `stored`: by then the worker is believed to hold the "
                "whole prompt",
                "look up the hits first, then note the prompt",
            ),
        ),
    ),
    "13.4": (
        *made(
            "Receiver.cancel",
            (
                "gives back at once",
                (STAYS, "    self.forget(number)\n"),
                "the blocks of a cancelled transfer are given back while its sender may still "
                "write: the next request's K and V are overwritten",
                WRITER,
            ),
            (
                "keeps what is complete",
                ("    if transfer.complete:\n        self.forget(number)\n", ""),
                "a transfer that is complete and then cancelled is kept for ever: its sender will "
                "not report again",
                LOST,
            ),
            (
                "cancels nothing",
                ("    transfer.wanted = False\n", ""),
                "a cancelled transfer continues as if it were wanted, and can be taken",
                "what does `stopped` have to know?",
            ),
            (
                "forgets without giving back",
                (STAYS, "    del self.transfers[number]\n"),
                "the transfer is forgotten, and its blocks with it: they are never free again",
                LOST,
            ),
        ),
        *made(
            "Receiver.stopped",
            (
                "a part for the whole",
                (JUDGED, "transfer.wanted"),
                "a transfer whose sender gave up is taken for complete: the request reads blocks "
                "that were never written",
                WHOLE,
            ),
            (
                "a part for the whole, cancelled or not",
                (JUDGED, "True"),
                "a transfer is complete whatever was written, and whether it is wanted or not",
                WHOLE,
            ),
            (
                "keeps what is not whole",
                ("    else:\n        self.forget(number)\n", ""),
                "the blocks of a transfer that was given up are never given back",
                LOST,
            ),
            (
                "anything written is enough",
                ("num_written == len(transfer.blocks)", "num_written > 0"),
                "one written block is enough to be complete",
                WHOLE,
            ),
            (
                "one block less is enough",
                ("num_written == len(transfer.blocks)", "num_written >= len(transfer.blocks) - 1"),
                "a transfer with a block missing is taken for complete",
                WHOLE,
            ),
        ),
        *made(
            "Receiver.died",
            (
                "waits for the dead",
                ("transfer.sender == sender and not transfer.complete",
                 "transfer.sender == sender and transfer.wanted and not transfer.complete"),
                "a cancelled transfer of a dead sender is kept: it waits for a message that will "
                "never come",
                LOST,
            ),
            (
                "throws away what is whole",
                (" and not transfer.complete", ""),
                "what the dead sender had completed is thrown away, though it is whole",
                "which transfers may still be written?",
            ),
            (
                "the wrong dead",
                ("transfer.sender == sender and not", "not"),
                "the transfers of all senders are given back, and the living senders still write",
                "whose transfers?",
            ),
            (
                "only the cancelled",
                ("transfer.sender == sender and not transfer.complete",
                 "transfer.sender == sender and not transfer.wanted"),
                "only cancelled transfers are given back: those that are wanted wait for ever",
                LOST,
            ),
            (
                "stops at the first",
                (
                    "            self.forget(number)\n",
                    "            self.forget(number)\n            break\n",
                ),
                "only one transfer of the dead sender is given back",
                "how many transfers may one sender have?",
            ),
        ),
    ),
    "13.5": (
        guessed("one worker, 13", 0, "a loop finds nothing",
                "the 130 blocks fit into 160: a loop that fits is found whole", LOOP),
        guessed("round robin, 12", 0, "every worker sees all twelve",
                "12 is a multiple of 4, so a conversation always meets the same worker", LOOP),
        guessed("round robin, 12", 25, "a quarter by chance",
                "round robin is not random: conversation 0 meets worker 0 each time", LOOP),
        guessed("round robin, 12", 100 * 40 / 120, "a third fits",
                "a worker sees three of the twelve conversations, not all of them", LOOP),
        guessed("round robin, 13", 100, "four caches are one",
                "160 blocks would hold everything, but each worker has 40 and sees all 130", LOOP),
        guessed("round robin, 13", 25, "a quarter on each",
                "each worker sees all 13 conversations in turn: a loop of 130 blocks in 40", LOOP),
        guessed("round robin, 13", 100 * 40 / 130, "as many as fit",
                "of a loop that does not fit, LRU keeps what was used last, never what comes "
                "next", LOOP),
        guessed("by prefix, 13", 0, "one too many",
                "the worker with four conversations has 40 blocks, and room for 40", LOOP),
        guessed("by prefix, 13", 100 * 12 / 13, "one conversation in vain",
                "the worker with four conversations has 40 blocks, and room for 40", LOOP),
        guessed("shared store, 13", 0, "the store is a loop, too",
                "the store has 160 blocks and gets 130", "what does the store evict?"),
        guessed("shared store, 13", 25, "a store per worker",
                "every block is written to one store, whichever worker computed it",
                "what does the store hold?"),
        guessed("blocks fetched", 0, "they are on the worker",
                "the worker has evicted the conversation when its next turn comes, exactly as "
                "without a store", LOOP),
        guessed("blocks fetched", 7.5, "three quarters from elsewhere",
                "nothing of the conversation is on the worker: all ten blocks come", LOOP),
        guessed("random, second turn", 75, "the others' share",
                "the second turn finds its prefix if it is drawn to the same worker as the first",
                "one of how many workers has it?"),
        guessed("random, second turn", 100, "everywhere at once",
                "after one turn, one worker has the prefix", "one of how many workers has it?"),
        guessed("random, third turn", 50, "two of four",
                "the two earlier turns may have been on the same worker",
                "1 minus the chance that neither was on this worker"),
        guessed("random, third turn", 25, "the last turn alone",
                "the first turn's worker still has the prefix: caches have no bound here",
                "1 minus the chance that neither was on this worker"),
        guessed("random, third turn", 6.25, "both of them",
                "one of the earlier turns is enough", "1 minus the chance that neither was"),
        guessed("8 workers, second", 25, "as with four",
                "the chance to meet the same worker again depends on their number",
                "one of how many workers has it?"),
        guessed("8 workers, second", 50, "twice as many find twice as much",
                "more workers find less here: the prefix is on one of eight",
                "one of how many workers has it?"),
    ),
    "13.6": (
        *made(
            "Breaker.allows",
            (
                "takes no lock",
                ("    with self._lock:\n", "    if True:\n"),
                "two threads can both find that the wait is over before either of them has "
                "lengthened it",
                "which lines may not be interrupted by another thread? `self._lock`",
            ),
            (
                "never tries again",
                (REFUSES, "        return False\n"),
                "once it is open, no call goes through again: the store is never asked again",
                TRIAL,
            ),
            (
                "everybody tries",
                ("        self._lengthen()  # others wait for this trial's end\n", ""),
                "once the wait is over, every caller goes through until one of them reports",
                TRIAL,
            ),
            (
                "is closed for the trial",
                ("self._lengthen()  # others wait for this trial's end", "self.wait = 0.0"),
                "it closes before the trial has reported: all callers go through, and the next "
                "wait is the first one again",
                TRIAL,
            ),
            (
                "a moment too late",
                ("self.clock() < self._next_trial", "self.clock() <= self._next_trial"),
                "at the time of the trial itself no call goes through",
                "may a call go through at exactly that time?",
            ),
            (
                "waits for a report",
                (
                    "        self._lengthen()  # others wait for this trial's end\n",
                    "        self._lengthen()\n"
                    '        self._next_trial = float("inf")\n',
                ),
                "if a trial never reports, no other call ever goes through",
                "can a caller end without a report?",
            ),
            (
                "the trial's wait is not doubled",
                (
                    "        self._lengthen()  # others wait for this trial's end\n",
                    "        self._next_trial = self.clock() + self.wait\n",
                ),
                "the waits stay as long as the first: during a long outage the store is asked "
                "again and again",
                DOUBLE,
            ),
            (
                "without an upper limit",
                (
                    "        self._lengthen()  # others wait for this trial's end\n",
                    "        self.wait *= 2\n"
                    "        self._next_trial = self.clock() + self.wait\n",
                ),
                "the waits double without end: `most` is not applied",
                DOUBLE,
            ),
            (
                "asks while it is open",
                (REFUSES, ""),
                "it lets callers through whether the wait is over or not",
                "what does `allows` return before the wait is over?",
            ),
        ),
        *made(
            "Breaker.worked",
            (
                "stays open",
                ("was_open, self.wait = self.is_open, 0.0", "was_open = self.is_open"),
                "a trial that worked does not close it",
                "which value of `wait` means closed?",
            ),
            (
                "begins with the last wait",
                ("was_open, self.wait = self.is_open, 0.0",
                 "was_open, self.first, self.wait = self.is_open, self.wait or self.first, 0.0"),
                "the next outage begins with the last wait of this one, not with `first`",
                "after a call that worked, it starts from the beginning",
            ),
            (
                "looks too late",
                ("was_open, self.wait = self.is_open, 0.0",
                 "self.wait = 0.0\n        was_open = self.is_open"),
                "`is_open` is read after the breaker has been closed",
                WAS,
            ),
            (
                "says that it was closed",
                ("return was_open", "return not was_open"),
                "`worked` returns whether it was open; this is the opposite",
                WAS,
            ),
        ),
        *made(
            "Breaker.failed",
            (
                "doubles twice",
                (REST, "        self._lengthen()\n"),
                "a trial that fails doubles the wait for the second time: `allows` has done it",
                DOUBLE,
            ),
            (
                "counts from the trial's beginning",
                (
                    REST,
                    "        if not was_open:\n            self._lengthen()\n",
                ),
                "the wait counts from the trial's beginning, not from its failure: after a slow "
                "failure the next one may try at once",
                "a whole wait from now",
            ),
            (
                "begins with the first wait again",
                (
                    "        if was_open:  # its trial has lengthened the wait already\n",
                    "        if was_open:\n            self.wait = self.first\n",
                ),
                "each failure begins with the first wait again: the waits never grow",
                DOUBLE,
            ),
            (
                "a time for a moment",
                ("self._next_trial = self.clock() + self.wait", "self._next_trial = self.wait"),
                "the length of the wait is taken for the moment at which it ends",
                "how long, or until when?",
            ),
            (
                "waits for three failures",
                (
                    "        was_open = self.is_open\n",
                    "        was_open = self.is_open\n"
                    '        self.strikes = getattr(self, "strikes", 0) + 1\n'
                    "        if not was_open and self.strikes < 3:\n"
                    "            return False\n",
                ),
                "it opens after several failures only; here the first one opens it",
                "how many callers should wait for the time limit?",
            ),
            (
                "says that it was open",
                ("return not was_open", "return was_open"),
                "`failed` returns whether it was closed; this is the opposite",
                WAS,
            ),
        ),
    ),
}  # fmt: skip
