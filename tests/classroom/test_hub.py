"""The example of a JupyterHub, with two students, as processes of this machine.

Needs jupyterhub, its idle culler and configurable-http-proxy beside our packages; without them
it is skipped. docs/teaching/CLASS.md says how to run it.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from chromium import needs_browser
from waiting import until

from minikv.course.exercise_data.manifest import chapter_of

pytest.importorskip("jupyterhub", reason="jupyterhub is not installed here: make test-class")
pytest.importorskip(
    "jupyterhub_idle_culler", reason="its idle culler is not installed here: make test-class"
)
if shutil.which("configurable-http-proxy") is None:
    pytest.skip("configurable-http-proxy is not installed here", allow_module_level=True)

CONFIG = Path(__file__).parents[2] / "docs" / "teaching" / "hub" / "jupyterhub_config.py"
FILE = f"exercises/{chapter_of('04').file_name}"
LIMIT = 300  # seconds for a server to start, on a busy machine


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Hub:
    def __init__(self, folder):
        self.folder, self.token = folder, secrets.token_hex(16)
        self.address = f"http://127.0.0.1:{free_port()}"
        command = [
            sys.executable, "-m", "jupyterhub", "-f", str(CONFIG),
            f"--JupyterHub.hub_port={free_port()}",
            f"--ConfigurableHTTPProxy.api_url=http://127.0.0.1:{free_port()}",
        ]  # fmt: skip
        mine = {
            "MINIKV_HUB": "local",
            "MINIKV_HUB_DATA": str(folder),
            "MINIKV_HUB_URL": self.address,
            "MINIKV_HUB_TOKEN": self.token,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        if lab := shutil.which("jupyter-lab"):  # in the environment that this one borrows from
            home = Path(lab).parents[1]
            mine |= {
                "JUPYTER_CONFIG_PATH": str(home / "etc" / "jupyter"),
                "JUPYTERLAB_DIR": str(home / "share" / "jupyter" / "lab"),
            }
        self.log = (folder / "hub.log").open("w")
        self.process = subprocess.Popen(
            command, cwd=folder, env=os.environ | mine, stdout=self.log, stderr=self.log,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, path, method="GET", body=None, token=None):
        """The answer of the hub's API or of a server's, as JSON; an HTTP status if it refuses."""
        request = Request(f"{self.address}{path}", method=method)
        request.add_header("Authorization", f"token {token or self.token}")
        try:
            with urlopen(request, None if body is None else json.dumps(body).encode()) as answer:
                return json.loads(answer.read() or "null")
        except HTTPError as error:
            return error.code

    def until(self, done, what):
        def found():
            assert self.process.poll() is None, "the hub has ended"
            with suppress(URLError, ConnectionError):
                return done()

        try:
            return until(found, LIMIT)
        except AssertionError as error:
            log = (self.folder / "hub.log").read_text()
            raise AssertionError(f"{what}: {error}\n{log[-3000:]}") from None

    def ready(self, user):
        found = self.ask(f"/hub/api/users/{user}")
        return isinstance(found, dict) and found["servers"].get("", {}).get("ready", False)

    def start(self, user):
        self.ask(f"/hub/api/users/{user}", "POST")

        def asked_again():  # a server that is just being stopped cannot be started
            self.ask(f"/hub/api/users/{user}/server", "POST")
            return self.ready(user)

        self.until(asked_again, f"the server of {user}")

    def file(self, user, path, **more):
        return self.ask(f"/user/{user}/api/contents/{path}", **more)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    hub = Hub(tmp_path_factory.mktemp("hub"))
    try:
        hub.until(lambda: isinstance(hub.ask("/hub/api/"), dict), "the hub")
        for user in ("ada", "ben"):
            hub.start(user)
        yield hub
    finally:
        os.killpg(hub.process.pid, signal.SIGTERM)
        try:
            hub.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(hub.process.pid, signal.SIGKILL)


def test_each_student_has_a_course_of_their_own(hub):
    mine = {"type": "file", "format": "text", "content": "# Ada's\n"}
    assert hub.file("ada", FILE, method="PUT", body=mine)["name"]
    assert hub.file("ada", FILE)["content"] == "# Ada's\n"
    assert "Exercise 04.1" in hub.file("ben", FILE)["content"]
    assert hub.file("ben", "notebooks/00_start_here.ipynb?content=0")["type"] == "notebook"


def test_one_student_cannot_reach_the_others_server(hub):
    own = hub.ask("/hub/api/users/ben/tokens", "POST", {})["token"]
    assert isinstance(hub.file("ben", FILE, token=own), dict)
    assert hub.file("ada", FILE, token=own) == 403


def log_in(hub, browser, user):
    """A page of a browser of their own, with what they see first."""
    context = browser.new_context()
    context.set_default_timeout(1000 * LIMIT)
    page = context.new_page()
    page.goto(hub.address)
    page.locator("#username_input").fill(user)
    page.locator("#password_input").fill("any: the example's authenticator is for trying it")
    page.locator("#login_submit").click()
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    return page


@needs_browser("nobody has logged in to the hub")
def test_two_students_log_in_and_run_a_cell(hub, browser):
    hub.file("ada", "adas.txt", method="PUT", body={
        "type": "file", "format": "text", "content": "not Ben's business",
    })  # fmt: skip
    for user, other in (("ada", "ben"), ("ben", "ada")):
        page = log_in(hub, browser, user)
        start = f"{hub.address}/user/{user}/lab/tree/notebooks/00_start_here.ipynb"
        assert page.url.partition("?")[0] == start
        # The first cell whose code is not folded: it imports the course.
        cell = page.locator(".jp-CodeCell").filter(has_text="ladder(here=0)")
        # JupyterLab drops what is run before its kernel is there.
        page.locator("#jp-main-statusbar").get_by_text("Idle").wait_for()
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Home")
        page.keyboard.type("print(6 * 700)\n")  # what is stored has no such output
        page.keyboard.press("Shift+Enter")
        cell.locator(".jp-OutputArea-output", has_text="4200").wait_for()
        cell.locator(".jp-OutputArea-output", has_text="you are here").first.wait_for()
        own = page.request.get(f"{hub.address}/user/{user}/api/contents/")
        names = {entry["name"] for entry in own.json()["content"]}
        assert {"notebooks", "exercises"} <= names and ("adas.txt" in names) == (user == "ada")
        others = page.request.get(f"{hub.address}/user/{other}/api/contents/adas.txt")
        assert others.status == 403 and "business" not in others.text()
        page.context.close()


def test_the_engine_runs_in_a_students_kernel(hub):
    websocket = pytest.importorskip("websocket")
    kernel = hub.ask("/user/ada/api/kernels", "POST", {"path": "notebooks/00_start_here.ipynb"})[
        "id"
    ]
    code = "import minikv; lm = minikv.load('tinypy'); print(lm.generate_naively([1, 2], 3))"
    address = f"{hub.address}/user/ada/api/kernels/{kernel}/channels".replace("http", "ws", 1)
    line = websocket.create_connection(
        address, header=[f"Authorization: token {hub.token}"], timeout=LIMIT
    )
    header = {"msg_id": "1", "msg_type": "execute_request", "username": "", "session": "1",
              "version": "5.3"}  # fmt: skip
    content = {"code": code, "silent": False, "store_history": False, "user_expressions": {},
               "allow_stdin": False}  # fmt: skip
    line.send(json.dumps({"header": header, "parent_header": {}, "metadata": {}, "content": content,
                          "channel": "shell", "buffers": []}))  # fmt: skip
    printed, reply = "", {}
    while not reply or (reply["status"] == "ok" and not printed):  # they come by two sockets
        message = json.loads(line.recv())
        printed += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
        reply = message["content"] if message["msg_type"] == "execute_reply" else reply
    line.close()
    assert reply["status"] == "ok", reply
    assert len(json.loads(printed)) == 3
    hub.ask(f"/user/ada/api/kernels/{kernel}", "DELETE")


def test_an_idle_server_is_stopped_and_its_files_stay(hub):
    """By the culler that the hub runs, with a shorter time."""
    command = [sys.executable, "-m", "jupyterhub_idle_culler", f"--url={hub.address}/hub/api"]
    culler = subprocess.Popen(
        [*command, "--timeout=1", "--cull-every=5"],
        env=os.environ | {"JUPYTERHUB_API_TOKEN": hub.token}, stderr=hub.log,
    )  # fmt: skip
    try:
        hub.until(lambda: not hub.ready("ada"), "the culler")
    finally:
        culler.terminate()
        culler.wait(60)
    hub.start("ada")
    assert hub.file("ada", FILE)["content"] == "# Ada's\n"
