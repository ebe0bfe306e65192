"""`make gpu` on a machine without a GPU: each part runs at a tiny size, or says why it cannot."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("run.py")
PARTS = """
import sys, threading
part = sys.argv[-1]
print("said by", part)
if part == "fails":
    raise ValueError("no such kernel")
if part == "hangs":
    print('ROW {"half": 1}', flush=True)
    threading.Event().wait()
print('ROW {"whole": 2}')
sys.exit(5 if part == "cannot" else 0)
"""


@pytest.fixture
def run():
    spec = importlib.util.spec_from_file_location("gpu_run", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_part_that_fails_or_hangs_stops_no_other(run, monkeypatch, tmp_path):
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    monkeypatch.setattr(run, "__file__", str(file))
    monkeypatch.setattr(run, "LIMITS", {"fails": 600, "hangs": 3, "cannot": 600, "works": 600})
    assert run.run_all(tmp_path / "out", 1803) == 1
    parts = json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {
        "fails": "failed", "hangs": "stopped by its limit", "cannot": "skipped", "works": "passed",
    }  # fmt: skip
    assert parts["fails"]["last"] == "ValueError: no such kernel"
    assert parts["works"]["rows"] == parts["cannot"]["rows"] == [{"whole": 2}]
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert all(f"said by {name}" in log for name in ("fails", "cannot", "works"))


@pytest.mark.thorough
def test_every_part_runs_here(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(FILE), "--seconds", "20000"]  # forty times as long as on a GPU
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu.log").read_text()[-4000:]
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {part["state"] for part in parts.values()} == {"passed"}
    rows = [row for part in parts.values() for row in part["rows"]]
    assert sum("tokens_per_s" in row and "transformers" in row for row in rows) == 4
    assert any(row.get("of") == "the copy's rate" for row in rows)
    assert any(row.get("of") == "the roofline" for row in rows)
    assert any("claim" in row for row in rows) and {"cells_failed": 0} in rows
