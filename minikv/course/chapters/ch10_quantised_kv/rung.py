"""Rung 10 of the ladder and of the running table: the requests of chapter 06, K and V in int8."""

from functools import partial

from minikv.course.workloads.running_table import TOGETHER, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "keys and values in 8 and 4 bits, read as such"
RUNS = {
    f"{TOGETHER} requests, K and V in int8": partial(
        run_in_engine, requests=TOGETHER, kv_dtype="int8"
    )
}


def why_not(lm: LanguageModel) -> str:
    """The table compares tokens, and int8 promises them for no model. On tinypy and the table's
    text they are those of naive attention."""
    return "" if lm.name == "tinypy" else "other tokens are allowed here"
