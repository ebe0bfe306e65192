"""Four requests that share a prefix: on the reader's chapter 02, then on their own engine."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import minikv
from minikv.course.pictures.table import Table
from minikv.course.reader.mine import mine, own_engine
from minikv.course.workloads.running_table import machine
from minikv.course.workloads.timing import no_gc
from minikv.course.workloads.workload import write_code

SHARED, NEW = 480, 16  # tokens
QUESTIONS = ("def test_first(self):\n", "def main(argv):\n", "class Queue:\n", "import os\n")


class FourRequests(Table):
    """One system prompt, four questions. Prints whose parts serve them, and shows what each way
    computed and how long it took. Raises AssertionError for other tokens than the oracle's."""

    def __init__(self, lm: minikv.LanguageModel):
        system = write_code(lm, SHARED, seed=7)
        self.prompts = [system + lm.encode(question) for question in QUESTIONS]
        self.expected = [lm.generate_naively(prompt, NEW) for prompt in self.prompts]
        generate, cache = mine("02.2", "02.3")

        def one_by_one() -> list[list[int]]:
            capacity = max(map(len, self.prompts)) + NEW
            return [
                generate(lm, cache(lm.config, capacity), prompt, NEW) for prompt in self.prompts
            ]

        one_by_one()  # not counted: the first run of anything is slower
        computed = sum(map(len, self.prompts)) + len(self.prompts) * (NEW - 1)
        seconds = self._timed(one_by_one)
        self._rows = [("chapter 02, one after another", f"{computed:,}", "–", _ms(seconds))]
        asked = sum(map(len, self.prompts))
        for way, cached, sent_before in (
            ("off", False, False), ("on, cold", True, False), ("on, warm", True, True),
        ):  # fmt: skip
            config = minikv.EngineConfig(max_num_seqs=4, prefix_cache=cached)
            engine = own_engine(lm, config, attention=minikv.TorchAttention)
            if sent_before:
                engine.generate([system], minikv.SamplingParams(max_tokens=1))
            before = engine.stats()
            seconds = self._timed(partial(self._serve, engine))
            after = engine.stats()
            self._rows.append(
                (
                    f"own engine, prefix cache {way}",
                    f"{after.computed_tokens - before.computed_tokens:,}",
                    f"{after.hit_tokens - before.hit_tokens:,} of {asked:,}",
                    _ms(seconds),
                )
            )
            engine.check()
        self.caption = (
            f"{len(self.prompts)} requests, {SHARED} shared prompt tokens, {NEW} new tokens each: "
            f"the oracle's tokens every time. Cold: all four are looked up in one step, "
            f"before any is computed. Warm: the shared prefix was sent once before. One run each; "
            f"{machine(lm)}."
        )

    def _serve(self, engine: minikv.Engine) -> list[list[int]]:
        params = minikv.SamplingParams(max_tokens=NEW, ignore_eos=True)
        return [list(output.token_ids) for output in engine.generate(self.prompts, params)]

    def _timed(self, work: Callable[[], list[list[int]]]) -> float:
        with no_gc():
            started = perf_counter()
            found = work()
            seconds = perf_counter() - started
        if found != self.expected:
            raise AssertionError(f"other tokens than the oracle's: {found}, not {self.expected}")
        return seconds

    def rows(self) -> list[tuple[str, ...]]:
        return [("served by", "tokens computed", "tokens found", "all done after"), *self._rows]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
