"""The search for settings, on a clock that makes times up: no GPU is needed to look for them."""

import importlib.util
import math

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)

from minikv.course.bench import tune
from minikv.course.bench.gpu_clock import random_values
from minikv.course.bench.kernel_workloads import DTYPE, Case
from minikv_kernels import settings
from minikv_kernels.mode import INTERPRETED
from minikv_kernels.settings import Setting

GUESS = Setting(16, 32, 4, 5, 256)


def test_one_size_at_a_time_leads_to_the_fastest():
    fastest, asked = Setting(16, 128, 2, 7, 128), []

    def measure(setting):
        asked.append(setting)
        if setting.tile * setting.columns > 128 * 256:
            return math.inf  # too large for this GPU
        return 1 + sum(abs(math.log2(a / b)) for a, b in zip(setting, fastest, strict=True))

    times = tune.search(measure, GUESS, tune.SIZES["decode"] | {"columns": (128, 256, 512)})
    assert min(times, key=times.get) == fastest
    assert asked[0] == GUESS and len(set(asked)) == len(asked) == len(times) < 40


def test_the_guess_stays_where_nothing_else_runs():
    times = tune.search(lambda s: 1.0 if s == GUESS else math.inf, GUESS, tune.SIZES["decode"])
    assert min(times, key=times.get) == GUESS and len(times) > 10


def test_a_search_ends_in_time():
    left = iter([True, True, False])
    times = tune.search(lambda setting: 1.0, GUESS, tune.SIZES["decode"], lambda: next(left, False))
    assert len(times) == 3


def test_every_size_that_is_tried_is_one_that_the_kernels_take():
    for kernel, sizes in tune.SIZES.items():
        for gpu in (0, 80, 89, 90, 100):
            for pad in (32, 64, 128):
                guess = settings.default(kernel, pad, DTYPE.itemsize, gpu)
                assert all(getattr(guess, name) in (*values, 16) for name, values in sizes.items())
        assert all(tile >= 16 and tile & (tile - 1) == 0 for tile in sizes["tile"])


class MadeUp:
    """Stands in for `minikv.course.bench.gpu_clock.CudaClock` where there is no GPU."""

    device, l2_bytes = torch.device("cpu"), 1000

    def captured(self, work):
        return work

    def seconds(self, work):
        work()
        [setting] = settings.TUNED.values()
        if setting.tile == 64:
            raise RuntimeError("out of something\nand more")
        return 1e-3 / setting.num_stages


@pytest.mark.skipif(not INTERPRETED, reason="the clock of a machine without a GPU")
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_it_prints_lines_for_the_table(kernel, capsys, monkeypatch):
    monkeypatch.setattr(settings, "TUNED", {})
    monkeypatch.setattr(tune, "PROGRAMS", (2, 4))
    monkeypatch.setitem(tune.SIZES, kernel, {"tile": (32, 64), "num_stages": (3, 7)})
    prefill = kernel == "prefill"
    case = Case(16, (24,) if prefill else (9, 20), 4, prefill, num_heads=4, num_kv_heads=2)
    values = random_values(case.num_values(MadeUp.l2_bytes), DTYPE, MadeUp.device)
    monkeypatch.setattr("minikv.course.bench.kernel_workloads.LAUNCHES", 1)
    tune.tune(MadeUp(), values, kernel, case, until=math.inf)
    [(key, best)] = settings.TUNED.items()
    assert key == (kernel, 16, 2, 0) and best.num_stages == 7 and best.tile != 64
    printed = capsys.readouterr().out
    assert f"    {key}: {best},  # 0." in printed  # evaluates to an entry of the table
    assert f"#   {best._replace(tile=64)}: out of something\n" in printed
    assert ("#   PROGRAMS_PER_SM 4: 0." in printed) == (kernel == "decode")
    assert settings.PROGRAMS_PER_SM == 6


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys):
    assert tune.main([]) == 2
    assert capsys.readouterr().err.startswith(
        "python -m minikv.course.bench.tune: needs a CUDA GPU"
    )
