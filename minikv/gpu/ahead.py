"""Running ahead: launch the next step before the tokens of the last one have come back.

A GPU works on while the host does something else. If the host waited for the tokens of a step
before it prepared the next one, the GPU would be idle meanwhile. So it prepares first:

    host    plan 1 │ plan 2 │ read 1, plan 3 │ read 2, plan 4 │
    GPU            │ step 1 │ step 2         │ step 3         │

A plan depends on how many tokens there are, not on which. So while the host plans, a sequence
counts the token that the step under way samples for it (`Sequence.device_row`), and the next
step reads the token's id where the GPU has left it (`TokenPool`). The host learns one step too
late that a token ended its sequence: the token after it is thrown away.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minikv.engine import Engine, Loop
from minikv.events import LowerTiers
from minikv.gpu.runner import DeviceRunner
from minikv.scheduler import Plan, Scheduler
from minikv.sequence import Sequence


@dataclass(slots=True)
class Launched:
    """A step under way."""

    plan: Plan
    sequences: list[Sequence]  # that get a token from it, by the token's row
    read: Callable[[], list[int]]  # waits for the tokens


class AheadLoop(Loop):
    """The engine's loop with two steps at a time: one is read while the next one runs."""

    def __init__(self, runner: DeviceRunner):
        self.runner = runner
        self._under_way: Launched | None = None

    def step(self, engine: Engine) -> bool:
        """Start a step, then read the one before. Returns False if nothing can run."""
        now, self._under_way = self._under_way, None
        if now is None or all(sequence.finish_reason for sequence in now.plan.sequences):
            now = self.launch(engine.scheduler, engine.scheduler.schedule())
        if now is None:
            return False
        after = self._launch_after(engine, now)
        self.receive(engine, now)
        self._under_way = after
        return True

    def start_over(self) -> None:
        """Forget the step under way: its tokens will be computed and drawn again."""
        self._under_way = None

    def launch(self, scheduler: Scheduler, plan: Plan) -> Launched | None:
        """Start a plan and count what it computes. None if it has no sequences; its moves of
        blocks are made all the same."""
        self.runner.move_blocks(plan)
        if not plan.sequences:
            return None
        read = self.runner.launch(plan)
        return Launched(plan, scheduler.commit(plan), read)

    def receive(self, engine: Engine, launched: Launched) -> None:
        """Wait for the tokens of a step and give them to their sequences."""
        token_ids = launched.read()
        pairs = zip(launched.sequences, token_ids, strict=True)
        live = [(s, token_id) for s, token_id in pairs if s.finish_reason is None]
        engine.append([s for s, _ in live], [token_id for _, token_id in live])

    def _launch_after(self, engine: Engine, now: Launched) -> Launched | None:
        """Plan and start the step after `now`, without the sequences that `now` completes."""
        live = [(row, s) for row, s in enumerate(now.sequences) if s.finish_reason is None]
        last = [s for _, s in live if len(s.token_ids) + 1 == s.request.max_length]
        for row, sequence in live:
            sequence.device_row = row
        after = self.launch(engine.scheduler, plan_without(last, engine))
        for sequence in now.sequences:
            sequence.device_row = None
        return after


def plan_without(leaving: list[Sequence], engine: Engine) -> Plan:
    """The next plan, as if these running sequences had finished already. While a step is under
    way, nothing waits for blocks from lower tiers."""
    scheduler, tiers = engine.scheduler, engine.tiers or LowerTiers()
    for sequence in leaving:
        scheduler.running.remove(sequence)
    tiers.may_wait = False  # a failure is followed by a recovery, which sets it again
    plan = scheduler.schedule()
    tiers.may_wait = True
    for sequence in leaving:
        scheduler.add_running(sequence)
    return plan
