"""What the pictures of every chapter share: colours, letters and paper.

A sequence has a colour and a letter, so that colour is never alone. Pictures are
drawn on white paper, whatever the theme around them: they also have to print.
Nothing here goes through pyplot, so a picture is shown once and leaves no state.
"""

from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

# Okabe and Ito's palette, in an order in which neighbours also differ in grey.
PALETTE = ("#0072B2", "#CC79A7", "#F0E442", "#D55E00", "#E69F00", "#009E73", "#56B4E9")
INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "#ffffff"
WIDTH = 8.6  # inches: the text column of JupyterLab at its usual size


def letter(index: int) -> str:
    """The name of sequence `index`: A, B, … Z, A1, B1, …"""
    round_, place = divmod(index, 26)
    return chr(ord("A") + place) + (str(round_) if round_ else "")


def color(index: int) -> str:
    """The colour of sequence `index`. They come round again; letters do not."""
    return PALETTE[index % len(PALETTE)]


def tint(shade: str, strength: float = 0.25) -> tuple[float, float, float]:
    """`shade` thinned with white: 1 is the colour itself, 0 is paper."""
    red, green, blue = (1 - strength * (1 - channel) for channel in to_rgb(shade))
    return red, green, blue


def ink_on(shade: str) -> str:
    """Black or white, whichever reads better on `shade`."""
    red, green, blue = to_rgb(shade)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else PAPER


def new_axes(title: str, xlabel: str, ylabel: str, height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure with one pair of axes. `title` is what to take away; the labels name their units."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=PAPER)
    axes = figure.add_subplot(facecolor=PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    return figure, axes


def png(figure: Figure, dpi: int = 144) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


class Picture:
    """A figure with the words that stand for it where it cannot be seen.

    As the last line of a cell it shows itself; the words go with it as alt text.
    """

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        width = round(self.figure.get_figwidth() * 96)
        data = {"image/png": png(self.figure), "text/plain": self.alt}
        return data, {"image/png": {"alt": self.alt, "width": width}}
