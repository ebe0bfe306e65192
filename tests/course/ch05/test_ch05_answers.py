"""Chapter 05: the count of blocks on paper is the engine's."""

import pytest
from thorough import thorough_after

from minikv import Engine, EngineConfig, SamplingParams
from minikv.course.chapters.ch05_copy_on_write.answers import blocks_for_samples

PROMPT = "class Queue:\n    def push(self, item):\n        self."


@pytest.mark.parametrize("block_size", thorough_after(2, [3, 16, 1, 4]))
@pytest.mark.parametrize("n", thorough_after(1, [5, 1, 2]))
def test_the_count_is_the_engines(lm, n, block_size):
    prompt = lm.encode(PROMPT)
    config = EngineConfig(num_blocks=256, block_size=block_size, prefix_cache=False)
    params = SamplingParams(n=n, max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
    for length in (1, 15, 16, 18):
        engine = Engine(lm, config)
        engine.add_request(prompt[:length], params)
        for stored in range(7):
            engine.step()
            used = engine.stats().blocks_used
            assert used == blocks_for_samples(n, length, stored, block_size)[0]
