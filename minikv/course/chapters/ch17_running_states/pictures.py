"""Chapter 17: what a state still says about tokens that went through it."""

from collections.abc import Mapping, Sequence

from minikv.course.pictures import style


def misread_picture(errors: Mapping[str, Sequence[float]], most: float = 3.5) -> style.Picture:
    """For each rule, how wrong a state is about a token, by the token's age. `most`: the axis."""
    title = "A state that corrects itself reads the newest tokens best"
    figure, axes = style.new_axes(title, "age of the token, in tokens", "error (the value: 1)")
    told = []
    for place, (name, by_age) in enumerate(errors.items()):
        axes.plot(range(len(by_age)), by_age, ("-", "--", ":")[place % 3],
                  color=style.color((3, 0, 5)[place % 3]), lw=2, label=name)  # fmt: skip
        some = ", ".join(f"{by_age[age]:.2f}" for age in (0, 16, 63))
        told.append(f"{name}: {some}")
    axes.axhline(1, color=style.FAINT, lw=0.8)
    axes.text(0.6, 1.06, "an empty state", fontsize=9, color=style.FAINT)
    axes.set_xlim(0, 63)
    axes.set_ylim(0, most)
    axes.legend(frameon=False, fontsize=9)
    return style.Picture(figure, f"{title}. At ages 0, 16 and 63, {'; '.join(told)}.")
