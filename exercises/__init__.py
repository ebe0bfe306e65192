"""One skeleton a chapter: `chNN_name.py`, where you write the part that the chapter builds.

Chapter 00 has none. The skeletons come with their chapters.
"""
