"""Prompts as the ids of their blocks, for caches that are tried without a model.

    streams = ids_of_jobs(conversations(lm, 200, turns=6, real_answers=False))
    streams = ids_of_trace(read_trace("conversation_trace.jsonl"))

An id stands for a block and all before it, as a chained hash does: equal ids, equal prefixes.
"""

from collections.abc import Hashable, Iterable, Sequence as Seq

from minikv.course.workloads.workload import Job, TraceRequest

Ids = Seq[int]  # of a prompt's blocks, in order


def ids_of_jobs(jobs: Iterable[Job], block_size: int = 16) -> list[Ids]:
    """The whole blocks of each prompt; a block's id is new unless it was seen after the same
    blocks and under the same salt."""
    known: dict[Hashable, int] = {}  # a chained hash that cannot collide
    streams: list[Ids] = []
    for job in jobs:
        ids: list[int] = []
        for end in range(block_size, len(job.prompt_ids) + 1, block_size):
            before = ids[-1] if ids else ("salt", job.salt)
            key = before, tuple(job.prompt_ids[end - block_size : end])
            ids.append(known.setdefault(key, len(known)))
        streams.append(ids)
    return streams


def ids_of_trace(requests: Iterable[TraceRequest]) -> list[Ids]:
    """The `hash_ids` of a trace, each of 512 tokens. Raises ValueError if there are none."""
    streams: list[Ids] = [request.hash_ids for request in requests]
    if not any(streams):
        raise ValueError("requests: have no hash_ids; a trace like Mooncake's has them, in jsonl")
    return streams
