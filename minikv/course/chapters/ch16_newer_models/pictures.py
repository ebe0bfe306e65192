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
    """The way of three cached latents to their scores, before and after the brackets move."""
    figure, axes = style.canvas(4.5)
    title = "Absorbed, the matrix meets the query once, and no cached token"
    axes.text(0.1, 0.25, title, fontsize=11, fontweight="bold", va="center")
    cached, made, score = (style.tint(style.PALETTE[place], 0.3) for place in (6, 3, 5))

    def box(column: int, y: float, text: str, shade: tuple[float, float, float]) -> None:
        x = 0.1 + 3 * column
        axes.add_patch(Rectangle((x, y), 1.9, 0.32, facecolor=shade, edgecolor=style.INK, lw=0.8))
        axes.text(x + 0.95, y + 0.16, text, fontsize=9.5, ha="center", va="center")

    def arrow(first: int, last: int, y: float, text: str) -> None:
        start, end = 2.07 + 3 * first, 0.03 + 3 * last
        axes.annotate("", (end, y + 0.16), (start, y + 0.16),
                      arrowprops=dict(arrowstyle="->", color=style.INK))  # fmt: skip
        axes.text((start + end) / 2, y + 0.06, text, fontsize=9.5, ha="center", va="bottom")

    axes.text(0.1, 0.75, "plain: every token, in every step", fontsize=9.5, va="center")
    axes.text(0.1, 2.55, "absorbed: the query, once per step", fontsize=9.5, va="center")
    box(0, 2.75, "query q", style.tint(style.PALETTE[4], 0.3))
    arrow(0, 1, 2.75, "× W_UKᵀ")
    box(1, 2.75, "absorbed query w", made)
    for place, token in enumerate("₁₂₃"):
        above, below = 0.95 + 0.44 * place, 3.25 + 0.42 * place
        for y in (above, below):
            box(0, y, f"latent c{token}", cached)
            box(2, y, f"score s{token}", score)
        arrow(0, 1, above, "× W_UK")
        box(1, above, f"key k{token}", made)
        arrow(1, 2, above, "· q")
        arrow(0, 2, below, "· w")
    words = "Plain: each of three cached latents is multiplied by W_UK to a key, and the keys meet "
    words += "q. Absorbed: q is multiplied by W_UKᵀ to w, and w meets each latent as it is cached."
    return style.Picture(figure, f"{title}. {words}")


def choice_picture(found: Mapping[str, Mapping[int, float]], blocks: int) -> style.Picture:
    """How far the next token's chances move, by the number of blocks that a query reads: of the
    latest ones, and of chosen ones."""
    latest, chosen = found.values()
    few = next((k for k in chosen if all(chosen[j] < 0.9 * latest[j] for j in chosen if j >= k)), 0)
    title = f"From {few} of {blocks} blocks on, chosen ones come closer than the latest"
    title = title if few else f"Which of {blocks} blocks a query reads"
    figure, axes = style.new_axes(
        title, "blocks that a query reads beside its own", "KL to full attention (bits)"
    )
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
