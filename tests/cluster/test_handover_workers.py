"""Prefill and decode workers, driven step by step: tokens equal one engine's."""

import sys

import pytest
import torch
from handover_case import LEASE, SlowNetwork, World, expected, greedy
from helpers import assert_empty, small, with_weights

from minikv import Engine, SamplingParams
from minikv.cluster.apart_front import make_connector
from minikv.cluster.connector import LocalNetwork

CONFIG = dict(attention="torch", max_batch_tokens=16)


@pytest.fixture
def prompts(llama):
    return llama.prompts(3, 4, 17, 30, 40)


def one_engine(lm, prompts, params, **config):
    return expected(Engine(lm, small(**CONFIG | config)), prompts, params)


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(1),
        greedy(temperature=1.0, seed=3),
        greedy(temperature=1.0, seed=5, n=3),
        SamplingParams(max_tokens=8, stop=tuple(range(0, 300, 7))),
    ],
    ids=["greedy", "one token", "sampled", "three samples", "stops"],
)
def test_tokens_equal_one_engines(llama, prompts, params):
    world = World(llama.lm)
    assert world.generate(prompts, params) == one_engine(llama.lm, prompts, params)
    [decode], [prefill] = world.of("decode"), world.of("prefill")
    assert (decode.num_taken, decode.num_computed_here) == (4, 0)  # one prompt has no whole block
    assert prefill.engine.stats().generated_tokens == 4 * params.n
    for worker in (decode, prefill):
        assert_empty(worker.engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float16"])
def test_quantised_blocks_travel_as_they_are(llama, prompts, kv_dtype):
    world = World(llama.lm, kv_dtype=kv_dtype)
    assert world.generate(prompts, greedy()) == one_engine(
        llama.lm, prompts, greedy(), kv_dtype=kv_dtype
    )
    assert world.of("decode")[0].num_taken == 4


def test_the_compiled_backend_hands_over_as_well(llama, prompts):
    world = World(llama.lm, attention="auto")
    assert world.generate(prompts, greedy()) == one_engine(llama.lm, prompts, greedy())
    assert world.of("decode")[0].num_taken == 4


def test_many_at_once_with_little_room(llama):
    prompts = llama.prompts(*[9, 21, 30, 14, 26, 33] * 4)
    world = World(llama.lm, prefill=2, decode=2, num_blocks=24, max_num_seqs=3)
    assert world.generate(prompts, greedy(9)) == one_engine(llama.lm, prompts, greedy(9))
    assert sum(worker.num_taken for worker in world.of("decode")) > 10


def test_a_layer_leaves_before_the_next_one_is_computed(llama):
    log = []

    class Noting(LocalNetwork):
        def carry(self, parcel):
            if parcel.save is not None:
                log.append(("save", parcel.save.layer, parcel.save.first))
            super().carry(parcel)

    world = World(llama.lm, network=Noting())
    inner = world.of("prefill")[0].engine.attention.inner
    bind = inner.bind

    def noting_bind(batch):
        attend = bind(batch)

        def noting_attend(layer, *qkv):
            log.append(("attend", layer))
            return attend(layer, *qkv)

        return noting_attend

    inner.bind = noting_bind
    world.generate(llama.prompts(30), greedy())
    chunk = [("attend", 0), ("save", 0, 0), ("attend", 1), ("save", 1, 0)]
    second = [("attend", 0), ("save", 0, 4), ("attend", 1), ("save", 1, 4)]
    assert log == chunk + second  # 16 tokens, then 14: 4 blocks, then 3


def test_only_blocks_that_the_decode_worker_lacks_are_sent(llama):
    [prompt] = llama.prompts(40)
    network = SlowNetwork()
    world = World(llama.lm, network=network)
    sent = []
    for tokens in (prompt[:21], prompt):
        number = world.front.submit(tokens, greedy())
        for _ in range(100):
            world.step()
            sent += [p.save for p in network.on_the_way if p.save is not None]
            network.deliver_all()
        assert world.front.answers[number].is_finished
    in_layer_0 = [len(save.block_ids) for save in sent if save.layer == 0]
    assert sum(in_layer_0) == 5 + 5  # 21 tokens: 5 blocks; of the 10 of 40 tokens 5 are known


def test_a_prompt_that_the_prefill_worker_has_cached_is_sent_as_well(llama):
    [prompt] = llama.prompts(30)
    world = World(llama.lm, decode=2)
    want = one_engine(llama.lm, [prompt], greedy())
    assert world.generate([prompt], greedy()) == want
    first, second = world.of("decode")
    world.front.decode.remove(first.mail.address)
    assert world.generate([prompt], greedy()) == want
    assert (first.num_taken, second.num_taken) == (1, 1)
    assert world.of("prefill")[0].engine.stats().hit_tokens == 28


def test_without_a_prefill_worker_the_decode_worker_computes(llama, prompts):
    world = World(llama.lm, prefill=0)
    assert world.generate(prompts, greedy()) == one_engine(llama.lm, prompts, greedy())


def test_a_full_decode_pool_refuses_and_takes_it_later(llama):
    """Back-pressure: nothing is allocated for what does not fit."""
    network = SlowNetwork()
    world = World(llama.lm, network=network, num_blocks=12)
    prompts = llama.prompts(30, 30)
    numbers = [world.front.submit(prompt, greedy()) for prompt in prompts]
    network.deliver_all()  # both are submitted
    [decode] = world.of("decode")
    decode.step()
    decode.check()
    assert len(decode.loads) == 1 and decode.landings.num_blocks == 7
    refused = [one.message for one in network.on_the_way if one.message.kind == "refused"]
    assert [one.body["for_good"] for one in refused] == [False]
    assert "it needs 8 blocks" in refused[0].body["reason"]
    for _ in range(200):
        network.deliver_all()
        world.step()
        world.clock.now += 0.01
    answers = [world.front.answers[number].token_ids for number in numbers]
    assert answers == one_engine(llama.lm, prompts, greedy())


def test_what_can_never_run_is_refused_for_good(llama):
    world = World(llama.lm, num_blocks=8)
    [answer] = [world.front.submit(prompt, greedy()) for prompt in llama.prompts(40)]
    world.drain()
    assert "num_blocks" in world.front.answers[answer].error
    with pytest.raises(ValueError, match="cache_salt"):
        world.front.submit([1, 2], greedy(cache_salt=object()))


def test_a_busy_prefill_worker_refuses_and_the_decode_worker_computes(llama):
    prompts = llama.prompts(*[21] * 6)
    world = World(llama.lm)
    world.of("prefill")[0].most_waiting = 2
    assert world.generate(prompts, greedy()) == one_engine(llama.lm, prompts, greedy())
    [decode] = world.of("decode")
    assert decode.num_taken >= 2 and decode.num_computed_here >= 1


def test_other_weights_never_hand_over(llama, prompts):
    """Right shapes, other weights: fluent nonsense, if nothing were compared."""
    world = World(llama.lm)
    state = {name: tensor * 1.01 for name, tensor in llama.hf.state_dict().items()}
    [address] = world.front.prefill
    world.kill(address)
    world.front.prefill.clear()
    world.lm = with_weights(llama.lm, state)
    world.front.add_worker("prefill", world.start("prefill"))
    assert world.generate(prompts, greedy()) == one_engine(llama.lm, prompts, greedy())
    [decode] = world.of("decode")
    assert (decode.num_taken, decode.num_computed_here) == (0, 4)


def test_weights_that_change_during_a_hand_over_are_noticed(llama):
    [prompt] = llama.prompts(30)
    world = World(llama.lm)
    [decode], [prefill] = world.of("decode"), world.of("prefill")
    number = world.front.submit(prompt, greedy())
    decode.step()
    prefill.step()  # the first 16 tokens
    state = {name: tensor * 1.01 for name, tensor in llama.hf.state_dict().items()}
    prefill.engine.update_weights(state)
    world.drain()
    assert world.front.answers[number].token_ids == one_engine(llama.lm, [prompt], greedy())[0]
    assert decode.num_bad > 0 and decode.num_computed_here == 1


def test_salts_do_not_share_and_are_part_of_the_checksum(llama):
    [prompt] = llama.prompts(30)
    world = World(llama.lm)
    for salt in (None, "alice", "bob"):
        world.generate([prompt], greedy(cache_salt=salt))
    [decode] = world.of("decode")
    assert decode.num_taken == 3
    assert decode.engine.stats().blocks_cached > 3 * 7


def test_cancel_at_every_moment(llama):
    """Aborted after each number of steps: no block is left anywhere."""
    [prompt] = llama.prompts(40)
    for moment in range(14):
        network = SlowNetwork()
        world = World(llama.lm, network=network)
        number = world.front.submit(prompt, greedy())
        for i in range(40):
            if i == moment:
                world.front.abort(number)
            world.step()
            if network.on_the_way:
                network.deliver_next(len(network.on_the_way) // 2)
        for _ in range(30):
            network.deliver_all()
            world.step()
        assert world.front.answers[number].finish_reasons in (["abort"], ["length"])
        assert not world.front.asked
        for worker in world.workers.values():
            assert_empty(worker.engine)
        assert not world.of("decode")[0].landings.landings
        assert not world.of("prefill")[0].jobs


def test_a_late_write_cannot_reach_another_request(llama):
    """The request is aborted while its blocks are on their way. Until the writer has finished, or
    is fenced, nobody else gets the blocks."""
    network = SlowNetwork()
    world = World(llama.lm, prefill=2, network=network, num_blocks=12)
    [decode], (slow, _) = world.of("decode"), world.of("prefill")
    victim, other = llama.prompts(30, 30)
    number = world.front.submit(victim, greedy())
    for _ in range(3):
        network.deliver_all()
        decode.step()
        slow.step()
    late = [parcel for parcel in network.on_the_way if parcel.save is not None]
    assert late
    network.on_the_way = [one for one in network.on_the_way if one.save is None]
    held = decode.landings.num_blocks
    world.front.abort(number)
    world.front.prefill.remove(slow.mail.address)
    second = world.front.submit(other, greedy())
    for _ in range(30):
        network.deliver_all()
        world.step()
        world.clock.now += 0.03
    assert decode.landings.num_blocks == held  # aborted, and kept
    assert not world.front.answers[second].is_finished  # no room
    network.on_the_way += late
    for _ in range(100):
        network.deliver_all()
        world.step()
        world.clock.now += 0.03
    assert decode.landings.num_blocks == 0
    assert world.front.answers[second].token_ids == one_engine(llama.lm, [other], greedy())[0]


def test_a_dead_prefill_worker(llama):
    """Its lease ends: the blocks are free again, the prompt is computed here."""
    prompts = llama.prompts(40, 33)
    world = World(llama.lm)
    numbers = [world.front.submit(prompt, greedy()) for prompt in prompts]
    for _ in range(2):
        world.step()
    [address] = world.front.prefill
    world.kill(address)
    world.step()
    [decode] = world.of("decode")
    assert decode.landings.num_blocks > 0
    world.clock.now += LEASE + 1
    decode.step()
    assert decode.landings.num_blocks == 0
    world.drain()
    answers = [world.front.answers[number].token_ids for number in numbers]
    assert answers == one_engine(llama.lm, prompts, greedy())
    assert decode.num_computed_here == 2


def test_a_prefill_worker_given_up_too_early_writes_into_the_void(llama):
    """It was slow, not dead: what it writes later is refused, and it learns that."""
    [prompt] = llama.prompts(40)
    network = SlowNetwork()
    world = World(llama.lm, network=network)
    [decode], [prefill] = world.of("decode"), world.of("prefill")
    number = world.front.submit(prompt, greedy())
    network.deliver_all()
    decode.step()
    network.deliver_all()
    prefill.step()
    late = [parcel for parcel in network.on_the_way if parcel.save is not None]
    network.on_the_way.clear()
    world.clock.now += LEASE + 1
    decode.step()
    before = decode.engine.store.blocks.clone()
    network.on_the_way += late
    network.deliver_all()
    assert torch.equal(before, decode.engine.store.blocks)
    for _ in range(200):
        world.step()
        network.deliver_all()
    assert world.front.answers[number].token_ids == one_engine(llama.lm, [prompt], greedy())[0]
    assert not prefill.jobs and not prefill.sendings.num_transfers


def test_where_a_late_write_is_not_refused_its_blocks_wait(llama):
    """The peer is silent, and is not fenced. Its blocks stay out of use until it has finished, or
    for the grace time; meanwhile it is asked for nothing more."""
    network = SlowNetwork()
    world = World(llama.lm, network=network)
    [decode], [prefill] = world.of("decode"), world.of("prefill")
    decode.receiver.grace, decode.receiver.forget = 50.0, lambda peer: None
    prompts = llama.prompts(40, 33, 37, 26)
    numbers = []

    def submit():
        numbers.append(world.front.submit(prompts[len(numbers)], greedy()))
        network.deliver_all()

    submit()
    decode.step()
    network.deliver_all()
    prefill.step()
    late = [parcel for parcel in network.on_the_way if parcel.save is not None]
    network.on_the_way.clear()

    def drain(*workers):
        for _ in range(100):
            network.deliver_all()
            for worker in workers:
                worker.step(), worker.check()
            world.front.poll()

    def given_up():
        [held] = [one.block_ids for one in decode.landings.landings.values()]
        world.clock.now += LEASE + 1
        submit()
        drain(decode)
        assert decode.landings.num_blocks == len(held) > 0 and not decode.loads
        return held

    held = given_up()
    before = decode.engine.store.blocks.clone()
    network.on_the_way += late
    network.deliver_all()
    others = [one for one in range(len(before[0])) if one not in held]
    assert not torch.equal(before, decode.engine.store.blocks), "the write was not refused"
    assert torch.equal(before[:, others], decode.engine.store.blocks[:, others])
    drain(decode, prefill)
    assert not decode.landings.landings and not prefill.jobs, "it has finished"

    submit()
    decode.step()
    world.kill(prefill.mail.address)
    given_up()
    world.clock.now += 50
    drain(decode)
    assert not decode.landings.landings
    answers = [world.front.answers[number].token_ids for number in numbers]
    assert answers == one_engine(llama.lm, prompts, greedy())
    assert_empty(decode.engine)


def test_a_dead_prefill_worker_is_noticed_though_it_is_asked_again_and_again(llama):
    world = World(llama.lm)
    first = world.front.submit(llama.prompts(40)[0], greedy())
    world.step()
    world.kill(world.front.prefill[0])
    for seed in range(5):
        world.clock.now += LEASE / 4
        world.front.submit(llama.prompts(20, seed=seed)[0], greedy())
        for _ in range(20):
            world.step()
    assert world.front.answers[first].is_finished


def test_a_dead_decode_worker(llama, prompts):
    """The front gives its requests to another one; no token changes."""
    world = World(llama.lm, decode=2)
    params = greedy(12, temperature=1.0, seed=8)
    numbers = [world.front.submit(prompt, params) for prompt in prompts]
    for _ in range(6):
        world.step()
    before = [list(world.front.answers[number].token_ids) for number in numbers]
    assert any(before)
    world.kill(world.front.decode[0])
    world.clock.now += LEASE / 2
    world.step()
    world.clock.now += LEASE / 2 + 1
    world.drain()
    answers = [world.front.answers[number].token_ids for number in numbers]
    assert answers == one_engine(llama.lm, prompts, params)
    for old, new in zip(before, answers, strict=True):
        assert all(whole[: len(part)] == part for part, whole in zip(old, new, strict=False))


def test_an_interrupt_in_a_decode_workers_step(llama, prompts):
    """Its pool is made again while peers write: their blocks are held there, too."""
    network = SlowNetwork()
    world = World(llama.lm, network=network)
    numbers = [world.front.submit(prompt, greedy()) for prompt in prompts]
    [decode] = world.of("decode")
    for _ in range(3):
        network.deliver_all()
        world.step()
    held = {block for one in decode.landings.landings.values() for block in one.block_ids}
    assert held
    decode.engine._is_sound = False
    decode.step()
    assert decode.landings.pool is decode.engine.pool
    assert all(decode.engine.pool.ref_count(block_id) > 0 for block_id in held)
    for _ in range(200):
        world.step()
        network.deliver_all()
    answers = [world.front.answers[number].token_ids for number in numbers]
    assert answers == one_engine(llama.lm, prompts, greedy())
    assert_empty(decode.engine)


def test_a_worker_needs_a_prefix_cache_and_messages_that_it_understands(llama, caplog):
    with pytest.raises(ValueError, match="prefix_cache"):
        World(llama.lm, prefix_cache=False)
    world = World(llama.lm)
    for worker in world.front.decode + world.front.prefill:
        for kind, body in (("submit", {}), ("layer", {}), ("prefill", {}), ("nonsense", {})):
            world.front._send(worker, kind, "t", **body)
    number = world.front.submit([1, 2, 3], greedy())
    [decode] = world.of("decode")
    decode.send("front", "progress", world.front.asked[number].ticket, token_ids=3)
    caplog.set_level("WARNING", "minikv.cluster")
    world.drain()
    assert world.front.answers[number].is_finished
    assert sum("is dropped" in one.message for one in caplog.records) >= 5


@pytest.mark.parametrize(("transport", "package"), [("zmq", "zmq"), ("nixl", "nixl")])
def test_a_missing_package_is_named_with_the_way_out(monkeypatch, transport, package):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    if package == "nixl":
        pytest.importorskip("zmq", reason='pyzmq is not installed: see "minikv[distributed]"')
    with pytest.raises(ImportError, match=r"pip install \"minikv\[distributed\]\""):
        make_connector(transport)
