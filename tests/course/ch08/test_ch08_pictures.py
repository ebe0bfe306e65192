"""The pictures of chapter 08 say what the kernels do: compared with what these load."""

import importlib.util
import random

import pytest
import torch
from thorough import thorough_after

from minikv.course.chapters.ch08_triton_paged_attention import pictures
from minikv.course.chapters.ch08_triton_paged_attention.pictures import Launch, Roof

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from minikv_kernels import settings
    from minikv_kernels.mode import INTERPRETED
    from minikv_kernels.paged_decode import paged_decode
    from minikv_kernels.splits import make_scratch

needs_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="watches the interpreter"
)


def batch(lens, block_size=16, num_heads=4, num_kv_heads=2, head_dim=16, seed=0):
    """(q, kv, block tables, context lengths), blocks in any order, three of them free."""
    torch.manual_seed(seed)
    widths = [-(-n // block_size) for n in lens]
    order = iter(torch.randperm(sum(widths) + 3).tolist())
    tables = torch.zeros(len(lens), max(widths), dtype=torch.int64)
    for row, width in enumerate(widths):
        tables[row, :width] = torch.tensor([next(order) for _ in range(width)], dtype=torch.int64)
    kv = torch.randn(sum(widths) + 3, block_size, 2, num_kv_heads, head_dim)
    q = torch.randn(len(lens), num_heads, head_dim)
    return q, kv, tables, torch.tensor(lens)


LENS = [640, 96, 48]


@pytest.fixture
def launches():
    arguments = batch(LENS)
    return [
        Launch.by_head(*arguments, tile=32),
        Launch.grouped(*arguments, tile=32),
        Launch.split(*arguments, tile=32, rows=32, min_split=128),
    ]


# ── What is read ──────────────────────────────────────────────────────────────


@needs_interpreter
@pytest.mark.parametrize("lens", [LENS, [1], [0, 17], [300, 5, 129, 256, 1]])
@pytest.mark.parametrize("block_size", thorough_after(1, [5, 1, 16, 64]))
def test_a_launch_is_what_the_kernel_does(lens, block_size):
    arguments = batch(lens, block_size)
    tile = settings.choose("decode", 16, torch.float32, torch.device("cpu")).tile
    scratch = make_scratch(4, 2, 16, torch.device("cpu"), rows=6)
    launch = Launch.split(*arguments, tile, rows=6, min_split=settings.MIN_SPLIT)
    with pictures.watch(arguments[1]) as loads:
        paged_decode(*arguments, scratch=scratch)
    assert launch.agrees(loads)
    assert loads.num_bytes == launch.num_bytes == sum(lens) * 2 * 2 * 16 * 4
    if max(lens) >= 256:
        assert len(launch.programs) > 2 * len(lens)
    if lens == LENS:  # other tables, other blocks
        other = Launch.split(*batch(lens, block_size, seed=1), tile, 6, settings.MIN_SPLIT)
        assert not other.agrees(loads)


@needs_interpreter
def test_what_is_watched_ends(launches):
    from triton.runtime.interpreter import interpreter_builder as builder

    arguments = batch([5])
    with pytest.raises(KeyError), pictures.watch(arguments[1]) as loads:
        raise KeyError
    assert "create_masked_load" not in vars(builder)
    paged_decode(*arguments)
    assert loads.num_bytes == 0 and loads.by_program == {}
    assert not launches[2].agrees(loads)


def test_three_ways_to_read_the_same(launches):
    by_head, grouped, split = launches
    assert [len(launch.programs) for launch in launches] == [12, 6, 2 * (5 + 1 + 1)]
    assert [launch.num_turns for launch in launches] == [20, 20, 4]
    assert by_head.num_bytes == 2 * grouped.num_bytes == 2 * split.num_bytes
    for launch in launches:
        read = {
            (block, program.kv_head)
            for program in launch.programs
            for block in launch.blocks(program)
        }
        held = {block for table in launch.tables for block in table}
        assert read == {(block, kv_head) for block in held for kv_head in (0, 1)}
        for program in launch.programs:
            turns = range(launch.num_turns)
            keys = [key for turn in turns for key in launch.keys(program, turn)]
            assert keys == list(range(program.start, program.end))
        work = [bool(launch.keys(p, t)) for p in launch.programs for t in range(launch.num_turns)]
        assert launch.at_work == pytest.approx(sum(work) / len(work))
    assert split.at_work > 2 * grouped.at_work


def test_an_empty_split_reads_nothing():
    # 33 tokens in tiles of 32, 2 splits: 32 and 1. 5 splits of 130 tokens: the last has none.
    launch = Launch.split(*batch([130], num_kv_heads=1, num_heads=1), 32, rows=5, min_split=26)
    assert [(p.start, p.end) for p in launch.programs] == [
        (0, 32), (32, 64), (64, 96), (96, 128), (128, 130),
    ]  # fmt: skip
    launch = Launch.split(*batch([96], num_kv_heads=1, num_heads=1), 64, rows=3, min_split=32)
    assert [len(launch.blocks(program)) for program in launch.programs] == [4, 2, 0]
    assert [launch.turns(program) for program in launch.programs] == [1, 1, 0]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TRITON, reason="asks the kernel's own function")
def test_splits_are_counted_as_on_the_device():
    from paged_case import count  # needs Triton

    draw = random.Random(8)
    for _ in range(20):
        lens = [draw.randint(0, 5000) for _ in range(draw.randint(1, 6))]
        rows = draw.randint(1, 15)
        assert pictures.num_splits(lens, rows, settings.MIN_SPLIT) == count(lens, rows)[0]


# ── What the compiler makes of it ─────────────────────────────────────────────


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TRITON, reason="compiles")
def test_the_decode_kernel_is_compiled_in_a_process_of_its_own():
    from minikv.course.chapters.ch08_triton_paged_attention import compiled

    decode, join = compiled.decode(90, num_heads=4, num_kv_heads=2, head_dim=64)
    assert decode["kernel"] == "paged_decode_kernel" and join["kernel"] == "join_splits_kernel"
    assert 0 < decode["shared"] < 227 * 1024 and decode["type"] == "*bf16"
    assert ".target sm_90" in decode["ptx"] and "cp.async.cg" in decode["ptx"]
    with pytest.raises(RuntimeError, match="the compiler failed"):
        compiled.decode(90, num_heads=4, num_kv_heads=3, head_dim=64)


# ── The pictures ──────────────────────────────────────────────────────────────


def words_in(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_grid():
    picture = pictures.grid_picture(10, 4)
    assert "3 programs, and a mask for the last 2" in picture.alt
    assert "Program 2: elements 8 to 9; 2 masked." in picture.alt
    words = words_in(picture.figure)
    assert words.count("yes") == 10 and words.count("no") == 2
    assert words.count("-1") == 2  # memory that nobody writes to, as in the notebook
    assert "mask" not in pictures.grid_picture(8, 4).alt


def test_a_row_a_program(launches):
    picture = pictures.launches_picture(launches)
    assert "Long contexts split: 4 turns instead of 20." in picture.alt
    assert "14 programs, 4 turns" in picture.alt
    words = words_in(picture.figure)
    split = launches[2]
    first = split.programs[0]
    assert " ".join(map(str, split.blocks(first, 0))) in words
    assert sum(word.startswith("A, KV head") for word in words) == 4 + 2 + 10
    for axes in ("sequence, query head", "sequence, KV head", "KV head, split of the batch"):
        assert f"left: program_id 0, 1 = {axes}" in words
    assert "20 turns" in pictures.launches_picture(launches[:1]).alt


def test_a_tile_of_one_block_is_a_turn_of_one_block():
    launch = Launch.by_head(*batch(LENS), tile=16)
    assert launch.num_turns == len(launch.tables[0]) == 40
    for program in launch.programs:
        for turn in range(launch.turns(program)):
            assert launch.blocks(program, turn) == [launch.tables[program.sequence][turn]]
    words = words_in(pictures.launches_picture([launch]).figure)
    cells = [word for word in words if word == str(launch.tables[1][0])]
    assert len(cells) >= 4  # 40 columns: the blocks are still named


def test_the_tiles_of_a_chunk_cover_what_is_visible():
    draw = random.Random(1)
    for _ in range(50):
        context, tile_queries, tile_keys = (draw.randint(1, 40) for _ in range(3))
        num_queries = draw.randint(1, context)
        tiles = pictures.chunk_tiles(context, num_queries, tile_queries, tile_keys)
        assert len(tiles) == -(-num_queries // tile_queries)
        for tile in tiles:
            last = min(tile.first + tile_queries, context) - 1
            assert tile.full % tile_keys == 0 and tile.full <= tile.first + 1  # all see these
            assert tile.end == last + 1 and tile.end - tile.full < tile_keys + tile_queries
    picture = pictures.chunk_picture(32, 12, 4, 8)
    assert "Of 12 tiles, 8 need no mask and 1 is never read." in picture.alt
    assert "Queries 20 to 23: keys 0 to 16 without a mask, to 24 with." in picture.alt


def test_the_roof():
    roof = Roof(bandwidth=10e9, rate=200e9, measured=True)
    assert roof.bend == 20
    assert (roof.attainable(2), roof.attainable(100)) == (20e9, 200e9)
    work = {"decode attention": 4.0, "weights, batch 1": 1.0}
    picture = pictures.roofline_picture({"here": roof, "there": Roof(1e12, 3e14, False)}, work)
    assert "Decode attention: 4 operations per byte; here bends at 20" in picture.alt
    [legend] = picture.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["here (measured here)", "there (data sheet, bfloat16)"]
    [axes] = picture.figure.axes
    bottom, top = axes.get_ylim()
    assert roof.attainable(0.5) / 1e9 / bottom < 4  # no decades without a roof in them
    assert all(bottom < tick < top for tick in axes.get_yticks())
    assert {text.get_text() for text in axes.texts} == {"attention", "batch 1"}
    assert all(text.get_rotation() == 0 for text in axes.texts)
