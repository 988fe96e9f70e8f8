# Each target does all the set-up that it needs, on a fresh Debian 12 or Ubuntu 24.04 machine.
.DEFAULT_GOAL := help
.PHONY: help setup package demo bench test asan tsan fuzz check format tidy clean
MAKEFLAGS += --no-print-directory

JOBS := $(shell nproc)
PACKAGE_STAMP := .venv/.package
PACKAGE_FILES := $(shell find include src kernels python cmake -not -name '*.pyc' -not -name __pycache__ 2>/dev/null) \
                 CMakeLists.txt pyproject.toml
# All of what a test printed, so that the reason of a skip is in the file.
CTEST = ctest --preset $(1) -j $(JOBS) --test-output-size-passed 65536 \
        --output-junit $(CURDIR)/build/$(1).xml

help:  ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

setup:  ## install system packages and .venv where missing
	@tools/setup.sh

package: setup  ## install the Python package into .venv if a source changed
	@$(MAKE) -s $(PACKAGE_STAMP)

$(PACKAGE_STAMP): $(PACKAGE_FILES)
	@echo "installing the package into .venv"
	@.venv/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
	@touch $@

demo: package  ## train the demo model, spread over ranks and in one process, and compare
	@.venv/bin/python -m deep_ep demo

bench: package  ## measure dispatch and combine against this machine's ceilings
	@.venv/bin/python -m deep_ep bench

test: package  ## build and run the C++ and the Python tests
	@cmake --preset dev && cmake --build --preset dev
	@rm -f build/dev.xml build/pytest.xml
	@status=0; \
	$(call CTEST,dev) || status=1; \
	.venv/bin/pytest -rs --junit-xml=build/pytest.xml || status=1; \
	.venv/bin/python tools/summarize_tests.py build/dev.xml build/pytest.xml || status=1; \
	exit $$status

asan tsan: setup
	@cmake --preset $@ && cmake --build --preset $@
	@$(call CTEST,$@)
asan:  ## run the C++ tests under the address and undefined behaviour sanitizers
tsan:  ## run the C++ tests under the thread sanitizer

fuzz: setup  ## run each fuzzer for 30 seconds
	@tools/setup.sh system clang-16 libclang-rt-16-dev
	@cmake --preset fuzz && cmake --build --preset fuzz
	@$(call CTEST,fuzz)

check: setup  ## check format and layers
	@tools/format.sh --check
	@.venv/bin/python tools/check_layers.py

format: setup  ## format C++ and Python
	@tools/format.sh

tidy: setup  ## run clang-tidy over the sources
	@tools/setup.sh system clang-tidy-16
	@cmake --preset dev
	@find src -name '*.cpp' -not -path 'src/python/*' -print0 | \
	  xargs -0 -n 1 -P $(JOBS) clang-tidy-16 --quiet -p build/dev

clean:  ## remove what was built, not .venv
	rm -rf build dist .venv/.package
