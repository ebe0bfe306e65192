"""A picture that moves: play, pause and a slider over the steps of something recorded."""

import os
from collections.abc import Callable

import ipywidgets as widgets
from matplotlib.figure import Figure

from minikv.course.pictures import film, style

# Where the keyboard is: ipywidgets shows it by a shade of the slider's knob alone.
FOCUS = (
    "<style>.noUi-handle:focus-visible,.jupyter-button:focus-visible"
    "{outline:3px solid #0072B2;outline-offset:2px}</style>"
)


class Player(widgets.VBox):
    """Steps 0 to `last`, one at a time. `slider.value` is the step that is shown.

    `frame(step)` draws it, `caption(step)` says in a line what it shows, and
    `text(step)`, if given, stands beside the picture. Both are HTML, and take the
    text colour of the page: only the picture is on white paper.

    With MINIKV_FILMS=1, which `make notebooks` sets, a film is stored beside it, for pages that
    have no kernel: all frames are drawn for it, which takes seconds.

    ipywidgets gives the buttons of a `Play` no names that a screen reader could say. So it
    stays hidden, keeps the time, and is started by a button.
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
        self._drawn: dict[int, str] = {}  # HTML, once each
        steps = dict(min=0, max=last, value=start)
        slow = 1200 if last <= 20 else 400  # ms: few steps are there to be read
        self.play = widgets.Play(**steps, interval=slow)
        self.play.layout.display = "none"
        self.buttons = {
            "back": widgets.Button(description="◀ Back", tooltip=f"One step of {what} back"),
            "play": widgets.Button(description="▶ Play", tooltip=f"Play {what} step by step"),
            "next": widgets.Button(description="Next ▶", tooltip=f"The next step of {what}"),
        }
        for button in self.buttons.values():
            button.layout.width = "auto"
        self.buttons["back"].on_click(lambda _: self._move(-1))
        self.buttons["next"].on_click(lambda _: self._move(1))
        self.buttons["play"].on_click(lambda _: self._toggle())
        self.play.observe(lambda change: self._name_play(change["new"]), names="playing")
        self.slider = widgets.IntSlider(**steps, readout=False)
        self.slider.style.description_width = f"{len(f'step {last} of {last}')}ch"
        self.slider.tooltip = f"The step of {what} that is shown; the arrow keys move it"
        self.slider.layout = widgets.Layout(flex="1 1 260px", width="auto")
        self.caption, self.text = widgets.HTML(), widgets.HTML()
        self.picture = widgets.HTML()  # with words for those who cannot see it, as Image has none
        self.picture.layout = widgets.Layout(width=f"{style.SHOWN}px", max_width="100%", margin="0")
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.slider.observe(lambda change: self._show(change["new"]), names="value")
        self._show(start)

        in_line = widgets.Layout(
            flex_flow="row wrap", align_items="center", max_width=f"{style.SHOWN}px"
        )
        moving = [self.play, *self.buttons.values(), self.slider]
        controls = widgets.HBox(moving, layout=in_line)
        self.text.layout = widgets.Layout(flex="1 1 300px")
        beside = [self.picture, self.text] if text else [self.picture]
        wrap = widgets.Layout(flex_flow="row wrap", align_items="flex-start")
        style_only = widgets.HTML(FOCUS, layout=widgets.Layout(display="none"))
        pictures = widgets.HBox(beside, layout=wrap)
        super().__init__([controls, self.caption, pictures, style_only])

    def _move(self, steps: int) -> None:
        """Within the slider's ends: it keeps to them by itself."""
        self.play.playing = False
        self.slider.value += steps

    def _toggle(self) -> None:
        if self.slider.value == self.slider.max and not self.play.playing:
            self.slider.value = self.slider.min  # once more from the beginning
        self.play.playing = not self.play.playing

    def _name_play(self, playing: bool) -> None:
        self.buttons["play"].description = "⏸ Pause" if playing else "▶ Play"

    def _show(self, step: int) -> None:
        self.slider.description = f"step {step} of {self.slider.max}"
        if step not in self._drawn:
            alt = f"{self._what}, step {step} of {self.slider.max}"
            self._drawn[step] = style.Picture(self._frame(step), alt).html(0)
        self.picture.value = self._drawn[step]
        self.caption.value = self._caption(step)
        if self._text is not None:
            self.text.value = self._text(step)

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        if os.environ.get("MINIKV_FILMS") == "1":
            bundle["text/html"] = self.film()
        return bundle

    def film(self) -> str:
        """The same steps as HTML that needs no kernel."""
        steps = range(self.slider.max + 1)
        return film.html(
            self._what,
            [style.svg(self._frame(step)) for step in steps],
            [self._caption(step) for step in steps],
            [self._text(step) for step in steps] if self._text else [],
            self.slider.value,
            self.play.interval,
        )

    def __repr__(self) -> str:  # what a page without widgets shows
        return f"A player for {self._what}: run this cell to use it."
