"""The ladder at the top of every notebook: the rungs so far, and what is still to come."""

from matplotlib.figure import Figure

from minikv.course.chapters import each, folders
from minikv.course.pictures.style import FAINT, INK, PAPER, WIDTH, Picture

# The parts of the course, by their first chapter. A picture names those above it, not their
# rungs: so it stays as it is when a chapter is added.
PARTS = (
    ("01", "one sequence"),
    ("04", "memory in blocks"),
    ("06", "many requests"),
    ("08", "kernels"),
    ("10", "smaller, longer, farther"),
)


def rungs() -> dict[str, tuple[str, str]]:
    """(name, idea) of every chapter by its number: "04" -> ("paged blocks", "blocks of …")."""
    names = folders()
    return {
        number: (names[number][5:].replace("_", " "), module.IDEA)
        for number, module in each("rung")
    }


def ladder(here: int) -> Picture:
    """The rungs from the bottom up to the one that you stand on, and the parts above it."""
    number = f"{here:02}"
    below = {key: rung for key, rung in rungs().items() if key <= number}
    above = [(first, part) for first, part in PARTS if first > number]
    top = len(below) + len(above)
    figure = Figure(figsize=(WIDTH, 0.36 * top + 0.2), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(-0.75, top - 0.25))
    axes.axis("off")
    for rail in (0.25, 2.95):
        axes.plot([rail, rail], [-0.65, top - 0.35], color=FAINT, linewidth=3)
    for height in range(top + 1):
        axes.plot([0.25, 2.95], [height - 0.5] * 2, color=FAINT, linewidth=1.5)
    for height, (key, (name, idea)) in enumerate(below.items()):
        mine = key == number
        weight = "bold" if mine else "normal"
        axes.text(
            0.5, height, f"{key}  {name}", va="center", fontsize=10,
            color=PAPER if mine else INK, fontweight=weight,
            bbox=dict(boxstyle="round,pad=0.3", facecolor=INK if mine else PAPER, linewidth=0),
            zorder=3,
        )  # fmt: skip
        axes.text(3.15, height, idea, va="center", fontsize=10, color=INK, fontweight=weight)
    for height, (first, part) in enumerate(above, len(below)):
        axes.text(0.5, height, f"{first} …", va="center", fontsize=10, color=FAINT)
        axes.text(3.15, height, part, va="center", fontsize=10, color=FAINT, style="italic")
    axes.text(
        WIDTH - 0.1,
        len(below) - 1,
        "◀ you are here",
        ha="right",
        va="center",
        fontsize=10,
        color=INK,
    )
    name, idea = below[number]
    rest = ", ".join(name for key, (name, _) in below.items() if key != number)
    alt = f"A ladder, one rung per notebook. You are on rung {number}, {name}: {idea}."
    alt += f" Below it: {rest}." if rest else ""
    alt += f" Above it: {', '.join(part for _, part in above)}." if above else ""
    return Picture(figure, alt)
