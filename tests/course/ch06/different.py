"""Chapter 06: right solutions that are written otherwise than the reference."""

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
    "06.5": {  # any may go; what the plan had for it is taken back: slot and copy
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
        held, moved = list(victim.table.block_ids), len(plan.swap_out)
        self.preempt(victim, plan)
        source = {to: block for block, to in plan.copies if to in held}
        plan.copies = [pair for pair in plan.copies if pair[1] not in source]
        plan.swap_out[moved:] = [(source.get(one, one), to) for one, to in plan.swap_out[moved:]]
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
