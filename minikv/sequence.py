"""A request, and the sequences that answer it.

    prompt_ids ─┬─ sequence 0: prompt, output …        one request, n sequences;
                └─ sequence 1: prompt, output …        they fork when the prompt is computed

For one sequence, at any time:

    token_ids   [ 0 … num_cached | … num_computed | … len(token_ids) )
                  K/V were found   K/V computed     still to be computed: 1 token in decode,
                  in the cache     here             more in prefill or after a preemption
"""

import random
from typing import Any

from minikv.blocks import BlockTable
from minikv.radix import Node
from minikv.sampling import SamplingParams


class Request:
    """What the caller asked for. Ids go up in order of arrival."""

    def __init__(
        self, request_id: int, prompt_ids: list[int], params: SamplingParams,
        eos_ids: tuple[int, ...] = (),
    ):  # fmt: skip
        self.request_id, self.prompt_ids, self.params = request_id, prompt_ids, params
        self.seed = random.getrandbits(64) if params.seed is None else params.seed
        self.max_length = len(prompt_ids) + params.max_tokens
        ends = () if params.ignore_eos else eos_ids
        self.stop_ids = {*ends, *(item for item in params.stop if isinstance(item, int))}
        strings = [item for item in params.stop if isinstance(item, str)]
        self.longest_stop = max((len(item.encode()) for item in strings), default=0)  # bytes
        self.sequences: list[Sequence] = [Sequence(self, 0, prompt_ids)]

    def start_over(self) -> list["Sequence"]:
        """Let the unfinished sequences hold nothing; returns them."""
        if self.sequences[0].must_fork:
            del self.sequences[1:]  # of a fork that was left halfway
        unfinished = [one for one in self.sequences if one.finish_reason is None]
        for sequence in unfinished:
            sequence.start_over()
        return unfinished


class Sequence:
    """One sample of a request: its tokens, its block table, and how far both have come.

    The constructor copies `token_ids`.
    """

    def __init__(self, request: Request, index: int, token_ids: list[int]):
        self.request, self.index = request, index
        self.token_ids = list(token_ids)
        self.num_computed = 0  # tokens whose K and V are in the table's blocks
        self.num_cached = 0  # of those, how many the prefix cache had at first admission
        self.num_inserted = 0  # blocks of the table that the prefix cache has as well
        self.num_preemptions = 0
        # None while it waits or is swapped out. Typed Any, for it is not asked for blocks then.
        self.table: BlockTable | Any = None
        self.must_fork = request.params.n > 1 and index == 0  # when the prompt is computed
        self.next_slot: int | None = None  # of the next decode; None: ask the table
        # Goes up with every change of the table's block ids, but for the block of the next decode:
        # its slot tells which it is.
        self.table_version = 0
        self.host_block_ids: list[int] | None = None  # set: swapped out to these
        self.node: Node | None = None  # locked in the prefix cache
        self.finish_reason: str | None = None  # "stop", "length" or "abort"
        # Of the search for stop strings (`minikv.outputs`): how many new tokens were read, the last
        # tokens that have a text, and the end of the text.
        self.read: tuple[int, list[int], str] = (0, [], "")
        # Set while the engine plans ahead: where on the device its newest token's id is, one
        # that `token_ids` does not have yet (`minikv.gpu.ahead`).
        self.device_row: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        """(request id, sample): the order of arrival, and of the samples within a request."""
        return self.request.request_id, self.index

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids) + (self.device_row is not None)

    @property
    def num_output(self) -> int:
        """Number of new tokens so far, without the prompt's."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The new tokens."""
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def samples(self) -> range:
        """Which samples of the request continue from here: its own, or all before they fork."""
        return range(self.request.params.n) if self.must_fork else range(self.index, self.index + 1)

    def draw(self, index: int | None = None, ahead: int = 0) -> float | None:
        """The uniform number that decides the next token of sample `index` (default: its own), or
        the one that comes `ahead` tokens after it; None for greedy.

        It depends on seed, sample and position alone: a token that has to be drawn again comes
        out the same, and the other sequences in the batch do not matter.
        """
        if self.request.params.temperature == 0:
            return None
        index = self.index if index is None else index
        place = self.num_tokens - len(self.request.prompt_ids) + ahead
        return random.Random(f"{self.request.seed}/{index}/{place}").random()

    def start_over(self) -> None:
        """Hold nothing: every token's K and V have to be computed again."""
        if self.table is not None:
            self.num_preemptions += 1
        self.num_computed = self.num_inserted = 0
        self.table = self.node = self.host_block_ids = self.next_slot = self.device_row = None

    def fork(self, index: int) -> "Sequence":
        """Return a second sequence with the same tokens so far (a copy), over the same blocks."""
        twin = Sequence(self.request, index, self.token_ids)
        self.next_slot = None  # the last block is shared from now on
        twin.num_computed, twin.num_cached = self.num_computed, self.num_cached
        twin.num_inserted = self.num_inserted
        twin.table = self.table.fork()
        return twin
