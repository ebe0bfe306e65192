"""Sphinx's settings for the site. `build.py` has laid out the pages beside a copy of this file."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(os.environ["MINIKV_ROOT"], "docs", "site")))

project = "minikv"
copyright = "the authors of minikv; MIT"
version = release = os.environ["MINIKV_VERSION"]
root_doc = "index"
language = "en"
extensions = ["myst_nb", "sphinx_copybutton", "mathml"]
exclude_patterns: list[str] = []

# ── Notebooks: what is stored is shown, and nothing is run ────────────────────
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "text/html", 0)]
nb_ipywidgets_js: dict = {}
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
myst_html_meta = {
    "description": "Build the memory manager of an LLM inference engine, block by block, on your "
    "laptop: a course of Jupyter notebooks with exercises that are checked, and no GPU needed."
}
suppress_warnings = ["misc.highlighting_failure"]

# ── How it looks ──────────────────────────────────────────────────────────────
html_theme = "sphinx_book_theme"
html_title = "minikv: the KV cache of an LLM inference engine"
html_favicon = "_static/icon.svg"
html_baseurl = ""
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_js_files = [("site.js", {"defer": "defer"})]
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}  # the reader's own: light or dark
html_theme_options = {
    "logo": {"text": "minikv"},
    "navbar_persistent": [],
    "show_toc_level": 1,
    "home_page_in_toc": False,
    "use_fullscreen_button": False,
    "use_source_button": False,
    "use_repository_button": False,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "max_navbar_depth": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_content_items": ["copyright.html"],
    "extra_footer": "",
}
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "sbt-sidebar-nav.html"]}
# A prompt is not copied.
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"
