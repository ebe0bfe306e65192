"""Hand-over over NIXL: the prefill worker writes K and V straight into the decode worker's store.

NIXL is NVIDIA's transfer library; vLLM, SGLang and Dynamo hand over with it. It picks the way:
RDMA between machines that have it, otherwise shared memory or TCP (by UCX). As in vLLM, messages go
beside it, over ZMQ; only the notice that blocks have arrived comes with them. Messages are
encrypted, and tell an agent's name and place only to who has the cluster's key; K and V are not.

A write cannot be refused, so the decode side has an agent of its own for each peer, which has the
store registered. To give a peer up is to end its agent. That is not enough on one machine, where
UCX writes by `process_vm_writev`: of 310 writes between two processes that began after the agent
had ended, 30 changed memory, although the writer was told of an error. (With UCX_TLS=tcp none of
300 did. Over RDMA, UCX promises it, https://github.com/openucx/ucx/issues/9452; not tried here.) So
the blocks that a silent peer may write to stay out of use until it says that it has finished, or
for `grace` seconds more.

What is left: a peer that stands still for longer than that, in the middle of a write on the same
machine, and then goes on, writes into blocks that others have. If a worker may be stopped and go
on, set UCX_TLS=tcp. And a peer that may write at all may write anywhere in the store: use this
between workers that trust each other.
"""

import base64
import json
import logging
import secrets
from typing import Any

from minikv.cluster.connector import MISSING, Message, Save, log
from minikv.cluster.zmq_connector import ZmqConnector
from minikv.paged import KVStore
from minikv.tiers import parts_of

DRAM = "DRAM"


class NixlConnector(ZmqConnector):
    """A worker's end: `Sender`, `Receiver` and `Mail` in one."""

    grace = 60.0

    def __init__(self, host: str = "127.0.0.1"):
        super().__init__(host)
        try:
            from nixl import _api as api  # type: ignore[import-not-found, import-untyped]
        except ImportError as error:
            self.close()
            raise ImportError(MISSING.format("nixl")) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets every agent
        self.api = api
        self.ours: Any = None  # the agent that writes
        self.agents: dict[str, tuple[Any, Any]] = {}  # by peer: the agent that it writes to
        self.remotes: dict[str, set[str]] = {}  # by peer: agents that we write to
        self.under_way: dict[int, tuple[str, Any]] = {}  # by save: the peer, and NIXL's handle

    def start_load_kv(self, peer: str, block_ids: list[int]) -> Any:
        if peer not in self.agents:
            agent = self._agent()
            registered = [agent.register_memory(part) for part in parts_of(self.store).values()]
            self.agents[peer] = agent, registered
        agent, _ = self.agents[peer]
        return {
            "agent": agent.name,
            "metadata": base64.b64encode(agent.get_agent_metadata()).decode(),
            "places": _places(self.store),
            "block_ids": block_ids,
        }

    def save_kv_layer(self, save: Save) -> None:
        try:
            self.under_way[save.number] = save.peer, self._post(save)
        except Exception as error:  # the library's own: the peer computes the prompt itself
            log.warning("nothing can be written to %s: %s", save.peer, error)
            self.ended.append((save.number, False))

    def get_finished(self) -> list[tuple[int, bool]]:
        for number, (peer, handle) in list(self.under_way.items()):
            state = self._state(handle)
            if state != "PROC":
                self._end(number, state == "DONE")
                if state != "DONE":
                    log.warning("a write to %s has failed: %s", peer, state)
        return super().get_finished()

    def receive(self) -> list[Message]:
        """The notices of what was written, and all messages. They go separate ways: "finished" may
        come before the last notices."""
        notices = []
        for peer, (agent, _) in self.agents.items():
            for texts in agent.get_new_notifs().values():
                for text in texts:
                    try:
                        head = json.loads(text)
                        notices.append(Message(head["kind"], peer, head["ticket"], head["body"]))
                    except (KeyError, TypeError, ValueError) as error:
                        log.warning("a notice of %s is dropped: %s", peer, error)
        return notices + super().receive()

    def forget(self, peer: str) -> None:
        # A write that is under way cannot be stopped: `get_finished` tells its end, as always.
        if not any(its == peer for its, _ in self.under_way.values()):
            for name in self.remotes.pop(peer, ()):
                self._try(lambda name=name: self.ours.remove_remote_agent(name))
        if peer in self.agents:
            agent, registered = self.agents.pop(peer)
            for one in registered:
                self._try(lambda one=one: agent.deregister_memory(one))
        super().forget(peer)

    def close(self) -> None:
        for number in list(getattr(self, "under_way", ())):
            self._end(number, False)
        for peer in {*getattr(self, "agents", ()), *getattr(self, "remotes", ())}:
            self.forget(peer)
        super().close()

    def _agent(self) -> Any:
        return self.api.nixl_agent(
            f"minikv-{secrets.token_hex(8)}", self.api.nixl_agent_config(backends=["UCX"])
        )

    def _post(self, save: Save) -> Any:
        if self.ours is None:
            self.ours = self._agent()
            for part in parts_of(self.store).values():
                self.ours.register_memory(part)
        target, known = save.target, self.remotes.setdefault(save.peer, set())
        if target["agent"] not in known:
            self.ours.add_remote_agent(base64.b64decode(target["metadata"]))
            known.add(target["agent"])
        into = target["block_ids"][save.first : save.first + len(save.block_ids)]
        mine = _addresses(_places(self.store), save.layer, save.block_ids)
        theirs = _addresses(target["places"], save.layer, into)
        notice = save.notice
        text = {"kind": notice.kind, "ticket": notice.ticket, "body": notice.body}
        handle = self.ours.initialize_xfer(
            "WRITE", self.ours.get_xfer_descs(mine, DRAM), self.ours.get_xfer_descs(theirs, DRAM),
            target["agent"], json.dumps(text).encode(),
        )  # fmt: skip
        if self.ours.transfer(handle) == "ERR":
            self.ours.release_xfer_handle(handle)
            raise RuntimeError("the transfer did not start")
        return handle

    def _state(self, handle: Any) -> str:
        try:
            return self.ours.check_xfer_state(handle)
        except Exception as error:  # the peer is gone
            return f"{type(error).__name__}"

    def _end(self, number: int, went_well: bool) -> None:
        _, handle = self.under_way.pop(number)
        self._try(lambda: self.ours.release_xfer_handle(handle))
        self.ended.append((number, went_well))

    def _try(self, call: Any) -> None:
        """NIXL may have noticed already that the other end is gone."""
        try:
            call()
        except Exception as error:
            log.info("NIXL: %s: %s", type(error).__name__, error)


def _places(store: KVStore) -> list[list[int]]:
    """Of each part: where it begins, bytes from layer to layer, from block to block, of a block."""
    return [
        [
            part.data_ptr(),
            part.stride(0) * part.element_size(),
            part.stride(1) * part.element_size(),
            part[0, 0].numel() * part.element_size(),
        ]
        for part in parts_of(store).values()
    ]


def _addresses(
    places: list[list[int]], layer: int, block_ids: list[int]
) -> list[tuple[int, int, int]]:
    """(address, bytes, device) of one layer of these blocks, block by block in each part."""
    return [
        (start + layer * by_layer + block_id * by_block, size, 0)
        for start, by_layer, by_block, size in places
        for block_id in block_ids
    ]
