"""How tests are run: in which order, by how many processes, with how many threads."""

import ctypes
import gc
import os
import re

import psutil
import pytest
from forked import Kernels
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Behind the notebooks, files that take longest; then others, and the one of the smallest parts.
LONGEST = (
    "test_jupyterlab", "test_serve_ray", "test_speculative", "test_bench", "test_journey",
    "test_openai", "test_app", "test_grade", "test_containment", "test_lab", "test_codes",
    "test_commands", "test_compile", "test_quant_engine", "test_parity", "test_mine",
    "test_examine", "test_serve", "test_interrupts", "test_update", "test_batch_invariance",
    "test_paged_attention", "test_ch09_answers", "test_random_programs", "test_split", "test_page",
    "test_configs", "test_capstone", "test_new_chapter",
)  # fmt: skip

# Every tensor of tests, and of what they start, is small: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# oneDNN and torch keep machine code for each number of rows: after a hundred numbers 300 MB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
# No test looks at a time: what the table of a notebook measures three times is measured once.
os.environ.setdefault("MINIKV_REPEATS", "1")
# Processor seconds for a reader's code, in notebooks too: only an endless loop takes so many.
os.environ.setdefault("MINIKV_TIME_LIMIT", "60")

# The same examples in every run, and no limit on time: a slow machine is not a failure.
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "minikv", derandomize=True, deadline=None, database=None, suppress_health_check=slow
)
settings.load_profile("minikv")
# Hypothesis would also draw numbers that stand in the files loaded so far: others on each worker.
no_constants = providers._local_constants
providers._get_local_constants = lambda: no_constants


def pytest_addoption(parser):
    parser.addoption("--chapter", metavar="NN", help="only the tests of this chapter")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: many tests wait for a browser, a kernel or a clock."""
    return (yield) + (0 if config.getoption("chapter") else 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file stay on one worker, in order; those of one exercise in `test_four_ways`
    likewise, for a worker remembers what it has played of a check; and those with one drafter."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrExercise(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if file.endswith(".ipynb") and not config.getoption("chapter"):
                return "notebooks"  # a kernel may take 700 MB: one at a time
            if file.endswith("test_install.py"):
                return nodeid  # each fills an environment of its own
            part = re.search(r"\[(\d\d\.\d)" if "four_ways" in file else r"(with \w+)\]$", test)
            return f"{file}::{part[1]}" if part else file

    return ByFileOrExercise(config, log)


def pytest_ignore_collect(collection_path, config):
    """With --chapter, what the folders of other chapters import is not waited for."""
    number, name = config.getoption("chapter"), collection_path.name
    if number and re.fullmatch(r"ch\d\d", name) and name != f"ch{number}":
        return True


def is_unusual(item) -> bool:
    """Whether more than one parameter differs from what its mark `usual` names."""
    usual = [pair for mark in item.iter_markers("usual") for pair in mark.kwargs.items()]
    return sum(item.callspec.params[name] != value for name, value in usual) > 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The longest files first, so that no worker ends with one alone; without workers, last.
    With --chapter, keep its folder, what is asked of one of its exercises, and its notebook."""
    for item in filter(is_unusual, items):
        item.add_marker("thorough")
    number, has_workers = config.getoption("chapter"), hasattr(config, "workerinput")
    first = [".ipynb"] if number else [".ipynb", *LONGEST]

    def place(item):  # of a notebook its suffix decides
        name = item.path.stem if item.path.suffix == ".py" else item.path.suffix
        place = first.index(name) if name in first else len(first) + (name == "test_four_ways")
        return place if has_workers else (place != len(first)) * (len(first) + 2 - place)

    items.sort(key=place)
    if number:
        # A reader's way through all chapters cannot begin in the middle.
        own = re.compile(
            rf"^(?!.*test_journey).*(/ch{number}/|\[{number}[._:\]-]|notebooks/{number}_)"
        )
        chosen = [item for item in items if own.search(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def own_memory() -> int:
    """MB that this process has for itself; 0 where the system does not tell."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) >> 20 if hasattr(memory, "shared") else 0


after_collection = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Engines and servers are circles of objects: they stay until garbage is looked for. Small
    pieces of memory that are free then are the system's again only if glibc is asked."""
    global after_collection
    if own_memory() > after_collection + 60:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        after_collection = own_memory()


def pytest_collection_finish(session):
    """What is imported stays: it need not be looked at again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    has_ray = config.option.markexpr != "not thorough"
    config.pluginmanager.register(Kernels(fork=not config.getoption("chapter"), ray=has_ray))
    config.pluginmanager.import_plugin("skipped")
    config.pluginmanager.import_plugin("chromium")
    if config.getoption("dist", "no") == "no":  # a process that only deals out tests needs no model
        config.pluginmanager.import_plugin("models")
        config.pluginmanager.import_plugin("drafted")
