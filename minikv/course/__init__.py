"""The course around the engine. A map, from the ground up; arrows go down:

    lab, terminal, doctor, …   what a reader calls, in a notebook or a terminal
    bench/                     what the engine costs, measured
    chapters/chNN_name/        one folder per chapter: all that only this chapter uses
    harness/                   how exercises are made, run, judged and told
    measure/                   timing, workloads, the running table
    pictures/                  how the course draws

Nothing below `chapters/` names a chapter: they are found. CONTRIBUTING.md says how to add one.
"""
