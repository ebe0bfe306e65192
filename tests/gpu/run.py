"""All that a GPU can show of minikv, in eight minutes, on a bare machine.

    make gpu                                  or: python3 tests/gpu/run.py
    python3 tests/gpu/run.py --part steps     one part alone, its rows on the screen

Nothing is installed: torch, Triton, transformers and pytest are enough. Each part is a process with
a limit of its own, the most telling part first. A part that fails or takes too long stops none
of the others. Every row is in gpu.json as soon as it is measured, and everything that a part prints
is in gpu.log: in the folder that the variable OUT names, or in build/gpu.

Without a CUDA GPU the same parts run at tiny sizes, by the host's clock, so that no minute of a GPU
is spent on an error of this file. Such rows say "rehearsal", and no time in them counts.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"tests": 150, "kernels": 90, "steps": 100, "transformers": 75, "notebook": 55}  # seconds
TESTS = ["tests/gpu/test_on_cuda.py", "tests/gpu/test_ahead_and_graphs.py", "tests/kernels"]
QUICK = ["tests/gpu/test_ahead_and_graphs.py", "-k", "buffers_hold or tokens_reach"]
NOTEBOOK = "notebooks/08_triton_paged_attention.ipynb"
SKIPPED = 5  # how a part ends that cannot run here, after a row that says why
ROW = "ROW "  # begins a line that is a row in JSON
SEED_CLAIM = 1990  # tokens/s, said of a 1B Llama on one GPU, without its batch
# What a reader answers, and what measures all chapters, is not for a GPU.
LEFT_OUT = r"^(check|hint|why|diff|closing|ladder)\("


def main() -> int:
    parser = argparse.ArgumentParser(description="What a GPU can show of minikv.")
    parser.add_argument("--part", choices=LIMITS)
    parser.add_argument("--seconds", type=float, default=sum(LIMITS.values()), help="for all parts")
    chosen = parser.parse_args()
    if chosen.part:
        PARTS[chosen.part]()
        return 0
    return run_all(Path(os.environ.get("OUT") or ROOT / "build" / "gpu"), chosen.seconds)


def run_all(out: Path, seconds: float) -> int:
    """Every part in a process of its own. Returns 1 if one has not passed."""
    out.mkdir(parents=True, exist_ok=True)
    file, result = out / "gpu.json", {"parts": {}}
    environment = {**os.environ, "PYTHONPATH": path_of_kernels(out), "PYTHONUNBUFFERED": "1"}
    with (out / "gpu.log").open("w") as log:
        for name, limit in LIMITS.items():
            began, limit = time.monotonic(), limit * seconds / sum(LIMITS.values())
            part = result["parts"][name] = {"state": "running", "rows": []}
            command = [sys.executable, __file__, "--part", name]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            late = threading.Timer(limit, end_group, [process])
            late.start()
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                if line.startswith(ROW):
                    row = json.loads(line.removeprefix(ROW))
                    print(f"{name:13}", *(f"{k}: {v}" for k, v in row.items()), sep="  ")
                    part["rows"].append(row)
                    write(file, result)
                part["last"] = line.strip()[:300] or part.get("last", "")
            code = process.wait()
            end_group(process)  # what it started, if it has died itself
            stopped = late.finished.is_set() and code < 0
            late.cancel()
            state = {0: "passed", SKIPPED: "skipped"}.get(code, "failed")
            part["state"] = "stopped by its limit" if stopped else state
            part["seconds"] = round(time.monotonic() - began, 1)
            if state != "failed":
                part.pop("last", None)
            write(file, result)
            print(f"{name:13}  {part['state']} after {part['seconds']} s", flush=True)
    print(f"{file}\n{out / 'gpu.log'}")
    return int(any(part["state"] not in ("passed", "skipped") for part in result["parts"].values()))


def path_of_kernels(out: Path) -> str:
    """What makes a checkout importable that is not installed: `kernels/` has another name there."""
    alias = out / "alias"
    alias.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (alias / "minikv_kernels").symlink_to(ROOT / "kernels")
    return os.pathsep.join(filter(None, [str(alias), str(ROOT), os.environ.get("PYTHONPATH")]))


def end_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


def write(file: Path, content: dict) -> None:
    """Whole or not at all."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)


def tell(**row) -> None:
    """On a line of its own: a bar of progress may stand on this one."""
    sys.stdout.write(f"\n{ROW}{json.dumps(row)}\n")
    sys.stdout.flush()


# ── The parts ─────────────────────────────────────────────────────────────────


def tests() -> None:
    """Each file in a process of its own, all at once: most of the time is compiling."""
    from minikv.course.bench.harness import environment

    tell(**environment())
    files = [path for name in TESTS for path in sorted(ROOT.glob(f"{name}/test_*.py")) or [name]]
    chosen = [[str(file)] for file in files] if on_gpu() else [QUICK]
    plain = (
        "--import-mode=importlib --strict-markers"  # what pyproject.toml asks for, without nbval
    )
    command = [sys.executable, "-m", "pytest", "-o", f"addopts={plain}", "-q", "-rf", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-m", "not thorough"]
    started = {
        Path(files_[0]).name: subprocess.Popen(
            [*command, *files_],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for files_ in chosen
    }
    codes = []
    for name, process in started.items():
        said, _ = process.communicate()
        print(said, flush=True)
        failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        tell(file=name, said=said.strip().splitlines()[-1], failed=failed)
        codes.append(process.returncode)
    sys.exit(max(codes))


def kernels() -> None:
    """The rates of kernels, as shares of a measured copy."""
    from minikv.course.bench import gpu, gpu_clock

    clock, repeats = measuring()
    gpu.add_kernels(Told("kernels", repeats), clock, gpu_clock.Copy(clock.device))


def steps() -> None:
    """Decode steps as shares of the roofline; then the smallest batch that meets the claim."""
    from minikv.course.bench import gpu, gpu_clock
    from minikv.course.bench.random_model import random_model

    clock, repeats = measuring()
    lm, size = random_model(**gpu.SHAPE, device=clock.device, dtype=gpu_clock.DTYPE)
    table, copy = Told("steps", repeats), gpu_clock.Copy(clock.device)
    gpu.add_steps(table, clock, copy, lm, size, gpu.GOALS, gpu.DecodeSteps())
    for batch in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
        [(seconds, _)] = gpu.decode_rounds(lm, batch, gpu.DecodeSteps(), 1)
        rate = batch * gpu.DecodeSteps().steps / seconds
        tell(claim=f"{SEED_CLAIM:,} tokens/s", batch=batch, tokens_per_s=round(rate, 1))
        if rate >= SEED_CLAIM or not on_gpu():
            break


def transformers() -> None:
    """`generate` and `generate_batch` at the model and the contexts of `steps`."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from minikv.course.bench import gpu

    device, shape, sizes = measuring(kernels=False)[0].device, gpu.SHAPE, gpu.DecodeSteps()
    config = LlamaConfig(
        num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"], max_position_embeddings=shape["max_context"],
        **{name: shape[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        head_dim=64, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    length, few, many = sizes.context - sizes.steps // 2, 1, 1 + sizes.steps

    def generation(tokens):
        return GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def generate(ids, tokens):
        model.generate(ids, generation_config=generation(tokens))

    def generate_batch(ids, tokens):
        per_request = -(-(length + many) // 16)
        room = ContinuousBatchingConfig(
            block_size=16, num_blocks=len(ids) * per_request + 64,
            max_batch_tokens=max(sizes.batch_tokens, len(ids)),
        )  # fmt: skip
        model.generate_batch(
            ids.tolist(), generation_config=generation(tokens), progress_bar=False,
            continuous_batching_config=room,
        )  # fmt: skip

    for call in (generate, generate_batch):
        for batch in gpu.GOALS:
            ids = torch.randint(1, shape["vocab_size"], (batch, length), device=device)
            try:
                rate = batch * (many - few) / decoding(call, ids, few, many)
            except Exception as error:  # the other batches, and the other call, are still told
                tell(transformers=call.__name__, batch=batch, error=repr(error)[:300])
            else:
                tell(transformers=call.__name__, batch=batch, tokens_per_s=round(rate, 1))


def decoding(call, ids, few, many) -> float:
    """Seconds that the tokens between `few` and `many` take: prefill is in both calls."""

    def seconds(tokens):
        began = time.perf_counter()
        call(ids, tokens)  # returns tokens to the host, so it has waited for the GPU
        return time.perf_counter() - began

    call(ids, few)
    return min(seconds(many) for _ in range(2)) - min(seconds(few) for _ in range(2))


def notebook() -> None:
    """Chapter 08's cells in order, without Jupyter: what a GPU changes is in the log."""
    interpreter()
    cells, names, failed = json.loads((ROOT / NOTEBOOK).read_text())["cells"], {}, 0
    for number, cell in enumerate(cells):
        code = "".join(cell["source"])
        if cell["cell_type"] != "code" or re.search(LEFT_OUT, code, re.MULTILINE):
            continue
        print(f"── cell {number}", flush=True)
        try:
            exec(compile(code, f"{NOTEBOOK} cell {number}", "exec"), names)
        except ModuleNotFoundError as error:
            tell(cell=number, skipped=f"{error.name} is not installed")
        except Exception as error:
            failed += 1
            tell(cell=number, error=repr(error)[:300])
    tell(cells_failed=failed)
    sys.exit(bool(failed))


PARTS = {each.__name__: each for each in (tests, kernels, steps, transformers, notebook)}


# ── What they share ───────────────────────────────────────────────────────────


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def measuring(kernels=True):
    """A clock and a number of repeats: the benchmark's on a GPU, else the host's and tiny sizes."""
    from minikv.course.bench import gpu, gpu_clock

    if on_gpu():
        clock, repeats = gpu_clock.CudaClock("make gpu"), 3
        copy = gpu_clock.Copy(clock.device)
        rates = [copy.rate(clock) / 1e9 for _ in range(repeats)]
        tell(copy_gb_per_s=[round(rate, 1) for rate in rates])
        return clock, repeats
    tell(rehearsal="no CUDA GPU here: tiny sizes, and times that mean nothing")
    gpu.SHAPE = dict(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2,
        num_kv_heads=1, max_context=64,
    )  # fmt: skip
    gpu.GOALS, usual = {1: 0, 2: 0}, gpu.DecodeSteps
    gpu.DecodeSteps = lambda: usual(context=20, steps=2, warm_up=1, batch_tokens=40)
    if kernels:
        interpreter()
        from minikv.course.bench import gpu_kernels

        gpu_kernels.LAUNCHES, gpu_clock.COPIED, gpu_clock.SIDE = 1, 4096, 16
        tiny = gpu_kernels.Case(16, (40, 40), block_size=16, num_heads=4, num_kv_heads=2)
        gpu_kernels.CASES, gpu_kernels.OVER = {"decode": (tiny, None)}, {}
    return HostClock(), 1


def interpreter():
    """Without a GPU kernels are interpreted. Ends this part where that cannot be."""
    from importlib.metadata import version

    triton, numpy = (version(package) for package in ("triton", "numpy"))
    old, new = (tuple(map(int, one.split(".")[:2])) for one in (triton, numpy))
    if not on_gpu() and old < (3, 7) and new >= (2, 4):
        why = f"Triton {triton} cannot interpret loops with NumPy {numpy}; a GPU compiles them"
        tell(skipped=why)
        sys.exit(SKIPPED)


class HostClock:
    """Stands in for `CudaClock` where there is no GPU."""

    l2_bytes = 4000

    def __init__(self):
        import torch

        self.device = torch.device("cpu")

    def free_bytes(self):
        return 10**12

    def captured(self, work):
        return work

    def seconds(self, work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def Told(title, repeats):
    """A table of a benchmark whose rows are told as they come."""
    from minikv.course.bench.harness import BenchTable

    class Rows(BenchTable):
        def add(self, row, goal=None):
            super().add(row, goal)
            tell(**self.as_json()["rows"][-1])

    return Rows(title, repeats)


if __name__ == "__main__":
    sys.exit(main())
