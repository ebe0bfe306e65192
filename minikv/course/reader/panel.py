"""The buttons under a report in JupyterLab: what they do can be typed as well."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets
from IPython.display import DisplayHandle, display

from minikv.course.reports import markup


@dataclass(frozen=True)
class Action:
    """One button. `show()` returns what it shows; with `sure`, a first click says that instead."""

    name: str
    tooltip: str
    show: Callable[[], object]
    sure: str = ""
    undoes: bool = False  # what the report says is no longer so


# What was open under an exercise, by its id: a check draws everything anew, and keeps it open.
_open: dict[str, str] = {}


class Panel:
    """A report with its buttons, and under them what the last button has shown."""

    def __init__(self, exercise_id: str, actions: list[Action], file_buttons: Callable[[], str]):
        """`file_buttons()` is HTML: the buttons that open and check the file as it is now."""
        self._id, self._actions = exercise_id, {action.name: action for action in actions}
        self._file_buttons = file_buttons
        self._asked: str | None = None  # the action whose first click has asked
        self.buttons = {action.name: self._button(action) for action in actions}
        self._report: DisplayHandle | None = None
        self.page = widgets.HTML()
        self.page.add_class("jp-RenderedHTMLCommon")  # text and tables as in any output
        wrap = widgets.Layout(flex_flow="row wrap")
        self.box = widgets.VBox([widgets.HBox(list(self.buttons.values()), layout=wrap), self.page])
        if _open.get(exercise_id) in self._actions:
            self._show(self._actions[_open[exercise_id]])

    def _button(self, action: Action) -> widgets.Button:
        button = widgets.Button(description=action.name, tooltip=action.tooltip)
        button.layout = widgets.Layout(width="auto")
        button.on_click(lambda _: self.click(action.name))
        return button

    def click(self, name: str) -> None:
        action = self._actions[name]
        asked, self._asked = self._asked, None
        for other in self._actions.values():
            self.buttons[other.name].description = other.name
        if action.sure and asked != name:
            self._asked = name
            self.buttons[name].description = f"{name}: sure?"
            self._fill(f"<p>{escape(action.sure)}</p>")
            return
        if _open.get(self._id) == name:  # a second click folds it
            del _open[self._id]
            self.page.value = ""
            return
        self._show(action)
        if not action.sure:
            _open[self._id] = name
        elif action.undoes and self._report is not None:
            gone = f"{self._id} was reset. Check shows it as it is now."
            html = f"<p>{gone}</p>{self._file_buttons()}"
            self._report.update({"text/html": html, "text/plain": gone}, raw=True)

    def _show(self, action: Action) -> None:
        try:
            shown = action.show()
        except Exception as error:  # the file cannot be read, say: there is no cell to raise it in
            self._fill(f"<p>{markup.marked(str(error))}</p>")
            return
        self._fill(shown._repr_html_())  # type: ignore[attr-defined]

    def _fill(self, html: str) -> None:
        # A widget's lines are otherwise as high as its buttons.
        self.page.value = f"<div style='line-height:1.5'>{html}</div>"

    def display(self, html: str, text: str) -> None:
        """Show a report, and the buttons under it."""
        shown = {"text/html": html, "text/plain": text}
        self._report = display(shown, raw=True, display_id=True)
        display(self.box)
