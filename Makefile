# Everything here sets itself up: see README.md.
PYTHON ?= python3
NAME ?= warren
NODES ?= 3
VERSION ?= 4.0
RUN := .venv/bin/
# A run starts hundreds of Python processes. Where this is set (containers do), each of them would
# compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
# How tests are dealt out: tests/support/scheduling.py. ONLY=groups runs those with `groups` in the
# name of their folder, file or function.
# Seven at a time on two cores: most of a test's time is waiting for a broker.
PYTEST := $(RUN)pytest --numprocesses 7 --durations 15 --durations-min 5 $(if $(ONLY),-k '$(ONLY)')

.PHONY: demo unit test test-all lint matrix bench bench-maps fuzz own-tests zip up down status checked brokers ready

demo: ready
	$(RUN)python -m examples.demo

# Without a broker.
unit: ready
	$(PYTEST) tests/unit tests/property

# Everything that matters; a test that is a twin of another is left to `make test-all`.
test: checked
	$(PYTEST)

# With the twins: nodes harmed on the oldest version too, a minute of every fault, a million rows.
LONG := WARREN_FAULT_SECONDS=60 WARREN_GROUP_MESSAGES=60000 WARREN_ROUND_TRIP_ROWS=1000000 \
	WARREN_ODD_PAIRS=5000 WARREN_CHANGED_BATCHES=200 WARREN_POLICY_ROUNDS=3
test-all: checked
	$(LONG) $(PYTEST) --all

# All of that on every broker version; sid's 4.3 moves, so it is not part of the others.
matrix: BROKERS += 4.3
matrix: checked
	for version in 3.10 4.0 4.3; do \
	  echo "== RabbitMQ $$version"; $(LONG) $(PYTEST) --all --broker-version $$version || exit 1; \
	done

lint: ready
	$(RUN)ruff check
	$(RUN)ruff format --check
	$(RUN)mypy
	$(RUN)lint-imports

# All of them, or with ONLY="streams spark" those; benchmarks/results.md and its chart are written.
bench: ready
	$(RUN)pip install --quiet --editable '.[bench]'
	$(RUN)python -m benchmarks $(ONLY)

# What a new client pays to learn the maps, in seconds of this machine: nothing else may run on it.
# The table is for docs/operations.md. MAPS="--queues 10 --changes 100" asks for less.
bench-maps: ready
	$(RUN)python -m benchmarks.map_log $(MAPS)

# Mutated frames and chunks for SECONDS, beyond what `make test` tries.
SECONDS ?= 60
fuzz: ready
	$(RUN)python -m tests.support.fuzz_streams --seconds $(SECONDS)

# pika's and aio-pika's own tests through the wrappers. PIKA is a checkout of pika at the version
# that is installed; without it aio-pika's only.
own-tests: ready
	$(RUN)python -m tests.conformance.own_tests $(if $(PIKA),blocking callback) aio $(if $(PIKA),--pika $(PIKA))

# For spark-submit --py-files: the wheel under a name that Spark takes. What it depends on (mmh3,
# pika, pyarrow, numpy) must be installed where the executors run.
zip: ready
	rm -rf dist
	$(RUN)pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	cp dist/rabbit_warren-*.whl dist/rabbit-warren.zip

up: ready
	$(RUN)python -m tests.cluster up $(NAME) --nodes $(NODES) --version $(VERSION)

# All clusters, or with NAME=… on the command line that one.
down: ready
	$(RUN)python -m tests.cluster down $(if $(filter command line,$(origin NAME)),$(NAME))

status: ready
	$(RUN)python -m tests.cluster status

# Lint, and what tests run on, side by side: on a new machine both take minutes.
BROKERS := 3.10 4.0
checked:
	@$(MAKE) --no-print-directory --jobs 2 lint brokers BROKERS='$(BROKERS)'

brokers:
	@$(PYTHON) -m tests.cluster.prepare $(BROKERS)

ready:
	@$(PYTHON) tests/machine.py
