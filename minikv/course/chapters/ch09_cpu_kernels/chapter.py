"""Chapter 09: its skeleton and its exercises."""

from minikv.course.harness.manifest import Chapter, Exercise, Function

CHAPTER = Chapter(
    number="09",
    name="cpu_kernels",
    doc="TODO: what the skeleton file is about, in one sentence.",
    skeleton=(
        Function(
            "minikv.course.chapters.ch09_cpu_kernels.answers:blocks_needed",
            "09.1",
        ),
    ),
    exercises=(
        Exercise(
            id="09.1",
            title="TODO",
            minutes=10,
            difficulty=1,
            kind="build",
            matters="TODO: why it matters, in one line.",
            hints=("TODO: a question.", "TODO: what to look at.", "TODO: pseudocode."),
            works="TODO: why it works, in eight to twelve lines.",
        ),
    ),
)
