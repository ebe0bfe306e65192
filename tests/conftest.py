"""How tests are run: in which order, by how many processes, with how many threads."""

import os
import re

import pytest
from hypothesis import HealthCheck, settings

# Files that take longest, in this order, and the notebooks behind them. Then the others, and last
# the one whose tests are dealt out in the smallest parts.
LONGEST = (
    "test_serve_ray", "test_jupyterlab", "test_speculative", "test_bench", "test_journey",
    "test_openai", "test_app", "test_grade", "test_containment", "test_lab", "test_codes",
    "test_commands", "test_compile", "test_quant_engine", "test_parity", "test_mine",
    "test_examine", "test_serve", "test_interrupts", "test_update", "test_batch_invariance",
    "test_paged_attention", "test_ch09_answers", "test_random_programs", "test_split", "test_page",
    "test_configs", "test_capstone", "test_new_chapter",
)  # fmt: skip
LAST = "test_four_ways"

# Every tensor here is small: threads would only wait for each other, and on a busy machine long.
# This is for the processes that tests start, and for the kernels of notebooks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test looks at a time, and nearly every notebook ends with a table that measures the rungs of
# all chapters before it: what notebooks measure three times is measured once.
os.environ.setdefault("MINIKV_REPEATS", "1")
# Processor seconds for a reader's code, in notebooks too: only an endless loop takes so many.
os.environ.setdefault("MINIKV_TIME_LIMIT", "60")

# The same examples in every run, and no limit on time: a slow machine is not a failure.
settings.register_profile(
    "minikv",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("minikv")


def pytest_addoption(parser):
    parser.addoption("--chapter", metavar="NN", help="only the tests of this chapter")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two more than there are cores: many tests wait for a browser, a kernel or a clock. Those of
    one chapter do not, and each worker takes seconds to begin."""
    return (yield) + (0 if config.getoption("chapter") else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file stay on one worker, in order; those of one exercise in `test_four_ways`
    likewise, for a worker remembers what it has played of a check; and those with one drafter."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrExercise(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            part = re.search(r"\[(\d\d\.\d)" if "four_ways" in file else r"(with \w+)\]$", test)
            return f"{file}::{part[1]}" if part else file

    return ByFileOrExercise(config, log)


def pytest_ignore_collect(collection_path, config):
    """With --chapter, what the folders of other chapters import is not waited for."""
    number, name = config.getoption("chapter"), collection_path.name
    if number and re.fullmatch(r"ch\d\d", name) and name != f"ch{number}":
        return True


def pytest_collection_modifyitems(config, items):
    """The longest files first, so that no worker ends with one alone. With --chapter, keep what
    lies in its folder or is asked of one of its exercises, and its notebook."""
    number = config.getoption("chapter")
    first = [".ipynb"] if number else [*LONGEST, ".ipynb"]

    def place(item):
        """Of a notebook its suffix decides."""
        name = item.path.stem if item.path.suffix == ".py" else item.path.suffix
        return first.index(name) if name in first else len(first) + (name == LAST)

    items.sort(key=place)
    if number:
        # A reader's way through all chapters cannot begin in the middle.
        own = re.compile(
            rf"^(?!.*test_journey).*(/ch{number}/|\[{number}[._:\]-]|notebooks/{number}_)"
        )
        chosen = [item for item in items if own.search(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


class OwnThreads:
    """The notebook about threads has as many as its readers have. As a plugin: hooks of this file
    are not called for what lies elsewhere."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        with pytest.MonkeyPatch.context() as patch:
            if item.path.name == "09_cpu_kernels.ipynb":
                patch.delenv("OMP_NUM_THREADS", raising=False)
            return (yield)


def pytest_configure(config):
    config.pluginmanager.register(OwnThreads())
    if config.getoption("dist", "no") == "no":  # a process that only deals out tests needs no model
        config.pluginmanager.import_plugin("models")
        config.pluginmanager.import_plugin("drafted")
