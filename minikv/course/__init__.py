"""The course around the engine. A map, from the ground up; arrows go down:

    lab, terminal, commands    what a reader calls, in a notebook or a terminal
    authoring/                 for those who write the course
    grading/                   a class: marks, and assignments for nbgrader
    reader/                    one reader: files, progress, parts, the panel
    bench/                     what the engine costs, measured
    chapters/chNN_name/        one folder per chapter: all that only this chapter uses
    reports/                   what a result looks like
    judge/                     runs a reader's code within limits, compares, names the mistake
    exercise_data/             manifests, skeletons, readers' files, known mistakes
    workloads/                 what is served and timed, the running table
    pictures/                  how the course draws

Nothing below `chapters/` names a chapter: they are found. CONTRIBUTING.md says how to add one.
"""
