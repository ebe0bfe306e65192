"""Chapter 05: what its notebook and checks are given. No exercise is answered here."""

from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import Sampler, SamplingParams
from minikv.sequence import Request, Sequence


def go_on(engine: Engine, sequence: Sequence, num_tokens: int) -> list[int]:
    """`num_tokens` more greedy tokens for a sequence that holds a table on the engine's pool.

    Tokens whose K and V are missing are computed first. The engine's own requests are not
    touched.
    """
    for _ in range(num_tokens):
        left = len(sequence.token_ids) - sequence.num_computed
        sequence.table.grow(len(sequence.token_ids) - sequence.table.num_tokens)
        slot, copy = sequence.table.writable_slot(sequence.num_computed)
        sequence.table_version += 1
        engine.store.copy_to(engine.store, [] if copy is None else [copy])
        logits = engine.runner.forward([sequence], [left], [slot])
        sequence.num_computed += left
        sequence.token_ids.append(int(logits[0].argmax()))
    return sequence.token_ids[-num_tokens:]


def sample_naively(
    lm: LanguageModel, prompt_ids: list[int], params: SamplingParams, index: int
) -> list[int]:
    """Sample `index` of a request by naive attention, with the same draws as the engine."""
    sequence = Sequence(Request(-1, prompt_ids, params), index, prompt_ids)
    for _ in range(params.max_tokens):
        logits = lm.logits(sequence.token_ids)[-1:]
        sequence.token_ids += Sampler()(logits, [params], [sequence.draw()]).tolist()
    return sequence.output_ids
