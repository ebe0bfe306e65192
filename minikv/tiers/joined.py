"""Joins the engine's parts to its tiers: a pool, a prefix cache and a scheduler of any class, each
with the few calls that tell the tiers what happens."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq

from minikv.blocks import BlockPool
from minikv.scheduler import Plan, Policy
from minikv.sequence import Sequence
from minikv.tiers.tiers import Tiers


def joined(
    tiers: Tiers, block_pool: type, prefix_cache: type, scheduler: type, policy: Policy
) -> tuple:
    """Subclasses of an engine's parts that tell its tiers what they need to know. Raises
    ValueError for a part that is not a class."""
    for name, part in (
        ("block_pool", block_pool), ("prefix_cache", prefix_cache), ("scheduler", scheduler)
    ):  # fmt: skip
        if not isinstance(part, type):
            raise ValueError(f"{name}: with host_blocks it must be a class, was {part!r}")

    class TieredPool(block_pool):  # type: ignore[misc]
        """Gives a named block to the tiers when its last holder releases it."""

        def __init__(self, num_blocks: int):
            super().__init__(num_blocks)
            tiers.start_over()
            tiers.pool = self

        def release(self, block_id: int) -> None:
            if self.ref_count(block_id) == 1:
                tiers.let_go(block_id, super())
            else:
                super().release(block_id)

    class TieredCache(prefix_cache):  # type: ignore[misc]
        """Names the blocks that are inserted."""

        def __init__(self, pool: BlockPool, block_size: int):
            super().__init__(pool, block_size)
            tiers.cache = self

        def insert(self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable = None):
            result = super().insert(token_ids, block_ids, salt)
            tiers.name(token_ids, result.block_ids, salt)
            return result

        def clear(self) -> None:
            """Forget everything on the device and on the host."""
            tiers.names.clear()
            tiers.host.forget_all()
            super().clear()

        def check(self) -> None:
            super().check()
            tiers.check()

    class TieredScheduler(scheduler):  # type: ignore[misc]
        """Brings blocks back before it plans, and leaves out sequences that still wait for some."""

        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            self.host_pool = tiers.host
            self.may_wait = True

        def schedule(self) -> Plan:
            plan, held = self._schedule()
            while held and self.may_wait and not (plan.sequences or self.running):
                tiers.runner.move_blocks(plan)  # before anything is brought back over them
                tiers.wait(held)
                plan, held = self._schedule()
            return plan

        def schedule_without(self, leaving: list[Sequence]) -> Plan:
            self.may_wait = False  # a step is under way
            plan = super().schedule_without(leaving)
            self.may_wait = True
            return plan

        def _schedule(self) -> tuple[Plan, list[Sequence]]:
            with tiers.planning():
                held = tiers.bring_back(self)
                for sequence in held:
                    self.waiting.remove(sequence)
                plan = super().schedule()
            tiers.measure(plan)
            for sequence in held:
                self.add(sequence)
            return plan, held

    return TieredPool, TieredCache, TieredScheduler, policy
