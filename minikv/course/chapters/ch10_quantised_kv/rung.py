"""Rung 10 of the ladder and of the running table."""

from minikv.course.measure.running_table import TOGETHER, Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "keys and values in 8 and 4 bits, read as such"


def run_int8(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The requests of chapter 06, with K and V in int8. Its tokens may differ from those of
    naive attention. On tinypy and the table's text they do not, and the table raises if they do."""
    return run_in_engine(lm, prompt_ids, max_tokens, requests=TOGETHER, kv_dtype="int8")


def why_not(lm: LanguageModel) -> str:
    """The table compares tokens, and int8 promises them for no model."""
    return "" if lm.name == "tinypy" else "other tokens are allowed here"


RUNS = {f"{TOGETHER} requests, K and V in int8": run_int8}
