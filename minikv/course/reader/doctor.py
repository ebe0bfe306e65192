"""Does this machine run the course? `python -m minikv doctor` computes the answer.

One line per check: `ok` and what was computed, `skip` and why, or `FAIL`, why, and
what to do. A check that breaks does not stop the others.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from importlib.machinery import PathFinder
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

import minikv
from minikv.machine import numba_problem

OLDEST_PYTHON = (3, 11)

REINSTALL = "make clean setup; if it fails again, report the line above"
FIX_GPU = "update the NVIDIA driver, or hide the GPU: CUDA_VISIBLE_DEVICES= make lab"
RESTORE = "git status minikv: the engine or its bundled model is not as it was published"

# Writes a few tokens through the Triton kernel and through PyTorch, on the device
# named by the first argument, and prints how many values differ.
KERNEL_PROBE = """
import sys
import torch
from minikv_kernels.cache_write import write_cache, write_cache_reference

torch.manual_seed(0)
k, v = torch.randn(2, 6, 2, 64).to(sys.argv[1])
kv = torch.zeros(4, 4, 2, 2, 64).to(sys.argv[1])
expected = kv.clone()
slots = torch.tensor([3, 9, -1, 0, 15, 7]).to(sys.argv[1])
write_cache(k, v, kv, slots)
write_cache_reference(k, v, expected, slots)
print(int((kv != expected).sum()), kv.numel())
"""


class Finding(NamedTuple):
    status: str  # "ok", "skip" or "FAIL"
    text: str  # what was computed, or why not
    remedy: str = ""  # what to do about a FAIL


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return Finding("FAIL", f"{version}: want {oldest} or newer", "make clean setup PYTHON=...")
    return Finding("ok", f"{version}, {sys.executable}")


def check_packages() -> Finding:
    """What pyproject.toml wants for the engine and for the course, when it was installed."""
    from packaging.requirements import Requirement  # here, so that only this check fails without it

    try:
        lines = importlib.metadata.requires("minikv") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("FAIL", "minikv is not installed in this environment", "make setup")
    pins = [Requirement(line) for line in lines]
    course = {"extra": "course"}
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(course)]
    wrong = []
    for pin in pins:
        try:
            version = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{pin.name} is missing")
        else:
            if not pin.specifier.contains(version, prereleases=True):
                wrong.append(f"{pin.name} is {version}, wanted {pin.specifier}")
    if wrong:
        return Finding("FAIL", "; ".join(wrong), 'make setup, or pip install "minikv[course]"')
    return Finding("ok", f"{len(pins)} packages at versions that minikv works with")


def check_torch() -> Finding:
    error = _matmul_error("cpu")
    if not error < 1e-3:
        return Finding("FAIL", f"a float32 matrix product is off by {error:.1e}", REINSTALL)
    return Finding("ok", f"float32 matrix product within {error:.1e} of float64")


def check_compiler() -> Finding:
    """Compile the engine's step, so that no notebook has to."""
    problem = numba_problem()
    if problem:
        return Finding("skip", f"Numba does not work ({problem}): all runs, several times slower")
    started = perf_counter()
    engine = minikv.Engine(minikv.load("tinypy"), minikv.EngineConfig(attention="cpu"))
    engine.generate([list(range(1, 33))], minikv.SamplingParams(max_tokens=2))
    return Finding("ok", f"the step of the engine, in {perf_counter() - started:.1f} s")


def check_model() -> Finding:
    """The bundled model without a cache, then on the engine, against stored numbers."""
    golden = json.loads((minikv.BUNDLED["tinypy"] / "golden.json").read_text())
    lm = minikv.load("tinypy")
    logit, token = lm.logits(golden["token_ids"])[-1].max(dim=-1)
    if int(token) != golden["next_token"] or not abs(logit - golden["next_logit"]) < 1e-2:
        return Finding(
            "FAIL",
            f"tinypy gives token {int(token)} with logit {float(logit):.4f}, "
            f"stored is {golden['next_token']} with {golden['next_logit']:.4f}",
            RESTORE,
        )
    params = minikv.SamplingParams(max_tokens=len(golden["continuation"]))
    tokens = list(minikv.Engine(lm).generate([golden["text"]], params)[0].token_ids)
    if tokens != golden["continuation"]:
        return Finding(
            "FAIL", f"the engine gives tokens {tokens}, stored is {golden['continuation']}", RESTORE
        )
    return Finding(
        "ok", f"tinypy: logit {float(logit):.4f}, then {len(tokens)} engine tokens, all as stored"
    )


def check_triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("skip", "no Triton here (it is for Linux): all but chapter 08 runs")
    wrong = _kernel_probe("cpu", interpret="1")
    if wrong:
        return Finding("FAIL", f"cache_write in the interpreter: {wrong}", REINSTALL)
    return Finding("ok", "cache_write in the interpreter equals PyTorch")


def check_gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("skip", "no CUDA device: no chapter needs one")
    properties = torch.cuda.get_device_properties(0)
    device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    error = _matmul_error("cuda")
    if not error < 1e-3:
        return Finding("FAIL", f"{device}: a float32 matrix product is off by {error:.1e}", FIX_GPU)
    if importlib.util.find_spec("triton") is None:
        return Finding("ok", f"{device}: matrix product within {error:.1e}; no Triton to compile")
    wrong = _kernel_probe("cuda", interpret="0")
    if wrong:
        return Finding("FAIL", f"{device}: cache_write compiled: {wrong}", FIX_GPU)
    return Finding("ok", f"{device}: matrix product within {error:.1e}, cache_write compiled")


def check_jupyter() -> Finding:
    """Does a notebook run in this environment, or in another one, and find its modules?"""
    from jupyter_client.manager import KernelManager  # here, for the same reason

    python = KernelManager(kernel_name="python3").format_kernel_cmd()[0]
    prefix = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    if prefix != sys.prefix:
        return Finding(
            "FAIL",
            f"the notebook kernel python3 starts {python}, of {prefix or 'no environment'}",
            f"{sys.executable} -m ipykernel install --sys-prefix, and unset JUPYTER_PATH",
        )
    elsewhere = [place for place in sys.path if place and Path(place) != Path.cwd()]
    for file in sorted(Path("notebooks").glob("*.py")):  # which a notebook imports before others
        if file.stem in sys.stdlib_module_names or PathFinder.find_spec(file.stem, elsewhere):
            return Finding("FAIL", f"{file} hides the module {file.stem} from notebooks",
                          "give your file another name")  # fmt: skip
    return Finding("ok", "the notebook kernel python3 runs in this environment")


# Name, check, and what to do when the check itself breaks.
CHECKS = (
    ("python", check_python, REINSTALL),
    ("packages", check_packages, REINSTALL),
    ("torch", check_torch, REINSTALL),
    ("compiler", check_compiler, REINSTALL),
    ("model", check_model, RESTORE),
    ("triton", check_triton, REINSTALL),
    ("gpu", check_gpu, FIX_GPU),
    ("jupyter", check_jupyter, REINSTALL),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__


def run(args: argparse.Namespace) -> int:
    """Print one line per check; 0 when none failed, else 1."""
    failed = 0
    for name, check, remedy in CHECKS:
        try:
            result = check()
        except Exception as error:
            result = Finding("FAIL", f"{type(error).__name__}: {error}", remedy)
        print(_line(f"{result.status:4}  {name:8}  ", result.text), flush=True)
        if result.status == "FAIL":
            failed += 1
            print(_line(f"{'':16}-> ", result.remedy), flush=True)
    print(f"\n{failed} of {len(CHECKS)} checks failed." if failed else "\nReady.")
    return 1 if failed else 0


def _line(before: str, text: str) -> str:
    """`text` behind `before`, in lines as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        text, width, initial_indent=before, subsequent_indent=" " * 16,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _matmul_error(device: str) -> float:
    """Largest error of one float32 matrix product, measured against NumPy in float64."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 512, generator=generator)
    b = torch.randn(512, 128, generator=generator)
    product = torch.matmul(a.to(device), b.to(device)).cpu()
    return float(abs(product.numpy() - a.double().numpy() @ b.double().numpy()).max())


def _kernel_probe(device: str, interpret: str) -> str:
    """What is wrong with the cache-write kernel on `device`; empty when nothing is.

    In a process of its own: `TRITON_INTERPRET` counts only before triton is imported.
    """
    probe = subprocess.run(
        [sys.executable, "-c", KERNEL_PROBE, device],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if probe.returncode != 0:
        return probe.stderr.strip().rpartition("\n")[2] or f"exit code {probe.returncode}"
    wrong, total = map(int, probe.stdout.split())
    return f"{wrong} of {total} values differ from PyTorch" if wrong else ""
