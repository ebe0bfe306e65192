"""Chapter 06: another choice of victim, and the arithmetic of batches and of preemption."""

from minikv.scheduler import Plan, Scheduler
from minikv.sequence import Sequence


class FreesTheMost(Scheduler):
    """Preempts the sequence that holds the most blocks, even the first to arrive: one victim
    frees as much as several small ones. It may be the largest of all that run, or of those that
    have no slot yet in this step. Either way, also with several samples and with swap, every
    request gets the tokens that it would get alone."""

    def _add_decodes(
        self, decoding: list[Sequence], prefilling: list[Sequence], plan: Plan
    ) -> bool:
        """One token for each of `decoding`, in order. While there is no block for one, the
        sequence that holds the most, of those without a slot, is preempted and leaves its list.
        Returns whether any was preempted."""
        preempted = False
        while len(plan.slots) < len(decoding):
            sequence = decoding[len(plan.slots)]
            slot = self._reserve_one(sequence, plan)
            if slot is not None:
                plan.slots.append(slot)
                continue
            victims = decoding[len(plan.slots) :] + prefilling
            victim = max(victims, key=lambda one: len(one.table.block_ids))
            (decoding if victim in decoding else prefilling).remove(victim)
            self.preempt(victim, plan)
            preempted = True
        plan.sequences.extend(decoding)
        plan.num_decodes = len(decoding)
        plan.num_tokens.extend([1] * len(decoding))
        return preempted


def before_the_race() -> dict[str, float]:
    """What static and continuous batches make of the same requests, and when to swap.

    Eight requests, A to H, all wait at the start and are served in that order, four at a time.
    They want 8, 2, 3, 3, 6, 1, 5 and 7 tokens. Every step gives each request in the batch one
    token, also the step that computes its prompt: a request of 3 tokens takes 3 steps. A seat is
    empty in a step if no request gets a token there.

    "static steps"        steps until all are done, in static batches of four: the next batch
                          begins when the longest request of the one before is done
    "static empty"        the number of empty seats, summed over those steps (four seats in each)
    "continuous steps"    steps if a free seat is taken in the next step
    "continuous empty"    the number of empty seats then, summed over the steps
    "equal steps"         continuous steps if all eight want 5 tokens
    "break-even"          a preempted request of a model that keeps 131,072 bytes per token is
                          computed again at 20,000 tokens per second, or swapped: its blocks go to
                          the host and come back later. At what speed of the link, in GB/s
                          (10^9 bytes per second), do both take the same time?

    Worked for two seats and 3, 1 and 2 tokens. Static: A and B take 3 steps and C takes 2, so
    there are 5 steps of two seats, 10 in all, for 6 tokens: 4 are empty. Continuous: C takes B's
    seat in step 2, and all are done after 3 steps, with no seat ever empty.
    """
    wanted, seats = [8, 2, 3, 3, 6, 1, 5, 7], 4
    static = sum(max(wanted[i : i + seats]) for i in range(0, len(wanted), seats))

    def continuous(wanted: list[int]) -> int:
        free_at = [0] * seats  # the step after which each seat is free
        for tokens in wanted:
            free_at[free_at.index(min(free_at))] += tokens
        return max(free_at)

    return {
        "static steps": static,
        "static empty": static * seats - sum(wanted),
        "continuous steps": continuous(wanted),
        "continuous empty": continuous(wanted) * seats - sum(wanted),
        "equal steps": continuous([5] * 8),
        "break-even": 2 * 131_072 * 20_000 / 1e9,
    }
