# The one entrance. Every target does its own set-up; the second time is quick.
SHELL := /bin/bash -euo pipefail
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)

ENGINE := $(shell find include src python/src cmake -type f 2>/dev/null) CMakeLists.txt
# The demo imports a fifth of what pip would compile, one file after the other; for tests what most of them import is compiled at once.
PIP := $(BIN)/pip install -qq --disable-pip-version-check --no-compile
WERROR := $(if $(CI),ON,OFF)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Set in many containers: then each of a thousand processes would compile again whatever it imports.
unexport PYTHONDONTWRITEBYTECODE
# ccache is used where it is installed.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)

# The demo's set-up is the first part of the tests'.
STEPS := $(if $(filter-out demo,$(or $(MAKECMDGOALS),all)),5,3)
step = echo "Set-up $(1) of $(STEPS): $(2)"

.PHONY: help demo build test test-all test-torch test-cpp test-python test-frameworks test-slow mutants simulate bench lint format sanitizers asan tsan fuzz docs gpu gpu-bundle wheel wheel-test clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: build/.installed  ## train, average, swap, save, resume at another world size, report
	$(BIN)/python -m examples.digits $(ARGS)

build: build/.installed build/.test-packages  ## set-up, and a build of all but the benchmarks
	@$(MAKE) --no-print-directory -j2 build/.test-setup test-programs  # pip works on one processor alone

.PHONY: test-programs
test-programs: build/.tests
	@$(BIN)/cmake --build build/release

test: build  ## the tests; Python's, which wait more than they work, beside the others
	$(MAKE) -j2 test-python test-beside

.PHONY: test-beside
test-beside: build
	$(MAKE) test-frameworks
	$(MAKE) test-cpp

test-all: test test-slow sanitizers wheel  ## the tests, under sanitizers too, and their full matrices; wheels, in bare roots; the build for a device
	tools/gpu-rehearsal $(BIN)/python
	SHARDOW_ALL=1 $(BIN)/ctest --test-dir build/release --output-on-failure -R "cuda_kernels|cuda_programs|file"
	SHARDOW_ALL=1 $(MAKE) -j2 test-python test-frameworks

# A test that stands still is an error and does not hold up the rest.
CTEST := --parallel $(JOBS) --timeout 1500

test-cpp: build
	$(BIN)/ctest --test-dir build/release --output-on-failure $(CTEST)
	@tools/skipped build/release/Testing/Temporary/LastTest.log

# What waits most comes first; what takes long is not last.
OF_PYTHON := $(addprefix tests/,crash libtorch machines) $(addprefix python/tests/,distributed averages start checkpoints) tests examples python/tests

# Python's own, and of what starts programs: the command, both languages, installed packages, machines. By files, so that what a file's tests
# share is made once; two files more at a time than there are processors, since files wait for a half of their time.
test-python: build
	$(BIN)/python -m pytest -n $$(($(JOBS) + 2)) --dist loadfile --no-loadscope-reorder --ignore=$(FRAMEWORKS) --ignore=tests/test_benchmarks.py \
		$(OF_PYTHON)

# In one process, since each that imports all frameworks takes 20 s for it.
FRAMEWORKS := python/tests/integrations

# Threads of OpenMP that wait for each other spin by default, and take the processors from tests beside them.
test-python test-frameworks test-slow: export OMP_WAIT_POLICY := passive

test-frameworks: build
	$(BIN)/python -m pytest $(FRAMEWORKS)

TORCH ?= 2.6.0

test-torch: build build/torch-$(TORCH)  ## what docs/versions.md names, with TORCH=2.6.0 or another beside the rest of .venv
	build/torch-$(TORCH)/bin/python -m pytest -n $(JOBS) --dist loadfile $(addprefix python/tests/,averages files model start distributed schedules)

# Looks into its own packages first, and then into those of .venv.
build/torch-%: build/.tests
	$(PYTHON) -m venv $@
	$@/bin/pip install -qq --disable-pip-version-check torch==$*
	for packages in $(CURDIR)/$(VENV)/lib/python3*/site-packages; do \
	  echo "import site; site.addsitedir('$$packages')" >$$(echo $@/lib/python3*/site-packages)/rest.pth; done

# What has no smaller form, or a matrix that CI has whole.
SLOW := tests/test_benchmarks.py tests/libtorch tests/nvrtc tests/install/test_install.py python/tests/averages/test_bit_identical.py

test-slow: build build/.slow-packages  ## the simulator in full, and that it finds mistakes; benchmarks, LibTorch's examples, all shardings, DeepSpeed; five minutes
	build/release/simulate_test --gtest_filter=Simulate.*
	SHARDOW_ALL=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(SLOW)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(wildcard $(FRAMEWORKS)/test_deepspeed*.py)

mutants: build  ## plants the mistakes of tests/mutants, and tells which of them tests notice; ONLY=: those with this text (an hour)
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only "$(ONLY)")

SECONDS ?= 60
FIRST ?= 0
SHARE = $(if $(RUNS),$(shell echo $$(($(RUNS) / $(JOBS)))),1000000000)
simulate: build  ## simulated trainings and saves from seed FIRST on: for SECONDS, or RUNS of them; a process for each of JOBS processors
	@seq 0 $$(($(JOBS) - 1)) | xargs -P $(JOBS) -I JOB sh -c 'SHARDOW_PROCESSOR=JOB SHARDOW_FIRST=$$(($(FIRST) + JOB * $(SHARE))) \
		$(if $(RUNS),SHARDOW_RUNS=$(SHARE),SHARDOW_SECONDS=$(SECONDS)) build/release/simulate_test --gtest_filter=*EverySave*'

bench: build  ## side-by-side tables; writes docs/performance.md
	@$(BIN)/cmake --build build/release --target benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

docs: build/.installed build/.test-setup build/.docs  ## the pages and the reference as HTML, in build/docs; a link within them that leads nowhere is an error
	$(BIN)/sphinx-build -q -W --keep-going -j auto -b html docs build/docs

gpu:  ## on a machine with a device: builds, runs what needs one, measures; needs no network; out/gpu/report.txt
	tools/gpu $(PYTHON)

gpu-bundle: build  ## fills .gpu with what `make gpu` needs there
	tools/gpu-bundle $(BIN)/python

WHEELS ?= x86_64

wheel: build/.wheel build/.venv  ## wheels for any Linux, and the source distribution, in dist/ (WHEELS="x86_64 aarch64": for both)
	rm -rf dist
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")' >/dev/null
	for arch in $(WHEELS); do tools/wheel/build $$arch; done
	$(BIN)/python tools/wheel/check.py dist/*.whl

wheel-test: build/.wheel build/.test-setup  ## installs what `make wheel` made where nothing else is, and uses it there
	SHARDOW_ALL=1 $(BIN)/python -m pytest tests/wheel/test_installed.py

sanitizers:  ## asan, then tsan; CI runs them after `make test`, whose deadlines a compiler beside them would eat
	$(MAKE) asan
	$(MAKE) tsan

# Tests of the order of steps and of what oracles notice take minutes here, and are left to the plain build; tsan looks for threads that meet, so
# tests of one thread are left to asan.
asan: export GTEST_FILTER := -PowerCut.*:Simulate.FindsMistakes*
tsan: export GTEST_FILTER := -PowerCut.*:Header.*:Targets/*:Cuda.*:NoMemory.*:Simulate.FindsMistakes*

# The plain build's tests wait for a disk's flushes. These look at memory, and need not.
asan tsan lint: export PATH := $(CURDIR)/$(BIN):$(PATH)
asan tsan: export TEST_TMPDIR := $(shell [ "$$(df --output=avail -k /dev/shm 2>/dev/null | tail -1)" -gt 4000000 ] 2>/dev/null && echo /dev/shm || echo $${TMPDIR:-/tmp})
asan tsan: build/.test-setup build/.optional  ## C++ tests under sanitizers
	$(BIN)/cmake --preset $@ -DSHARDOW_WERROR=$(WERROR) >/dev/null
	$(BIN)/cmake --build --preset $@
	$(BIN)/ctest --preset $@ $(CTEST)

# libFuzzer is clang's; what the parsers need is compiled anew with it.
FUZZED := src/file/header_read.cc src/file/header_write.cc src/file/index.cc src/file/json.cc src/base/errors.cc src/base/files.cc src/tensor/dtype.cc
FUZZ_SECONDS ?= 60

fuzz: build/fuzz/header build/fuzz/index  ## headers and indexes that nobody would write, for FUZZ_SECONDS each
	$(PYTHON) tests/fuzz/seeds.py build/fuzz/corpus
	for target in header index; do build/fuzz/$$target -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/$$target- build/fuzz/corpus/$$target; done

build/fuzz/%: tests/fuzz/%_fuzz.cc $(FUZZED) build/.system build/.fuzz
	@mkdir -p $(@D)
	clang++-14 -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Iinclude -Isrc $< $(FUZZED) -lfmt -lsimdjson -o $@

build/.fuzz: tools/packages-fuzz.txt
	tools/install-packages $<
	@mkdir -p build && touch $@

# clang-tidy reads how each file is compiled alone; nothing of build/lint is built.
lint: build/.installed build/.test-setup build/.optional build/.lint  ## lengths, words, ruff, clang-format, mypy, clang-tidy
	$(PYTHON) tools/code_lines.py
	$(PYTHON) tools/lint_words.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	clang-format-14 --dry-run --Werror $$(git ls-files '*.h' '*.cc' '*.cuh')
	cp build/release/_core.pyi python/shardow/
	$(BIN)/mypy
	$(BIN)/cmake --preset lint >/dev/null
	git ls-files 'src/*.cc' | grep -v -e _test.cc -e _bench.cc -e cpu | xargs -P $(JOBS) -n 4 \
	  clang-tidy-14 --quiet --extra-arg=-Wno-unknown-warning-option -p build/lint

format: build/.test-setup build/.lint  ## rewrite sources in house style
	clang-format-14 -i $$(git ls-files '*.h' '*.cc' '*.cuh')
	$(BIN)/ruff check --fix -q . || true
	$(BIN)/ruff format -q .

clean:
	rm -rf build out dist

build/.system: tools/packages.txt
	@$(call step,1,Debian packages)
	@tools/install-packages $<
	@mkdir -p build && touch $@

# What Debian has and only some of the tests need; where it is missing, they are skipped in sight. Changed when something was installed.
build/.optional: FORCE
	@mkdir -p build; now=$$(tools/install-packages --optional tools/packages-optional.txt); [ "$$now" = "$$(cat $@ 2>/dev/null)" ] || echo "$$now" >$@
FORCE:

build/.lint: tools/packages-lint.txt
	tools/install-packages $<
	@mkdir -p build && touch $@

build/.wheel: tools/packages-wheel.txt tools/requirements-wheel.txt build/.venv
	tools/install-packages $<
	@$(PIP) -r tools/requirements-wheel.txt
	@touch $@

build/.docs: tools/requirements-docs.txt build/.venv
	@$(PIP) -r $<
	@touch $@

build/.venv: tools/requirements-demo.txt build/.system
	@$(call step,2,Python packages into $(VENV) (about 1 minute))
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r $<
	@touch $@

# What is installed. The tests are built in the same folder afterwards, and compile nothing of this again.
TESTS = $(if $(wildcard build/.tests),ON,OFF)
build/.installed: build/.venv pyproject.toml $(ENGINE)
	@$(call step,3,the extension and the command are compiled (about 2 minutes on 2 cores))
	@$(PIP) --no-build-isolation --no-deps -e . -Cbuild-dir=build/release \
	  "-Cbuild.targets=_core;_core_stub;shardow_command;shardow_pages" \
	  -Ccmake.define.SHARDOW_TESTS=$(TESTS) -Ccmake.define.SHARDOW_SHARED=ON -Ccmake.define.SHARDOW_COMMAND=ON \
	  -Ccmake.define.SHARDOW_WERROR=$(WERROR)
	@touch $@

build/.test-packages: tools/packages-test.txt build/.venv
	@tools/install-packages $<
	@touch $@

build/.test-setup: tools/requirements.txt tools/requirements-peers.txt build/.test-packages
	@$(call step,4,what tests use of Debian and Python (about 1 minute))
	@$(PIP) -r $<
	@$(PIP) --no-deps --no-build-isolation -r tools/requirements-peers.txt
	@$(BIN)/python -m compileall -qq -j $(JOBS) -x '/(tests|models|pipelines|pip|mypy|sympy|scipy|sklearn|networkx|pygments|fontTools)/' $(VENV)/lib/python3*/site-packages || true  # some are templates, not Python
	@touch $@

build/.slow-packages: tools/requirements-slow.txt build/.test-setup
	@$(PIP) --no-deps --no-build-isolation -r $<
	@touch $@

build/.tests: build/.installed build/.test-packages build/.optional
	@$(call step,5,the test programs are compiled (about 1 minute on 2 cores))
	@$(BIN)/cmake -DSHARDOW_TESTS=ON -DSHARDOW_BENCHMARKS=ON build/release >/dev/null
	@touch $@
