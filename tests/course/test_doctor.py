"""The environment check: it passes here, and each check fails when it should."""

import argparse
import importlib.metadata
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from thorough import thorough_after

import minikv
from minikv.course.reader import doctor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton here (it is for Linux)"
)


@pytest.mark.thorough
@pytest.mark.again
@pytest.mark.parametrize(("name", "check"), [entry[:2] for entry in doctor.CHECKS])
def test_passes_here(name, check):
    result = check()
    assert result.status in ("ok", "skip"), result


def test_every_check_has_a_remedy_and_runs_after_a_crash(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    def crash():
        raise OSError("the disk is on fire")

    monkeypatch.setattr(
        doctor,
        "CHECKS",
        (
            ("first", crash, "call someone"),
            ("second", lambda: doctor.Finding("skip", "not today"), ""),
            ("third", lambda: doctor.Finding("FAIL", "no", "try yes"), ""),
            ("fourth", lambda: doctor.Finding("ok", "fine"), ""),
        ),
    )
    assert doctor.run(argparse.Namespace()) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  first     OSError: the disk is on fire",
        "                -> call someone",
        "skip  second    not today",
        "FAIL  third     no",
        "                -> try yes",
        "ok    fourth    fine",
        "",
        "2 of 4 checks failed.",
    ]


def test_exit_code_when_nothing_fails(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "CHECKS", (("gpu", lambda: doctor.Finding("skip", "none"), "buy one"),)
    )
    assert doctor.run(argparse.Namespace()) == 0
    assert capsys.readouterr().out == "skip  gpu       none\n\nReady.\n"


def test_old_python(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 4, "final", 0))
    result = doctor.check_python()
    assert result.status == "FAIL" and "3.10.4: want 3.11 or newer" in result.text


def test_packages_against_their_pins(monkeypatch):
    pins = [
        "torch==1.0",
        "pytest==" + importlib.metadata.version("pytest"),
        "no-such-package==2",
        "drawing==3; extra == 'course'",
        "testing==4; extra == 'test'",
        "other-system==1; platform_system == 'Plan 9'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: pins)
    result = doctor.check_packages()
    torch_version = importlib.metadata.version("torch")
    assert result.status == "FAIL"
    assert result.text.startswith(f"torch is {torch_version}, wanted ==1.0; ")
    assert result.text.endswith("; no-such-package is missing; drawing is missing")


def test_minikv_not_installed(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert doctor.check_packages() == (
        "FAIL",
        "minikv is not installed in this environment",
        "make setup",
    )


@pytest.mark.parametrize("wrong", thorough_after(1, [float("nan"), 1.01]))
def test_wrong_matrix_product(monkeypatch, wrong):
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: matmul(a, b) * wrong)
    result = doctor.check_torch()
    assert result.status == "FAIL" and "is off by" in result.text


@pytest.fixture
def stored_model(monkeypatch, tmp_path):
    """A model that gives token 3 with logit 1.5, whose engine then counts up from 3."""

    def write(**changes):
        golden = {
            "text": "ab",
            "token_ids": [1, 2],
            "next_token": 3,
            "next_logit": 1.5,
            "continuation": [3, 4, 5, 6, 7, 8, 9, 10],
        }
        (tmp_path / "golden.json").write_text(json.dumps(golden | changes))

    def logits(token_ids):
        return torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, 1.5]])

    def generate(prompts, params):
        return [SimpleNamespace(token_ids=list(range(3, 3 + params.max_tokens)))]

    monkeypatch.setattr(minikv, "BUNDLED", {"tinypy": tmp_path}, raising=False)
    monkeypatch.setattr(minikv, "load", lambda name: SimpleNamespace(logits=logits), raising=False)
    monkeypatch.setattr(minikv, "Engine", lambda lm: SimpleNamespace(generate=generate), False)
    monkeypatch.setattr(minikv, "SamplingParams", SimpleNamespace, raising=False)
    write()
    return write


def test_model_as_stored(stored_model):
    assert doctor.check_model().status == "ok"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"next_token": 2}, "tinypy gives token 3 with logit 1.5000, stored is 2 with 1.5000"),
        ({"next_logit": 1.52}, "stored is 3 with 1.5200"),
        ({"continuation": [3, 4, 5, 6, 7, 8, 9, 11]}, "the engine gives tokens [3, 4, 5"),
    ],
)
def test_model_not_as_stored(stored_model, changes, text):
    stored_model(**changes)
    result = doctor.check_model()
    assert result.status == "FAIL" and text in result.text


def test_model_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(minikv, "BUNDLED", {"tinypy": tmp_path}, raising=False)
    monkeypatch.setattr(doctor, "CHECKS", (("model", doctor.check_model, doctor.RESTORE),))
    assert doctor.run(argparse.Namespace()) == 1
    out = " ".join(capsys.readouterr().out.split())  # the lines are wrapped
    assert "FileNotFoundError" in out and "golden.json" in out and doctor.RESTORE in out


def test_no_triton_is_no_failure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor.check_triton().status == "skip"


@needs_triton
@pytest.mark.parametrize(
    ("probe", "text"),
    [
        ("print(2, 4096)", "2 of 4096 values differ from PyTorch"),
        ("import sys; sys.exit('line 1\\nKernelError: boom')", "interpreter: KernelError: boom"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_wrong_kernel(monkeypatch, probe, text):
    monkeypatch.setattr(doctor, "KERNEL_PROBE", probe)
    result = doctor.check_triton()
    assert result.status == "FAIL" and text in result.text


@pytest.mark.thorough
@needs_triton
def test_kernel_probe_sees_a_kernel_that_writes_nothing(monkeypatch):
    broken = doctor.KERNEL_PROBE.replace("\nwrite_cache(k", "\n(lambda *_: None)(k")
    assert broken != doctor.KERNEL_PROBE
    monkeypatch.setattr(doctor, "KERNEL_PROBE", broken)
    assert "of 4096 values differ" in doctor.check_triton().text


def test_no_gpu_is_no_failure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_gpu() == ("skip", "no CUDA device: no chapter needs one", "")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is there by name; `probe` holds what the compiled kernel gets wrong."""
    properties = SimpleNamespace(name="Some GPU", total_memory=8 * 2**30)
    state = SimpleNamespace(error=1e-5, probe="")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(doctor, "_matmul_error", lambda device: state.error)
    monkeypatch.setattr(doctor, "_kernel_probe", lambda device, interpret: state.probe)
    return state


@needs_triton
def test_gpu(gpu):
    result = doctor.check_gpu()
    assert result.status == "ok" and result.text.startswith("Some GPU, 8 GiB: ")
    gpu.probe = "no ptxas"
    assert "cache_write compiled: no ptxas" in doctor.check_gpu().text
    gpu.error = float("nan")
    result = doctor.check_gpu()
    assert result.status == "FAIL" and "off by nan" in result.text and "driver" in result.remedy


def test_a_kernelspec_of_another_environment(monkeypatch, tmp_path):
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho /elsewhere\n")
    other.chmod(0o755)
    argv = [str(other), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "Other", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    result = doctor.check_jupyter()
    assert result.status == "FAIL" and f"starts {other}, of /elsewhere" in result.text


@pytest.mark.parametrize("name", ["token", "torch", "mine"])
def test_a_readers_file_with_the_name_of_a_module_is_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / f"{name}.py").write_text("")
    result = doctor.check_jupyter()
    if name == "mine":
        assert result.status == "ok"
    else:
        assert result.status == "FAIL"
        assert f"{name}.py hides the module {name}" in result.text
