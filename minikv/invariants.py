"""What must hold between two steps, and the message for when no step is possible."""

from collections import Counter
from collections.abc import Iterable

from minikv.blocks import blocks_for
from minikv.errors import require
from minikv.scheduler import Scheduler
from minikv.sequence import Request


def check(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Raise AssertionError, naming what is broken, unless every invariant holds.

    A block's reference count is the number of its holders: block tables, and the prefix cache as
    one. Blocks without a holder are free. Both queues are in the policy's order. A sequence has a
    block for every token that it has computed, and none that no token of it needs. The scheduler
    has exactly the unfinished sequences of `requests`.
    """
    pool, cache = scheduler.pool, scheduler.cache
    holders: Counter[int] = Counter()
    host_holders: Counter[int] = Counter()
    for sequence in scheduler:
        host_holders.update(sequence.host_block_ids or ())
        if sequence.table is not None:
            holders.update(sequence.table.block_ids)
            room = len(sequence.table.block_ids) * scheduler.config.block_size
            at = f"request {sequence.order}"
            require(room >= sequence.num_computed, f"{at}: computed tokens without a block")
            unused = room - max(sequence.num_computed, len(sequence.token_ids))
            require(unused < scheduler.config.block_size, f"{at}: a block without a token")
    for queue in (scheduler.waiting, scheduler.running):
        values = [scheduler.policy(sequence) for sequence in queue]
        in_order = values == sorted(values)
        require(in_order, f"a value of the policy has changed while it counted: {values}")
    if cache is not None:
        cache.check()
        holders.update(cache.block_ids())
    for one, expected in ((pool, holders), (scheduler.host_pool, host_holders)):
        if one is None:
            continue
        counts = [one.ref_count(block_id) for block_id in range(one.num_blocks)]
        for block_id, count in enumerate(counts):
            held = expected[block_id]
            require(count == held, f"block {block_id}: reference count {count}, {held} holders")
        num_free = getattr(one, "num_unused", one.num_free)  # with groups, fewer can be had
        without = counts.count(0)
        require(num_free == without, f"{num_free} free blocks, {without} without a holder")
    live = {s for request in requests for s in request.sequences if not s.finish_reason}
    require(
        set(scheduler) == live, "the scheduler has other sequences than the unfinished requests"
    )


def why_stuck(scheduler: Scheduler) -> str:
    """Why the scheduler's plan was empty though requests are unfinished, and what to do."""
    if not scheduler.waiting:
        return "no request can run: the scheduler gave none of the running sequences a token"
    first, config, cache = scheduler.waiting[0], scheduler.config, scheduler.cache
    needed = blocks_for(len(first.token_ids), config.block_size)
    evictable = cache.num_evictable_blocks if cache is not None else 0
    return (
        f"no request can run: the first in the queue, {first.request.request_id}, needs "
        f"{needed} blocks; {scheduler.pool.num_free} are free and {evictable} can be evicted of "
        f"{config.num_blocks}. Release what is held outside the engine, or abort the request"
    )
