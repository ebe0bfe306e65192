"""For tests of a front: workers of this process that can die, prompts, what one engine answers."""

import random
import threading

from waiting import PATIENCE

from minikv import Engine, EngineConfig, SamplingParams
from minikv.cluster.front import WorkerLost
from minikv.cluster.worker import EngineWorker

CONFIG = EngineConfig(num_blocks=64, max_num_seqs=8, attention="torch")


class Fragile:
    """A worker in this process. It dies as `dies()` says, before or after it has computed."""

    def __init__(self, lm, config=CONFIG, dies=lambda: False, work_seconds=0.0):
        self.make = lambda: EngineWorker(lm, config, work_seconds)
        self.worker, self.dies, self.is_gone = self.make(), dies, False
        self.num_deaths = self.num_ends = 0
        self.paused = threading.Event()
        self.paused.set()

    def start(self):
        if self.is_gone:
            raise WorkerLost("is gone")
        return self.worker.start()

    def work(self, jobs, cancelled):
        assert self.paused.wait(PATIENCE)
        before = self.dies()
        done = None if before else self.worker.work(jobs, cancelled)
        if before or self.dies():
            self.num_deaths += 1
            self.worker = self.make()
            raise WorkerLost("died")
        return done

    def end(self):
        self.num_ends += 1
        self.worker = self.make()


def prompts_of(lm, number, seed=0):
    draw = random.Random(seed)
    heads = [[draw.randrange(lm.config.vocab_size) for _ in range(40)] for _ in range(3)]
    return [
        draw.choice(heads) + [draw.randrange(lm.config.vocab_size) for _ in range(1 + i % 20)]
        for i in range(number)
    ]


def tokens(stream):
    return [token_id for delta in stream for token_id in delta.token_ids]


def params_of(number):
    """Greedy and drawn ones, of several lengths."""
    return [
        SamplingParams(max_tokens=4 + i % 9, temperature=(i % 2) * 0.8, seed=i, ignore_eos=True)
        for i in range(number)
    ]


def one_engine(lm, prompts, params, config=CONFIG):
    """The tokens of each prompt."""
    return [output.token_ids for output in Engine(lm, config).generate(prompts, params)]


def assert_all_free(workers):
    for one in workers:
        one.worker.start()  # drops what was cancelled after the last call
        engine = one.worker.engine
        engine.check()
        assert not engine.has_unfinished and not one.worker.jobs and not one.worker.arrived
        assert engine.pool.num_free + engine.cache.num_cached_blocks == engine.pool.num_blocks
