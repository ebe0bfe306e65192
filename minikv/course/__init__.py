"""The course around the engine. CONTRIBUTING.md has a map of its folders, from the ground up, and
says how to add a chapter: chapters are found, and nothing below `chapters/` names one."""
