"""A class is graded on a Ray cluster as it is by processes of this machine."""

import os
import time
from contextlib import closing

import pytest
from four_ways import right

from minikv.course.exercises.manifest import chapter_of, find
from minikv.course.exercises.mistakes import mistakes_of, text_of_mistake
from minikv.course.exercises.skeletons import skeleton
from minikv.course.grading import grade, on_ray
from minikv.course.judge import containment

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'minikv[distributed]'")
SLOTS = find("04.3")
FILE = chapter_of("04").file_name


@pytest.fixture
def students(tmp_path, monkeypatch):
    """Ada and Bob hand in the same right file; Ben is wrong, Dan has not begun."""
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "60")
    done = right(SLOTS)
    texts = {
        "ada": done,
        "ben": text_of_mistake(SLOTS, mistakes_of(SLOTS)[0]),
        "bob": done,
        "dan": skeleton(chapter_of("04")),
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(text)
    return [grade.find_student(tmp_path / name) for name in texts]


class Counted:
    """An executor that counts what it is asked."""

    def __init__(self, pool):
        self.pool, self.count = pool, 0

    def submit(self, *job):
        self.count += 1
        return self.pool.submit(*job)


def graded(pool, store, students):
    found = grade.grades(pool, store, students, [SLOTS])
    return {student.name: vars(report) | {"seconds": 0} for student, report in found}


def test_two_workers_give_the_marks_that_one_process_gives(students, tmp_path):
    expected = {one.name: vars(grade.grade(one, SLOTS)) | {"seconds": 0} for one in students}
    assert [one["status"] for one in expected.values()] == [
        "passed", "failed", "passed", "not started",
    ]  # fmt: skip
    path, before = tmp_path / "kept.sqlite", set(containment.descendants(os.getpid()))
    with on_ray.workers("local", 2) as pool:
        first, second = Counted(pool), Counted(pool)
        with closing(grade.Store(path)) as store:
            some = graded(first, store, students[:2])
        with closing(grade.Store(path)) as store:
            found = graded(second, store, students)
        pids = set(containment.descendants(os.getpid())) - before
        assert pool.submit(os.getpid).result() in pids
    assert found == expected and some.items() <= found.items()
    assert (first.count, second.count) == (2, 1), "Dan's alone is new, and Bob's is Ada's"
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pids), "what was started has ended"


def alive(pids):
    return pids & set(containment.descendants(1))


def test_a_machine_with_another_version_is_refused():
    assert on_ray._do(on_ray._course(), len, "abc") == 3
    with pytest.raises(RuntimeError, match="another version of minikv"):
        on_ray._do("another", len, "abc")
