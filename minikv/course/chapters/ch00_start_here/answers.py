"""Chapter 00: what an engine asks of every request before each step."""


def next_pass(
    token_ids: list[int], num_computed: int, budget: int
) -> tuple[list[int], list[int], bool]:
    """What the next step of a request feeds to the model.

    token_ids     the tokens of prompt and answer so far
    num_computed  the first so many are computed: their keys and values are kept. At least one
                  token is not.
    budget        a step computes at most so many tokens, at least 1

    Returns (tokens, positions, gives_token): the ids of the tokens to compute, in their order; the
    position of each in the text, from 0; and True if a new token comes out of this step, which is
    so if it leaves no token uncomputed. Changes nothing.
    """
    end = min(len(token_ids), num_computed + budget)
    positions = list(range(num_computed, end))
    return token_ids[num_computed:end], positions, end == len(token_ids)
