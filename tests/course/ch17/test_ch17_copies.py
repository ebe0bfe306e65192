"""Copies of states: loads without a model, the film, and what published models keep."""

import minikv
from minikv.course.chapters.ch17_running_states import keeping
from minikv.course.chapters.ch17_running_states.answers import states_on_paper
from minikv.course.chapters.ch17_running_states.published import MODELS
from minikv.course.chapters.ch17_running_states.state_viewer import StateFilm
from minikv.states.slots import copies_due


def test_the_report_of_64_prompts():
    """Copies among each prompt's own tokens: no hit. At the junction: all but two of each group."""
    found = {
        name: keeping.served(keeping.groups(), due)
        for name, due in {"last": keeping.last_only, "both": copies_due,
                          "each": keeping.every(1)}.items()
    }  # fmt: skip
    assert {name: one.hits for name, one in found.items()} == {"last": 0, "both": 48, "each": 56}
    assert [one.recomputed_tokens for one in found.values()] == [56 * 1056, 8 * 1056, 0]
    assert [one.counts.made for one in found.values()] == [64, 72, 144]


def test_a_chat_goes_on_at_its_last_state_unless_there_is_no_room():
    load = keeping.chats(minikv.load("tinypy"), 4, 3)
    assert any(len(end) > len(prompt) for prompt, end in load.requests)
    again = [keeping.served(load, copies_due, copies).recomputed_tokens for copies in (0, 2, 100)]
    assert again[0] > again[1] > again[2]
    rows = keeping.compared(load, (2, 100), copies_due)
    assert rows["last state and junction"] == again[1:] and rows["every block"][1] == 0
    told = keeping.copies_picture({"chats": {1.0: {"last": 70}, 2.0: {"last": 7}}}).alt
    assert "chats, last: 70, 7" in told


def test_the_film_shows_a_junction_and_who_begins_there():
    lm = minikv.load("tinypy-states")
    room = 6 * lm.config.state_bytes(lm.dtype)
    config = minikv.EngineConfig(
        64, 4, max_num_seqs=1, min_prefix_tokens=0, state_bytes=room, attention="torch"
    )
    film = StateFilm(minikv.Engine(lm, config))
    prompts = {"A": range(20, 28), "B": range(30, 38), "C": range(40, 48)}
    film.serve({name: [*range(3, 13), *own] for name, own in prompts.items()}, 4)
    assert film.begins == {"A": 0, "B": 0, "C": 8}
    assert [look for _, look, _ in film.steps[2].rows["B"]][:3] == ["hatched", "hatched", "filled"]
    assert [copy for *_, copy in film.steps[2].rows["A"]] == [False, True, False, False, True]
    assert ("A", "8") in film.steps[2].slots and ("B", "now") in film.steps[2].slots
    assert ("B", "now") not in film.steps[3].slots
    assert "copies: A after 20, A after 8, B after 16." in film.picture().alt
    assert film.counted(5) == {"tokens computed again": 8}


def test_block_sizes_that_users_of_vllm_report():
    """528 tokens for Qwen3.5 4B (issue 40696), and 784 for 48 matrices (issue 47430)."""
    assert states_on_paper()["block"] == 528
    larger = MODELS["Qwen3.5 4B"]._replace(matrices=48, channels=2 * 16 * 128 + 48 * 128)
    state = 4 * larger.matrices * larger.rows * larger.columns + 6 * larger.channels
    assert -(-state // (2 * larger.cached * 16)) * 16 == 784
