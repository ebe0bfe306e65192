"""Formulas as MathML, made when the site is built.

Browsers draw it, screen readers speak it, and a page needs neither a script nor a font for it.
"""

import latex2mathml.converter
from sphinx.util.math import get_node_equation_number


def converted(latex: str, display: str) -> str:
    return latex2mathml.converter.convert(latex, display=display)


def inline(self, node) -> None:
    self.body.append(converted(node.astext(), "inline"))


def block(self, node) -> None:
    number = f"({get_node_equation_number(self, node)})" if node["number"] else ""
    # It scrolls on a narrow page, so the keyboard has to reach it.
    self.body.append(
        f'<div class="formula" tabindex="0" role="group" aria-label="formula">'
        f"{converted(node.astext(), 'block')}{number}</div>"
    )


def skip_children(visit):
    def visitor(self, node):
        from docutils.nodes import SkipNode

        visit(self, node)
        raise SkipNode

    return visitor


def setup(app):
    app.add_html_math_renderer(
        "mathml", (skip_children(inline), None), (skip_children(block), None)
    )
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
