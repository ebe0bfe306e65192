"""The sandbox: what its buttons do is what the classes do, and what it lists leads there again."""

import re
from base64 import b64decode
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.blocks import BlockPool, BlockTable, OutOfBlocks
from minikv.course.reader.sandbox import sandbox
from minikv.radix import RadixCache

NUM_BLOCKS, BLOCK_SIZE = 6, 2
TEXTS = ("a", "ab", "abab", "ababc", "abba", "é")
PRESSES = ("new", "begin", "match", "grow", "write", "fork", "insert", "release", "evict")


def press(panel, name, text=None, letter=None, count=None):
    panel.text.value = text or panel.text.value
    panel.sequence.value = letter or panel.sequence.value
    panel.count.value = count or panel.count.value
    panel.buttons[name].click()


def drawing(panel):
    """Both pictures, as SVG."""
    images = re.findall("base64,([^']*)'", panel.picture.value)
    return "".join(b64decode(image).decode() for image in images)


def state(pool, cache, tables):
    return (
        pool.num_free,
        [pool.ref_count(block_id) for block_id in range(pool.num_blocks)],
        [(list(node.block_ids), node.keys, node.lock_count) for node in cache.nodes()],
        [list(node.block_ids) for node in cache.unlocked],
        {name: (list(table.block_ids), table.num_tokens) for name, table in tables.items()},
    )


class Direct:
    """The same actions, as calls of the engine's classes."""

    def __init__(self):
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = RadixCache(self.pool, BLOCK_SIZE)
        self.tables, self.tokens, self.nodes, self.named = {}, {}, {}, 0

    def name(self):
        self.named += 1
        return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[self.named - 1]

    def do(self, action, text, letter, count):
        tokens, table = list(text.encode()), self.tables.get(letter)
        if action == "new":
            self.start(self.name(), tokens)
        elif action == "begin":
            name, hit = self.name(), self.cache.match(tokens)
            self.cache.lock(hit.node)
            self.nodes[name] = hit.node
            self.start(name, tokens, hit)
        elif action == "match":
            self.cache.match(tokens)
        elif action == "grow":
            table.grow(len(tokens))
            self.tokens[letter] += tokens
        elif action == "write":
            table.writable_slot(len(self.tokens[letter]) - 1)
        elif action == "fork":
            twin = self.name()
            self.tables[twin], self.tokens[twin] = table.fork(), list(self.tokens[letter])
            if letter in self.nodes:
                self.nodes[twin] = self.nodes[letter]
                self.cache.lock(self.nodes[twin])
        elif action == "insert":
            done = self.cache.insert(self.tokens[letter], table.block_ids)
            for index, block_id in enumerate(done.block_ids):
                table.replace(index, block_id)
            self.cache.lock(done.node)
            if letter in self.nodes:
                self.cache.unlock(self.nodes[letter])
            self.nodes[letter] = done.node
        elif action == "release":
            if letter in self.nodes:
                self.cache.unlock(self.nodes.pop(letter))
            self.tables.pop(letter).release()
            del self.tokens[letter]
        else:
            self.cache.evict(count)

    def start(self, name, tokens, hit=None):
        self.tables[name], self.tokens[name] = BlockTable(self.pool, BLOCK_SIZE), []
        if hit is not None:
            self.tables[name].share(hit.block_ids)
            self.tokens[name] = tokens[: hit.num_tokens]
        self.tables[name].grow(len(tokens) - len(self.tokens[name]))
        self.tokens[name] = tokens


@pytest.mark.thorough
@settings(max_examples=8)
@given(
    trace=st.lists(
        st.tuples(
            st.sampled_from(PRESSES), st.sampled_from(TEXTS), st.integers(0, 5), st.integers(1, 3)
        ),
        max_size=10,
    )
)
def test_a_button_does_what_the_classes_do(trace):
    panel = sandbox(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    direct = Direct()
    now = state(direct.pool, direct.cache, {})
    for action, text, which, count in trace:
        letters = sorted(direct.tables)
        if panel.buttons[action].disabled:
            assert not letters
            continue
        letter = letters[which % len(letters)] if letters else None
        refused = False
        try:
            direct.do(action, text, letter, count)
        except (OutOfBlocks, ValueError):
            refused = True
        press(panel, action, text, letter, count)
        names = panel.session.names
        now = state(names["pool"], names["cache"], panel.session.tables)
        assert now == state(direct.pool, direct.cache, direct.tables)
        assert ("was refused" in panel.session.said) == refused

    again = {}  # what it lists, run again
    exec("\n".join(panel.session.lines), again)
    tables = {letter: again[letter.lower()] for letter in panel.session.texts}
    assert state(again["pool"], again["cache"], tables) == now


def test_what_a_button_did_is_said_drawn_told_and_listed():
    panel = sandbox(num_blocks=4, block_size=2)
    assert panel.buttons["fork"].disabled and not panel.buttons["new"].disabled
    press(panel, "new", "abc")
    press(panel, "fork")
    assert panel.sequence.options == ("A", "B") and panel.sequence.value == "A"
    press(panel, "write", letter="B")
    assert "new in this step" in drawing(panel)
    said = "B writes its token at position 2 into slot 4, after block 1, which is shared, is copied"
    assert f"{said} to block 2." in panel.message.value
    assert panel.picture.value.count("<img") == 2
    for words in ("Block 0 is shared by A and B, count 2.", "1 of 4 blocks free."):
        assert words in unescape(panel.words.value) and words in unescape(panel.picture.value)
    assert "slot, copy = b.writable_slot(2)" in unescape(panel.words.value)
    press(panel, "again")
    assert panel.session.tables == {} and panel.buttons["fork"].disabled


def test_a_full_pool_is_told_in_a_sentence():
    panel = sandbox(num_blocks=1, block_size=2)
    press(panel, "new", "abc")
    said = unescape(re.sub("<[^>]*>", "", panel.message.value))
    assert said == (
        "`a.grow(3)` was refused. Blocks needed: 2, free: 1. Release a sequence, or evict from "
        "the tree, and try again."
    )
    assert "with suppress(Exception):\n    a.grow(3)" in panel.session.lines


def test_own_classes_are_used_and_their_errors_told():
    class Pool(BlockPool):
        def release(self, block_id):
            raise KeyError("no such block")

    panel = sandbox(block_pool=Pool)
    press(panel, "new", "ab")
    assert type(panel.session.names["pool"]) is Pool
    press(panel, "release")
    assert "`a.release()` was refused. KeyError: 'no such block'." in unescape(panel.message.value)


def test_what_cannot_be_drawn_is_told():
    class Table(BlockTable):
        @property
        def block_ids(self):
            return None

        @block_ids.setter
        def block_ids(self, ids):
            pass

    panel = sandbox(block_table=Table)
    press(panel, "new", "")
    assert "This cannot be drawn. TypeError: table A: block_ids must be" in panel.picture.value


def test_every_control_has_a_name():
    panel = sandbox()
    for button in panel.buttons.values():
        assert button.description and button.tooltip
    for field in (panel.text, panel.sequence, panel.count):
        assert field.description and field.tooltip
    assert repr(panel).endswith("run this cell to use it.")


@pytest.mark.parametrize("text", ["é" * 5, "\n\t", "'quoted' \"twice\""])
def test_any_text_is_tokens(text):
    panel = sandbox()
    press(panel, "new", text)
    press(panel, "insert")
    assert "refused" not in panel.session.said and "cannot be drawn" not in panel.picture.value


def test_the_drawings_leave_room_for_the_buttons_on_a_laptops_screen():
    panel = sandbox()
    for _ in range(3):
        press(panel, "new", "def fib(n)")
        press(panel, "insert")
    assert "max-width:500px" not in panel.picture.value, "as wide as the page"
    assert panel.picture.value.count("min-width:0px!important") == 2, "they shrink to fit in there"
    sizes = re.findall(r"viewBox=\"0 0 ([\d.]+) ([\d.]+)\"", drawing(panel))
    assert len(sizes) == 2 and sum(500 * float(h) / float(w) for w, h in sizes) < 600
