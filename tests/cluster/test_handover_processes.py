"""Hand-over between real processes, over ZMQ and NIXL, and what kill -9 does to it."""

import json
import time

import pytest
import torch
from handover_case import expected, greedy
from helpers import small

from minikv import Engine
from minikv.cluster.apart import DecodeWorker, PrefillWorker
from minikv.cluster.apart_front import Front, local_workers, make_connector
from minikv.cluster.connector import Message
from minikv.cluster.zmq_connector import KEY

zmq = pytest.importorskip("zmq", reason='pyzmq is not installed: pip install "minikv[distributed]"')

CONFIG = dict(
    num_blocks=128, block_size=4, max_num_seqs=8, max_batch_tokens=16, min_prefix_tokens=0,
    attention="torch",
)  # fmt: skip
LEASE = 6.0  # on a busy machine a worker may be silent for a while


def want(llama, prompts, params):
    return expected(Engine(llama.lm, small(**CONFIG)), prompts, params)


def front_of(mail, workers):
    prefill, decode = (
        [worker.address for worker in workers if worker.role == role]
        for role in ("prefill", "decode")
    )
    return Front(mail, prefill, decode, lease=LEASE)


def taken(mail, workers, timeout=60) -> int:
    """Hand-overs that went well, on all decode workers."""
    asked = [worker.address for worker in workers if worker.role == "decode"]
    for address in asked:
        mail.send(address, Message("stats", mail.address))
    got, end = {}, time.monotonic() + timeout
    while len(got) < len(asked):
        assert time.monotonic() < end, "no answer"
        got |= {one.sender: one.body["taken"] for one in mail.receive() if one.kind == "stats"}
        time.sleep(0.002)
    return sum(got.values())


@pytest.fixture
def ends():
    """Connectors, closed at the end."""
    made = []

    def make(transport):
        made.append(make_connector(transport))
        return made[-1]

    yield make
    for one in made:
        one.close()


def poll_until(front, done, timeout=60):
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, "it takes too long"
        front.poll()
        time.sleep(0.002)


def test_kill_9_of_either_side(llama, ends):
    """Tokens stay those of one engine, whoever dies; in the end one decode worker is left."""
    prompts, params = llama.prompts(9, 30, 41, 26), greedy(12, temperature=1.0, seed=3)
    tokens = want(llama, prompts, params)
    with local_workers(llama.folder, CONFIG, prefill=1, decode=2, lease=LEASE) as workers:
        mail, prefill = ends("zmq"), workers[0]
        front = front_of(mail, workers)
        assert [one.token_ids for one in front.generate(prompts, params)] == tokens
        assert taken(mail, workers) > 0
        # Aborted, and everybody works on.
        front.abort(front.submit(prompts[2], params))
        # A decode worker dies with requests in the middle.
        long = greedy(200, temperature=1.0, seed=5)
        number = front.submit(prompts[1], long)
        poll_until(front, lambda: sum(map(len, front.answers[number].token_ids)) > 5)
        decode = next(one for one in workers if one.address == front.asked[number].decode)
        decode.kill()
        poll_until(front, lambda: front.answers[number].is_finished)
        assert front.answers[number].token_ids == want(llama, [prompts[1]], long)[0]
        # The prefill worker dies as well.
        numbers = [front.submit(prompt, params) for prompt in llama.prompts(33, 44, seed=7)]
        prefill.kill()
        poll_until(front, lambda: all(front.answers[one].is_finished for one in numbers))
        answers = [front.answers[one].token_ids for one in numbers]
        assert answers == want(llama, llama.prompts(33, 44, seed=7), params)
    assert all(one.process.poll() is not None for one in workers)


def in_one_process(llama, ends, transport, prompts, params, **config):
    sender, receiver = ends(transport), ends(transport)
    engine_config = small(**CONFIG | config)
    prefill = PrefillWorker(llama.lm, engine_config, sender, lease=60)
    decode = DecodeWorker(llama.lm, engine_config, receiver, lease=60)
    front = Front(ends("zmq"), [sender.address], [receiver.address], lease=60)
    numbers = [front.submit(prompt, params) for prompt in prompts]

    def is_done():
        prefill.step(), decode.step()
        prefill.check(), decode.check()
        return not front.asked

    poll_until(front, is_done)
    assert decode.num_computed_here == decode.num_bad == 0
    assert decode.num_taken == len(prompts)
    return prefill, decode, [front.answers[number].token_ids for number in numbers]


@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
def test_zmq_carries_every_part_of_a_block(llama, ends, kv_dtype):
    prompts = llama.prompts(17, 30)
    _, _, tokens = in_one_process(llama, ends, "zmq", prompts, greedy(), kv_dtype=kv_dtype)
    engine = Engine(llama.lm, small(**CONFIG, kv_dtype=kv_dtype))
    assert tokens == expected(engine, prompts, greedy())


@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
def test_nixl_writes_every_part_of_a_block(llama, ends, kv_dtype):
    pytest.importorskip("nixl", reason='nixl is not installed: pip install "minikv[distributed]"')
    prompts = llama.prompts(17, 30)
    prefill, _, tokens = in_one_process(llama, ends, "nixl", prompts, greedy(), kv_dtype=kv_dtype)
    engine = Engine(llama.lm, small(**CONFIG, kv_dtype=kv_dtype))
    assert tokens == expected(engine, prompts, greedy())
    assert not prefill.sender.under_way and len(prefill.sender.remotes) == 1


def test_what_a_peer_that_nixl_has_given_up_writes_late_harms_nothing(llama, ends):
    """The decode worker ends the agent that the peer writes to. Mostly the peer's transfers fail;
    where they do not, they reach blocks that are kept out of use."""
    pytest.importorskip("nixl", reason='nixl is not installed: pip install "minikv[distributed]"')
    [prompt, other] = llama.prompts(30, 33)
    prefill, decode, _ = in_one_process(llama, ends, "nixl", [prompt], greedy())
    sender, receiver = prefill.sender, decode.receiver
    front = Front(ends("zmq"), [sender.address], [receiver.address], lease=60)
    number = front.submit(other, greedy())
    poll_until(front, lambda: decode.step() and decode.loads)
    assert sender.inbox.poll(20_000)  # it knows where to write
    decode.heard[sender.address] -= 61  # the lease has ended
    decode.step()
    assert not receiver.agents and not decode.loads
    held = {block_id for one in decode.landings.landings.values() for block_id in one.block_ids}
    blocks = decode.engine.store.blocks.view(torch.int32)  # bits: blocks that are new may hold NaN
    others = [block_id for block_id in range(blocks.shape[1]) if block_id not in held]
    before = blocks[:, others]
    poll_until(front, lambda: prefill.step() is False)  # it computes, writes, and has finished
    assert held and blocks[:, others].equal(before)
    poll_until(front, lambda: (decode.step(), decode.check(), not front.asked)[2])
    assert front.answers[number].token_ids == want(llama, [other], greedy())[0]
    assert not prefill.sendings.num_transfers and not decode.landings.landings


def test_nixl_between_processes_and_kill_9(llama, ends):
    pytest.importorskip("nixl", reason='nixl is not installed: pip install "minikv[distributed]"')
    prompts, params = llama.prompts(30, 41), greedy(6)
    tokens = want(llama, prompts, params)
    with local_workers(llama.folder, CONFIG, transport="nixl", lease=LEASE) as workers:
        mail = ends("zmq")
        front = front_of(mail, workers)
        assert [one.token_ids for one in front.generate(prompts, params)] == tokens
        assert taken(mail, workers) == len(prompts)
        again = llama.prompts(37, seed=4)
        number = front.submit(again[0], params)
        workers[0].kill()
        poll_until(front, lambda: front.answers[number].is_finished)
        assert front.answers[number].token_ids == want(llama, again, params)[0]


def test_what_is_not_for_us_is_dropped(ends, caplog):
    """A restarted worker may get the port of a dead one, and another program may have the key."""
    caplog.set_level("WARNING", "minikv.cluster")
    one, other = ends("zmq"), ends("zmq")
    stranger = one.context.socket(zmq.PUSH)
    stranger.curve_publickey, stranger.curve_secretkey = one.public, one.secret
    stranger.curve_serverkey = other.public
    stranger.connect(other.address.partition("#")[0])
    head = {"to": other.address, "kind": 3, "sender": "x", "ticket": "t", "body": {}}
    for text in (b"\xff", b"[]", b"{}", json.dumps(head).encode()):
        stranger.send(text)
    assert one.send(other.address.partition("#")[0] + "#dead", Message("ping", one.address))
    assert one.send(other.address, Message("ping", one.address, "t", {"x": 1}, b"data"))
    assert not one.send("nonsense", Message("ping", one.address))
    got, end = [], time.monotonic() + 20
    dropped = []
    while (not got or len(dropped) < 5) and time.monotonic() < end:
        got += other.receive()
        dropped = [record for record in caplog.records if "a message is dropped" in record.message]
        time.sleep(0.01)
    stranger.close(linger=0)
    assert got == [Message("ping", one.address, "t", {"x": 1}, b"data")]
    assert len(dropped) == 5


def test_who_does_not_have_the_key_is_not_heard(ends):
    worker, friend = ends("zmq"), ends("zmq")
    head = {"to": worker.address, "kind": "hello", "sender": "s", "ticket": "", "body": {}}
    public, secret = zmq.curve_keypair()
    strangers = [
        {},
        {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": public},
        {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": worker.public},
    ]
    for keys in strangers:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            for name, value in keys.items():
                setattr(socket, name, value)
            socket.connect(worker.address.partition("#")[0])
            socket.send(json.dumps(head).encode())
            assert not worker.inbox.poll(300)
    assert friend.send(worker.address, Message("hello", friend.address))
    worker.wait(20)
    assert [one.sender for one in worker.receive()] == [friend.address]


def test_a_key_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv(KEY, "too short")
    with pytest.raises(ValueError, match=f"{KEY}: must be a key of 40 characters, has 9 "):
        make_connector("zmq")


def test_workers_that_do_not_start_are_told_and_ended(tmp_path):
    with (
        pytest.raises(RuntimeError, match="did not start"),
        local_workers(tmp_path, CONFIG, prefill=0),
    ):
        pass
