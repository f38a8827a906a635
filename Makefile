# Everything from a fresh checkout: `make demo`, `make test`, `make serve`. See README.md.
#
#   MODEL=DIR        checkpoint to serve; default: the small retrieval model of this repository
#   SERVE_ARGS=...   further options of `hisparse-pd pair` for `make serve`
#   BENCH_ARGS=...   further options of `python -m tools.bench.serve` for `make bench-serve`
#   TEST_PROCESSES=n processes of pytest; default: 4, because two of them leave two cores idle while they wait
#   SLOW_TEST_PROCESSES=n  those of `make test-full`, whose tests start many processes each; default: 3
#   GPU_TEST_PROCESSES=n  processes of pytest that share the GPU in `make test-gpu`; default: 5
#   TEST_ARGS=...    further arguments of pytest for `make test`
#   FUZZ_INPUTS=n    inputs to each decoder for `make fuzz`; default: 100000
#   ROOM_EXAMPLES=n  histories of the room protocol for `make rooms`; default: 10000
#   SOAK_SECS=n      how long `make soak` goes on; default: 120
#   SOAK_RANKS=n     ranks of each node in `make soak`; default: 1
#   SOAK_DRAFTS=n    drafts that steps verify at most in `make soak`; default: 3
#   SOAK_BUFFER=n    --device-buffer-size of decode nodes in `make soak`; default: 200; 0: without a bound
#   SOAK_FLIPS=n     bits a second that flip in each decode engine's host pool in `make soak`; default: 0
#   PYTHON=python3   the interpreter (3.11, 3.12 or 3.13) that makes .venv
#   TORCH_PIP_ARGS=  further arguments of the `pip install` of torch, such as the index with its CPU build

PYTHON ?= python3
MODEL ?= tools/checkpoints/retrieval
SERVE_ARGS ?=
BENCH_ARGS ?=
TEST_PROCESSES ?= 4
SLOW_TEST_PROCESSES ?= 3
GPU_TEST_PROCESSES ?= 5
TEST_ARGS ?=
FUZZ_INPUTS ?= 100000
SOAK_SECS ?= 120
SOAK_RANKS ?= 1
SOAK_DRAFTS ?= 3
SOAK_FLIPS ?= 0
SOAK_BUFFER ?= 200
ROOM_EXAMPLES ?= 10000
TORCH_PIP_ARGS ?=

# Unit tests that need no torch: folders, and files of folders whose other tests do. tests/unit/test_docs.py holds it.
FAST_TESTS := $(addprefix tests/unit/,base deploy grammar http paging protocol router memory/test_numa.py \
    transfer/test_plan.py transfer/test_rdma.py transfer/test_transport.py \
    test_architecture.py test_docs.py test_pair.py test_process.py test_settings.py)
# Folders that `make coverage` has a line for.
COVERED := hisparse_pd/base hisparse_pd/core hisparse_pd/engine hisparse_pd/serving hisparse_pd/commands \
    protocol kernels transfer prefill_node decode_node router

# The retrieval model has a draft layer; another model may have none. SERVE_ARGS come later, and so prevail.
DRAFT_ARGS := $(if $(filter tools/checkpoints/retrieval,$(MODEL)),--speculative-num-steps 3)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# LiteLLM cannot live beside the others. Nothing of the project is in these, its settings of pytest aside.
CLIENTS := .venv-clients
CLIENTS_LITELLM := .venv-clients-litellm
# What npm has, where there is Node; without, its tests are skipped.
NPM_CLIENTS := $(shell command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1 && echo .npm-clients/.ready)
CLIENT_TESTS = python -m pytest -m clients --confcutdir tests/clients -p pytest_timeout -o filterwarnings= $(TEST_ARGS)
# A network of its own, where this machine allows that. Elsewhere the tests' proxies, which lead nowhere, have to do.
LOOPBACK_ONLY = $(shell unshare -rn ip link set lo up 2>/dev/null && \
    echo "unshare -rn sh -c 'ip link set lo up && exec \"\$$@\"' sh")

ACCELERATOR := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet
CLIENT_PIP_INSTALL = $(@D)/bin/python -m pip install --disable-pip-version-check --quiet

# Shared library that Mooncake loads, and the Debian or Ubuntu package that has it.
SYSTEM_LIBRARIES := libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4
ifeq ($(ACCELERATOR),cuda)
SYSTEM_LIBRARIES += libmlx5.so.1:ibverbs-providers
endif

# Debian packages that the machines of test-rdma need. Their kernel is unpacked by the tests, not installed.
RDMA_PACKAGES := qemu-system-x86 ibverbs-providers iproute2

# Command that test-compose needs where no engine answers, and the Debian or Ubuntu package that has it. From Debian
# 13 on the client is a package of its own.
COMPOSE_COMMANDS = dockerd:docker.io docker:$(DOCKER_CLIENT) docker-compose:docker-compose debootstrap:debootstrap
DOCKER_CLIENT = $(shell . /etc/os-release 2>/dev/null; \
    [ "$$ID" = debian ] && [ "$${VERSION_ID:-13}" -ge 13 ] && echo docker-cli || echo docker.io)

# Where Python may not keep what it compiled, each process of a test run rewrites and compiles all tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup system-libraries rdma-packages compose-packages demo test test-fast test-full test-gpu test-compose test-rdma test-clients fuzz rooms soak serve lint format coverage wheel bench bench-accuracy bench-serve bench-swap-in clean

help:
	@sed -n 's/^#   //p; s/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

setup: $(READY) ## set up .venv and the system libraries, and nothing else

demo: $(READY) $(MODEL)/config.json ## start a pair and a router, send real requests, stop
	@$(BIN)/python -m tools.bench.demo --model-path $(MODEL)

serve: $(READY) $(MODEL)/config.json ## start a pair and a router, and stay
	@$(BIN)/hisparse-pd pair --model-path $(MODEL) $(DRAFT_ARGS) $(SERVE_ARGS)

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

test-fast: $(READY) ## unit tests that need no torch: protocol, plans, router, HTTP, docs; 30 seconds
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -p tests.without_torch $(FAST_TESTS) $(TEST_ARGS)

test-full: $(READY) ## what takes longer: the full oracle matrix, failures, more examples of each property; some 16 minutes
	$(BIN)/python -m pytest -n $(SLOW_TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m slow $(TEST_ARGS)
	MANY_EXAMPLES=1 $(BIN)/python -m pytest -n $(SLOW_TEST_PROCESSES) --dist loadfile tests/property $(TEST_ARGS)
	MANY_EXAMPLES=1 $(BIN)/python -m pytest -n $(SLOW_TEST_PROCESSES) --dist loadfile -m "hypothesis and not slow" tests/unit $(TEST_ARGS)

test-gpu: $(READY) ## the tests that need an NVIDIA GPU: its kernels, and the pair's own tests with both nodes on it
	$(BIN)/python -m pytest -o addopts="-ra" -n $(GPU_TEST_PROCESSES) --dist loadfile tests/gpu
	HISPARSE_PD_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/integration

test-compose: $(READY) | compose-packages ## the two-node deployment in containers; Docker, or Debian and root
	$(BIN)/python -m pytest -m compose tests/compose $(TEST_ARGS)

test-rdma: $(READY) | rdma-packages ## the pair over RDMA verbs, in two machines with Soft-RoCE that QEMU runs; Debian
	$(BIN)/python -m pytest -m rdma tests/rdma $(TEST_ARGS)

test-clients: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
test-clients: $(READY) $(CLIENTS)/.ready $(CLIENTS_LITELLM)/.ready $(NPM_CLIENTS) ## the clients that people use, against a pair; without network
	@failed=0; \
	$(LOOPBACK_ONLY) $(CLIENTS)/bin/$(CLIENT_TESTS) --ignore tests/clients/test_litellm.py tests/clients || failed=1; \
	$(LOOPBACK_ONLY) $(CLIENTS_LITELLM)/bin/$(CLIENT_TESTS) tests/clients/test_litellm.py || failed=1; \
	exit $$failed

fuzz: $(READY) ## hostile inputs to every decoder, new ones each time; FUZZ_INPUTS each; some 10 minutes
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/python -m pytest -n 2 --timeout 0 -k fuzz tests/property $(TEST_ARGS)

rooms: $(READY) ## ROOM_EXAMPLES new histories of the room protocol with both ends; some 15 minutes
	ROOM_EXAMPLES=$(ROOM_EXAMPLES) $(BIN)/python -m pytest --timeout 0 tests/property/test_rooms_both_ends.py $(TEST_ARGS)

soak: $(READY) ## nodes under load that are killed, stopped and started again, for SOAK_SECS
	SOAK_SECS=$(SOAK_SECS) SOAK_RANKS=$(SOAK_RANKS) SOAK_DRAFTS=$(SOAK_DRAFTS) SOAK_FLIPS=$(SOAK_FLIPS) SOAK_BUFFER=$(SOAK_BUFFER) $(BIN)/python -m pytest -s -m soak tests/soak $(TEST_ARGS)

lint: $(READY) ## ruff, mypy, and that tests which only run elsewhere can be imported
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -o addopts= -qqq --collect-only tests/gpu tests/rdma tests/compose tests/soak

format: $(READY) ## sort imports and format
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

coverage: $(READY) ## lines and branches that unit and property tests run, by folder; a page in out/coverage/html
	@rm -rf out/coverage
	$(BIN)/coverage run -m pytest -q -n $(TEST_PROCESSES) --dist loadfile tests/unit tests/property $(TEST_ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage html --quiet --directory out/coverage/html
	@for folder in $(COVERED); do \
	    printf '%-24s %3s%%\n' $$folder $$($(BIN)/coverage report --format=total --include="$$folder/*"); \
	done

wheel: $(READY) ## build the wheel of this checkout into out/wheel
	@rm -rf build out/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir out/wheel .

bench: $(READY) ## measure the transfer; results go to out
	$(BIN)/python -m tools.bench.transfer

bench-swap-in: $(READY) ## measure the CUDA swap-in kernel; needs a GPU
	$(BIN)/python -m tools.bench.kernels swap-in

bench-accuracy: $(READY) ## exact match of long-context answers, all modes beside transformers; an hour on 2 cores
	$(BIN)/python -m tools.bench.accuracy --model-path $(MODEL)

bench-serve: $(READY) ## latencies and throughput of what `make serve` started, dense beside hisparse
	$(BIN)/python -m tools.bench.serve $(BENCH_ARGS)

clean: ## remove .venv, the tiny model, caches and results
	rm -rf $(VENV) $(CLIENTS) $(CLIENTS_LITELLM) .npm-clients .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis out build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is in $$missing is installed when we are root on Debian or Ubuntu. Otherwise the line to run is printed.
define install-missing
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
	    echo "$(1) needs system packages that are not here. Run this, then make again:" >&2; \
	    echo "    sudo apt-get update && sudo apt-get install -y$$missing" >&2; \
	    exit 1; \
	fi
endef

system-libraries:
	@missing=''; \
	for entry in $(SYSTEM_LIBRARIES); do \
	    PATH="$$PATH:/usr/sbin:/sbin" ldconfig -p | grep -qF "$${entry%%:*} " || missing="$$missing $${entry##*:}"; \
	done; \
	$(call install-missing,Mooncake)

rdma-packages:
	@missing=''; \
	for package in $(RDMA_PACKAGES); do \
	    dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
	done; \
	$(call install-missing,test-rdma)

compose-packages:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=''; \
	if ! docker info >/dev/null 2>&1 || ! { docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null; }; then \
	    for entry in $(COMPOSE_COMMANDS); do \
	        command -v $${entry%%:*} >/dev/null || case "$$missing " in \
	            *" $${entry##*:} "*) ;; \
	            *) missing="$$missing $${entry##*:}" ;; \
	        esac; \
	    done; \
	fi; \
	$(call install-missing,test-compose)

# A change of either file installs again; without one, make starts in no time.
$(READY): pyproject.toml constraints.txt constraints-$(ACCELERATOR).txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	    echo "Python 3.11, 3.12 or 3.13 is needed, because Mooncake has wheels for no other, and $(PYTHON) is:" \
	        "$$($(PYTHON) --version 2>&1). Choose another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(MAKE) --no-print-directory system-libraries
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu:" \
	        "sudo apt-get install -y python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@echo "installing the Python packages into $(VENV) ($(ACCELERATOR)); the first time takes some minutes"
	@$(PIP_INSTALL) $(TORCH_PIP_ARGS) "$$(grep '^torch==' constraints-$(ACCELERATOR).txt)"
	@$(PIP_INSTALL) -c constraints.txt -c constraints-$(ACCELERATOR).txt -e '.[$(ACCELERATOR),test]'
	@$(BIN)/python -c 'import mooncake.engine' || { \
	    echo "Mooncake cannot be loaded; the line above says what it lacks" >&2; exit 1; }
	@touch $@

$(CLIENTS)/.ready: tests/clients/requirements.txt
$(CLIENTS_LITELLM)/.ready: tests/clients/requirements-litellm.txt
$(CLIENTS)/.ready $(CLIENTS_LITELLM)/.ready: | $(READY)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing clients into $(@D); the first time takes some minutes"
	@! grep -q '^guidellm' $< || $(CLIENT_PIP_INSTALL) $(TORCH_PIP_ARGS) "$$(grep '^torch==' constraints-cpu.txt)"
	@$(CLIENT_PIP_INSTALL) -r $<
	@touch $@

.npm-clients/.ready: tests/clients/package.json
	@echo "installing clients into $(@D)"
	@mkdir -p $(@D) && cp $< $(@D)/
	@npm install --prefix $(@D) --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel error
	@touch $@

