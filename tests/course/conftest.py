"""What many tests of the course begin with."""

import subprocess

import pytest


@pytest.fixture(scope="session")
def lm(tinypy):
    """The bundled model."""
    return tinypy.lm


@pytest.fixture
def exercises(tmp_path, monkeypatch):
    """A reader's folder of exercises, of this test's own."""
    folder = tmp_path / "exercises"
    folder.mkdir()
    monkeypatch.setenv("MINIKV_EXERCISES", str(folder))
    return folder


@pytest.fixture(scope="module")
def started_judge():
    """For tests of a judge's fences: it is started as a reader's is, and not forked."""
    from minikv.course.judge import process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", subprocess)
        process._dismiss()
        yield
        process._dismiss()
