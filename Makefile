# Everything here sets itself up: see README.md.
PYTHON ?= python3
NAME ?= warren
NODES ?= 3
VERSION ?= 4.0
RUN := .venv/bin/
# Two files at a time: much of a test's time is a broker that boots.
PYTEST := $(RUN)pytest --numprocesses 2 --dist loadfile

.PHONY: demo test lint matrix bench fuzz faults zip up down status ready

demo: ready
	$(RUN)python -m examples.demo

# Rolling restarts and Spark under kills take many minutes more: `make faults`.
test: lint
	$(RUN)python -m tests.cluster prepare 3.10 4.0
	$(PYTEST) -m "not long"

lint: ready
	$(RUN)ruff check
	$(RUN)ruff format --check
	$(RUN)mypy
	$(RUN)lint-imports

# The whole suite on every broker version; sid's 4.3 moves, so it is not part of `make test`.
matrix: lint
	$(RUN)python -m tests.cluster prepare 3.10 4.0 4.3
	for version in 3.10 4.0 4.3; do \
	  echo "== RabbitMQ $$version"; $(PYTEST) --broker-version $$version || exit 1; \
	done

# All of them, or with ONLY="streams spark" those; benchmarks/results.md and its chart are written.
bench: ready
	$(RUN)pip install --quiet --editable '.[bench]'
	$(RUN)python -m benchmarks $(ONLY)

# Mutated frames and chunks for SECONDS, beyond what `make test` tries.
SECONDS ?= 60
fuzz: ready
	$(RUN)python -m tests.fuzz_streams --seconds $(SECONDS)

# A minute of publishing for each fault, on both versions; Spark under kills, and with a million rows.
faults: ready
	WARREN_FAULT_SECONDS=60 WARREN_GROUP_MESSAGES=60000 $(RUN)pytest tests/faults -s
	WARREN_ROUND_TRIP_ROWS=1000000 $(RUN)pytest tests/spark/test_round_trip.py -s

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

ready:
	@$(PYTHON) tests/machine.py
