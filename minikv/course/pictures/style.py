"""What the pictures of every chapter share: colours, letters and paper.

A sequence has a colour and a letter, so that colour is never alone. Pictures are
drawn on white paper, whatever the theme around them: they also have to print.
Nothing here goes through pyplot, so a picture is shown once and leaves no state.
"""

import re
from base64 import b64encode
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `bench` and `serve` come past here, and draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette and a grey, in an order in which neighbours also differ in grey.
PALETTE = ("#0072B2", "#CC79A7", "#F0E442", "#D55E00", "#E69F00", "#009E73", "#56B4E9", "#404040")
INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "#ffffff"
EDGE = "#8a8a8a"  # around the paper, seen on a light page and on a dark one
WIDTH = 8.6  # inches: the text column of JupyterLab at its usual size
SHOWN, LEAST = 860, 640  # pixels on a page: it is scaled between these, and then scrolls
# Beside an open editor a page is narrower, and a picture may be as small as can still be read. The
# line that stands for a folded cell is cut, so that the page does not scroll sideways for it. Each
# notebook sets this once, with its ladder.
BESIDE_EDITOR = (
    "<style>figure > img { min-width: 520px !important } "
    ".jp-InputPlaceholder > * { min-width: 0 }</style>"
)
MOST_POINTS = 10_000  # of an SVG; more are smaller as pixels
# The narrowest page that shows a picture whole is the site's, on a laptop. There no letter is
# smaller than this; exponents are.
NARROW, SMALLEST = 676, 9.1  # pixels of the picture, pixels of a letter
POINT = re.compile(rb"[MLCQ](?=[ \d-])|<use|<text|<image")  # of a path; a mark; a word
FONTS = {  # of the pictures, and what is about as wide
    "DejaVu Sans": "Verdana,sans-serif",
    "DejaVu Sans Mono": "Menlo,Consolas,monospace",
}


def letter(index: int) -> str:
    """The name of sequence `index`: A, B, … Z, A1, B1, …"""
    round_, place = divmod(index, 26)
    return chr(ord("A") + place) + (str(round_) if round_ else "")


def color(index: int) -> str:
    """The colour of sequence `index`. They come round again; letters do not."""
    return PALETTE[index % len(PALETTE)]


def tint(shade: str, strength: float = 0.25) -> tuple[float, float, float]:
    """`shade` thinned with white: 1 is the colour itself, 0 is paper."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - channel) for channel in to_rgb(shade))
    return red, green, blue


def ink_on(shade: str) -> str:
    """Black or white, whichever reads better on `shade`."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(shade)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else PAPER


def new_axes(title: str, xlabel: str, ylabel: str, height: float = 3.4) -> "tuple[Figure, Axes]":
    """A figure with one pair of axes. `title` is what to take away; the labels name their units."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=PAPER)
    axes = figure.add_subplot(facecolor=PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, wrap=True)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    return figure, axes


def canvas(height: float, width: float = WIDTH, inches: float = WIDTH) -> "tuple[Figure, Axes]":
    """A figure `inches` wide, whose axes are inches from its upper left corner, or another unit, of
    which `width` are as wide as the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches, height * (inches / width)), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def least_points(width: float = WIDTH) -> float:
    """The smallest letters that can be read on a narrow page, in a figure `width` inches wide."""
    return SMALLEST * 72 * width / NARROW


def legible(figure: "Figure") -> None:
    """Enlarge what would be too small on a narrow page."""
    from matplotlib.text import Text

    least = least_points(figure.get_figwidth())
    for text in figure.findobj(
        lambda one: isinstance(one, Text) and float(one.get_fontsize()) < least
    ):
        text.set_fontsize(least)  # type: ignore[attr-defined]


def png(figure: "Figure", dpi: int = 144) -> bytes:
    legible(figure)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: "Figure") -> bytes:
    """The same bytes for the same drawing, and about half of what matplotlib writes."""
    from matplotlib import rc_context

    legible(figure)
    buffer = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "minikv"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    number = re.compile(r"-?\d+\.\d{3,}")  # of a place; what is written between tags stays
    text = re.sub("<[^>]+>", lambda tag: number.sub(lambda n: f"{float(n[0]):.2f}", tag[0]), text)
    for first, rest in FONTS.items():  # the reader's machine may lack the first
        text = re.sub(f"'{first}'[^;\"]*", f"'{first}',{rest}", text)
    text = re.sub(r'style="[^"]*"', lambda found: re.sub("([:;]) ", r"\1", found[0]), text)
    return re.sub(r"\s*\n\s*([A-Zz])?", lambda found: found[1] or "\n", text).encode()


class Picture:
    """A figure with the words that stand for it where it cannot be seen.

    As the last line of a cell it shows itself, with `caption`, if any, in a line below.
    """

    def __init__(self, figure: "Figure", alt: str, caption: str = ""):
        self.figure, self.alt, self.caption = figure, alt, caption

    def _repr_mimebundle_(self, include=None, exclude=None):
        # JupyterLab and nbconvert drop the alt text of image/png, and JupyterLab that of SVG. An
        # <img> in HTML keeps it, trusted or not.
        return {"text/html": self.html(), "text/plain": self.alt}

    def html(self, least: int = LEAST) -> str:
        """The picture as wide as the page lets it be, and its caption. In less than `least` pixels
        it scrolls, as it could not be read; with 0 it always fits. A little of a dark page shines
        through the white paper, so that it does not glare."""
        kind, data = "svg+xml", svg(self.figure)
        if len(POINT.findall(data)) > MOST_POINTS:
            kind, data = "png", png(self.figure)
        important = "" if least else "!important"  # BESIDE_EDITOR is for those that may scroll
        wide, high = self.figure.get_size_inches()
        # In a widget one picture takes the place of another, which keeps its height meanwhile.
        place = "" if least else f"aspect-ratio:{wide:.2f}/{high:.2f};"
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        return (  # the first line is what JupyterLab shows of a folded output
            f"<!-- a picture -->\n<figure style='margin:0;max-width:{SHOWN}px;overflow-x:auto'>"
            f"<img style='width:100%;min-width:{least}px{important};max-width:none;"
            f"{place}"
            "box-sizing:border-box;padding:4px;background:white;opacity:0.9;"
            f"border:1px solid {EDGE};border-radius:6px' alt='{escape(self.alt)}' "
            f"src='data:image/{kind};base64,{b64encode(data).decode()}'>{caption}</figure>"
        )
