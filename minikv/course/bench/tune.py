"""Measure settings of the kernels on this GPU, and print lines for kernels/settings.py.

    python -m minikv.course.bench.tune              # head dims 64 and 128, in at most 5 minutes
    python -m minikv.course.bench.tune 96 --minutes 2

Each search begins at the guess of `settings.default` and changes one size at a time, as long
as that helps. It times what `gpu_kernels` times, in the same way: 64 decodes at contexts of
4,096 tokens, and the prefill of a prompt of 8,192, in bfloat16. Last, with the setting found,
how many programs a batch of decodes is split into.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from triton.errors import TritonError

from minikv.course.bench.gpu_clock import CudaClock, random_values, where
from minikv.course.bench.kernel_workloads import DTYPE, Case, Workload
from minikv_kernels import settings
from minikv_kernels.settings import Setting

COMMAND = "python -m minikv.course.bench.tune"
SIZES: dict[str, dict[str, Sequence[int]]] = {
    "decode": {
        "columns": (0, 128, 256, 512),
        "tile": (16, 32, 64, 128),
        "num_stages": (3, 5, 7, 9),
        "num_warps": (1, 2, 4, 8),
    },
    "prefill": {
        "tile": (32, 64, 128),
        "num_stages": (3, 5, 7),
        "rows": (64, 128),
        "num_warps": (4, 8),
    },
}
PROGRAMS = (2, 3, 4, 6, 8, 12)  # settings.PROGRAMS_PER_SM


def search(
    measure: Callable[[Setting], float],
    guess: Setting,
    sizes: Mapping[str, Sequence[int]],
    in_time: Callable[[], bool] = lambda: True,
) -> dict[Setting, float]:
    """What `measure` said of each setting tried, `guess` among them.

    One size at a time takes all its values, and the fastest of all settings so far goes on,
    until a round through the sizes finds none faster, or `in_time` says no.
    """
    times = {guess: measure(guess)}
    best = None
    while best != (best := min(times, key=times.__getitem__)):
        for name, values in sizes.items():
            fastest = min(times, key=times.__getitem__)
            for value in values:
                setting = fastest._replace(**{name: value})
                if setting not in times and in_time():
                    times[setting] = measure(setting)
    return times


def tune(clock: CudaClock, values: torch.Tensor, kernel: str, case: Case, until: float) -> None:
    """Search for `kernel` on `case`, made of `values`, and print what was found; no new setting
    is tried after `until`, a time of `time.monotonic`. What is found is used from then on."""
    pad, gpu = settings.padded(case.head_dim), settings.capability(clock.device)
    key = (kernel, pad, DTYPE.itemsize, gpu)
    guess, workload = settings.default(*key), Workload(case, values, clock.l2_bytes)

    def milliseconds(setting: Setting) -> float:
        """Of one launch; infinity, and a line that says why, if it cannot be used."""
        settings.TUNED[key] = setting
        try:
            run = clock.captured(workload.run)
            workload.poison()
            taken = clock.seconds(run) / workload.launches
            workload.check()
        except (TritonError, RuntimeError) as error:
            print(f"#   {setting}: {str(error).splitlines()[0]}", flush=True)
            return math.inf
        return 1e3 * taken

    times = search(milliseconds, guess, SIZES[kernel], lambda: time.monotonic() < until)
    best = settings.TUNED[key] = min(times, key=times.__getitem__)
    print(
        f"    {key}: {best},  # {times[best]:.4f} ms, {len(times)} tried; "
        f"{times[guess]:.4f} ms with {guess}", flush=True,
    )  # fmt: skip
    if kernel == "decode":
        usual = settings.PROGRAMS_PER_SM
        for settings.PROGRAMS_PER_SM in PROGRAMS:
            workload = Workload(case, values, clock.l2_bytes)  # its scratch memory is of that size
            print(f"#   PROGRAMS_PER_SM {settings.PROGRAMS_PER_SM}: {milliseconds(best):.4f} ms")
        settings.PROGRAMS_PER_SM = usual


def main(arguments: list[str]) -> int:
    """0, or 2 for a bad argument or no GPU."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("head_dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--minutes", type=float, default=5, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        clock = CudaClock(COMMAND)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    cases = []
    for head_dim in args.head_dims:
        cases.append(("decode", Case(head_dim, (4096,) * 64)))
        cases.append(("prefill", Case(head_dim, (8192,), prefill=True)))
    needed = max(case.num_values(clock.l2_bytes) for _, case in cases)
    values = random_values(needed, DTYPE, clock.device)
    machine = where()["machine"]
    print(f"# {machine['gpu']}, triton {machine['triton']}, torch {machine['torch']}", flush=True)
    began = time.monotonic()
    for place, (kernel, case) in enumerate(cases, start=1):
        tune(clock, values, kernel, case, began + 60 * args.minutes * place / len(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
