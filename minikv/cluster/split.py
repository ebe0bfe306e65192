"""Prefill and decode on different workers, so that no answer waits for another one's prompt.

    front ── job ──> prefill worker    computes the prompt and its first token
          <── token, K and V ──        K and V: a reference to an object of Ray
          ── job, K and V ──> decode worker    puts them under its prefix cache, and continues

K and V of the prompt's whole blocks travel as one object. An object cannot be changed, and exists
as long as somebody refers to it, so nobody has to agree who may write to a block and when, as where
one machine writes into another one's memory (exercise 13.3). The decode worker computes the few
tokens behind the last whole block, and draws the first token again: a draw depends only on seed and
position, so it is the same one, and the client does not get it twice.

Every doubt is a miss: if the object is lost, because the worker that made it has died, or if the
decode worker's pool has no room for it, the decode worker computes the prompt. If a decode worker
dies, its requests go through prefill again, where the prefix cache still has them.

Decode workers are whole engines. A prompt of which one of them has all but `SHORT` tokens goes
there directly, and so do all prompts while no prefill worker is up.

Why objects, and not the shared store that workers may have, too? It would need a server, a wait
until the last block is written, and more copies. On two cores, 48 blocks of tinypy (3.9 MB) took
12 ms from one engine's cache into another's as an object of Ray, and 26 ms by way of Redis, where
each block is packed and checked for itself; computing them took 70 ms. Medians of 12, in turns.
"""

from collections.abc import Hashable, Iterable, Sequence as Seq

from minikv.cluster.routing import Name, Router, Ticket

SHORT = 64  # tokens: computing them takes about as long as handing their K and V over


class SplitRouter:
    """A router for prefill workers and one for decode workers, who come after them. A request goes
    to the first, and with K and V of its prompt to the second."""

    def __init__(self, policy: type[Router], num_prefill: int, num_decode: int, block_size: int):
        self.prefill, self.decode = policy(num_prefill, block_size), policy(num_decode, block_size)
        self.num_prefill, self.block_size = num_prefill, block_size

    @property
    def up(self) -> list[bool]:
        """Which decode workers are up: these can serve without the others."""
        return self.decode.up

    def is_prefill(self, worker: int) -> bool:
        return worker < self.num_prefill

    def route(
        self, names: Seq[Name], num_tokens: int, session: Hashable = None, is_computed: bool = False
    ) -> Ticket:
        """As `Router.route`. is_computed: K and V of the prompt come along."""
        held = max(self.decode.hits(names).values(), default=0) * self.block_size
        if is_computed or num_tokens - held <= SHORT or not any(self.prefill.up):
            ticket = self.decode.route(names, num_tokens, session)
            return ticket._replace(worker=self.num_prefill + ticket.worker)
        return self.prefill.route(names, num_tokens, session)

    def computed(self, ticket: Ticket) -> None:
        router, worker = self._of(ticket.worker)
        router.computed(ticket._replace(worker=worker))

    def stored(self, worker: int, names: Iterable[Name]) -> None:
        router, worker = self._of(worker)
        router.stored(worker, names)

    def removed(self, worker: int, names: Iterable[Name]) -> None:
        router, worker = self._of(worker)
        router.removed(worker, names)

    def lost(self, worker: int) -> None:
        router, worker = self._of(worker)
        router.lost(worker)

    def back(self, worker: int) -> None:
        router, worker = self._of(worker)
        router.back(worker)

    def _of(self, worker: int) -> tuple[Router, int]:
        """The router that a worker belongs to, and its number there."""
        if self.is_prefill(worker):
            return self.prefill, worker
        return self.decode, worker - self.num_prefill
