"""The files that other places read: Binder, Codespaces, Docker, a hub."""

import json
import re
import stat
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import minikv

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PINNED = [ROOT / "constraints.txt", ROOT / "docs/teaching/hub/requirements.txt"]


def pins(file):
    return re.findall(r"^([\w.-]+)==(\S+?);?(?:\s|$)", file.read_text(encoding="utf-8"), re.M)


def requirements(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and line[0] not in "#-"]


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == minikv.__version__


def test_everything_is_pinned_once():
    names = [pin.name for file in PINNED for pin in requirements(file)]
    assert len(names) == len(set(names)) == sum(len(pins(file)) for file in PINNED)


def test_the_pins_fit_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    asked = {one.name: one for one in map(Requirement, lines) if one.name != "minikv"}
    pinned = dict(pins(ROOT / "constraints.txt"))
    assert asked.keys() == pinned.keys()
    wrong = [f"{one}, but constraints.txt has {pinned[one.name]}" for one in asked.values()
             if pinned[one.name] not in one.specifier]  # fmt: skip
    assert wrong == []
    own, *others = extras["course"]
    assert own == "minikv[serve]"
    needed = [*project["dependencies"], *extras["serve"], *others]
    course = [Requirement(line).name for line in needed]
    first, *others = requirements(ROOT / "requirements.txt")
    assert [first.name, *(one.name for one in others)] == course
    assert str(first) == f"torch=={pinned['torch']}", "a range brings gigabytes: first and exact"
    assert not any(one.specifier for one in others)


def test_every_place_has_the_same_python():
    binder = (ROOT / "binder" / "runtime.txt").read_text().strip()
    devcontainer = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    version = re.search(r"^FROM python:([\d.]+)-", DOCKERFILE, re.M)[1]
    assert binder == f"python-{version}" and f"python:{version}-" in devcontainer["image"]


def test_what_they_name_is_there():
    assert "COPY requirements.txt constraints.txt ./\n" in DOCKERFILE
    assert "-r ../requirements.txt\n" in (ROOT / "binder" / "requirements.txt").read_text()
    for name in ("postBuild", "start"):
        assert (ROOT / "binder" / name).stat().st_mode & stat.S_IXUSR


def test_the_image_has_the_hubs_version():
    hub = dict(pins(ROOT / "docs" / "teaching" / "hub" / "requirements.txt"))
    assert f"ARG JUPYTERHUB={hub['jupyterhub']}\n" in DOCKERFILE
