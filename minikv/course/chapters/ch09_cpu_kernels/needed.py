"""Numba, or a sentence for a notebook where there is none."""

from minikv.course.exercise_data.manifest import ReaderError, chapter_of

if why := chapter_of("09").cannot_run:
    raise ReaderError(f"{why}. You can read on: nothing below runs without it")

import numba

__all__ = ["numba"]
