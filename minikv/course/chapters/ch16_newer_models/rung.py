"""Rung 16 of the ladder and of the running table."""

from time import perf_counter

from minikv.course.workloads.running_table import Run
from minikv.engine import Engine, EngineConfig
from minikv.groups import layout_of
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams

IDEA = "layers with memory rules of their own: windows, latents, chosen blocks"


def why_not(lm: LanguageModel) -> str:
    return "" if layout_of(lm.config) else "all layers of this model keep everything"


def run_groups(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """One request, as on rung 04. Layers with a window give back what they no longer see. What is
    counted is the memory that others cannot have, from the first decode on."""
    engine = Engine(lm, EngineConfig(prefix_cache=False, attention="torch"))
    size, held, seen, seconds = engine.config.block_size, 0, 0, 0.0
    engine.add_request(prompt_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    token_ids: list[int] = []
    while engine.has_unfinished:
        started = perf_counter()
        outputs = engine.step()
        seconds += perf_counter() - started
        token_ids = outputs[0].token_ids if outputs else []
        if len(token_ids) > 1 and engine.has_unfinished:
            held += engine.stats().blocks_used * size
            seen += len(prompt_ids) + len(token_ids) - 1
    kept = engine.store.bytes_per_token * (held / seen if seen else 1)
    return Run(token_ids, seconds, round(kept), None)


RUNS = {"one request, KV groups": run_groups}
