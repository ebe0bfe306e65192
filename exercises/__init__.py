"""One skeleton a chapter: `chNN_name.py`, where you write the part that the chapter builds.

Chapter 00 has none. The files are made from the reference by `python -m minikv.course skeletons`.
"""
