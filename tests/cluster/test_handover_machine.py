"""The state machine of the hand-over: every block is released once, and not while it is written."""

import random

import pytest

from minikv import BlockPool, OutOfBlocks
from minikv.cluster.handover import Landings, Sendings


def landings(num_blocks=8, num_layers=2):
    return Landings(BlockPool(num_blocks), num_layers)


def arrive(one, ticket, num_blocks, num_layers=2):
    for layer in range(num_layers):
        for index in range(num_blocks):
            assert one.arrived(ticket, layer, index)


def test_a_whole_landing_belongs_to_the_caller():
    one = landings()
    block_ids = one.begin("a", "p", 3)
    assert block_ids == [0, 1, 2] and one.num_blocks == 3
    arrive(one, "a", 3)
    assert one.finished("a") == block_ids
    assert one.num_blocks == 0
    assert [one.pool.ref_count(block_id) for block_id in block_ids] == [1, 1, 1]
    assert one.finished("a") is None  # said twice
    assert one.pool.num_free == 5


def test_no_room_changes_nothing_and_a_ticket_is_used_once():
    one = landings(4)
    one.begin("a", "p", 3)
    with pytest.raises(OutOfBlocks):
        one.begin("b", "p", 2)
    assert one.pool.num_free == 1 and set(one.landings) == {"a"}
    with pytest.raises(ValueError, match="ticket"):
        one.begin("a", "p", 1)


def test_blocks_of_an_aborted_request_are_kept_while_its_peer_may_write():
    """The race of sgl-project/sglang#24527: the pages went to the next request at once, and the
    old writer came late."""
    one = landings(4)
    mine = one.begin("a", "p", 3)
    one.aborted("a")
    with pytest.raises(OutOfBlocks):
        one.begin("b", "q", 2)
    assert not one.arrived("a", 0, 0)
    assert one.finished("a") is None
    assert one.begin("b", "q", 3) == mine


def test_blocks_of_an_aborted_request_are_released_when_its_peer_dies():
    """The leak of vllm-project/vllm#46283: the dead cannot say that they have finished."""
    one = landings()
    one.begin("a", "p", 2)
    one.begin("b", "p", 2)
    one.begin("c", "q", 2)
    one.aborted("a")
    assert one.given_up("p") == ["b"]  # nobody wants "a"
    assert one.given_up("p") == [] and one.pool.num_free == 2, "it may be alive, and writing"
    one.lost("p")
    assert one.pool.num_free == 6 and set(one.landings) == {"c"}
    one.lost("p")
    assert one.finished("a") is None and one.finished("b") is None
    assert one.pool.num_free == 6


def test_a_landing_with_pieces_missing_is_released():
    one = landings()
    one.begin("a", "p", 2)
    assert one.arrived("a", 1, 0)
    assert not one.arrived("a", 1, 0)  # twice
    assert not one.arrived("a", 2, 0) and not one.arrived("unknown", 0, 0)
    assert one.finished("a") is None
    assert one.pool.num_free == 8


def test_blocks_are_held_in_a_pool_that_was_made_again():
    one = landings()
    one.begin("a", "p", 2)
    one.begin("b", "p", 2)
    one.finished("a")
    pool = BlockPool(8)
    one.hold_again(pool)
    assert one.pool is pool
    assert [pool.ref_count(block_id) for block_id in range(8)] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert [pool.allocate() for _ in range(6)] == [0, 1, 4, 5, 6, 7]
    one.lost("p")
    assert pool.num_free == 2


def test_sent_blocks_are_held_until_no_transfer_reads_them():
    pool = BlockPool(4)
    one = Sendings()
    block_ids = [pool.allocate(), pool.allocate()]
    first, second = one.post("a", pool, block_ids), one.post("a", pool, block_ids[:1])
    for block_id in block_ids:  # the sequence has finished
        pool.release(block_id)
    assert pool.num_free == 2
    assert not one.close("a")
    with pytest.raises(ValueError, match="closed"):
        one.post("a", pool, block_ids)
    assert one.done(first) is None
    assert pool.num_free == 3
    assert one.done(second) == "a"
    assert one.done(second) is None
    assert pool.num_free == 4 and one.num_transfers == 0
    assert one.close("b")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_block_is_free_at_the_end(seed):
    """A plain model: a block is held by its landing until the first of finished and lost."""
    rng = random.Random(seed)
    one = landings(12)
    held: dict[str, tuple[str, int]] = {}
    taken: list[int] = []
    for number in range(400):
        ticket = rng.choice([*held, f"t{number}", "t0"])
        event = rng.choice(
            ["begin", "arrived", "arrived", "finished", "aborted", "given_up", "lost"]
        )
        if event == "begin" and ticket not in held:
            peer, size = rng.choice("pqr"), rng.randint(0, 4)
            try:
                one.begin(ticket, peer, size)
                held[ticket] = peer, size
            except OutOfBlocks:
                assert size > one.pool.num_free
        elif event == "arrived":
            for _ in range(4):
                one.arrived(ticket, rng.randrange(2), rng.randrange(4))
        elif event == "aborted":
            one.aborted(ticket)
        elif event == "finished":
            taken += one.finished(ticket) or []
            held.pop(ticket, None)
        elif event == "given_up":
            peer = rng.choice("pqr")
            assert {held[its][0] for its in one.given_up(peer)} <= {peer}
        elif event == "lost" and rng.random() < 0.3:
            peer = rng.choice("pqr")
            one.lost(peer)
            held = {its: value for its, value in held.items() if value[0] != peer}
        if taken and rng.random() < 0.5:
            one.pool.release(taken.pop())
        in_use = sum(size for _, size in held.values())
        assert one.num_blocks == in_use
        assert one.pool.num_free == 12 - in_use - len(taken)
