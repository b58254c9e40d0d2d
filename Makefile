# `make demo` and `make test` do all of the set-up on a Debian 12, and nothing again that is done.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

RUN_PACKAGES := python3-venv python3-bpfcc
TEST_PACKAGES := $(RUN_PACKAGES) golang-1.19-go gcc libc6-dev binutils openssl prometheus \
	containerd runc buildah debootstrap chromium chromium-driver fonts-dejavu-core

.DEFAULT_GOAL := help
.PHONY: help demo test e2e cgroup2 check lint types bench bench-docs layouts packages test-packages

help: ## Say what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: packages $(INSTALLED) ## Watch a real Go server under load inside a CPU limit (root)
	@$(PYTHON) -m tools.demo

test: test-packages $(INSTALLED) lint ## Ruff, mypy, all tests but those of make cgroup2 (root; without, those that need none)
	@$(PYTHON) -m tools.toolchains fetch >/dev/null
	@$(PYTHON) -m tools.run_tests

e2e: test-packages $(INSTALLED) ## Of the tests, those of the agent with containers and Prometheus (root)
	@$(PYTHON) -m tools.toolchains fetch >/dev/null
	@$(PYTHON) -m tools.run_tests tests/e2e

cgroup2: test-packages $(INSTALLED) ## The agent with the cpu controller in cgroup2, moved there for a while (root)
	@$(PYTHON) -m tools.toolchains fetch >/dev/null
	@$(PYTHON) -m tools.run_tests tests/cgroup2

check: $(INSTALLED) lint ## What needs no root: ruff, mypy, tests/unit
	@$(PYTHON) -m pytest tests/unit

bench: packages $(INSTALLED) ## Measure what watching costs the target, and the agent (root)
	@tools/system_packages.sh bpftrace wrk
	@$(PYTHON) -m bench

bench-docs: packages $(INSTALLED) ## The same, and write the figures into docs/performance.md and README.md (root)
	@tools/system_packages.sh bpftrace wrk
	@$(PYTHON) -m bench --write

layouts: test-packages $(INSTALLED) ## Regenerate symbols/layouts.json from real Go toolchains
	@$(PYTHON) -m tools.regenerate_layouts

lint: types
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy

# mypy finds packages by folder name: links give agent/ and symbols/ the names they are imported by.
types:
	@mkdir -p build/types/schedtrace
	@ln -sfn $(CURDIR)/agent/*.py $(CURDIR)/agent/py.typed $(CURDIR)/symbols $(CURDIR)/bpf build/types/schedtrace
	@find build/types -xtype l -delete

packages:
	@tools/system_packages.sh $(RUN_PACKAGES)

test-packages:
	@tools/system_packages.sh $(TEST_PACKAGES)

# The venv sees the system's packages, because that is where BCC's Python module is.
$(VENV)/bin/python: | packages
	@/usr/bin/python3 -m venv --system-site-packages $(VENV)

$(INSTALLED): pyproject.toml | $(VENV)/bin/python
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
