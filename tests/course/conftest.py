"""What many tests of the course begin with."""

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
