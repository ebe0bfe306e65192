"""The files that other places read: Binder, Codespaces, Docker, a hub."""

import json
import re
import stat
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
REQUIREMENTS = sorted(
    [*ROOT.glob("requirements*.txt"), ROOT / "docs/teaching/hub/requirements.txt"]
)


def pins(file):
    return re.findall(r"^([\w.-]+)==(\S+?);?(?:\s|$)", file.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_requirements_are_pinned_once(file):
    lines = [line for line in file.read_text().splitlines() if line and line[0] not in "#-"]
    assert len(pins(file)) == len(lines)
    others = [name for other in REQUIREMENTS if other != file for name, _ in pins(other)]
    assert not {name for name, _ in pins(file)} & set(others)


def test_every_place_has_the_same_python():
    binder = (ROOT / "binder" / "runtime.txt").read_text().strip()
    devcontainer = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    version = re.search(r"^FROM python:([\d.]+)-", DOCKERFILE, re.M)[1]
    assert binder == f"python-{version}" and f"python:{version}-" in devcontainer["image"]


def test_what_they_name_is_there():
    copied = re.search(r"^COPY (requirements.*) \./$", DOCKERFILE, re.M)[1].split()
    included = re.findall(
        r"^-r \.\./(\S+)$", (ROOT / "binder" / "requirements.txt").read_text(), re.M
    )
    assert copied == included and all((ROOT / name).exists() for name in copied)
    for name in ("postBuild", "start"):
        assert (ROOT / "binder" / name).stat().st_mode & stat.S_IXUSR


def test_the_image_has_the_hubs_version():
    hub = dict(pins(ROOT / "docs" / "teaching" / "hub" / "requirements.txt"))
    assert f"ARG JUPYTERHUB={hub['jupyterhub']}\n" in DOCKERFILE
