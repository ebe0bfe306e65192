"""Chapter 06: right solutions written otherwise, and wrong ones."""

from four_ways import Edit, Rewrite

DIFFERENT = {
    "06.1": {  # slices the tokens, and finds the slot in the table by itself
        "Scheduler._add_chunk": """
def _add_chunk(self, sequence, budget, plan):
    chunk = sequence.token_ids[sequence.num_computed :][:budget]
    if not chunk:
        return 0
    index, offset = divmod(sequence.num_computed, self.config.block_size)
    plan.slots += [sequence.table.block_ids[index] * self.config.block_size + offset]
    plan.num_tokens += [len(chunk)]
    plan.sequences += [sequence]
    return len(chunk)
""",
    },
    "06.2": {  # one way out, and what has to be undone is kept in a list
        "Scheduler._admit": """
def _admit(self, sequence, plan):
    undo = []
    table = self.block_table(self.pool, self.config.block_size)
    try:
        taken = 0
        for one in [*self.running, sequence]:
            taken += one.request.params.n if one.must_fork else 1
        if taken > self.config.max_num_seqs:
            raise OutOfBlocks(0, 0)
        hit = self.look_up(sequence)
        if hit is not None:
            self.cache.lock(hit.node)
            undo.append(lambda: self.cache.unlock(hit.node))
            table.share(hit.block_ids)
        undo.append(table.release)
        missing = len(sequence.token_ids) - table.num_tokens
        blocks = (missing + self.config.block_size - 1) // self.config.block_size
        if not self._make_free(blocks, len(self.running)):
            raise OutOfBlocks(blocks, self.pool.num_free)
        table.grow(missing)
    except OutOfBlocks:
        for step in reversed(undo):
            step()
        return False
    self._begin(sequence, table, hit, plan)
    return True
""",
    },
    "06.3": {  # no lists of its own: asks `running` again, and what is in the plan already
        "": "import bisect",
        "Scheduler.schedule": """
def schedule(self):
    plan, before = Plan(), self.num_preemptions

    def is_decode(one):
        return one.num_computed + 1 == len(one.token_ids) and not one.must_fork

    self._add_decodes(
        list(filter(is_decode, self.running)),
        [one for one in self.running if not is_decode(one)],
        plan,
    )

    def left():
        return self.config.max_batch_tokens - sum(plan.num_tokens)

    for one in tuple(self.running):
        if one not in plan.sequences:
            self._add_chunk(one, left(), plan)
    if self.num_preemptions > before:
        return plan
    for one in tuple(self.waiting):
        if left() == 0 or not self._admit(one, plan):
            break
        self.waiting.remove(one)
        place = bisect.bisect([self.policy(other) for other in self.running], self.policy(one))
        self.running.insert(place, one)
        self._add_chunk(one, left(), plan)
    return plan
""",
    },
    "06.4": {  # notes what is in the table, lets go of it, asks the host block by block
        "Scheduler.preempt": """
def preempt(self, sequence, plan=None):
    self.num_preemptions = self.num_preemptions + 1
    sequence.num_preemptions += 1
    size = self.config.block_size
    device = sequence.table.block_ids[: (sequence.num_computed + size - 1) // size]
    self._release(sequence)
    self.running = [one for one in self.running if one is not sequence]
    self.add(sequence)
    host = []
    if plan is not None and device and self.config.preemption == "swap":
        try:
            while len(host) < len(device):
                host.append(self.host_pool.allocate())
        except OutOfBlocks:
            while host:
                self.host_pool.release(host.pop())
    if not host:
        sequence.num_computed = 0
        return
    sequence.host_block_ids = host
    plan.swap_out += [(device[i], host[i]) for i in range(len(host))]
    self.num_swaps_out += 1
""",
    },
    "06.5": {  # anybody may go, and whoever had a slot gives it back
        "FreesTheMost._add_decodes": """
def _add_decodes(self, decoding, prefilling, plan):
    slots, preempted = {}, False
    while len(slots) < len(decoding):
        sequence = next(one for one in decoding if one not in slots)
        slot = self._reserve_one(sequence, plan)
        if slot is not None:
            slots[sequence] = slot
            continue
        victim = max(decoding + prefilling, key=lambda one: len(one.table.block_ids))
        slots.pop(victim, None)
        for group in (decoding, prefilling):
            if victim in group:
                group.remove(victim)
        self.preempt(victim, plan)
        preempted = True
    plan.sequences += decoding
    plan.slots += [slots[one] for one in decoding]
    plan.num_decodes = len(decoding)
    plan.num_tokens += [1 for _ in decoding]
    return preempted
""",
    },
    "06.6": {
        "before_the_race": """
def before_the_race():
    return {
        "static steps": 15.0, "static empty": 25, "continuous steps": 11, "continuous empty": 9,
        "equal steps": 10, "break-even": 5.24,
    }
""",
    },
}


def answers(**other):
    """before_the_race with some of its six numbers exchanged."""
    right = {"static_steps": 15, "static_empty": 25, "continuous_steps": 11,
             "continuous_empty": 9, "equal_steps": 10, "break_even": 5.24}  # fmt: skip
    numbers = {key.replace("_", " "): value for key, value in (right | other).items()}
    numbers["break-even"] = numbers.pop("break even")
    return {"before_the_race": f"def before_the_race():\n    return {numbers}\n"}


MAKE_FREE = """    if not self._make_free(needed, headroom=len(self.running)):
        table.release()
        if hit is not None:
            self.cache.unlock(hit.node)
        return False
"""
LOCK = "        self.cache.lock(hit.node)  # before anything is evicted to make room\n"
ADMIT_LOOP = "while self.waiting and budget > 0 and self._admit(self.waiting[0], plan):"

WRONG = {
    "06.1": (
        Edit(
            "ignores the budget",
            {"Scheduler._add_chunk": (
                ("min(len(sequence.token_ids) - start, budget)",
                 "(len(sequence.token_ids) - start) * (budget > 0)"),
            )},
            says="the chunk is all that is left, whatever the budget",
        ),
        Edit(
            "takes the whole budget",
            {"Scheduler._add_chunk": (
                ("min(len(sequence.token_ids) - start, budget)", "budget"),
            )},
            says="the chunk is as long as the budget, also where less is left",
        ),
        Edit(
            "counts the prompt alone",
            {"Scheduler._add_chunk": (
                ("len(sequence.token_ids) - start",
                 "len(sequence.request.prompt_ids) - start"),
            )},
            says="only the prompt's tokens are counted",
        ),
        Edit(
            "counts what is computed once more",
            {"Scheduler._add_chunk": (("sequence.token_ids) - start", "sequence.token_ids)"),)},
            says="what is computed already is counted again",
        ),
        Edit(
            "all or nothing",
            {"Scheduler._add_chunk": (
                ("    if num_tokens > 0",
                 "    if num_tokens < len(sequence.token_ids) - start:\n"
                 "        num_tokens = 0\n"
                 "    if num_tokens > 0"),
            )},
            says="a prompt that does not fit into the budget as a whole gets nothing",
        ),
        Edit(
            "returns what is left over",
            {"Scheduler._add_chunk": (("return num_tokens", "return budget - num_tokens"),)},
            says="what is returned is the budget that is left over",
        ),
        Edit(
            "returns nothing",
            {"Scheduler._add_chunk": (("    return num_tokens", ""),)},
            says="the budget cannot shrink if nobody knows what was used",
        ),
        Edit(
            "plans a chunk of nothing",
            {"Scheduler._add_chunk": (("    if num_tokens > 0:", "    if True:"),)},
            says="a chunk of no tokens is planned",
        ),
        Edit(
            "the slot of the first position",
            {"Scheduler._add_chunk": (("writable_slot(start)", "writable_slot(0)"),)},
            says="the slot is that of position 0",
        ),
        Edit(
            "the slot of the last token",
            {"Scheduler._add_chunk": (
                ("writable_slot(start)", "writable_slot(start + num_tokens - 1)"),
            )},
            says="the slot is that of the chunk's last token",
        ),
        Edit(
            "takes the position for the slot",
            {"Scheduler._add_chunk": (("sequence.table.writable_slot(start)[0]", "start"),)},
            says="the position is taken for a slot",
        ),
        Edit(
            "takes slot and copy",
            {"Scheduler._add_chunk": (("writable_slot(start)[0]", "writable_slot(start)"),)},
            says="`writable_slot` returns a pair",
        ),
        Edit(
            "forgets the slot",
            {"Scheduler._add_chunk": (
                ("        plan.slots.append(sequence.table.writable_slot(start)[0])\n", ""),
            )},
            says="no slot is planned",
        ),
        Edit(
            "counts it as computed",
            {"Scheduler._add_chunk": (
                ("    return num_tokens", "    sequence.num_computed += num_tokens\n"
                 "    return num_tokens"),
            )},
            says="the engine counts what was computed, once it is",
        ),
        Edit(
            "counts a chunk of one token as a decode",
            {"Scheduler._add_chunk": (
                ("    return num_tokens", "    plan.num_decodes += num_tokens == 1\n"
                 "    return num_tokens"),
            )},
            says="a chunk is counted as a decode",
        ),
    ),
    "06.2": (
        Edit(
            "counts no seats",
            {"Scheduler._admit": (("    if seats > self.config.max_num_seqs:", "    if False:"),)},
            says="nobody counts seats",
        ),
        Edit(
            "counts requests, not samples",
            {"Scheduler._admit": (
                ("sum(map(_seats, self.running)) + _seats(sequence)", "len(self.running) + 1"),
            )},
            says="a request of several samples is counted as one",
        ),
        Edit(
            "keeps a seat empty",
            {"Scheduler._admit": (("seats > self", "seats >= self"),)},
            says="a free seat is refused",
        ),
        Edit(
            "blocks for the prompt",
            {"Scheduler._admit": (
                ("-(-len(sequence.token_ids) // ", "-(-len(sequence.request.prompt_ids) // "),
                ("table.grow(len(sequence.token_ids)",
                 "table.grow(len(sequence.request.prompt_ids)"),
            )},
            says="blocks for the prompt only",
        ),
        Edit(
            "asks for the prompt, grows for all",
            {"Scheduler._admit": (
                ("-(-len(sequence.token_ids) // ", "-(-len(sequence.request.prompt_ids) // "),
            )},
            says="blocks are counted for the prompt, and the table grows for all tokens",
        ),
        Edit(
            "always one block more",
            {"Scheduler._admit": (
                ("-(-len(sequence.token_ids) // self.config.block_size)",
                 "len(sequence.token_ids) // self.config.block_size + 1"),
            )},
            says="one block too many is asked for when a prompt fills its blocks",
        ),
        Edit(
            "a block to spare for each seat",
            {"Scheduler._admit": (
                ("headroom=len(self.running)", "headroom=sum(map(_seats, self.running))"),
            )},
            says="a block is kept back for each seat",
        ),
        Edit(
            "moves the request itself",
            {"Scheduler._admit": (
                ("    return True", "    self.waiting.remove(sequence)\n"
                 "    self.running.append(sequence)\n    return True"),
            )},
            says="the lists belong to `schedule`",
        ),
        Edit(
            "blocks for the first chunk",
            {"Scheduler._admit": (
                ("    seats = ",
                 "    first = min(len(sequence.token_ids), self.config.max_batch_tokens)\n"
                 "    seats = "),
                ("-(-len(sequence.token_ids) // ", "-(-first // "),
                ("table.grow(len(sequence.token_ids)", "table.grow(first"),
            )},
            says="blocks for the first chunk only",
        ),
        Edit(
            "no block to spare",
            {"Scheduler._admit": ((", headroom=len(self.running)", ""),)},
            says="no block is left over for those that run",
        ),
        Edit(
            "one block to spare too many",
            {"Scheduler._admit": (("len(self.running))", "len(self.running) + 1)"),)},
            says="more is kept back than one block for each that runs",
        ),
        Edit(
            "does not ask the pool",
            {"Scheduler._admit": (("    if not self._make_free(", "    if False and not (0, "),
                                  (", headroom=", ", "),)},
            says="nobody asks whether the pool has the blocks",
        ),
        Edit(
            "never evicts",
            {"Scheduler._admit": (
                ("not self._make_free(needed, headroom=len(self.running))",
                 "needed + len(self.running) > self.pool.num_free"),
            )},
            says="cached blocks that nobody uses are treated as if they were taken",
        ),
        Edit(
            "does not look for a prefix",
            {"Scheduler._admit": (("hit = self.look_up(sequence)", "hit = None"),)},
            says="the prefix cache is not asked",
        ),
        Edit(
            "counts the blocks of the hit again",
            {"Scheduler._admit": ((" - len(table.block_ids)", ""),)},
            says="the blocks of the hit are not counted as there already",
        ),
        Edit(
            "never locks",
            {"Scheduler._admit": (
                (LOCK, "        pass\n"),
                ("            self.cache.unlock(hit.node)", "            pass"),
            )},
            says="the hit is not locked",
        ),
        Edit(
            "locks when the room is made",
            {"Scheduler._admit": (
                (LOCK, "        pass\n"),
                (MAKE_FREE,
                 "    if not self._make_free(needed, headroom=len(self.running)):\n"
                 "        table.release()\n"
                 "        return False\n"
                 "    if hit is not None:\n"
                 "        self.cache.lock(hit.node)\n"),
            )},
            says="room is made before the hit is locked",
        ),
        Edit(
            "keeps the lock of a no",
            {"Scheduler._admit": (
                ("        if hit is not None:\n            self.cache.unlock(hit.node)\n", ""),
            )},
            says="a lock was not undone",
        ),
        Edit(
            "keeps the blocks of a no",
            {"Scheduler._admit": (("        table.release()\n", ""),)},
            says="what was taken before it was clear is not given back",
        ),
        Edit(
            "takes no blocks",
            {"Scheduler._admit": (
                ("    table.grow(len(sequence.token_ids) - table.num_tokens)\n", ""),
            )},
            says="the table is never grown",
        ),
        Edit(
            "does not begin",
            {"Scheduler._admit": (("    self._begin(sequence, table, hit, plan)\n", ""),)},
            says="nobody tells the sequence what it has",
        ),
        Edit(
            "says nothing",
            {"Scheduler._admit": (("    return True", "    return"),)},
            says="`schedule` has to know whether the request is in",
        ),
    ),
    "06.3": (
        Edit(
            "chunks first",
            {"Scheduler.schedule": (
                ("    preempted = self._add_decodes(decoding, prefilling, plan)\n"
                 "    budget -= len(decoding)\n", ""),
                ("    if not preempted:  #",
                 "    preempted = self._add_decodes(decoding, prefilling, plan)\n"
                 "    budget -= len(decoding)\n"
                 "    if not preempted:  #"),
            )},
            says="chunks come before decodes",
        ),
        Edit(
            "decodes cost nothing",
            {"Scheduler.schedule": (("    budget -= len(decoding)\n", ""),)},
            says="decodes are not taken off the budget",
        ),
        Edit(
            "whoever gives way costs a token",
            {"Scheduler.schedule": (
                ("    preempted = self._add_decodes(decoding, prefilling, plan)\n"
                 "    budget -= len(decoding)\n",
                 "    budget -= len(decoding)\n"
                 "    preempted = self._add_decodes(decoding, prefilling, plan)\n"),
            )},
            says="the budget shrinks by a token for somebody who gave way",
        ),
        Edit(
            "chunks cost nothing",
            {"Scheduler.schedule": (
                ("        budget -= self._add_chunk(sequence, budget, plan)\n    if",
                 "        self._add_chunk(sequence, budget, plan)\n    if"),
            )},
            says="chunks of running prefills are not taken off the budget",
        ),
        Edit(
            "newcomers cost nothing",
            {"Scheduler.schedule": (
                ("            budget -= self._add_chunk(sequence, budget, plan)\n    return",
                 "            self._add_chunk(sequence, budget, plan)\n    return"),
            )},
            says="what the newcomers compute is not taken off the budget",
        ),
        Edit(
            "static batches",
            {"Scheduler.schedule": (
                ("    if not preempted:  #", "    if not decoding and not prefilling:  #"),
            )},
            says="these are static batches",
        ),
        Edit(
            "one at a time",
            {"Scheduler.schedule": ((ADMIT_LOOP, ADMIT_LOOP.replace("while", "if")),)},
            says="only one request is admitted in a step",
        ),
        Edit(
            "nothing to do in the first step",
            {"Scheduler.schedule": (
                ("            budget -= self._add_chunk(sequence, budget, plan)\n    return",
                 "    return"),
            )},
            says="who is admitted gets no tokens in that step",
        ),
        Edit(
            "admits without a budget",
            {"Scheduler.schedule": ((" and budget > 0 and", " and"),)},
            says="admission goes on when the budget is used up",
        ),
        Edit(
            "begun and forgotten",
            {"Scheduler.schedule": (
                ("    for sequence in prefilling:\n"
                 "        budget -= self._add_chunk(sequence, budget, plan)\n", ""),
            )},
            says="a prefill gets tokens when it is admitted and then never again",
        ),
        Edit(
            "a decode is who has written",
            {"Scheduler.schedule": (
                ("one_left = len(sequence.token_ids) - sequence.num_computed == 1",
                 "one_left = sequence.num_output > 0"),
            )},
            says="what counts is how many tokens are left to compute",
        ),
        Edit(
            "admits while it preempts",
            {"Scheduler.schedule": (("    if not preempted:  #", "    if True:  #"),)},
            says="somebody is admitted in a step that has preempted",
        ),
        Edit(
            "passes over who does not fit",
            {"Scheduler.schedule": (
                (ADMIT_LOOP + "\n            sequence = self.waiting.pop(0)\n",
                 "for sequence in self.waiting.copy():\n"
                 "            if budget == 0 or not self._admit(sequence, plan):\n"
                 "                continue\n"
                 "            self.waiting.remove(sequence)\n"),
            )},
            says="a request that does not fit is skipped",
        ),
        Edit(
            "leaves it in both lists",
            {"Scheduler.schedule": (
                (ADMIT_LOOP + "\n            sequence = self.waiting.pop(0)\n",
                 "for sequence in self.waiting.copy():\n"
                 "            if budget == 0 or not self._admit(sequence, plan):\n"
                 "                break\n"),
            )},
            says="it was put into one of the lists and never taken out of the other",
        ),
        Edit(
            "does not put it into the other list",
            {"Scheduler.schedule": (
                ("            insort(self.running, sequence, key=self.policy)\n", ""),
            )},
            says="a sequence that was preempted in this very step, or never admitted",
        ),
        Edit(
            "to the end of the list",
            {"Scheduler.schedule": (
                ("insort(self.running, sequence, key=self.policy)",
                 "self.running.append(sequence)"),
            )},
            says="who is admitted is put at the end of `running`",
        ),
        Edit(
            "does not know samples",
            {"Scheduler.schedule": ((" and not sequence.must_fork", ""),)},
            says="forks when its last prompt token is computed as a chunk",
        ),
        Edit(
            "returns nothing",
            {"Scheduler.schedule": (("    return plan", ""),)},
            says="a Plan is expected",
        ),
    ),
    "06.4": (
        Edit(
            "keeps its blocks",
            {"Scheduler.preempt": (("    self._release(sequence)\n", ""),)},
            says="its blocks are not given back",
        ),
        Edit(
            "keeps its lock",
            {"Scheduler.preempt": (
                ("    self._release(sequence)\n",
                 "    sequence.table.release()\n"
                 "    sequence.table = sequence.next_slot = None\n"),
            )},
            says="its lock stays for ever",
        ),
        Edit(
            "goes on running",
            {"Scheduler.preempt": (("    self.running.remove(sequence)\n", ""),)},
            says="it would be given tokens in the next step, without a block",
        ),
        Edit(
            "waits nowhere",
            {"Scheduler.preempt": (
                ("    insort(self.waiting, sequence, key=self.policy)\n", ""),
            )},
            says="nobody would ever hear of it again",
        ),
        Edit(
            "to the end of the queue",
            {"Scheduler.preempt": (
                ("insort(self.waiting, sequence, key=self.policy)",
                 "self.waiting.append(sequence)"),
            )},
            says="it goes to the end of the queue",
        ),
        Edit(
            "to the front of the queue",
            {"Scheduler.preempt": (
                ("insort(self.waiting, sequence, key=self.policy)",
                 "self.waiting.insert(0, sequence)"),
            )},
            says="it goes to the front of the queue",
        ),
        Edit(
            "forgets what it wrote",
            {"Scheduler.preempt": (
                ("        sequence.num_computed = 0",
                 "        sequence.num_computed = 0\n"
                 "        del sequence.token_ids[len(sequence.request.prompt_ids) :]"),
            )},
            says="what it has written so far is thrown away",
        ),
        Edit(
            "still counts as computed",
            {"Scheduler.preempt": (("        sequence.num_computed = 0", "        pass"),)},
            says="tokens count as computed whose K and V are gone",
        ),
        Edit(
            "not computed, although on the host",
            {"Scheduler.preempt": (
                ("    else:\n        sequence.num_computed = 0", "    sequence.num_computed = 0"),
            )},
            says="its K and V are kept, and then computed again anyway",
        ),
        Edit(
            "never swaps",
            {"Scheduler.preempt": (("    if swap and", "    if False and"),)},
            says="nothing is moved to the host, though there is room",
        ),
        Edit(
            "rounds down",
            {"Scheduler.preempt": (
                ("-(-sequence.num_computed // self.config.block_size)",
                 "sequence.num_computed // self.config.block_size"),
            )},
            says="the last block, filled in part, is left behind",
        ),
        Edit(
            "moves empty blocks",
            {"Scheduler.preempt": (
                ("-(-sequence.num_computed // self.config.block_size)",
                 "len(sequence.table.block_ids)"),
            )},
            says="blocks that hold nothing yet are moved as well",
        ),
        Edit(
            "a swap of nothing",
            {"Scheduler.preempt": (("0 < used <=", "used <="),)},
            says="a swap of no blocks",
        ),
        Edit(
            "does not ask for room on the host",
            {"Scheduler.preempt": ((" <= self.host_pool.num_free", ""),)},
            says="nobody asks whether the host has room",
        ),
        Edit(
            "moves what fits",
            {"Scheduler.preempt": (
                ("    if swap and",
                 "    used = min(used, self.host_pool.num_free) if swap else used\n"
                 "    if swap and"),
            )},
            says="what fits is moved",
        ),
        Edit(
            "never fills the host",
            {"Scheduler.preempt": (("used <= self", "used < self"),)},
            says="exactly as many as are needed, and that is treated as too few",
        ),
        Edit(
            "the wrong way round",
            {"Scheduler.preempt": (
                ("zip(sequence.table.block_ids[:used], sequence.host_block_ids, strict=True)",
                 "zip(sequence.host_block_ids, sequence.table.block_ids[:used], strict=True)"),
            )},
            says="the pairs are the wrong way round",
        ),
        Edit(
            "does not note where",
            {"Scheduler.preempt": (
                ("        self.num_swaps_out += 1",
                 "        self.num_swaps_out += 1\n        sequence.host_block_ids = None"),
            )},
            says="it does not know where on the host its blocks are",
        ),
        Edit(
            "makes up host blocks",
            {"Scheduler.preempt": (
                ("[self.host_pool.allocate() for _ in range(used)]", "list(range(used))"),
            )},
            says="host blocks are named without being taken",
        ),
        Edit(
            "needs a plan",
            {"Scheduler.preempt": (("plan is not None and ", ""),)},
            says="`recompute_all` preempts without a plan",
        ),
        Edit(
            "does not count",
            {"Scheduler.preempt": (("    self.num_preemptions += 1\n", ""),)},
            says="three counters: its own, and two of the scheduler's",
        ),
    ),
    "06.5": (
        Edit(
            "takes the newest slot back",
            {"FreesTheMost._add_decodes": (
                ("decoding[len(plan.slots) :] + prefilling", "decoding + prefilling"),
                ("        self.preempt(victim, plan)\n",
                 "        self.preempt(victim, plan)\n"
                 "        if plan.slots and victim is not sequence and victim not in prefilling:\n"
                 "            plan.slots.pop()\n"),
            )},
            says="a slot is taken back, but not that of whoever gave way",
        ),
        Edit(
            "still anybody, by another name",
            {"FreesTheMost._add_decodes": (
                ("decoding[len(plan.slots) :] + prefilling", "prefilling + decoding"),
            )},
            says="the slot of whoever gave way stays in the plan",
        ),
        Edit(
            "anybody but who asks",
            {"FreesTheMost._add_decodes": (
                ("decoding[len(plan.slots) :] +", "decoding[len(plan.slots) + 1 :] +"),
            )},
            says="whoever asks may be the only one that can give way",
        ),
        Edit(
            "stays in the list",
            {"FreesTheMost._add_decodes": (
                ("        (decoding if victim in decoding else prefilling).remove(victim)\n",
                 ""),
            )},
            says="whoever gave way has no table any more",
        ),
        Edit(
            "passes over who finds no block",
            {"FreesTheMost._add_decodes": (
                ("        victims = decoding[len(plan.slots) :] + prefilling\n",
                 "        decoding.remove(sequence)\n        continue\n"
                 "        victims = decoding[len(plan.slots) :] + prefilling\n"),
            )},
            says="whoever finds no block is passed over",
        ),
        Edit(
            "the last to come",
            {"FreesTheMost._add_decodes": (
                ("max(victims, key=lambda one: len(one.table.block_ids))",
                 "max(victims, key=self.policy)"),
            )},
            says="the last to come gives way",
        ),
        Edit(
            "who asks",
            {"FreesTheMost._add_decodes": (
                ("max(victims, key=lambda one: len(one.table.block_ids))", "sequence"),
            )},
            says="whoever asks gives way itself",
        ),
        Edit(
            "the smallest",
            {"FreesTheMost._add_decodes": (("max(victims", "min(victims"),)},
            says="whoever holds the fewest blocks gives way",
        ),
        Edit(
            "the most computed",
            {"FreesTheMost._add_decodes": (
                ("len(one.table.block_ids))", "one.num_computed)"),
            )},
            says="the most computed tokens decide",
        ),
        Edit(
            "decodes alone",
            {"FreesTheMost._add_decodes": ((" :] + prefilling", " :]"),)},
            says="only decodes are asked to give way",
        ),
    ),
    "06.6": (
        Rewrite("one batch", answers(static_steps=8), says="that is the first batch"),
        Rewrite("never empty", answers(static_steps=9), says="if none were ever empty"),
        Rewrite("what is filled", answers(static_empty=35), says="how often a seat is not empty"),
        Rewrite("all seats", answers(static_empty=60), says="60 is all seats of all steps"),
        Rewrite("forgets H", answers(continuous_steps=8), says="A is done after 8"),
        Rewrite("the sum alone", answers(continuous_steps=9), says="H begins late and is long"),
        Rewrite("a step late", answers(continuous_steps=12), says="in the very next step"),
        Rewrite("no end", answers(continuous_empty=0), says="what when nobody waits any more?"),
        Rewrite("all at once", answers(equal_steps=5), says="only four can sit at a time"),
        Rewrite("one way", answers(break_even=2.62), says="every byte moves twice"),
        Rewrite("megabytes", answers(break_even=5243), says="these are MB/s"),
        Rewrite("binary", answers(break_even=4.88), says="these are GiB/s"),
        Rewrite(
            "leaves a number out",
            {"before_the_race": 'def before_the_race():\n    return {"static steps": 15}\n'},
            says="a dictionary with the 6 keys of the docstring is expected",
        ),
        Rewrite("leaves the dots", answers(equal_steps=None), says="a number is expected"),
    ),
}  # fmt: skip
