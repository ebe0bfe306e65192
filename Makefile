# make lab     set up, check the machine, open JupyterLab on the first notebook
#              make lab ROUTE=weekend also chooses a shorter route: weekend, course or everything
# make test    set up if needed, then test the course and the engine; make test-all: all there is
# make site    the course as pages for a browser, in build/site
#
# All need Python 3.11 or newer, make and git, and install into .venv (the site: .venv-site) alone.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
CHECKED := .venv/checked
TRUSTED := .venv/trusted
PINS := -c constraints.txt
# Nothing is compiled in advance: Python does that when it first imports a file, and of the 17,000
# that come along few ever are.
INSTALL := -m pip --disable-pip-version-check install --no-compile
PIP := $(BIN)/python $(INSTALL)
# Where PyTorch itself publishes builds without CUDA, which are much smaller.
TORCH_CPU := https://download.pytorch.org/whl/cpu
NOTEBOOK := notebooks/00_start_here.ipynb
NOTEBOOKS := notebooks/*.ipynb
SITE := .venv-site
PYTEST := $(BIN)/python -m pytest --durations=5
# Processes begin and end sooner with what stands in this folder.
QUICK := $(CURDIR)/tests/quick
PARALLEL := --numprocesses=auto --no-loadscope-reorder
NBVAL := --nbval --nbval-current-env

# A .venv points at the folder it was made in. One that came along with a copied
# checkout would run the code of the other place, so it is made again.
ifeq ($(shell $(BIN)/python -c 'import pip' 2>&1; grep -csF ' $(CURDIR)/.venv' .venv/pyvenv.cfg),1)
HAVE_VENV := yes
endif

# Many container images set this. Then every process compiles torch, transformers and the rest anew
# (pip left that to the first import, above): four seconds of processor time each.
unexport PYTHONDONTWRITEBYTECODE

# torch's threads spin while they wait for each other. On a machine that is busy with something
# else that can make a step tens of times slower. Asleep, they wait at little cost.
export OMP_WAIT_POLICY ?= PASSIVE

# Opens the notebook by its address, so that the file browser shows the whole course. Control-C
# ends it without a question.
LAB := $(BIN)/jupyter lab --log-level=ERROR --LabApp.log_level=ERROR -y \
	--KernelManager.transport_encryption=auto --LabApp.news_url=None \
	--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
	--LabApp.default_url=/lab/tree/$(NOTEBOOK)
ifeq ($(shell id -u),0)
LAB += --allow-root
endif
ifeq ($(DISPLAY)$(WAYLAND_DISPLAY)$(filter Darwin,$(shell uname)),)
HEADLESS := yes
endif

# Prints pip's option for a torch without CUDA: on Linux without an NVIDIA driver, if PyTorch's own
# index answers. Otherwise nothing, and pip takes what its usual index has.
define FIND_CPU_BUILD
[ "$$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null \
	&& $(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(TORCH_CPU)/torch/", timeout=5)' \
	2> /dev/null && echo --extra-index-url $(TORCH_CPU)
endef

.PHONY: help setup lab test test-all units test-class test-site test-install test-delays \
	test-elsewhere wheel lint doctor environment notebooks site slides gpu clean

help:
	@echo "make lab        set up, check the machine, open JupyterLab on the first notebook"
	@echo "make lab ROUTE=weekend  the same on a shorter route: weekend, course or everything"
	@echo "make test       set up if needed, then lint, unit and property tests, notebooks, a browser"
	@echo "make test-all   that, every known mistake, long random programs, faults, and the three below"
	@echo "make setup      only make .venv and install into it"
	@echo "make lint       ruff over Python files and notebooks, mypy over the package and the kernels"
	@echo "make test CHAPTER=05  the tests of one chapter alone: its exercises and its notebook"
	@echo "make test-class    nbgrader and clients of the server, in environments of their own"
	@echo "make test-site     build the pages and the slides, and look at them in a browser"
	@echo "make test-install  the wheel, Colab's and Binder's steps, each in an empty environment: slow"
	@echo "make site       build the pages of the course in build/site; KEYS=1 with exam and answers"
	@echo "make slides     build a deck per chapter in build/slides; PLAN=six_weeks or a file says what is due"
	@echo "make notebooks  run every notebook, or that of CHAPTER=05, and store its outputs in place"
	@echo "make wheel      build what pip installs, in dist"
	@echo "make gpu        what a CUDA GPU shows: tokens, kernels, decode steps, in eight minutes"
	@echo "make clean      remove .venv and every cache"

setup: $(STAMP)

ifndef HAVE_VENV
.PHONY: $(STAMP)
endif
$(STAMP): constraints.txt pyproject.toml
ifndef HAVE_VENV
	@echo "== Making .venv with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "minikv needs Python 3.11 or newer, and '$(PYTHON)' is not." \
			"Name another one at the end of your line: PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -m venv --clear .venv || { \
		echo "$(PYTHON) could not make .venv: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
endif
	@echo "== Installing torch, the largest download: this takes some minutes"
	@$(PIP) $$($(FIND_CPU_BUILD)) "$$(grep '^torch==' constraints.txt)"
	@echo "== Installing this checkout and the rest: this takes some minutes, too"
	@$(PIP) --quiet $(PINS) --editable ".[course,test]"
	@# mypy does not follow pip's way to a folder of another name.
	@mkdir -p .venv/alias && ln -sfn ../../kernels .venv/alias/minikv_kernels
	@# JupyterLab asks newcomers about news and updates, over the first page. Not here.
	@$(BIN)/jupyter labextension disable --log-level=ERROR \
		"@jupyterlab/apputils-extension:announcements"
	@touch $@

# Once they have passed, the checks run again only when something was installed since.
$(CHECKED): $(STAMP) $(wildcard .venv/lib/python3*/site-packages)
	@echo "== Checking the machine"
	@$(BIN)/python -m minikv doctor || { echo; \
		echo "Fix what FAILs above and run make lab again, or open the notebooks as they are:"; \
		echo "    $(LAB)"; exit 1; }
	@touch $@

# JupyterLab shows the pictures of a stored page only if it trusts the notebook.
$(TRUSTED): $(CHECKED) $(wildcard $(NOTEBOOKS))
	@$(BIN)/jupyter trust --log-level=ERROR $(NOTEBOOKS) > /dev/null
	@touch $@

lab: $(TRUSTED)
ifdef ROUTE
	@$(BIN)/python -m minikv start --no-lab --route $(ROUTE)
endif
ifdef HEADLESS
	@echo
	@echo "There is no display here, so no browser opens."
	@echo "JupyterLab prints an address below, with a token in it: open it in a browser on this"
	@echo "machine, or on yours, once its port is forwarded: ssh -L 8888:localhost:8888 <this machine>"
	@echo "Without any browser, a notebook runs and reads in the terminal:"
	@echo "    $(BIN)/jupyter nbconvert --to markdown --execute --stdout $(NOTEBOOK)"
	@echo
	@$(LAB) --no-browser
else
	@echo "== JupyterLab opens in the browser; Control-C here stops it"
	@$(LAB)
endif

# What `make test` leaves to `make test-all`.
MARKED := -m "not thorough"
define ADDED
   make test-all adds each exercise and its known mistakes, more models, formats, drafters and
   clients, each way to cheat and to end a check, JupyterLab in a browser, long random programs,
   processes that are killed, Ray, nbgrader and a hub, other people's clients and caches, the site,
   an installation.
endef
export ADDED

ifdef CHAPTER
test: setup
	@PYTHONPATH="$(QUICK)" $(PYTEST) $(PARALLEL) $(NBVAL) --chapter=$(CHAPTER) tests/course \
		notebooks/$(CHAPTER)_*.ipynb
else
# The long part begins when the kernels of the CPU are compiled, and not at all if lint has failed.
test:
	@$(MAKE) --no-print-directory -j3 environment lint units
	@echo "== All passed"
	@$(if $(MARKED),echo "$$ADDED")
endif

# And what has an environment of its own. The last line says what was skipped.
SKIPPED := .venv/skipped
test-all:
	@rm -f $(SKIPPED)
	@$(MAKE) --no-print-directory test MARKED=
	@$(MAKE) --no-print-directory test-class
	@$(MAKE) --no-print-directory test-site
	@$(MAKE) --no-print-directory test-install
	@$(MAKE) --no-print-directory test-delays test-elsewhere
	@$(BIN)/python tests/skipped.py $(SKIPPED)
test-all: export MINIKV_SKIPPED := $(CURDIR)/$(SKIPPED)

# What only chapter 13 uses, and only `make test-all` tests. The checkout itself, which is there, is
# not installed once more: others run on it meanwhile.
RAY := .venv/ray
$(RAY): $(STAMP)
	@echo "== Installing Ray, for engines on many machines"
	@$(PIP) --quiet $(PINS) "minikv[distributed]" \
		&& touch $@ || echo "It could not be installed; its tests will be skipped"

# What others have made has an environment, which sees the packages of .venv: nbgrader and a hub,
# clients that ask the server, caches to compare with. What is not to be had is skipped by its tests.
CLASS := .venv/class
HUB := docs/teaching/hub/requirements.txt
THEIRS := "nbgrader" "-c $(HUB) jupyterhub jupyterhub-idle-culler" \
	"langchain-openai litellm guidellm" "xllamacpp gguf" "hqq optimum-quanto ninja"
PROXY := configurable-http-proxy@5.3.0
$(CLASS)/installed: $(STAMP) $(HUB)
	@$(BIN)/python -m venv --clear $(CLASS)
	@$(BIN)/python -c 'import sysconfig as s; \
		print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
		> $$($(CLASS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	@touch $@; for theirs in $(THEIRS); do \
		$(CLASS)/bin/python $(INSTALL) --quiet $(PINS) $$theirs || { rm -f $@; \
			echo "These could not be installed; their tests will be skipped: $$theirs"; }; done
	@npm install --silent --no-save --prefix $(CLASS) $(PROXY) \
		|| echo "npm could not install the hub's proxy; its test will be skipped"

# aiperf needs an older huggingface-hub than the course, and so one more.
AIPERF := $(CLASS)/aiperf
$(AIPERF)/installed: $(CLASS)/installed
	@$(BIN)/python -m venv --clear $(AIPERF)
	@$(AIPERF)/bin/python $(INSTALL) --quiet "aiperf~=0.13.0" \
		&& touch $@ || echo "aiperf could not be installed; its test will be skipped"

test-class: $(CLASS)/installed $(AIPERF)/installed
	@echo "== A class: nbgrader's round trip, a hub; clients of the server, other people's caches"
	@PATH="$(CURDIR)/$(BIN):$(CURDIR)/$(CLASS)/node_modules/.bin:$$PATH" PYTHONPATH="$(QUICK)" \
		JUPYTER_PATH="$(CURDIR)/.venv/share/jupyter" \
		MINIKV_AIPERF="$(CURDIR)/$(AIPERF)/bin/aiperf" $(CLASS)/bin/python -m pytest --durations=5 \
		$(IN_CLASS) $(PEERS) || [ $$? = 5 ]  # 5: all is skipped

IN_CLASS := tests/classroom tests/serving/test_clients.py tests/ring/test_ring_peer.py
PEERS := $(addprefix tests/engine/test_quant_quality.py::test_beside_,int4_of_transformers llama_cpp)
SUITE := $(NBVAL) $(MARKED) $(addprefix --ignore=,tests/install tests/site $(IN_CLASS)) tests notebooks

# While one worker waits for a browser, a kernel or a clock, another has room for its tests. Memory
# of 4 MiB and more is the system's again as soon as it is free: glibc would keep the K and V of
# engines that are gone, and a worker makes hundreds.
units: environment $(if $(MARKED),,$(RAY))
	@echo "== Unit, property and parity tests; a page in a browser; notebooks: every stored output is"
	@echo "   what the code prints"
	@PYTHONPATH="$(QUICK)" MALLOC_MMAP_THRESHOLD_=4194304 \
		$(PYTEST) $(PARALLEL) -o faulthandler_timeout=900 \
		-o faulthandler_exit_on_timeout=true $(SUITE)

# What a busy machine, a slow disk and a slow store may bring about.
test-delays: environment
	@echo "== Servers, clusters and tiers that are put to sleep at random moments"
	@PYTHONPATH="$(QUICK):$(CURDIR)/tests" $(PYTEST) -p delays $(PARALLEL) -m "not thorough" \
		$(addprefix --ignore=,$(IN_CLASS) tests/cluster/test_serve_ray.py) \
		$(addprefix --ignore=,tests/tiers/test_tiers_interrupts.py) \
		tests/serving tests/cluster tests/tiers

PLACES := $(addprefix tests/course/test_,commands.py doctor.py grade.py lab.py update.py) \
	tests/course/ch09/test_ch09_answers.py tests/serving/test_command.py tests/tiers/test_sessions.py
test-elsewhere: environment
	@echo "== Another path, user, terminal, locale and time zone, and no network"
	@$(BIN)/python tests/elsewhere.py --durations=5 $(PARALLEL) -m "not thorough or again" $(PLACES)

doctor: setup
	@echo "== Environment"
	@$(BIN)/python -m minikv doctor

# The kernels of the CPU for codes of 8 and of 4 bits, for layers with windows, for those with states,
# and for weights of 16 bits, compiled for the tests to find: two that begin at once would both
# compile them. In two processes, for Numba compiles one function at a time in each.
COMPILED := $(addprefix .venv/compiled-for-,int8-states int4-windows-bfloat16)
define COMPILE
import sys
import torch
import minikv as m
models = {"windows": "tinypy-hybrid", "states": "tinypy-states"}
for kind in sys.argv[1].split("-"):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    lm = m.load(models.get(kind, "tinypy"), dtype=dtype)
    config = m.EngineConfig(64, kv_dtype=kind if kind in ("int8", "int4") else "auto")
    m.Engine(lm, config).generate([70 * [1]])
endef
export COMPILE
$(COMPILED): .venv/compiled-for-%: $(STAMP) $(wildcard $(patsubst %,minikv/%/*.py,cpu quant groups states)) | doctor
	@$(BIN)/python -c "$$COMPILE" $*
	@touch $@

# Python's own files of all that tests import: workers that begin at once would each make them all.
IMPORTED := .venv/imported
$(IMPORTED): $(STAMP) | doctor
	@PYTHONPATH="$(QUICK)" $(PYTEST) --collect-only --quiet $(SUITE) > /dev/null; touch $@

environment: $(IMPORTED) $(COMPILED)

# Downloads everything again, into empty environments: minutes.
test-install: setup
	@$(PYTEST) --numprocesses=2 tests/install

# Pages and slides, then: links, HTML, a browser's view, accessibility.
test-site: setup site slides
	@$(PYTEST) tests/site

wheel: setup
	@$(BIN)/python -m build

lint: setup
	@echo "== Lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -p minikv -p minikv_kernels

# The site's own environment: nothing of the course runs in it. Where npm is, the validators too.
$(SITE)/installed: docs/site/requirements.txt docs/site/package.json docs/site/package-lock.json
	@echo "== Making $(SITE), which builds and checks the site"
	@$(PYTHON) -m venv --clear $(SITE)
	@$(SITE)/bin/python $(INSTALL) --quiet -r $<
	@cp docs/site/package.json docs/site/package-lock.json $(SITE)/
	@if command -v npm > /dev/null; then npm ci --silent --ignore-scripts --prefix $(SITE); \
		else echo "There is no npm here: HTML and workflows are not validated."; fi
	@touch $@

site: $(SITE)/installed
	@echo "== The site"
	@KEYS=$(KEYS) $(SITE)/bin/python docs/site/build.py build/site
	@$(SITE)/bin/python docs/site/check.py build/site

slides: $(SITE)/installed
	@echo "== The slides"
	@PLAN=$(PLAN) $(SITE)/bin/python -m sphinx --fail-on-warning --quiet \
		-b revealjs docs/teaching/slides build/slides
	@echo "build/slides/index.html"

notebooks: NOTEBOOKS := notebooks/$(CHAPTER)*.ipynb
notebooks: setup
	MINIKV_FILMS=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False $(NOTEBOOKS)

# On a machine where nothing is installed but torch and its friends, too.
gpu:
	@$(if $(HAVE_VENV),$(BIN)/python,$(PYTHON)) tests/gpu/run.py

clean:
	rm -rf .venv $(SITE) build dist *.egg-info .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -prune -exec rm -rf {} +
