"""Chapter 09: mistakes that readers make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake

MISTAKES = {
    "09.1": (
        Mistake(
            "rounds down",
            edits={"blocks_needed": (("return -(-num_tokens", "return (num_tokens"),)},
            cause="the number of blocks is rounded down, so the last tokens have no block",
            look="7 tokens in blocks of 4 need 2",
        ),
    ),
}
