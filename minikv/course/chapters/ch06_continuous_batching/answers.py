"""Chapter 06: another choice of victim."""

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
