"""Hand-over over ZMQ: K and V travel in the message that announces them.

This is the transport to read. Every worker has one socket that it reads from, and one to each peer.
Blocks are copied three times: into the message, out of the socket, into the store. `nixl_connector`
copies them once.

Everything is encrypted by CURVE, which is part of ZMQ. All workers of a cluster share one key;
messages from anyone without it are ignored. The key is in the environment variable
MINIKV_CLUSTER_KEY. If that is not set, a key is made for this process and those that it starts. On
several machines, set the same key on all of them:

    export MINIKV_CLUSTER_KEY=$(python -c "import zmq; print(zmq.curve_keypair()[1].decode())")

A worker listens on its machine alone unless `host` names another interface.
"""

import json
import os
import secrets
from typing import Any

from minikv.cluster.connector import MISSING, Message, Save, log, views
from minikv.paged import KVStore

KEY = "MINIKV_CLUSTER_KEY"


def cluster_key() -> tuple[bytes, bytes]:
    """The secret key of all workers, and its public key. Raises ImportError without ZMQ, ValueError
    for a bad key."""
    try:
        import zmq
    except ImportError as error:
        raise ImportError(MISSING.format("pyzmq")) from error
    if KEY not in os.environ:
        os.environ[KEY] = zmq.curve_keypair()[1].decode()
    secret = os.environ[KEY].encode()
    try:
        return secret, zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise ValueError(
            f"{KEY}: must be a key of 40 characters, has {len(secret)} that are not one; unset it, "
            "or make one as minikv/cluster/zmq_connector.py says"
        ) from None


class ZmqConnector:
    """A worker's end: `Sender`, `Receiver` and `Mail` in one. Raises as `cluster_key`."""

    store: KVStore
    grace = 0.0

    def __init__(self, host: str = "127.0.0.1", most_messages: int = 1000):
        """most_messages: that wait for a peer; a further one is not sent."""
        self.secret, self.public = cluster_key()
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        self.zmq, self.most_messages = zmq, most_messages
        self.context = zmq.Context()
        self.doorman = ThreadAuthenticator(self.context)
        self.doorman.start()
        self.doorman.configure_curve_callback(credentials_provider=self)
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.curve_server, self.inbox.curve_secretkey = True, self.secret
        self.inbox.linger = 0
        self.inbox.maxmsgsize = 1 << 30
        port = self.inbox.bind_to_random_port(f"tcp://{host}")
        # A restarted worker may get the port of a dead one, whose messages are not for it.
        self.address = f"tcp://{host}:{port}#{secrets.token_hex(8)}"
        self.peers: dict[str, Any] = {}
        self.ended: list[tuple[int, bool]] = []

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this public key may connect. The authenticator asks."""
        return secrets.compare_digest(key, self.public)

    def send(self, peer: str, message: Message) -> bool:
        head = {
            "to": peer, "kind": message.kind, "sender": message.sender,
            "ticket": message.ticket, "body": message.body,
        }  # fmt: skip
        frames = [json.dumps(head).encode()]
        if message.data is not None:
            frames.append(message.data)
        try:
            self._socket(peer).send_multipart(frames, flags=self.zmq.NOBLOCK, copy=True)
        except self.zmq.ZMQError as error:
            log.warning("nothing can be sent to %s: %s", peer, error)
            return False
        return True

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                frames = self.inbox.recv_multipart(flags=self.zmq.NOBLOCK)
            except self.zmq.Again:
                return messages
            try:
                messages.append(self._message(frames))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("a message is dropped: %s", error)

    def wait(self, seconds: float) -> None:
        """Return when a message is there, but not later than in `seconds`."""
        self.inbox.poll(int(seconds * 1000))

    def register_kv_caches(self, store: KVStore) -> None:
        self.store = store

    def start_load_kv(self, peer: str, block_ids: list[int]) -> Any:
        return None  # the message names request, layer and place; only we know the block ids

    def save_kv_layer(self, save: Save) -> None:
        pieces = [view for one in save.block_ids for view in views(self.store, save.layer, one)]
        notice = save.notice
        message = Message(notice.kind, notice.sender, notice.ticket, notice.body, b"".join(pieces))
        self.ended.append((save.number, self.send(save.peer, message)))

    def get_finished(self) -> list[tuple[int, bool]]:
        ended, self.ended = self.ended, []
        return ended

    def forget(self, peer: str) -> None:
        """A message for a request that is over is ignored, so there is nothing to fence."""
        socket = self.peers.pop(peer, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        for peer in list(self.peers):
            self.forget(peer)
        self.inbox.close(linger=0)
        self.doorman.stop()
        self.context.term()

    def _socket(self, peer: str) -> Any:
        if peer not in self.peers:
            socket = self.context.socket(self.zmq.PUSH)
            socket.curve_secretkey, socket.curve_publickey = self.secret, self.public
            socket.curve_serverkey = self.public
            socket.linger = 0
            socket.sndhwm = self.most_messages
            try:
                socket.connect(peer.partition("#")[0])
            except self.zmq.ZMQError:
                socket.close(linger=0)
                raise
            self.peers[peer] = socket
        return self.peers[peer]

    def _message(self, frames: list[bytes]) -> Message:
        head = json.loads(frames[0])
        if head["to"] != self.address:
            raise ValueError(f"it is for {head['to']}, this is {self.address}")
        kind, sender, ticket, body = head["kind"], head["sender"], head["ticket"], head["body"]
        if not all(isinstance(one, str) for one in (kind, sender, ticket)):
            raise ValueError("its head is not one of ours")
        if not isinstance(body, dict):
            raise ValueError("its body is not one of ours")
        return Message(kind, sender, ticket, body, frames[1] if len(frames) > 1 else None)
