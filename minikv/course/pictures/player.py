"""A picture that moves: play, pause and a slider over the steps of something recorded."""

from collections.abc import Callable

import ipywidgets as widgets
from matplotlib.figure import Figure
from traitlets import Unicode

from minikv.course.pictures import style


class _Image(widgets.Image):
    """An image whose tooltip is its name for a screen reader.

    In ipywidgets 8.1 an image with a tooltip is not drawn unless it has a description.
    """

    description = Unicode("").tag(sync=True)


class Player(widgets.VBox):
    """Steps 0 to `last`, one at a time. `slider.value` is the step that is shown.

    `frame(step)` draws it, `caption(step)` says in a line what it shows, and
    `text(step)`, if given, stands beside the picture. Both are HTML, and take the
    text colour of the page: only the picture is on white paper.
    """

    def __init__(
        self,
        what: str,
        last: int,
        frame: Callable[[int], Figure],
        caption: Callable[[int], str],
        text: Callable[[int], str] | None = None,
        start: int = 0,
    ):
        self._what, self._frame, self._caption, self._text = what, frame, caption, text
        self._drawn: dict[int, bytes] = {}  # once each
        steps = dict(min=0, max=last, value=start)
        slow = 1200 if last <= 20 else 400  # ms: few steps are there to be read
        self.play = widgets.Play(**steps, interval=slow)
        self.play.tooltip = f"Play {what} step by step"
        self.slider = widgets.IntSlider(**steps, description="step")
        self.slider.tooltip = f"The step of {what} that is shown; the arrow keys move it"
        self.caption, self.text = widgets.HTML(), widgets.HTML()
        self.picture = _Image(format="png")
        wide = "700px" if text else f"{96 * style.WIDTH:.0f}px"
        self.picture.layout = widgets.Layout(width=wide, max_width="100%")
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.slider.observe(lambda change: self._show(change["new"]), names="value")
        self._show(start)

        in_line = widgets.Layout(flex_flow="row wrap", align_items="center")
        controls = widgets.HBox([self.play, self.slider, self.caption], layout=in_line)
        self.text.layout = widgets.Layout(flex="1 1 300px")
        beside = [self.picture, self.text] if text else [self.picture]
        wrap = widgets.Layout(flex_flow="row wrap", align_items="flex-start")
        super().__init__([controls, widgets.HBox(beside, layout=wrap)])

    def _show(self, step: int) -> None:
        if step not in self._drawn:
            self._drawn[step] = style.png(self._frame(step), dpi=120)
        self.picture.value = self._drawn[step]
        self.picture.tooltip = f"{self._what}, step {step} of {self.slider.max}"
        self.caption.value = self._caption(step)
        if self._text is not None:
            self.text.value = self._text(step)

    def __repr__(self) -> str:  # what a page without widgets shows
        return f"A player for {self._what}: run this cell to use it."
