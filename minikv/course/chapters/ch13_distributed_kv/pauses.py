"""How long the tokens of running requests take when a long prompt arrives."""

from time import perf_counter

from minikv.config import EngineConfig
from minikv.course.workloads.workload import write_code
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams


def seconds_per_step(
    lm: LanguageModel, budget: int, prompt_tokens: int = 768, steps: int = 40
) -> list[float]:
    """Seconds of each step while four requests decode, at most `budget` tokens per step. Before
    step 10 a prompt arrives; 0 tokens: it goes to another worker."""
    config = EngineConfig(
        num_blocks=128, max_batch_tokens=budget, max_num_seqs=8, prefix_cache=False,
        attention="torch",
    )  # fmt: skip
    engine, seconds = Engine(lm, config), []
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for i in range(4):
        engine.add_request(write_code(lm, 32, f"decodes {i}"), params)
    for _ in range(4):
        engine.step()
    for step in range(steps):
        if step == 10 and prompt_tokens:
            engine.add_request(write_code(lm, prompt_tokens, "arrives"), params)
        started = perf_counter()
        engine.step()
        seconds.append(perf_counter() - started)
    return seconds
