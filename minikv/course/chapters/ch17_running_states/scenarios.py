"""Chapter 17 as programs: what is asked, and what can be seen."""

from minikv.course.judge.scenarios import Group, Log, scenario


def blocks(mine, program, log: Log) -> None:
    num_tokens, block_size = program
    text = f"{num_tokens} tokens, blocks of {block_size}"
    log.call(text, mine.blocks_needed, num_tokens, block_size)


scenario(
    "17.1",
    blocks,
    Group(
        "whole blocks and a rest",
        [(tokens, size) for size in (1, 3, 4) for tokens in range(10)],
        look="the rounding: up or down?",
    ),
)
