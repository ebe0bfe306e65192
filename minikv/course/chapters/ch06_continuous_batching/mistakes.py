"""Chapter 06: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake


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

MISTAKES = {
    "06.1": (
        Mistake(
            "ignores the budget",
            edits={"Scheduler._add_chunk": (
                ("min(len(sequence.token_ids) - start, budget)",
                 "(len(sequence.token_ids) - start) * (budget > 0)"),
            )},
            cause="the chunk is all that is left, whatever the budget",
            look="what is the second number that limits a chunk?",
        ),
        Mistake(
            "takes the whole budget",
            edits={"Scheduler._add_chunk": (
                ("min(len(sequence.token_ids) - start, budget)", "budget"),
            )},
            cause="the chunk is as long as the budget, also where less is left",
            look="what is the second number that limits a chunk?",
        ),
        Mistake(
            "counts the prompt alone",
            edits={"Scheduler._add_chunk": (
                ("len(sequence.token_ids) - start",
                 "len(sequence.request.prompt_ids) - start"),
            )},
            cause="only the prompt's tokens are counted; after a preemption the tokens written so"
            " far have to be computed again, too",
            look="which list of the sequence holds prompt and output?",
        ),
        Mistake(
            "counts what is computed once more",
            edits={"Scheduler._add_chunk": (("sequence.token_ids) - start", "sequence.token_ids)"),)},
            cause="what is computed already is counted again",
            look="how much of the sequence is left?",
        ),
        Mistake(
            "all or nothing",
            edits={"Scheduler._add_chunk": (
                ("    if num_tokens > 0",
                 "    if num_tokens < len(sequence.token_ids) - start:\n"
                 "        num_tokens = 0\n"
                 "    if num_tokens > 0"),
            )},
            cause="a prompt that does not fit into the budget as a whole gets nothing, and will "
            "never begin",
            look="a part of the prompt is welcome",
        ),
        Mistake(
            "returns what is left over",
            edits={"Scheduler._add_chunk": (("return num_tokens", "return budget - num_tokens"),)},
            cause="what is returned is the budget that is left over, not what was used",
            look="what does `schedule` do with the number?",
        ),
        Mistake(
            "returns nothing",
            edits={"Scheduler._add_chunk": (("    return num_tokens", ""),)},
            cause="the budget cannot shrink if nobody knows what was used",
            look="what stands after `return`?",
        ),
        Mistake(
            "plans a chunk of nothing",
            edits={"Scheduler._add_chunk": (("    if num_tokens > 0:", "    if True:"),)},
            cause="a chunk of no tokens is planned",
            look="what should be planned when the budget is used up?",
        ),
        Mistake(
            "the slot of the first position",
            edits={"Scheduler._add_chunk": (("writable_slot(start)", "writable_slot(0)"),)},
            cause="the slot is that of position 0, not of the first one to be computed",
            look="which position does this chunk begin with?",
        ),
        Mistake(
            "the slot of the last token",
            edits={"Scheduler._add_chunk": (
                ("writable_slot(start)", "writable_slot(start + num_tokens - 1)"),
            )},
            cause="the slot is that of the chunk's last token",
            look="`Plan.slots`: where each one's first token goes",
        ),
        Mistake(
            "takes the position for the slot",
            edits={"Scheduler._add_chunk": (("sequence.table.writable_slot(start)[0]", "start"),)},
            cause="the position is taken for a slot",
            look="who knows the slot of a position? `writable_slot`",
        ),
        Mistake(
            "takes slot and copy",
            edits={"Scheduler._add_chunk": (("writable_slot(start)[0]", "writable_slot(start)"),)},
            cause="`writable_slot` returns a pair, the slot and a copy",
            look="which of the two goes into the plan?",
        ),
        Mistake(
            "forgets the slot",
            edits={"Scheduler._add_chunk": (
                ("        plan.slots.append(sequence.table.writable_slot(start)[0])\n", ""),
            )},
            cause="no slot is planned",
            look="the plan has three lists; see `Plan`",
        ),
        Mistake(
            "counts it as computed",
            edits={"Scheduler._add_chunk": (
                ("    return num_tokens", "    sequence.num_computed += num_tokens\n"
                 "    return num_tokens"),
            )},
            cause="the engine counts what was computed, once it is; counted here as well, tokens "
            "are left out",
            look="is anything computed yet?",
        ),
        Mistake(
            "counts a chunk of one token as a decode",
            edits={"Scheduler._add_chunk": (
                ("    return num_tokens", "    plan.num_decodes += num_tokens == 1\n"
                 "    return num_tokens"),
            )},
            cause="a chunk is counted as a decode; those come first in the plan, and each of them"
            " is one token of a sequence that `_add_decodes` has served",
            look="which three lists of the plan does a chunk go to?",
        ),
    ),
    "06.2": (
        Mistake(
            "counts no seats",
            edits={"Scheduler._admit": (("    if seats > self.config.max_num_seqs:", "    if False:"),)},
            cause="nobody counts seats",
            look="what does `max_num_seqs` limit? `_seats` says what a sequence takes",
        ),
        Mistake(
            "counts requests, not samples",
            edits={"Scheduler._admit": (
                ("sum(map(_seats, self.running)) + _seats(sequence)", "len(self.running) + 1"),
            )},
            cause="a request of several samples is counted as one: it forks when its prompt is "
            "computed",
            look="what does `_seats` say about it?",
        ),
        Mistake(
            "keeps a seat empty",
            edits={"Scheduler._admit": (("seats > self", "seats >= self"),)},
            cause="a free seat is refused",
            look="the comparison: > or >=?",
        ),
        Mistake(
            "blocks for the prompt",
            edits={"Scheduler._admit": (
                ("-(-len(sequence.token_ids) // ", "-(-len(sequence.request.prompt_ids) // "),
                ("table.grow(len(sequence.token_ids)",
                 "table.grow(len(sequence.request.prompt_ids)"),
            )},
            cause="blocks for the prompt only; what it wrote before it was preempted has to go "
            "somewhere, too",
            look="which list of the sequence holds prompt and output?",
        ),
        Mistake(
            "asks for the prompt, grows for all",
            edits={"Scheduler._admit": (
                ("-(-len(sequence.token_ids) // ", "-(-len(sequence.request.prompt_ids) // "),
            )},
            cause="blocks are counted for the prompt, and the table grows for all tokens",
            look="which list of the sequence holds prompt and output?",
        ),
        Mistake(
            "always one block more",
            edits={"Scheduler._admit": (
                ("-(-len(sequence.token_ids) // self.config.block_size)",
                 "len(sequence.token_ids) // self.config.block_size + 1"),
            )},
            cause="one block too many is asked for when a prompt fills its blocks to the last slot",
            look="a division that is rounded up: 16 tokens are 4 blocks of 4, and 17 are 5",
        ),
        Mistake(
            "a block to spare for each seat",
            edits={"Scheduler._admit": (
                ("headroom=len(self.running)", "headroom=sum(map(_seats, self.running))"),
            )},
            cause="a block is kept back for each seat; a request counts once, however many samples",
            look="`_seats` is for the seats; how many sequences run?",
        ),
        Mistake(
            "moves the request itself",
            edits={"Scheduler._admit": (
                ("    return True", "    self.waiting.remove(sequence)\n"
                 "    self.running.append(sequence)\n    return True"),
            )},
            cause="the lists belong to `schedule`, which moves the request once `_admit` has said"
            " yes: it would be moved twice",
            look="what is `_admit` asked for, and what not?",
        ),
        Mistake(
            "blocks for the first chunk",
            edits={"Scheduler._admit": (
                ("    seats = ",
                 "    first = min(len(sequence.token_ids), self.config.max_batch_tokens)\n"
                 "    seats = "),
                ("-(-len(sequence.token_ids) // ", "-(-first // "),
                ("table.grow(len(sequence.token_ids)", "table.grow(first"),
            )},
            cause="blocks for the first chunk only: the next chunks may find none, and preempt "
            "somebody who has just come in",
            look="all of its tokens, or none",
        ),
        Mistake(
            "no block to spare",
            edits={"Scheduler._admit": ((", headroom=len(self.running)", ""),)},
            cause="no block is left over for those that run: the next of them to open one would "
            "find none, and somebody is preempted",
            look="what does the second argument of `_make_free` do?",
        ),
        Mistake(
            "one block to spare too many",
            edits={"Scheduler._admit": (("len(self.running))", "len(self.running) + 1)"),)},
            cause="more is kept back than one block for each that runs; who is alone needs none",
            look="for whom is a block kept back?",
        ),
        Mistake(
            "does not ask the pool",
            edits={"Scheduler._admit": (("    if not self._make_free(", "    if False and not (0, "),
                                  (", headroom=", ", "),)},
            cause="nobody asks whether the pool has the blocks before they are taken",
            look="what does `_make_free` say?",
        ),
        Mistake(
            "never evicts",
            edits={"Scheduler._admit": (
                ("not self._make_free(needed, headroom=len(self.running))",
                 "needed + len(self.running) > self.pool.num_free"),
            )},
            cause="cached blocks that nobody uses are treated as if they were taken",
            look="`_make_free` evicts them; does anything say no before it is asked?",
        ),
        Mistake(
            "does not look for a prefix",
            edits={"Scheduler._admit": (("hit = self.look_up(sequence)", "hit = None"),)},
            cause="the prefix cache is not asked, and all is computed again",
            look="who looks for a cached prefix? `look_up`",
        ),
        Mistake(
            "counts the blocks of the hit again",
            edits={"Scheduler._admit": ((" - len(table.block_ids)", ""),)},
            cause="the blocks of the hit are not counted as there already",
            look="what `look_up` returns, and what the table has before it grows",
        ),
        Mistake(
            "never locks",
            edits={"Scheduler._admit": (
                (LOCK, "        pass\n"),
                ("            self.cache.unlock(hit.node)", "            pass"),
            )},
            cause="the hit is not locked: it may be evicted from under a running sequence",
            look="`self.cache.lock`, and when",
        ),
        Mistake(
            "locks when the room is made",
            edits={"Scheduler._admit": (
                (LOCK, "        pass\n"),
                (MAKE_FREE,
                 "    if not self._make_free(needed, headroom=len(self.running)):\n"
                 "        table.release()\n"
                 "        return False\n"
                 "    if hit is not None:\n"
                 "        self.cache.lock(hit.node)\n"),
            )},
            cause="room is made before the hit is locked, so the hit itself is counted as room, "
            "and evicted",
            look="the order of `lock` and `_make_free`",
        ),
        Mistake(
            "keeps the lock of a no",
            edits={"Scheduler._admit": (
                ("        if hit is not None:\n            self.cache.unlock(hit.node)\n", ""),
            )},
            cause="the prefix cache is not as it was: a lock was not undone",
            look="`lock` needs an `unlock` on every way that ends in a no",
        ),
        Mistake(
            "keeps the blocks of a no",
            edits={"Scheduler._admit": (("        table.release()\n", ""),)},
            cause="a no keeps blocks: what was taken before it was clear is not given back, or "
            "what was cached is evicted for nothing",
            look="all that happens before `return False`, and how it is undone",
        ),
        Mistake(
            "takes no blocks",
            edits={"Scheduler._admit": (
                ("    table.grow(len(sequence.token_ids) - table.num_tokens)\n", ""),
            )},
            cause="the table is never grown: the sequence is in without a single block",
            look="who takes blocks for the table? `grow`",
        ),
        Mistake(
            "does not begin",
            edits={"Scheduler._admit": (("    self._begin(sequence, table, hit, plan)\n", ""),)},
            cause="nobody tells the sequence what it has: that is what `_begin` does",
            look="the last lines of `_admit`, and `_begin` below it",
        ),
        Mistake(
            "says nothing",
            edits={"Scheduler._admit": (("    return True", "    return"),)},
            cause="`schedule` has to know whether the request is in",
            look="what stands after `return`, on every way out?",
        ),
    ),
    "06.3": (
        Mistake(
            "chunks first",
            edits={"Scheduler.schedule": (
                ("    preempted = self._add_decodes(decoding, prefilling, plan)\n"
                 "    budget -= len(decoding)\n", ""),
                ("    if not preempted:  #",
                 "    preempted = self._add_decodes(decoding, prefilling, plan)\n"
                 "    budget -= len(decoding)\n"
                 "    if not preempted:  #"),
            )},
            cause="chunks come before decodes: whoever writes is held up by whoever reads",
            look="the order: decodes, chunks of running prefills, admissions",
        ),
        Mistake(
            "decodes cost nothing",
            edits={"Scheduler.schedule": (("    budget -= len(decoding)\n", ""),)},
            cause="decodes are not taken off the budget",
            look="one token each: how much budget do they leave?",
        ),
        Mistake(
            "whoever gives way costs a token",
            edits={"Scheduler.schedule": (
                ("    preempted = self._add_decodes(decoding, prefilling, plan)\n"
                 "    budget -= len(decoding)\n",
                 "    budget -= len(decoding)\n"
                 "    preempted = self._add_decodes(decoding, prefilling, plan)\n"),
            )},
            cause="the budget shrinks by a token for somebody who gave way: it is taken off "
            "before it is clear who decodes",
            look="what does `_add_decodes` do to the list, and when is its length what you need?",
        ),
        Mistake(
            "chunks cost nothing",
            edits={"Scheduler.schedule": (
                ("        budget -= self._add_chunk(sequence, budget, plan)\n    if",
                 "        self._add_chunk(sequence, budget, plan)\n    if"),
            )},
            cause="chunks of running prefills are not taken off the budget",
            look="what does `_add_chunk` return?",
        ),
        Mistake(
            "newcomers cost nothing",
            edits={"Scheduler.schedule": (
                ("            budget -= self._add_chunk(sequence, budget, plan)\n    return",
                 "            self._add_chunk(sequence, budget, plan)\n    return"),
            )},
            cause="what the newcomers compute is not taken off the budget",
            look="what does `_add_chunk` return?",
        ),
        Mistake(
            "static batches",
            edits={"Scheduler.schedule": (
                ("    if not preempted:  #", "    if not decoding and not prefilling:  #"),
            )},
            cause="nobody is admitted while anybody runs: these are static batches",
            look="when may a request join?",
        ),
        Mistake(
            "one at a time",
            edits={"Scheduler.schedule": ((ADMIT_LOOP, ADMIT_LOOP.replace("while", "if")),)},
            cause="only one request is admitted in a step, whatever the budget",
            look="until when does the admission go on?",
        ),
        Mistake(
            "nothing to do in the first step",
            edits={"Scheduler.schedule": (
                ("            budget -= self._add_chunk(sequence, budget, plan)\n    return",
                 "    return"),
            )},
            cause="who is admitted gets no tokens in that step",
            look="what does an admitted sequence need besides its seat, and what if there is none"
            " of it left?",
        ),
        Mistake(
            "admits without a budget",
            edits={"Scheduler.schedule": ((" and budget > 0 and", " and"),)},
            cause="admission goes on when the budget is used up, or comes before those that run "
            "have had theirs; its blocks lie idle",
            look="what does an admitted sequence need besides its seat, and what if there is none"
            " of it left?",
        ),
        Mistake(
            "begun and forgotten",
            edits={"Scheduler.schedule": (
                ("    for sequence in prefilling:\n"
                 "        budget -= self._add_chunk(sequence, budget, plan)\n", ""),
            )},
            cause="a prefill gets tokens when it is admitted and then never again",
            look="who continues prompts that are half computed?",
        ),
        Mistake(
            "a decode is who has written",
            edits={"Scheduler.schedule": (
                ("one_left = sequence.num_tokens - sequence.num_computed == 1",
                 "one_left = sequence.num_output > 0"),
            )},
            cause="a decode is taken to be a sequence that has written something; what counts is "
            "how many tokens are left to compute",
            look="which sequences go to `_add_decodes`?",
        ),
        Mistake(
            "admits while it preempts",
            edits={"Scheduler.schedule": (("    if not preempted:  #", "    if True:  #"),)},
            cause="somebody is admitted in a step that has preempted, and takes blocks that were "
            "freed for those that run",
            look="what does `_add_decodes` return?",
        ),
        Mistake(
            "passes over who does not fit",
            edits={"Scheduler.schedule": (
                (ADMIT_LOOP + "\n            sequence = self.waiting.pop(0)\n",
                 "for sequence in self.waiting.copy():\n"
                 "            if budget == 0 or not self._admit(sequence, plan):\n"
                 "                continue\n"
                 "            self.waiting.remove(sequence)\n"),
            )},
            cause="a request that does not fit is skipped, and one behind it comes in: a large "
            "one may wait for ever while small ones pass",
            look="what happens after the first no?",
        ),
        Mistake(
            "leaves it in both lists",
            edits={"Scheduler.schedule": (
                (ADMIT_LOOP + "\n            sequence = self.waiting.pop(0)\n",
                 "for sequence in self.waiting.copy():\n"
                 "            if budget == 0 or not self._admit(sequence, plan):\n"
                 "                break\n"),
            )},
            cause="it was put into one of the lists and never taken out of the other",
            look="who moves a sequence from one list to the other?",
        ),
        Mistake(
            "does not put it into the other list",
            edits={"Scheduler.schedule": (
                ("            insort(self.running, sequence, key=self.policy)\n", ""),
            )},
            cause="a sequence that was preempted in this very step, or never admitted, is in the "
            "plan",
            look="when is it decided who is in the plan, and when who gives way?",
        ),
        Mistake(
            "to the end of the list",
            edits={"Scheduler.schedule": (
                ("insort(self.running, sequence, key=self.policy)",
                 "self.running.append(sequence)"),
            )},
            cause="who is admitted is put at the end of `running`",
            look="the list is in the policy's order; how does `add` keep it so?",
        ),
        Mistake(
            "does not know samples",
            edits={"Scheduler.schedule": ((" and not sequence.must_fork", ""),)},
            cause="a request of several samples forks when its last prompt token is computed as a"
            " chunk",
            look="`must_fork`",
        ),
        Mistake(
            "returns nothing",
            edits={"Scheduler.schedule": (("    return plan", ""),)},
            cause="a Plan is expected",
            look="what stands after `return`?",
        ),
    ),
    "06.4": (
        Mistake(
            "keeps its blocks",
            edits={"Scheduler.preempt": (("    self._release(sequence)\n", ""),)},
            cause="its blocks are not given back, and that was what it was preempted for",
            look="`_release` gives back all that a running sequence holds",
        ),
        Mistake(
            "keeps its lock",
            edits={"Scheduler.preempt": (
                ("    self._release(sequence)\n",
                 "    sequence.table.release()\n"
                 "    sequence.table = sequence.next_slot = None\n"),
            )},
            cause="its lock stays for ever, and those blocks can never be evicted",
            look="what does `_release` do besides releasing the table?",
        ),
        Mistake(
            "goes on running",
            edits={"Scheduler.preempt": (("    self.running.remove(sequence)\n", ""),)},
            cause="it would be given tokens in the next step, without a block",
            look="which list does it leave, and which does it join?",
        ),
        Mistake(
            "waits nowhere",
            edits={"Scheduler.preempt": (
                ("    insort(self.waiting, sequence, key=self.policy)\n", ""),
            )},
            cause="nobody would ever hear of it again",
            look="which list does it leave, and which does it join?",
        ),
        Mistake(
            "to the end of the queue",
            edits={"Scheduler.preempt": (
                ("insort(self.waiting, sequence, key=self.policy)",
                 "self.waiting.append(sequence)"),
            )},
            cause="it goes to the end of the queue, behind those that came after it",
            look="`waiting` is in the policy's order; how does `add` keep it so?",
        ),
        Mistake(
            "to the front of the queue",
            edits={"Scheduler.preempt": (
                ("insort(self.waiting, sequence, key=self.policy)",
                 "self.waiting.insert(0, sequence)"),
            )},
            cause="it goes to the front of the queue, whatever its turn",
            look="`waiting` is in the policy's order; how does `add` keep it so?",
        ),
        Mistake(
            "forgets what it wrote",
            edits={"Scheduler.preempt": (
                ("        sequence.num_computed = 0",
                 "        sequence.num_computed = 0\n"
                 "        del sequence.token_ids[len(sequence.request.prompt_ids) :]"),
            )},
            cause="what it has written so far is thrown away; only K and V are lost",
            look="prompt and output are both computed again",
        ),
        Mistake(
            "still counts as computed",
            edits={"Scheduler.preempt": (("        sequence.num_computed = 0", "        pass"),)},
            cause="tokens count as computed whose K and V are gone",
            look="what is left of its K and V?",
        ),
        Mistake(
            "not computed, although on the host",
            edits={"Scheduler.preempt": (
                ("    else:\n        sequence.num_computed = 0", "    sequence.num_computed = 0"),
            )},
            cause="its K and V are kept, and then computed again anyway",
            look="what is left to compute when it comes back?",
        ),
        Mistake(
            "never swaps",
            edits={"Scheduler.preempt": (("    if swap and", "    if False and"),)},
            cause="nothing is moved to the host, though there is room",
            look="when is it a swap? the mode, and room on the host",
        ),
        Mistake(
            "rounds down",
            edits={"Scheduler.preempt": (
                ("-(-sequence.num_computed // self.config.block_size)",
                 "sequence.num_computed // self.config.block_size"),
            )},
            cause="the last block, filled in part, is left behind, and its K and V are lost",
            look="9 tokens are in 3 blocks of 4",
        ),
        Mistake(
            "moves empty blocks",
            edits={"Scheduler.preempt": (
                ("-(-sequence.num_computed // self.config.block_size)",
                 "len(sequence.table.block_ids)"),
            )},
            cause="blocks that hold nothing yet are moved as well",
            look="how many blocks do the computed tokens fill?",
        ),
        Mistake(
            "a swap of nothing",
            edits={"Scheduler.preempt": (("0 < used <=", "used <="),)},
            cause="a swap of no blocks: it would come back as if it had been swapped",
            look="what if no block is in use?",
        ),
        Mistake(
            "does not ask for room on the host",
            edits={"Scheduler.preempt": ((" <= self.host_pool.num_free", ""),)},
            cause="nobody asks whether the host has room",
            look="`self.host_pool.num_free`",
        ),
        Mistake(
            "moves what fits",
            edits={"Scheduler.preempt": (
                ("    if swap and",
                 "    used = min(used, self.host_pool.num_free) if swap else used\n"
                 "    if swap and"),
            )},
            cause="what fits is moved, and the tokens of the block that is left behind still "
            "count as computed",
            look="all of the blocks in use, or none",
        ),
        Mistake(
            "never fills the host",
            edits={"Scheduler.preempt": (("used <= self", "used < self"),)},
            cause="exactly as many as are needed, and that is treated as too few",
            look="the comparison: < or <=?",
        ),
        Mistake(
            "the wrong way round",
            edits={"Scheduler.preempt": (
                ("zip(sequence.table.block_ids[:used], sequence.host_block_ids, strict=True)",
                 "zip(sequence.host_block_ids, sequence.table.block_ids[:used], strict=True)"),
            )},
            cause="the pairs are the wrong way round",
            look="`Plan.swap_out`: (device block, host block)",
        ),
        Mistake(
            "does not note where",
            edits={"Scheduler.preempt": (
                ("        self.num_swaps_out += 1",
                 "        self.num_swaps_out += 1\n        sequence.host_block_ids = None"),
            )},
            cause="it does not know where on the host its blocks are, so they are lost",
            look="`sequence.host_block_ids`",
        ),
        Mistake(
            "makes up host blocks",
            edits={"Scheduler.preempt": (
                ("[self.host_pool.allocate() for _ in range(used)]", "list(range(used))"),
            )},
            cause="host blocks are named without being taken from the host's pool",
            look="who knows which of them are free? `self.host_pool`",
        ),
        Mistake(
            "needs a plan",
            edits={"Scheduler.preempt": (("plan is not None and ", ""),)},
            cause="`recompute_all` preempts without a plan, after a failed step",
            look="the default of `plan`",
        ),
        Mistake(
            "does not count",
            edits={"Scheduler.preempt": (("    self.num_preemptions += 1\n", ""),)},
            cause="three counters: its own, and two of the scheduler's",
            look="three counters: its own, and two of the scheduler's",
        ),
    ),
    "06.5": (
        Mistake(
            "takes the newest slot back",
            edits={"FreesTheMost._add_decodes": (
                ("decoding[len(plan.slots) :] + prefilling", "decoding + prefilling"),
                ("        self.preempt(victim, plan)\n",
                 "        self.preempt(victim, plan)\n"
                 "        if plan.slots and victim is not sequence and victim not in prefilling:\n"
                 "            plan.slots.pop()\n"),
            )},
            cause="a slot is taken back, but not that of whoever gave way",
            look="who has a slot, and whose slot is it, when somebody leaves the list?",
        ),
        Mistake(
            "still anybody, by another name",
            edits={"FreesTheMost._add_decodes": (
                ("decoding[len(plan.slots) :] + prefilling", "prefilling + decoding"),
            )},
            cause="the slot of whoever gave way stays in the plan, so each of the others gets the"
            " slot of the one before it",
            look="who has a slot, and whose slot is it, when somebody leaves the list?",
        ),
        Mistake(
            "anybody but who asks",
            edits={"FreesTheMost._add_decodes": (
                ("decoding[len(plan.slots) :] +", "decoding[len(plan.slots) + 1 :] +"),
            )},
            cause="nobody is left to choose from: whoever asks may be the only one that can give "
            "way",
            look="who is in the list that the victim is taken from?",
        ),
        Mistake(
            "stays in the list",
            edits={"FreesTheMost._add_decodes": (
                ("        (decoding if victim in decoding else prefilling).remove(victim)\n",
                 ""),
            )},
            cause="whoever gave way has no table any more, and is still among those who get a "
            "token",
            look="which list does the victim leave?",
        ),
        Mistake(
            "passes over who finds no block",
            edits={"FreesTheMost._add_decodes": (
                ("        victims = decoding[len(plan.slots) :] + prefilling\n",
                 "        decoding.remove(sequence)\n        continue\n"
                 "        victims = decoding[len(plan.slots) :] + prefilling\n"),
            )},
            cause="whoever finds no block is passed over, and nobody gives way",
            look="what should happen when `_reserve_one` returns None?",
        ),
        Mistake(
            "the last to come",
            edits={"FreesTheMost._add_decodes": (
                ("max(victims, key=lambda one: len(one.table.block_ids))",
                 "max(victims, key=self.policy)"),
            )},
            cause="the last to come gives way, not whoever holds the most blocks",
            look="what this class promises in its docstring",
        ),
        Mistake(
            "who asks",
            edits={"FreesTheMost._add_decodes": (
                ("max(victims, key=lambda one: len(one.table.block_ids))", "sequence"),
            )},
            cause="whoever asks gives way itself",
            look="what this class promises in its docstring",
        ),
        Mistake(
            "the smallest",
            edits={"FreesTheMost._add_decodes": (("max(victims", "min(victims"),)},
            cause="whoever holds the fewest blocks gives way",
            look="what this class promises in its docstring",
        ),
        Mistake(
            "the most computed",
            edits={"FreesTheMost._add_decodes": (
                ("len(one.table.block_ids))", "one.num_computed)"),
            )},
            cause="the most computed tokens decide, or the last to come, not the most blocks",
            look="a prefill's blocks are reserved before its tokens are computed",
        ),
        Mistake(
            "decodes alone",
            edits={"FreesTheMost._add_decodes": ((" :] + prefilling", " :]"),)},
            cause="only decodes are asked to give way",
            look="the lists of those who run",
        ),
    ),
    "06.6": (
        Mistake("one batch", sources=answers(static_steps=8), cause="that is the first batch; E to H come after it", look="the second batch"),
        Mistake("never empty", sources=answers(static_steps=9), cause="35 tokens over four seats, if none were ever empty", look="who waits for whom?"),
        Mistake("what is filled", sources=answers(static_empty=35), cause="35 is how often a seat is not empty", look="all seats of all steps, less those"),
        Mistake("all seats", sources=answers(static_empty=60), cause="60 is all seats of all steps", look="how often does somebody sit there?"),
        Mistake("forgets H", sources=answers(continuous_steps=8), cause="A is done after 8; is everybody?", look="when does H start?"),
        Mistake("the sum alone", sources=answers(continuous_steps=9), cause="35 tokens over four seats; but H begins late and is long", look="when does H start, and how many tokens does it want?"),
        Mistake("a step late", sources=answers(continuous_steps=12), cause="a seat that becomes free is taken in the very next step", look="B is done after step 2: when does E begin?"),
        Mistake("no end", sources=answers(continuous_empty=0), cause="no seat is empty while somebody waits; what when nobody waits any more?", look="the last steps"),
        Mistake("all at once", sources=answers(equal_steps=5), cause="only four can sit at a time", look="eight requests, four seats"),
        Mistake("one way", sources=answers(break_even=2.62), cause="the blocks go out and come back: every byte moves twice", look="what is swapped out must be swapped in"),
        Mistake("megabytes", sources=answers(break_even=5243), cause="these are MB/s", look="10^9 bytes are a GB"),
        Mistake("binary", sources=answers(break_even=4.88), cause="these are GiB/s", look="10^9 bytes are a GB"),
        Mistake(
            "leaves a number out",
            sources={"before_the_race": 'def before_the_race():\n    return {"static steps": 15}\n'},
            cause="a dictionary with the 6 keys of the docstring is expected",
            look="how the key is written",
        ),
        Mistake("leaves the dots", sources=answers(equal_steps=None), cause="a number is expected", look="what the key stands for"),
    ),
}  # fmt: skip
