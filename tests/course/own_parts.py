"""`test_journey` has this run in a process of its own: all exercises on a reader's earlier parts,
confined as a check is.

Writes a line of JSON for each check: its "report", what was "printed", and "on": "nothing", for
what is not built on other parts; "earlier" ones; or "later" ones of its chapter, too. And a line
for each run of tinypy on a chapter's parts, "model", where one is not the reference's: how much it
"handed" over, and how that "differs" from what the reference does.
"""

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import minikv_kernels  # noqa: F401  before transformers: settles Triton's interpreter

import torch  # isort: skip
from four_ways import EXERCISES, checked_by_reader, on_the_way, reference_sources

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import chapters
from minikv.course.exercise_data.skeletons import fill, skeleton, targets
from minikv.course.judge import containment, scenarios
from minikv.course.judge.checking import CHECKS, MODEL_RUNS
from minikv.course.judge.examine import COMPILES, examine, import_checks
from minikv.course.judge.observing import Here, disagreement
from minikv.course.judge.raised import Failure

torch.set_num_threads(1)
import_checks("parts")
RUNS = dict(MODEL_RUNS)
MODEL_RUNS.clear()  # so that no check runs the model
WHOLE = {}  # a chapter: its file with all solved
TEXTS = {}  # an exercise: its chapter's file when it has just been solved
for chapter in chapters().values():
    targets(chapter)  # of all, before any of the reference is swapped
    text = skeleton(chapter)
    for exercise in chapter.exercises:
        if exercise in EXERCISES:
            text = TEXTS[exercise] = fill(text, on_the_way(exercise))
    WHOLE[chapter] = text
    Path(os.environ["MINIKV_EXERCISES"], chapter.file_name).write_text(text)
containment.confine(tempfile.mkdtemp(dir=os.environ["MINIKV_EXERCISES"]))


def tell(**message):
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def check(exercise, on, text, own=()):
    with redirect_stdout(StringIO()) as printed:
        report = examine(exercise, text, own)
    tell(on=on, report=asdict(report), printed=printed.getvalue())


def run_model(chapter, exercise):
    MODEL_RUNS[exercise.id] = RUNS[exercise.id]
    here = Here(exercise, {one.id for one in chapter.exercises})
    handed = []
    try:
        here.load(WHOLE[chapter])
        handed = here.on_model()[1]
        differs = disagreement(exercise, None, handed)
    except Failure as error:
        differs = error.raised.line("", None, None).what
    MODEL_RUNS.clear()
    tell(model=exercise.id, handed=len(handed), differs=differs)


for exercise in EXERCISES:
    if exercise.kind != "build":
        check(exercise, "nothing", TEXTS[exercise])
for chapter in WHOLE:
    others = [one for one in chapter.exercises if one in TEXTS]
    others = [one for one in others if on_the_way(one) != reference_sources(one)]
    for exercise in {RUNS[one.id]: one for one in others if one.id in RUNS}.values():
        run_model(chapter, exercise)

scenarios._reference_of.cache_clear()  # from here on the reference is on the reader's parts
for chapter in WHOLE:
    builds = [one for one in chapter.exercises if one in TEXTS and one.kind == "build"]
    for exercise in builds:
        if not checked_by_reader(exercise):
            own = {one.id for one in chapter.exercises if one.id < exercise.id}
            check(exercise, "earlier", TEXTS[exercise], own)
    for exercise in builds[:1]:
        CHECKS[exercise.id] = [one for one in CHECKS[exercise.id] if one.name != COMPILES]
        check(exercise, "later", WHOLE[chapter], {one.id for one in chapter.exercises})
    if ids := {one.id for one in chapter.exercises if one in TEXTS}:
        module = reader_files.parsed(chapter, WHOLE[chapter]).load(ids)
        reader_files.borrow(chapter, module, ids)
