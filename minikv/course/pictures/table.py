"""A table of measurements that shows itself: as text in a terminal, as HTML in a notebook."""

from html import escape


class Table:
    """What inherits from it has `rows()`, texts with the header first, and a `caption`."""

    caption: str

    def rows(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", self.caption])

    def _repr_html_(self) -> str:
        head, *body = self.rows()

        def line(row: tuple[str, ...], tag: str) -> str:
            sides = ["left"] + ["right"] * (len(row) - 1)
            return "".join(
                f"<{tag} style='text-align:{side}'>{escape(cell)}</{tag}>"
                for side, cell in zip(sides, row, strict=True)
            )

        lines = "".join(f"<tr>{line(row, 'td')}</tr>" for row in body)
        return (
            f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>"
            f"<p>{escape(self.caption)}</p>"
        )
