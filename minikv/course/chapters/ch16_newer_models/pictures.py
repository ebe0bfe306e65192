"""Chapter 16: memory by the length of a text, a latent's way, and blocks that are chosen."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from minikv.course.pictures import style


def memory_picture(runs: Mapping[str, Mapping[int, int]]) -> style.Picture:
    """The bytes that one sequence holds, by the tokens of its text, for each way."""
    title = "With KV groups, only the full layers keep growing"
    figure, axes = style.new_axes(title, "tokens of text", "memory of one sequence (MiB)")
    told = []
    for place, (name, held) in enumerate(runs.items()):
        mib = [num_bytes / 2**20 for num_bytes in held.values()]
        axes.plot(list(held), mib, "so"[place % 2] + "-", color=style.color(3 * place),
                  markersize=5, label=name)  # fmt: skip
        told.append(f"{name}: {', '.join(f'{one:.1f}' for one in mib)}")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=9)
    sizes = ", ".join(f"{size:,}" for size in next(iter(runs.values())))
    return style.Picture(figure, f"{title}. MiB at {sizes} tokens: {'; '.join(told)}.")


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


def latent_picture() -> style.Picture:
    """A latent's way to a score, before and after the brackets move."""
    figure, axes = style.canvas(2.5)
    rows = {
        "plain, for every token": ["latent c", "W_UK c = k", "q · k"],
        "absorbed": ["latent c", "(W_UKᵀ q) · c"],
    }
    for row, (name, boxes) in enumerate(rows.items()):
        y = 0.45 + 1.1 * row
        axes.text(0.1, y - 0.2, name, fontsize=9.5, fontweight="bold", va="center")
        for place, text in enumerate(boxes):
            last = place == len(boxes) - 1
            x, shade = 0.1 + 2.9 * (2 if last else place), style.PALETTE[5 if last else 6]
            axes.add_patch(Rectangle((x, y), 2.1, 0.42, facecolor=style.tint(shade, 0.3),
                                     edgecolor=style.INK, linewidth=0.8))  # fmt: skip
            axes.text(x + 1.05, y + 0.21, text, fontsize=9.5, ha="center", va="center")
            if not last:
                end = 0.1 + 2.9 * (2 if place == len(boxes) - 2 else place + 1) - 0.08
                axes.annotate("", (end, y + 0.21), (x + 2.18, y + 0.21),
                              arrowprops=dict(arrowstyle="->", color=style.INK))  # fmt: skip
                over = "× W_UK" if len(boxes) == 3 and place == 0 else ""
                axes.text((x + 2.1 + end) / 2, y + 0.06, over, fontsize=8.5, ha="center")
    axes.text(3.0, 2.12, "W_UKᵀ q: once per step, for all tokens", fontsize=8.5)
    words = "Plain: each cached latent is multiplied by W_UK to a key, and the key meets q. "
    words += (
        "Absorbed: W_UK meets q once per step, and the result meets each latent as it is cached."
    )
    return style.Picture(figure, words)


def choice_picture(found: Mapping[str, Mapping[int, float]], blocks: int) -> style.Picture:
    """How far the next token's chances move, by the number of blocks that a query reads."""
    title = f"Which of {blocks} blocks a query reads"
    figure, axes = style.new_axes(title, "blocks read, and its own", "KL to full attention (bits)")
    told = []
    for place, (name, by_count) in enumerate(found.items()):
        axes.plot(list(by_count), list(by_count.values()), "so"[place % 2] + "-",
                  color=style.color(3 * place), label=name)  # fmt: skip
        told.append(f"{name}: " + ", ".join(f"{kl:.3f} with {k}" for k, kl in by_count.items()))
    counts = list(next(iter(found.values())))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, labels=list(map(str, counts)))
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=9)
    return style.Picture(figure, f"{title}. KL in bits, {'; '.join(told)}.")
