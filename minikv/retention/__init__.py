"""Retention: what the prefix cache keeps for somebody who will come back.

    engine = Engine(lm, EngineConfig(retention="pinned"))
    engine.add_request(prompt, SamplingParams(retain_s=10))  # the answer calls a tool

An agent's request ends with a tool call, and the next one begins with the same tokens a moment
later. Age alone does not know this. With `retain_s`, a request says for how many seconds its prefix
is worth keeping, and its last node is pinned until then (vLLM's RFC #52113 has such a hint). A pin
ends when the prefix is used again, or at its deadline.

A pin is a wish. It changes what is evicted first, never what can be evicted: if only pinned blocks
are left, they go, too. And no pin is longer than `LONGEST`, nor do all pins together hold more than
`MOST` of the pool, so that requests without hints keep a share of it.

A policy says two things of a leaf: until when it is kept, and its age. Leaves whose time is over go
first, then the others, and in each half a smaller age goes before a larger one:

    by_age                 the least recently used: what `RadixCache` does, there without a heap
    time_to_live           kept for so long after each use
    pinned                 kept until its pin ends
    whole_conversations    the same, but of the tree's branches first that which as a whole was not
                           used for longest, and of its branches again, down to a leaf

The first two are the same. A prefix that was not used for 30 seconds is older than one that was, so
a time to live that is equal for all is age. And a conversation without branches is evicted as a
whole by age, too: a use makes all of a path recent, so a path goes from its end to where others
share it before a younger one is touched. The last one differs where branches meet: what was asked
for after a prefix that others still use stays longer than what shares nothing.

    retaining   the prefix cache that asks a policy, and the policy for pins
    policies    the others
"""

from functools import partial

from minikv.config import EngineConfig
from minikv.engine import Classes
from minikv.groups import GroupCache
from minikv.radix import RadixCache
from minikv.retention.policies import POLICIES, by_age, time_to_live, whole_conversations
from minikv.retention.retaining import (
    LONGEST,
    MOST,
    Policy,
    Rank,
    RetainingCache,
    RetainingGroupCache,
    pinned,
)

__all__ = [
    "LONGEST", "MOST", "Policy", "Rank", "RetainingCache", "by_age", "pinned", "time_to_live",
    "whole_conversations", "with_policy",
]  # fmt: skip

CACHES = {RadixCache: RetainingCache, GroupCache: RetainingGroupCache}


def with_policy(classes: Classes, config: EngineConfig) -> Classes:
    """What an engine is made of, with a prefix cache that asks the policy of `config.retention`.
    Raises ValueError if there is no prefix cache, or a cache that asks no policy."""
    pool, table, cache = classes
    if not config.prefix_cache or cache not in CACHES:
        raise ValueError(
            f"retention: {config.retention!r} is a policy of the engine's own prefix cache, and "
            f"this engine has {'none' if not config.prefix_cache else cache}; leave one of the two "
            "arguments out"
        )
    return pool, table, partial(CACHES[cache], policy=POLICIES[config.retention])
