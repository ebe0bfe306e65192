"""Chapter 16: memory of a sequence as it runs, and of models by the length of a text."""

from collections.abc import Mapping, Sequence

from minikv.course.pictures import style


def memory_picture(runs: Mapping[str, Sequence[int]], prefill_steps: int) -> style.Picture:
    """The bytes that one sequence holds after each step, by way. The first `prefill_steps` compute
    its prompt."""
    ends = {name: held[-1] / 2**20 for name, held in runs.items()}
    told = ", ".join(f"{mib:.1f} MiB ({name})" for name, mib in ends.items())
    title = f"At the end one sequence holds {told}"
    figure, axes = style.new_axes(title, "step", "memory of one sequence (MiB)")
    axes.axvspan(0.5, prefill_steps + 0.5, color=style.tint(style.EDGE, 0.2), linewidth=0)
    axes.text(0.7, 0.03 * max(map(max, runs.values())) / 2**20, "the prompt, chunk by chunk",
              fontsize=9, color=style.INK)  # fmt: skip
    for place, (name, held) in enumerate(runs.items()):
        mib = [one / 2**20 for one in held]
        axes.plot(range(1, len(mib) + 1), mib, "so"[place % 2] + "-", color=style.color(3 * place),
                  markersize=4, label=name)  # fmt: skip
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=9)
    return style.Picture(
        figure, f"{title}, after {prefill_steps} steps of prefill and then decode."
    )


def kept_picture(sizes: Sequence[int], kept: Mapping[str, Sequence[float]]) -> style.Picture:
    """KiB per token by the length of a text, for several models; both axes in powers."""
    ends = [per_token[-1] for per_token in kept.values()]
    title = f"In a text of {sizes[-1]:,} tokens, each costs {min(ends):.0f} to {max(ends):.0f} KiB"
    figure, axes = style.new_axes(title, "tokens of text", "KiB per token", height=4.0)
    told = []
    for place, (name, per_token) in enumerate(kept.items()):
        shade = style.color((0, 3, 5, 7, 4, 1)[place % 6])
        marks = "os^Dv*"[place % 6] + ("-", "--")[place % 2]
        axes.plot(sizes, per_token, marks, color=shade, markersize=5, label=name)
        told.append(f"{name}: {', '.join(f'{one:.1f}' for one in per_token)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
    ticks = [2, 8, 32, 128, 512]
    axes.set_yticks(ticks, labels=list(map(str, ticks)))
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    words = f"{title}. KiB per token at {', '.join(f'{one:,}' for one in sizes)} tokens: "
    return style.Picture(figure, words + "; ".join(told) + ".")
