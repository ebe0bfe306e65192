"""What a reader's kernels do, seen from outside: which memory they touch, and whether they compile.

    with Watch() as seen:
        out = add(x, y)
    seen.launches[0].grid      # (3,)
    seen.reads["x"]            # 10 elements

Works on Triton's interpreter alone. A GPU reads beyond an array without a word; here
every address is looked at before it is used. What is not right is said without a cause: that
is for the chapter's known mistakes.
"""

import minikv_kernels  # noqa: F401, I001  before triton
import inspect
import json
import linecache
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from minikv.course.chapters.ch08_triton_paged_attention.compiled import TYPES
from minikv.course.judge.checking import Wrong

GUARD = 1 << 16  # bytes on either side of an array: a wrong address there is the array's own
COMPILER = Path(__file__).with_name("compiler.py")
COMPILER_LIMIT = 600.0  # seconds of the clock; it needs one or two of a processor


def _read_at_once(made: Callable) -> Callable:
    """Triton reads a kernel's text when it is first run. By then another may stand in its place:
    known mistakes are loaded one after the other, under the name of the reader's file."""

    def stand_in(kernel, *arguments, **options):
        made(kernel, *arguments, **options)
        if "NotImplementedError" not in kernel.fn.__code__.co_names:
            kernel.rewrite()

    return stand_in


interpreter.InterpretedFunction.__init__ = _read_at_once(interpreter.InterpretedFunction.__init__)


@contextmanager
def language_patched_once() -> Iterator[None]:
    """Triton's interpreter replaces the functions of `tl` by its own whenever a kernel calls
    another, which takes longer than most kernels do. In here they are replaced all the time.
    Each launch is in here, and what makes many can be, too."""
    patch = interpreter._patch_lang
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    done = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda kernel: done
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        scope.restore()


interpreter.GridExecutor.__call__ = language_patched_once()(interpreter.GridExecutor.__call__)


@dataclass
class Launch:
    """One kernel that was started: what it was started with, by name."""

    kernel: Callable  # the Python function
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class Array:
    """A tensor that a kernel was given, moved to where nothing else is near."""

    def __init__(self, name: str, tensor: torch.Tensor):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: want it contiguous")
        self.name, self.tensor = name, tensor
        self.size, self.itemsize = tensor.numel(), tensor.element_size()
        nbytes = self.size * self.itemsize
        memory = torch.full((nbytes + 2 * GUARD,), 0xFF, dtype=torch.uint8)  # NaN as floats
        self.inner = memory[GUARD : GUARD + nbytes].view(tensor.dtype).view(tensor.shape)
        self.inner.copy_(tensor)
        self.start = self.inner.data_ptr()
        self.writers = np.full(self.size, -1, dtype=np.int64)  # programs, by element

    def element(self, address: int) -> int:
        return (address - self.start) // self.itemsize


class Watch:
    """Looks at every load and store of the kernels that are started inside `with`.

    Raises Wrong, from inside the kernel, for an address outside the arrays that it was given.
    `races` says where two programs of one launch have written the same element, and `unwritten`
    where a kernel has read what no program has written. Meanwhile torch.empty gives NaN, and so
    does a masked load without `other` in the places that it masks: `undefined` names those.
    Programs are numbered in order, with the last number of `program_id` changing fastest.
    With `backwards` the programs of a launch run from the last to the first; if `dry`, not at all.
    """

    def __init__(self, backwards: bool = False, dry: bool = False):
        self.backwards, self.dry = backwards, dry
        self.launches: list[Launch] = []
        # Of all launches, by the argument's name: elements that each program reads; which ones, of
        # whole numbers as those of a block table; addresses in the largest load.
        self.reads: dict[str, Counter[int]] = defaultdict(Counter)
        self.looked_up: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.largest: Counter[str] = Counter()
        self.stores: Counter[int] = Counter()  # how often each program has stored
        self.writers: dict[str, np.ndarray] = {}  # programs, by element, of the latest launch
        self.written: set[int] = set()  # addresses of the tensors that were written to
        self.races: list[str] = []
        self.unwritten: list[str] = []
        self.undefined: list[str] = []
        self._arrays: list[Array] = []
        self._fresh: dict[int, tuple[torch.Tensor, np.ndarray]] = {}  # by address; what is written
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "Watch":
        builder = interpreter.InterpreterBuilder
        language = ExitStack()
        language.enter_context(language_patched_once())
        self._undo.append(language.close)
        self._patch(interpreter.InterpretedFunction, "run", self._run)
        self._patch(builder, "create_masked_load", self._load)
        self._patch(builder, "create_masked_store", self._store)
        self._patch(builder, "create_atomic_rmw", self._atomic)
        self._patch(builder, "create_atomic_cas", self._atomic)
        self._patch(builder, "set_grid_idx", self._next_program)
        self._patch(torch, "empty", self._empty)
        self._patch(torch, "empty_like", self._empty)
        return self

    def __exit__(self, *error) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _patch(self, owner: object, name: str, replacement: Callable) -> None:
        original = getattr(owner, name)

        def stand_in(*arguments, **options):
            return replacement(original, *arguments, **options)

        setattr(owner, name, stand_in)
        self._undo.append(lambda: setattr(owner, name, original))

    def _empty(self, original, *arguments, **options):
        made = original(*arguments, **options)
        made.fill_(torch.nan if made.is_floating_point() else 77)
        self._fresh[made.data_ptr()] = made, np.zeros(made.numel(), dtype=bool)
        return made

    def never_written(self, tensor: torch.Tensor) -> list[int]:
        """Elements of a tensor made by torch.empty that no kernel has written."""
        _, written = self._fresh.get(tensor.data_ptr(), (None, np.ones(0, dtype=bool)))
        return np.flatnonzero(~written).tolist()

    def _next_program(self, original, builder, *place):
        if self.backwards:
            place = [size - 1 - i for size, i in zip(builder.grid_dim, place, strict=True)]
        return original(builder, *place)

    def _run(self, original, kernel, *arguments, grid, warmup, **options):
        accepted = inspect.signature(kernel.fn).parameters
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        named |= {name: value for name, value in options.items() if name in accepted}
        self._arrays = [
            Array(name, value) for name, value in named.items() if isinstance(value, torch.Tensor)
        ]
        sizes = grid(named) if callable(grid) else grid
        self.launches.append(Launch(kernel.fn, tuple(sizes), named))
        if self.dry:
            return None
        moved = named | {array.name: array.inner for array in self._arrays}
        try:
            with np.errstate(all="ignore"):  # a GPU says nothing of inf and NaN either
                return original(kernel, grid=grid, warmup=warmup, **moved)
        finally:
            self.writers = {array.name: array.writers for array in self._arrays}
            for array in self._arrays:
                if (array.writers >= 0).any():
                    self.written.add(array.tensor.data_ptr())
                    array.tensor.copy_(array.inner)
                    _, written = self._fresh.get(array.tensor.data_ptr(), (None, None))
                    if written is not None:
                        written |= array.writers >= 0
            self._arrays = []

    def _load(self, original, builder, ptrs, mask, other, *rest):
        mask = _handle(mask)
        for array, elements in self._touched(ptrs, mask, "reads"):
            self.reads[array.name][self._program()] += len(elements)
            self.largest[array.name] = max(self.largest[array.name], ptrs.data.size)
            if not array.tensor.is_floating_point():
                self.looked_up[array.name][self._program()].update(elements.tolist())
            _, written = self._fresh.get(array.tensor.data_ptr(), (None, None))
            if written is not None and not written[elements].all():
                element = int(elements[~written[elements]][0])
                self.unwritten.append(
                    f"{self.launches[-1].kernel.__name__} reads element {element} of "
                    f"`{array.name}`, which no program has written"
                )
        kind = ptrs.get_element_ty()
        if other is None and kind.is_floating() and not mask.data.all():
            self.undefined.append(self.launches[-1].kernel.__name__)
            undefined = np.full(ptrs.data.shape, np.nan, dtype=interpreter._get_np_dtype(kind))
            other = interpreter.TensorHandle(undefined, kind)
        return original(builder, ptrs, mask, other, *rest)

    def _store(self, original, builder, ptrs, value, mask, *rest):
        mask = _handle(mask)
        self.stores[self._program()] += 1
        for array, elements in self._touched(ptrs, mask, "writes"):
            self._note(array, elements)
        return original(builder, ptrs, value, mask, *rest)

    def _atomic(self, original, builder, *arguments):
        raise Wrong(
            f"{self.launches[-1].kernel.__name__} uses an atomic operation",
            look="`tl.load` and `tl.store` are enough here: which elements belong to this program?",
        )

    def _program(self) -> int:
        grid = self.launches[-1].grid
        return int(
            np.ravel_multi_index(interpreter.interpreter_builder.grid_idx[: len(grid)], grid)
        )

    def _touched(self, ptrs, mask, does: str) -> list[tuple[Array, np.ndarray]]:
        """The arrays that these addresses lie in, and their elements there."""
        every = np.broadcast_to(ptrs.data, mask.data.shape) if mask.data.shape else ptrs.data
        addresses = every[mask.data.astype(bool)].astype(np.int64)
        found, left = [], len(addresses)
        for array in self._arrays:
            elements = (addresses - array.start) // array.itemsize
            inside = elements[(elements >= 0) & (elements < array.size)]
            if len(inside):
                found.append((array, inside))
                left -= len(inside)
        if left:
            self._outside(addresses, does, ptrs.data.size == 1)
        return found

    def _outside(self, addresses: np.ndarray, does: str, alone: bool) -> None:
        program = shown_program(interpreter.interpreter_builder.grid_idx, self.launches[-1].grid)
        who = f"{self.launches[-1].kernel.__name__}, {program} {does}"
        for address in addresses.tolist():
            near = [
                array
                for array in self._arrays
                if -GUARD <= address - array.start < array.size * array.itemsize + GUARD
            ]
            if not near:
                raise Wrong(
                    f"{who} at an address far from all of its arrays",
                    look="the offsets: print them, they are tiles of numbers. One may come from an "
                    "entry that means nothing, such as one of a block table past its context",
                )
            [array, *_] = near
            if not 0 <= array.element(address) < array.size:
                beyond = sorted({
                    element for element in map(array.element, addresses.tolist())
                    if not 0 <= element < array.size and abs(element) < array.size + GUARD
                })  # fmt: skip
                raise Wrong(
                    f"{who} {shown_elements(beyond)} of `{array.name}`, which has {array.size}",
                    look="how often does the loop run, and does its last block exist?"
                    if alone
                    else f"which elements of this tile exist, and which does `tl."
                    f"{'load' if does == 'reads' else 'store'}` get?",
                )

    def _note(self, array: Array, elements: np.ndarray) -> None:
        grid, program = self.launches[-1].grid, self._program()
        place = interpreter.interpreter_builder.grid_idx
        before = array.writers[elements]
        if ((before >= 0) & (before != program)).any():
            which = int(np.argmax((before >= 0) & (before != program)))
            other = np.unravel_index(int(before[which]), grid)
            self.races.append(
                f"{self.launches[-1].kernel.__name__}: element {int(elements[which])} of "
                f"`{array.name}` is written by {shown_program(other, grid)} and by "
                f"{shown_program(place, grid)}"
            )
        array.writers[elements] = program


def _handle(mask):
    """A mask as the interpreter has it; that of `tl.make_block_ptr` is a bare array."""
    return interpreter.TensorHandle(mask, tl.int1) if isinstance(mask, np.ndarray) else mask


def shown_elements(elements: list[int]) -> str:
    """ "element 10", "elements 10 and 11", "elements 10 to 15", "5 elements from 10 to 90"."""
    first, last, count = elements[0], elements[-1], len(elements)
    if count == 1:
        return f"element {first}"
    if count == last - first + 1:
        return f"elements {first} {'and' if count == 2 else 'to'} {last}"
    return f"{count} elements from {first} to {last}"


def shown_program(place, grid: tuple[int, ...]) -> str:
    """ "program 2", or "program (0, 1)" where the grid has more dimensions."""
    numbers = [int(number) for number in place][: len(grid)]
    return f"program {numbers[0]}" if len(grid) == 1 else f"program {tuple(numbers)}"


# ── A GPU's compiler ──────────────────────────────────────────────────────────


def compiled(file: str, launches: list[Launch]) -> list[dict]:
    """What a compiler for sm_90 makes of the kernels of `file` among `launches`: dicts with
    "kernel", and "error" and "line", or "dots" and "tf32". Empty if no compiler can be had.

    In another process: this one has chosen the interpreter.
    """
    jobs = []
    for launch in launches:
        if launch.kernel.__code__.co_filename == file:
            signature, constants = {}, {}
            for name, parameter in inspect.signature(launch.kernel).parameters.items():
                value = launch.arguments.get(name, parameter.default)
                signature[name] = _type_of(parameter, value)
                if signature[name] == "constexpr":
                    constants[name] = value
            job = {
                "kernel": launch.kernel.__name__, "signature": signature, "constants": constants,
            }  # fmt: skip
            if job not in jobs:
                jobs.append(job)
    with tempfile.TemporaryDirectory(prefix="minikv-") as folder:
        copy = Path(folder, Path(file).name)
        copy.write_text("".join(linecache.getlines(file)), encoding="utf-8")
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(COMPILER), str(copy), json.dumps(jobs)],
                capture_output=True, text=True, env=environment, timeout=COMPILER_LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Wrong(
                f"the compiler did not finish within {COMPILER_LIMIT:g} s",
                "it needs a second or two; this machine is busy with something else",
                "nothing in your code is wrong: try again",
            ) from None
    return json.loads(done.stdout) if done.returncode == 0 else []


def _type_of(parameter: inspect.Parameter, value: object) -> str:
    if "constexpr" in str(parameter.annotation):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"
