"""A pool, block tables and a prefix cache to play with: buttons, a drawing, Python lines.

    sandbox()                                                # the engine's own classes
    sandbox(block_pool=BlockPool, block_table=BlockTable)    # yours

A token is a byte of text here, so no model is needed. Each button runs a few lines of Python
and lists them: run again in this order, they lead to the same state.
"""

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from minikv.blocks import BlockPool, BlockTable, OutOfBlocks
from minikv.course.pictures import style
from minikv.course.pictures.block_viewer import History, Recording
from minikv.course.pictures.tree_viewer import TreeHistory
from minikv.radix import RadixCache


class Session:
    """The objects, what was done with them as lines of Python, and what came of the last one."""

    def __init__(self, block_pool, block_table, prefix_cache, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.texts: dict[str, bytes] = {}  # what each sequence has stored, by letter
        self.lines = ["from contextlib import suppress"]
        self.names: dict[str, Any] = {}
        self._num_named = 0
        for what in (block_pool, block_table, prefix_cache):
            self.names[what.__name__] = what
            self.lines.append(f"from {what.__module__} import {what.__name__}")
        self._table = f"{block_table.__name__}(pool, {block_size})"
        self.said = "Nothing is stored yet. Begin with a new sequence."
        self.run(
            f"pool = {block_pool.__name__}({num_blocks})",
            f"cache = {prefix_cache.__name__}(pool, {block_size})",
        )

    @property
    def tables(self) -> dict:
        """The block tables by letter."""
        return {letter: self.names[letter.lower()] for letter in self.texts}

    def run(self, *lines: str) -> bool:
        """Run lines up to the first that raises; say what that was. Returns whether none did."""
        for line in lines:
            try:
                exec(line, self.names)
            except Exception as error:
                self.lines.append(f"with suppress(Exception):\n    {line}")
                self.said = f"`{line}` was refused. {_sentence(error)}"
                return False
            self.lines.append(line)
        return True

    def new(self, text: str) -> None:
        """A sequence that computes its whole prompt."""
        a, letter = self._next()
        if self.run(f"{a} = {self._table}"):
            self.texts[letter] = b""
            self._grow(letter, text.encode(), f"{letter} stores a prompt of")

    def begin(self, text: str) -> None:
        """A sequence that begins with what the cache has of its prompt."""
        a, letter = self._next()
        tokens = text.encode()
        ready = self.run(
            f"hit = cache.match({_ids(tokens)})",
            f"cache.lock(hit.node); {a}_node = hit.node",
            f"{a} = {self._table}",
        )
        if not ready:
            return
        self.texts[letter] = b""
        if self.run(f"{a}.share(hit.block_ids)"):
            found = self.names[a].num_tokens
            self.texts[letter] = tokens[:found]
            words = f"{letter} finds {found} tokens in the cache and stores"
            self._grow(letter, tokens[found:], words)

    def grow(self, letter: str, text: str) -> None:
        self._grow(letter, text.encode(), f"{letter} grows by")

    def write(self, letter: str) -> None:
        """The slot of the last token, as before it is written."""
        a, last = letter.lower(), len(self.texts[letter]) - 1
        if self.run(f"slot, copy = {a}.writable_slot({last})"):
            slot, copy = self.names["slot"], self.names["copy"]
            self.said = f"{letter} writes its token at position {last} into slot {slot}, "
            if copy is None:
                self.said += "in place: no other sequence has the block."
            else:
                source, target = copy
                self.said += f"after block {source}, which is shared, is copied to block {target}."

    def fork(self, letter: str) -> None:
        (b, twin), a = self._next(), letter.lower()
        lines = [f"{b} = {a}.fork()"]
        if f"{a}_node" in self.names:
            lines.append(f"{b}_node = {a}_node; cache.lock({b}_node)")
        if self.run(lines[0]):
            self.texts[twin] = self.texts[letter]
            self.said = f"{twin} is a fork of {letter}: the same blocks, counted once more."
            self.run(*lines[1:])

    def release(self, letter: str) -> None:
        a = letter.lower()
        lines = [f"cache.unlock({a}_node); del {a}_node"] if f"{a}_node" in self.names else []
        if self.run(*lines, f"{a}.release()", f"del {a}"):
            del self.texts[letter]
            self.said = f"{letter} has given its blocks back. The tree keeps those that it holds."

    def insert(self, letter: str) -> None:
        """A sequence's full blocks go into the tree, and stay locked while it runs."""
        a, tokens = letter.lower(), _ids(self.texts[letter])
        lines = [
            f"done = cache.insert({tokens}, {a}.block_ids)",
            f"for index, block_id in enumerate(done.block_ids): {a}.replace(index, block_id)",
            "cache.lock(done.node)",
        ]
        lines += [f"cache.unlock({a}_node)"] if f"{a}_node" in self.names else []
        if self.run(*lines, f"{a}_node = done.node"):
            done = self.names["done"]
            self.said = (
                f"The tree has {len(done.block_ids)} full blocks of {letter}, of which "
                f"{done.num_existing} were there before."
            )

    def match(self, text: str) -> None:
        if self.run(f"hit = cache.match({_ids(text.encode())})"):
            hit = self.names["hit"]
            self.said = (
                f"Of {len(text.encode())} tokens the cache has the first {hit.num_tokens}, "
                f"in blocks {hit.block_ids}."
            )

    def evict(self, num_blocks: int) -> None:
        before = list(self.names["cache"].block_ids())
        if self.run(f"gone = cache.evict({num_blocks})"):
            left = list(self.names["cache"].block_ids())
            gone = [block_id for block_id in before if block_id not in left]
            self.said = f"Evicted: {gone}." if gone else "Nothing is evicted."
            if len(gone) < num_blocks:
                self.said += f" Sequences have locked what is left: {left}." if left else ""

    def _next(self) -> tuple[str, str]:
        """The name and the letter of a new sequence."""
        letter = style.letter(self._num_named)
        self._num_named += 1
        return letter.lower(), letter

    def _grow(self, letter: str, tokens: bytes, words: str) -> None:
        if self.run(f"{letter.lower()}.grow({len(tokens)})"):
            self.texts[letter] += tokens
            self.said = f"{words} {len(tokens)} tokens."


def _ids(tokens: bytes) -> str:
    """Token ids as an expression that can be read."""
    try:
        return f"list({tokens.decode()!r}.encode())"
    except UnicodeDecodeError:  # cut within a letter
        return f"list({tokens!r})"


def _sentence(error: Exception) -> str:
    if isinstance(error, OutOfBlocks):
        return (
            f"Blocks needed: {error.needed}, free: {error.free}. Release a sequence, or evict "
            "from the tree, and try again."
        )
    text = str(error)
    return f"{type(error).__name__}: {text}{'' if text.endswith('.') else '.'}"


class Sandbox(widgets.VBox):
    """Buttons over a `Session`, and a drawing of what is there after each."""

    def __init__(self, make: Callable[[], Session]):
        self._make = make
        self._start_again()
        wide = widgets.Layout(width="min(100%, 420px)")
        self.text = widgets.Text("def fib(n)", description="text", layout=wide)
        self.text.tooltip = "A prompt, or the tokens to add: each letter is a token"
        self.sequence = widgets.Dropdown(options=[], description="sequence")
        self.sequence.tooltip = "The sequence that the buttons beside it work on"
        self.count = widgets.BoundedIntText(1, min=1, max=999, description="blocks")
        self.count.tooltip = "How many blocks to evict"
        self.buttons: dict[str, widgets.Button] = {}
        self.message, self.picture, self.words = (widgets.HTML() for _ in range(3))
        super().__init__(
            [
                self._row(
                    self.text,
                    ("new", "New sequence", "A sequence that computes its whole prompt"),
                    ("begin", "New, from the cache", "A sequence that shares what the tree has"),
                    ("match", "Match", "How much of this text the tree has"),
                ),
                self._row(
                    self.sequence,
                    ("grow", "Grow by the text", "Room for the letters of the text", self._grow),
                    ("write", "Write the last token", "Its slot; a shared block is copied first"),
                    ("fork", "Fork", "A second sequence over the same blocks"),
                    ("insert", "Insert in the tree", "Its full blocks, for others to find"),
                    ("release", "Release", "The sequence gives its blocks back"),
                ),
                self._row(
                    self.count,
                    ("evict", "Evict", "Blocks of the tree, the least recently used first"),
                    ("again", "Start again", "An empty pool", self._start_again),
                ),
                self.message, self.picture, self.words,
            ]
        )  # fmt: skip
        self._show()

    def _row(self, field, *buttons) -> widgets.HBox:
        """Buttons do what the session calls so with the field's value, if they name no action."""
        made = []
        for name, words, tooltip, *actions in buttons:
            button = widgets.Button(description=words, tooltip=tooltip)
            button.layout.width = "auto"
            [action] = actions or [lambda name=name: getattr(self.session, name)(field.value)]
            button.on_click(lambda _, action=action: self._do(action))
            self.buttons[name] = button
            made.append(button)
        return widgets.HBox([field, *made], layout=widgets.Layout(flex_flow="row wrap"))

    def _do(self, action: Callable[[], None]) -> None:
        action()
        self._show()

    def _grow(self) -> None:
        self.session.grow(self.sequence.value, self.text.value)

    def _start_again(self) -> None:
        self.session = self._make()
        self.blocks = History(self.session.names["pool"])
        self.tree = TreeHistory(self.session.names["cache"])

    def _show(self) -> None:
        letters = list(self.session.texts)
        chosen = self.sequence.value if self.sequence.value in letters else None
        self.sequence.options = letters
        self.sequence.value = chosen or (letters[-1] if letters else None)
        for name in ("grow", "write", "fork", "insert", "release"):
            self.buttons[name].disabled = not letters
        pictures, told = self._drawn()
        self.message.value = f"<p role='status'><b>{escape(self.session.said)}</b></p>"
        # Narrow, so that buttons and drawings are on a laptop's screen together.
        self.picture.value = f"<div>{''.join(pictures)}</div>"
        lines = escape("\n".join(self.session.lines))
        self.words.value = (
            f"<details><summary>In words</summary><p>{escape(told)}</p></details>"
            f"<details><summary>As Python</summary><pre>{lines}</pre></details>"
        )

    def _drawn(self) -> tuple[list[str], str]:
        """The drawings as HTML, with what is new marked, and what they show in words."""
        tables, nodes = self.session.tables, self.tree.cache.nodes()
        letters = {
            name: [chr(token) for token in text] for name, text in self.session.texts.items()
        }
        both: list[Recording] = [self.blocks, self.tree]
        try:
            cached = [block_id for node in nodes for block_id in node.block_ids]
            self.blocks.snap("now", tables, letters, cached)
            self.tree.snap("now", lambda ids: bytes(ids).decode(errors="replace"), tables)
            pictures, words = [], []
            for one in both:
                one.steps = one.steps[-2:]  # the state before is what the new one is compared with
                last = len(one.steps) - 1
                told = one.describe(last, last - 1 if last else None)
                words.append(f"{one.title}. {told}")
                pictures.append(style.Picture(one.frame(last), words[-1]).html(least=0))
            return pictures, " ".join(words)
        except Exception as error:  # of a reader's own classes: what they say cannot be drawn
            told = f"This cannot be drawn. {_sentence(error)}"
            return [f"<p>{escape(told)}</p>"], told

    def __repr__(self) -> str:  # what a page without widgets shows
        return "A sandbox of blocks, tables and a prefix cache: run this cell to use it."


def sandbox(
    block_pool=BlockPool,
    block_table=BlockTable,
    prefix_cache=RadixCache,
    num_blocks: int = 12,
    block_size: int = 4,
) -> Sandbox:
    """A pool, block tables and a prefix cache to play with, of the engine or your own classes."""
    return Sandbox(lambda: Session(block_pool, block_table, prefix_cache, num_blocks, block_size))
