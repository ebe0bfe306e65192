"""The form that every notebook has, and the widget of notebook 00.

What the cells compute is not tested here: strict nbval runs them and compares.
"""

import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import torch
from thorough import thorough_after

import minikv
from minikv.course.authoring import buttons
from minikv.course.chapters import each, folders, notebook as name_of
from minikv.course.exercise_data.manifest import chapter_of, chapters
from minikv.course.exercise_data.skeletons import skeleton
from minikv.course.pictures import style
from minikv.course.pictures.engine_step import engine_step
from minikv.course.pictures.timeline import Timeline, _chip, visible
from minikv.course.reader import ladder, progress_file, routes
from minikv.course.reports.markup import hours
from minikv.course.workloads import running_table
from minikv.course.workloads.running_table import Run, Rung, RunningTable

ROOT = Path(__file__).parents[2]
NOTEBOOKS, EXERCISES = sorted((ROOT / "notebooks").glob("*.ipynb")), ROOT / "exercises"
OPENING = ("You will be able to", "You need", "Minutes:", "Where this rung stands")
CLOSING = ["Summary", "Three open questions", "What to read next", "Your parts in the engine"]
LONGEST_CELL = 25  # lines
ABSOLUTE_PATH = re.compile(
    r"(?<![\w./:-])/(?:home|Users|root|work|tmp|opt|usr|var|mnt|srv|private|content)/"
    r"|\b[A-Z]:\\\\?(?:Users|\w+\\)"
)


# ── Every notebook ────────────────────────────────────────────────────────────


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem, scope="module")
def path(request):
    return request.param


@pytest.fixture(scope="module")
def notebook(path):
    """Read once, for all its tests in turn."""
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def texts(notebook):
    """Every text that a reader may see: sources and outputs."""
    for cell in notebook.cells:
        yield cell.source
    for output in outputs(notebook):
        yield output.get("text", "")
        yield from (value for value in output.get("data", {}).values() if isinstance(value, str))


def headings(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield from re.findall(r"^## (.+)$", cell.source, re.MULTILINE)


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == [name_of(number) for number in folders()]
    assert NOTEBOOKS


def test_is_valid_and_names_its_kernel(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"


def test_opens_as_every_notebook_does(path, notebook):
    number = int(path.stem[:2])
    assert notebook.cells[0].source.startswith(f"# {number:02} · ")
    opening = []
    for cell in notebook.cells:
        if cell.source.startswith("## "):
            break
        opening.append(cell)
    prose = "\n".join(cell.source for cell in opening if cell.cell_type == "markdown")
    places = [prose.find(f"**{label}") for label in OPENING]
    assert -1 not in places and places == sorted(places)
    first, *_ = (c for c in opening if c.cell_type == "code" and c.id != "colab")
    assert first.source.endswith(f"ladder(here={number})")


def test_closes_as_every_notebook_does(path, notebook):
    *_, last = code_cells(notebook)
    number = int(path.stem[:2])
    assert list(headings(notebook))[-len(CLOSING) :] == CLOSING
    assert re.search(rf"^closing\({number}[,)]", last.source, re.M) and notebook.cells[-1] is last


def test_what_lists_the_chapters_may_change_with_them(notebook):
    for cell in code_cells(notebook):
        if re.search(r"^(ladder|navigation|progress|closing)\(", cell.source, re.MULTILINE):
            assert "nbval-ignore-output" in cell.metadata.get("tags", []), cell.source


def test_asks_three_open_questions(notebook):
    [cell] = [cell for cell in notebook.cells if cell.source.startswith("## Three open questions")]
    assert re.findall(r"^(\d)\. ", cell.source, re.MULTILINE) == ["1", "2", "3"]


def test_states_the_oracles_verdict(notebook):
    assert any("raise AssertionError" in cell.source for cell in code_cells(notebook))


def test_opens_with_one_click(path):
    """If not: python -m minikv.course buttons"""
    text = path.read_text(encoding="utf-8")
    assert buttons.in_notebook(path.name, text, buttons.repository()) == text


def test_cells_are_short(notebook):
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= LONGEST_CELL, cell.source


def test_was_run_from_top_to_bottom(notebook):
    cells = [cell for cell in code_cells(notebook) if cell.id != "colab"]
    new = [cell.id for cell in cells if cell.execution_count is None]
    assert not new, f"not run yet: {', '.join(new)}; make notebooks CHAPTER=NN stores what they say"
    counts = [cell.execution_count for cell in cells]
    first = counts[0]  # 2 if the cell for Colab, which does nothing here, was run before
    assert first in (1, 2) and counts == list(range(first, first + len(counts)))


def test_stores_no_error_and_no_warning(notebook):
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


def test_stores_nothing_of_its_authors_machine(notebook):
    for text in texts(notebook):
        assert not ABSOLUTE_PATH.search(text), ABSOLUTE_PATH.search(text)
    for cell in notebook.cells:
        assert "execution" not in cell.metadata  # when it ran


def test_says_by_tags_what_nbval_leaves_out(notebook):
    for cell in code_cells(notebook):
        assert "NBVAL" not in cell.source, cell.source


def first_line(cell):
    """Of a cell's first output, in the form that JupyterLab takes for a folded one."""
    output = cell.outputs[0]
    shown = output.get("data", {"text/plain": output.get("text", "")})
    text = shown.get("text/html", shown.get("text/plain", ""))
    return next(line for line in text.splitlines() if line)


def test_what_a_prediction_asks_for_is_folded_until_it_is_run(notebook):
    """Stored outputs of the cells between a prediction and its answer; running one unfolds it."""
    asked = set()
    for cell in code_cells(notebook):
        answered = set(re.findall(r'\bmeasured\(\s*"([^"]+)"', cell.source))
        begun = set(re.findall(r'\bpredict\(\s*"([^"]+)"', cell.source))
        folded = cell.metadata.get("jupyter", {}).get("outputs_hidden", False)
        if (asked and not begun and not cell.source.startswith("check(")) or answered:
            assert folded or not cell.outputs, cell.source
        if answered and folded:  # JupyterLab shows the first line of what is folded
            assert not re.search(r": -?[\d.]", first_line(cell)), first_line(cell)
        asked = (asked | begun) - answered
    assert not asked, f"no cell measures {sorted(asked)}"


def test_every_picture_has_words(notebook):
    for output in outputs(notebook):
        for kind in output.get("data", {}):
            if kind.startswith("image/"):
                assert output.metadata.get(kind, {}).get("alt"), output.data.get("text/plain")
    for text in texts(notebook):
        assert "![](" not in text
        for tag in re.findall(r"<img[^>]*>", text):
            assert re.search(r"alt=['\"][^'\"]", tag), tag


WITHOUT_PLAYER = {"08"}  # its picture shows each program over time


def test_has_a_widget_and_a_picture_beside_it(path, notebook):
    shown = [output.get("data", {}) for output in outputs(notebook)]
    widgets = ["application/vnd.jupyter.widget-view+json" in data for data in shown]
    pictures = ["<!-- a picture -->" in data.get("text/html", "") for data in shown]
    assert any(widgets) == (path.stem[:2] not in WITHOUT_PLAYER) and any(pictures)


def test_stores_a_film_of_each_player(path, notebook):
    """What a page without a kernel shows in its place: `make notebooks` stores it."""
    shown = [output.get("data", {}) for output in outputs(notebook)]
    players = [data for data in shown if data.get("text/plain", "").startswith("A player for ")]
    assert bool(players) == (path.stem[:2] not in WITHOUT_PLAYER)
    assert all("<div class='film'" in data.get("text/html", "") for data in players)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("in /home/someone/course", True),
        (r"C:\Users\someone", True),
        ("minikv/engine.py and /lib/", False),
        ("https://example.org/home/page", False),
    ],
)
def test_absolute_paths_are_told_from_others(text, found):
    assert bool(ABSOLUTE_PATH.search(text)) == found


# ── Numbers, and words ────────────────────────────────────────────────────────

NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w/]|[.,]\d)")
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$[^$]*\$|^\|[^\n]*$|chapters? \d\d(?: (?:and|to) \d\d)?|\b\d\d\.\d\b",
    re.DOTALL | re.MULTILINE,
)
# Arithmetic that no cell prints, and givens of a question.
ALSO_GIVEN = {
    "00": {"500"}, "07": {"29"}, "10": {"255"}, "11": {"150"}, "13": {"989"},
}  # fmt: skip


def digits(number):
    return number.replace(",", "").replace("_", "")


def test_numbers_in_prose_stand_in_the_notebook(path, notebook):
    """Above 12, a number in prose is one that a cell of the same notebook computes or is given,
    or one of the exercise file, unless its cell cites where it is from, or sets a question."""
    number = path.stem[:2]
    known = [cell.source for cell in code_cells(notebook)]
    for output in outputs(notebook):
        shown = output.get("data", {}).items()
        known += [re.sub(r"<[^>]+>", " ", text) for kind, text in shown if "text/" in kind]
        known.append(output.get("text", ""))
    if file := next(EXERCISES.glob(f"ch{number}_*.py"), None):
        known.append(file.read_text(encoding="utf-8"))
    found = {digits(one) for text in known for one in re.findall(r"\d[\d,_]*(?:\.\d+)?", text)}
    for cell in notebook.cells[1:]:
        asks = cell.source.startswith(("### ", "## Three open questions"))
        if cell.cell_type == "markdown" and not asks and "http" not in cell.source:
            for one in map(digits, NUMBER.findall(NOT_PROSE.sub("", cell.source))):
                is_year = re.fullmatch(r"(19|20)\d\d", one)
                if float(one) > 12 and not is_year:
                    assert one in found | ALSO_GIVEN.get(number, set()), f"{cell.id}: {one}"


# Words of text, and exercises. A course that grows again buries its best parts.
WORDS = {
    "00": 1700, "01": 2600, "02": 2400, "03": 2300, "04": 3200, "05": 2300, "06": 3400, "07": 3600,
    "08": 3500, "09": 3700, "10": 3200, "11": 3400, "12": 3100, "13": 3200, "14": 2700, "15": 3300,
    "16": 2500, "17": 3900,
}  # fmt: skip
CELL_WORDS, ALL_WORDS, ALL_EXERCISES = 250, 54_000, 97


def words(cell):
    """Without the marks of the routes."""
    return len(routes.MARK.sub(r"\1", cell.source).split()) if cell.cell_type == "markdown" else 0


def test_a_notebook_is_not_too_long(path, notebook):
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert sum(len(text.split()) for text in texts) <= WORDS.get(path.stem[:2], 4000)


def test_no_text_cell_is_too_long(notebook):
    assert not {cell.id for cell in notebook.cells if words(cell) > CELL_WORDS}


def test_the_course_is_not_too_long():
    assert sum(WORDS.values()) <= ALL_WORDS
    assert sum(len(chapter.exercises) for chapter in chapters().values()) <= ALL_EXERCISES


# ── The timeline ──────────────────────────────────────────────────────────────

PROMPT = "def area(width, height):\n    return"


@pytest.fixture
def make_engine(lm):
    def make(**config):
        return minikv.Engine(lm, minikv.EngineConfig(prefix_cache=False, **config))

    return make


def params(max_tokens):
    return minikv.SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def timeline(make_engine):
    return Timeline.record(make_engine(), PROMPT, params(6))


def test_records_what_the_engine_did(lm, make_engine, timeline):
    expected = make_engine().generate(PROMPT, params(6))[0]
    [request_id] = timeline.rows
    bars = timeline.bars(request_id)
    assert [bar.kind for bar in bars] == ["prefill"] + ["decode"] * 5
    assert [token for bar in bars for token in bar.token_ids] == expected.token_ids
    assert all(len(bar.token_ids) == 1 for bar in bars)
    assert "".join(bar.text for bar in bars) == expected.text
    assert bars[0].num_computed == len(lm.encode(PROMPT))
    assert [step.num_computed for step in timeline.steps] == [bars[0].num_computed, 1, 1, 1, 1, 1]


def test_a_step_is_drawn_as_it_was(lm):
    few = minikv.EngineConfig(max_batch_tokens=8, max_num_seqs=4, prefix_cache=False)
    engine = minikv.Engine(lm, few)
    engine.add_request("import os\n", params(2))
    engine.step()
    for text in (PROMPT, "class A:"):
        engine.add_request(text, params(4))
    alt = engine_step(engine).alt
    assert alt.startswith("One step: 8 tokens of 2 requests in one pass.")
    assert "A: runs: 3 of 4 computed | 1 token: position 3 | 4 of 4 computed" in alt
    assert "finished; B: waits: 0 of 11 computed | 7 tokens: positions 0 to 6" in alt
    assert "7 of 11 computed | none yet: 4 are left; C: waits: 0 of 3 computed | nothing" in alt
    assert "B: runs: 7 of 11 computed | 4 tokens: positions 7 to 10" in engine_step(engine).alt


def test_times_are_those_of_the_steps(timeline):
    steps = timeline.steps
    assert all(step.start < step.end for step in steps)
    assert all(before.end <= after.start for before, after in pairwise(steps))
    assert timeline.time_to_first_token() == pytest.approx(steps[0].end)
    between = [after.end - before.end for before, after in pairwise(steps)]
    assert timeline.times_between_tokens() == pytest.approx(between)


def test_a_prompt_over_the_token_budget_is_prefilled_in_chunks(lm, make_engine):
    engine = make_engine(max_batch_tokens=4, max_num_seqs=4)
    timeline = Timeline.record(engine, PROMPT, params(3))
    bars = timeline.bars(next(iter(timeline.rows)))
    chunks = -(-len(lm.encode(PROMPT)) // 4)
    assert [bar.kind for bar in bars] == ["prefill"] * chunks + ["decode"] * 2
    assert sum(bar.num_computed for bar in bars[:chunks]) == len(lm.encode(PROMPT))
    assert all(bar.token_ids == [] for bar in bars[: chunks - 1])


def test_requests_share_steps_and_may_come_later(make_engine):
    timeline = Timeline(make_engine())
    first = timeline.add(PROMPT, params(5))
    timeline.step()
    timeline.step()
    second = timeline.add("import", params(2))
    timeline.run()
    assert [bar.kind for bar in timeline.bars(first)] == ["prefill"] + ["decode"] * 4
    assert [bar.kind for bar in timeline.bars(second)] == ["prefill", "decode"]
    assert timeline.bars(second)[0].step == 2
    assert timeline.rows[second].arrived > 0
    assert 0 < timeline.time_to_first_token(second) < timeline.steps[-1].end


def test_a_request_that_waits_is_not_called_prefill(make_engine):
    engine = make_engine(max_num_seqs=1, max_batch_tokens=512)
    timeline = Timeline.record(engine, [PROMPT, "import"], params(3))
    first, second = timeline.rows
    assert [bar.kind for bar in timeline.bars(first)] == ["prefill", "decode", "decode"]
    kinds = [bar.kind for bar in timeline.bars(second)]
    assert kinds == ["waiting"] * 3 + ["prefill", "decode", "decode"]


def test_refuses_several_samples_and_an_empty_drawing(make_engine):
    with pytest.raises(ValueError, match="n: "):
        Timeline.record(make_engine(), PROMPT, minikv.SamplingParams(n=2))
    with pytest.raises(ValueError, match="nothing is recorded"):
        Timeline(make_engine()).figure()


def test_the_figure_has_one_bar_a_token_and_units(timeline):
    [axes] = timeline.figure().axes
    assert len(axes.patches) == 6
    assert len(timeline.figure(upto=2).axes[0].patches) == 2
    assert axes.get_xlabel().endswith("(ms)") and axes.get_ylabel() and axes.get_title(loc="left")
    assert axes.get_xlim() == timeline.figure(upto=2).axes[0].get_xlim()


def test_shows_itself_with_words(timeline):
    data = timeline._repr_mimebundle_()
    assert data["text/plain"] == timeline.describe()
    assert f"alt='{timeline.describe()}'" in data["text/html"]
    assert "5 decode bars" in timeline.describe()


@pytest.mark.thorough
def test_the_slider_moves_the_picture_and_the_text(timeline):
    player = timeline.widget()
    seen = []
    for step in (0, 1, 2, len(timeline.steps)):
        player.slider.value = step
        seen.append((player.picture.value, player.text.value, player.caption.value))
    for before, after in pairwise(seen):
        assert all(old != new for old, new in zip(before, after, strict=True))
    assert player.slider.max == player.play.max == len(timeline.steps)
    final = timeline.output(next(iter(timeline.rows))).text
    shown = re.sub(r"</?(b|span)[^>]*>", "", timeline.text_so_far(len(timeline.steps)))
    assert final in shown.replace("↵", "")
    player.slider.value = 1
    assert (player.picture.value, player.text.value, player.caption.value) == seen[1]


def test_the_newest_token_is_framed_and_its_line_end_seen(timeline):
    assert [timeline.text_so_far(i).count("border:1.5px") for i in (0, 1, 2)] == [0, 1, 1]
    assert re.fullmatch(r"<span [^>]*>x↵</span>\n", _chip("x\n"))


def test_text_is_escaped_and_labels_are_readable(make_engine):
    timeline = Timeline.record(make_engine(), "if a < b and c > '<i>':", params(2))
    assert "<i>" not in timeline.text_so_far(2)
    assert visible("\n    ") == "↵····" and len(visible("x" * 40)) < 12


def test_draws_without_a_tokenizer(lm):
    bare = minikv.LanguageModel("bare", lm.transformer, None)
    timeline = Timeline.record(minikv.Engine(bare), [5, 6, 7], params(3))
    assert timeline.figure().axes
    assert "5 6 7" in timeline.text_so_far(1)


# ── What the chapters share ───────────────────────────────────────────────────


def links(shown):
    return re.findall(r'<a href="([^"]+)"', shown._repr_html_())


def test_pictures_shrink_beside_an_editor_and_folded_cells_are_cut():
    shown = ladder.ladder(4)._repr_html_()
    assert re.search(r"<style>figure > img \{ min-width: 5\d\dpx !important \} ", shown)
    assert ".jp-InputPlaceholder > * { min-width: 0 }</style>" in shown
    assert "<style>" not in ladder.navigation(4)._repr_html_(), "once is enough"


@pytest.mark.parametrize("number", thorough_after(3, [int(path.stem[:2]) for path in NOTEBOOKS]))
def test_the_ladder_links_every_notebook_but_its_own(exercises, number):
    shown = ladder.ladder(number)
    own = name_of(f"{number:02}")
    others = [path.name for path in NOTEBOOKS if path.name != own]
    assert set(others) <= set(links(shown)) and own not in links(shown)
    html = shown._repr_html_()
    assert html.count("you are here") == 1
    for text in (html, repr(shown)):
        for key, (name, idea) in ladder.rungs().items():
            assert f"{key} {name}" in text and idea in text
        for chapter in chapters().values():
            minutes = hours(sum(exercise.minutes for exercise in chapter.exercises))
            assert f"0 of {len(chapter.exercises)} exercises passed, {minutes}" in text


def test_a_ladder_is_open_where_one_stands_and_in_the_contents(exercises):
    assert ladder.ladder(4)._repr_html_().count("<details open>") == 1
    html = ladder.ladder(0)._repr_html_()
    assert html.count("<details open>") == html.count("<details")


def test_a_ladder_shows_what_is_passed(exercises):
    chapter = chapter_of("05")
    (exercises / chapter.file_name).write_text(skeleton(chapter))
    for exercise in chapter.exercises:
        progress_file.save(exercise.id, progress_file.Entry(passed=1.0))
    shown = ladder.ladder(4)
    assert shown._repr_html_().count("✓ all passed") == 1
    passed = rf"\b{len(chapter.exercises)} of \d+ exercises passed"
    assert re.search(passed, shown._repr_html_()) and " ✓ 05 Copy on write" in repr(shown)


def test_navigation_links_its_neighbours_and_the_exercises(exercises, monkeypatch):
    monkeypatch.chdir(exercises)
    file = "ch04_paged_blocks.py"
    around = ["03_kv_memory.ipynb", "00_start_here.ipynb", file, "05_copy_on_write.ipynb"]
    assert links(ladder.navigation(4)) == around
    assert links(ladder.ladder(4))[:4] == around
    assert links(ladder.navigation(0)) == ["ch00_start_here.py", "01_naive_attention.ipynb"]
    assert NOTEBOOKS[-2].name in links(ladder.navigation(int(NOTEBOOKS[-1].stem[:2])))
    with pytest.raises(ValueError, match="no chapter 77"):
        ladder.navigation(77)


def test_neighbouring_colours_differ_in_grey():
    grey = []
    for color in style.PALETTE:
        red, green, blue = style.tint(color, 1)
        grey.append(0.299 * red + 0.587 * green + 0.114 * blue)
    assert all(abs(a - b) > 0.1 for a, b in pairwise(grey))


@pytest.mark.thorough
def test_the_running_table_measures_every_rung(lm):
    table = RunningTable(lm, max_tokens=32, repeats=1)  # as a reader sees it
    # A rung that says nothing on this machine is named in any case.
    rungs = running_table.rungs()
    missing = [name for name, rung in rungs.items() if rung.why_not(lm)]
    assert list(table.missing) == missing
    assert list(table.runs) == [name for name in rungs if name not in missing]
    assert all(f"{name} ({rungs[name].why_not(lm)})" in table.caption for name in missing)
    [relative] = [row[-1] for row in table.rows() if row[0].startswith("04 ")]
    assert relative == "1" and all(float(row[-1]) > 0 for row in table.rows()[1:])
    assert len({tuple(run.token_ids) for runs in table.runs.values() for run in runs}) == 1
    kept = {name: {run.kv_bytes_per_token for run in runs} for name, runs in table.runs.items()}
    alone = lm.config.kv_bytes_per_token(lm.dtype)
    for name, bytes_per_token in kept.items():
        if rungs[name].chapter in ("05", "07"):  # one token's K and V serve several sequences
            [shared] = bytes_per_token
            assert alone / running_table.TOGETHER < shared < alone
        elif rungs[name].chapter < "09":
            assert bytes_per_token == {0 if rungs[name].chapter == "01" else alone}
    for text in (repr(table), table._repr_html_()):
        assert all(name in text for name in rungs) and "torch" in text


@pytest.mark.thorough
@pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="interprets kernels"
)
def test_the_rung_of_the_kernels_gives_the_same_tokens(lm, monkeypatch):
    rung = dict(each("rung"))["08"]
    monkeypatch.setattr(rung, "TOGETHER", 2)
    prompt_ids = lm.encode("import")
    [run_kernels] = rung.RUNS.values()
    run = run_kernels(lm, prompt_ids, 3)
    assert run.token_ids == lm.generate_naively(prompt_ids, 3) and run.answers == 2


def test_the_running_table_counts_what_is_reserved(lm):
    table = RunningTable(lm, PROMPT, max_tokens=4, repeats=1, upto="03")
    prompt, wasted = (
        len(lm.encode(PROMPT)),
        {name: runs[0].wasted for name, runs in table.runs.items()},
    )
    held = sum(range(prompt, prompt + 4))
    assert wasted == {
        "01 naive attention": None,
        "02 cache that grows by copying": 0,
        "02 cache for the whole context": 1 - held / (4 * lm.config.max_context),
        "03 cache for the longest answer": 1 - held / (4 * (prompt + 3)),
    }


def test_the_running_table_counts_shared_slots_once(lm):
    prompt_ids, samples = lm.encode(2 * PROMPT), running_table.TOGETHER
    prompt = len(prompt_ids)
    run = running_table.rungs()[f"05 {samples} samples, shared blocks"].run(lm, prompt_ids, 4)
    full = prompt // 16 * 16  # the rest of the prompt is copied by all but one sample
    held = [(samples * (prompt + i), full + samples * (prompt - full + i)) for i in (1, 2)]
    seen, stored = samples * prompt, prompt  # after the first step all still share
    for all_tokens, slots in held:
        seen, stored = seen + all_tokens, stored + slots
    assert run.answers == samples
    assert run.kv_bytes_per_token == round(lm.config.kv_bytes_per_token(lm.dtype) * stored / seen)


def test_the_running_table_takes_a_single_token(lm):
    table = RunningTable(lm, PROMPT, max_tokens=1, repeats=1, upto="07")
    alone = lm.config.kv_bytes_per_token(lm.dtype)
    for name, [run] in table.runs.items():
        assert run.kv_bytes_per_token == (0 if name.startswith("01") else alone)
        assert name[:2] < "04" or run.wasted is None


def test_the_running_table_shows_the_rungs_that_are_asked_for(lm):
    table = RunningTable(lm, PROMPT, max_tokens=2, repeats=1, only=["01", "07"])
    assert [name[:2] for name in table.runs] == ["01", "07"]
    assert f"from 07 on {running_table.TOGETHER} times at once" in table.caption
    first = RunningTable(lm, PROMPT, max_tokens=2, repeats=1, upto="01")
    assert [name[:2] for name in first.runs] == ["01"] and "at once" not in first.caption


def test_the_running_table_runs_a_slow_rung_once(lm):
    table = RunningTable(lm, PROMPT, max_tokens=2, repeats=2, upto="02", enough=0)
    assert [len(runs) for runs in table.runs.values()] == [1, 1, 1]
    assert "one run if it takes 0 s" in table.caption
    assert not any("to" in speed for _, speed, *_ in table.rows()[1:])


@pytest.mark.thorough
def test_the_running_table_refuses_other_tokens(lm, monkeypatch):
    def run(*_):
        return Run([0], 1.0, 0, None)

    rungs = running_table.rungs() | {"broken": Rung("99", run, lambda lm: "")}
    monkeypatch.setattr(running_table, "rungs", lambda: rungs)
    with pytest.raises(AssertionError, match="broken"):
        RunningTable(lm, PROMPT, max_tokens=2, repeats=1)
