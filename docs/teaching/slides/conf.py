"""The slides: `make slides` builds them into build/slides with Sphinx and reveal.js."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "minikv"
extensions = ["myst_parser", "sphinx_revealjs", "stored_outputs"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
suppress_warnings = ["myst.header"]
revealjs_static_path = ["_static"]
revealjs_css_files = ["slides.css"]
revealjs_style_theme = "white"
revealjs_script_plugins = [
    {"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"},
    {"name": "RevealZoom", "src": "revealjs/plugin/zoom/zoom.js"},
]
revealjs_script_conf = {
    "width": 1280,
    "height": 720,
    "hash": True,
    "slideNumber": "c/t",
    "transition": "none",
    "center": False,
    "zoomLevel": 3,  # a label of a tall picture may have 6 pixels; from 18 on it can be read
}
