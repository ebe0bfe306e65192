"""A request, and the sequences that answer it.

    prompt_ids ─┬─ sequence 0: prompt, output …        one request, n sequences;
                └─ sequence 1: prompt, output …        they fork when the prompt is computed

For one sequence, at any time:

    token_ids   [ 0 … num_cached | … num_computed | … len(token_ids) )
                  K/V were found   K/V computed     still to be computed: 1 token in decode,
                  in the cache     here             more in prefill or after a preemption
"""

import random

from minikv.blocks import BlockTable
from minikv.radix import Node
from minikv.sampling import SamplingParams


class Request:
    """What the caller asked for. `request_id` is also the order of arrival."""

    __slots__ = (
        "longest_stop", "max_length", "params", "prompt_ids", "request_id", "seed", "sequences",
        "stop_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        eos_ids: tuple[int, ...] = (),
    ):
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = random.getrandbits(64) if params.seed is None else params.seed
        self.max_length = len(prompt_ids) + params.max_tokens
        ends = () if params.ignore_eos else eos_ids
        self.stop_ids = {*ends, *(item for item in params.stop if isinstance(item, int))}
        strings = [item for item in params.stop if isinstance(item, str)]
        self.longest_stop = max((len(item.encode()) for item in strings), default=0)  # bytes
        self.sequences: list[Sequence] = [Sequence(self, 0, prompt_ids)]


class Sequence:
    """One sample of a request: its tokens, its block table, and how far both have come."""

    __slots__ = (
        "finish_reason", "host_block_ids", "index", "must_fork", "next_slot", "node",
        "num_cached", "num_computed", "num_inserted", "num_preemptions", "request", "table",
        "table_version", "token_ids",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, token_ids: list[int]):
        self.request = request
        self.index = index
        self.token_ids = list(token_ids)
        self.num_computed = 0  # tokens whose K and V are in the table's blocks
        self.num_cached = 0  # of those, how many the prefix cache had at first admission
        self.num_inserted = 0  # blocks of the table that the prefix cache has as well
        self.num_preemptions = 0
        self.table: BlockTable | None = None  # None: waiting or swapped out
        self.must_fork = request.params.n > 1 and index == 0  # when the prompt is computed
        self.next_slot: int | None = None  # of the next decode; None: ask the table
        self.table_version = 0  # goes up with every change of the table's block ids
        self.host_block_ids: list[int] | None = None  # set: swapped out to these
        self.node: Node | None = None  # locked in the prefix cache
        self.finish_reason: str | None = None  # "stop", "length" or "abort"

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served."""
        return self.request.request_id, self.index

    @property
    def num_output(self) -> int:
        """New tokens whose ids are known. On a GPU the newest may still be on their way: they
        stand in `token_ids` as negative numbers (`minikv.ahead`)."""
        tokens = self.token_ids
        count = len(tokens)
        while tokens[count - 1] < 0:
            count -= 1
        return count - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        num_prompt = len(self.request.prompt_ids)
        return self.token_ids[num_prompt : num_prompt + self.num_output]

    def forget_unknown(self) -> None:
        """Take tokens that are still on their way as if they had not been asked for."""
        while self.token_ids[-1] < 0:
            self.token_ids.pop()

    def draw(self) -> float | None:
        """The uniform number that decides the next token; None for greedy.

        A function of seed, sample and position alone, so a token that has to be drawn
        again is the same, and so it is in any company.
        """
        if self.request.params.temperature == 0:
            return None
        place = len(self.token_ids) - len(self.request.prompt_ids)
        return random.Random(f"{self.request.seed}/{self.index}/{place}").random()

    def fork(self, index: int) -> "Sequence":
        """A second sequence with the same tokens so far, over the same blocks."""
        twin = Sequence(self.request, index, self.token_ids)
        self.next_slot = None  # the last block is shared from now on
        twin.num_computed, twin.num_cached = self.num_computed, self.num_cached
        twin.num_inserted = self.num_inserted
        twin.table = self.table.fork()
        return twin
