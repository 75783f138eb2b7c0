# Everything that a user types. `make help` lists it.
PYTHON     ?= python3
# Extra pip options for the test environment, e.g. PyTorch's CPU index where PyPI has only a CUDA build
TORCH_PIP  ?=
JOBS       ?= 2
# The engine to make: a Hugging Face directory, tensor-parallel size, output directory
MODEL_DIR  ?= out/tiny
TP         ?= 1
OUTPUT     ?= out/engine
BUILD_ARGS ?=
PEERS      ?=
# Ports of `make serve`
HTTP_PORT  ?= 8000
GRPC_PORT  ?= 8001
METRICS_PORT ?= 8002

MODELS := .venv/models/bin/python
TEST   := .venv/test/bin/python
CLIENT := .venv/client/bin/python
PIP     = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
PIP_INTO = .venv/models/bin/python -m pip --python $(1)/bin/python install --quiet --disable-pip-version-check
CHECKPOINT = $(OUTPUT).checkpoint
MAKEFLAGS += --no-print-directory
REAL_CONFIG := tests/data/minimax_m3_config.json

# NumPy's BLAS spins: on few cores one thread a process is up to three times faster than many
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup plugins build tiny engine demo serve test test-numpy1 test-slow test-gpu verify-gpu \
  lint format bench report clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "Variables, as in 'make serve HTTP_PORT=9000', and their values now:"
	@printf '  %-12s %-10s %s\n' \
	  MODEL_DIR '$(MODEL_DIR)' 'Hugging Face checkpoint that `engine` converts' \
	  TP '$(TP)' 'tensor-parallel size' \
	  OUTPUT '$(OUTPUT)' 'engine directory; the converted checkpoint lies beside it' \
	  BUILD_ARGS '$(BUILD_ARGS)' 'more flags for m3trt.build' \
	  HTTP_PORT '$(HTTP_PORT)' 'ports of `serve`' \
	  GRPC_PORT '$(GRPC_PORT)' '' METRICS_PORT '$(METRICS_PORT)' '' \
	  JOBS '$(JOBS)' 'compilers at once' \
	  PEERS '$(PEERS)' 'folder of vLLM and SGLang files, timed too by `bench`' \
	  PYTHON '$(PYTHON)' 'interpreter of the environments, 3.11 to 3.13' \
	  TORCH_PIP '$(TORCH_PIP)' 'pip options for PyTorch in the test environment'

# ---- environments: one for converters, builder and models, one for the server, one for clients --

.venv/models/bin/python .venv/test/bin/python:
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "make: $(PYTHON) must be Python 3.11 to 3.13 with venv (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

.venv/models/.done: pyproject.toml setup.cfg | .venv/models/bin/python
	$(call PIP,.venv/models) -e '.[models]'
	@touch $@

# Small environments that need no pip of their own
.venv/client/bin/python .venv/server/bin/python: | .venv/models/.done
	$(PYTHON) -m venv --without-pip $(@:/bin/python=)

.venv/client/.done: | .venv/client/bin/python
	$(call PIP_INTO,.venv/client) numpy==2.4.6 'tritonclient[grpc]==2.73.0'
	@touch $@

.venv/server/.done: triton_repo/fetch_libpython.sh | .venv/server/bin/python
	$(call PIP_INTO,.venv/server) --no-deps nvidia-pytriton==0.7.0
	triton_repo/fetch_libpython.sh
	@touch $@

.venv/test/.done: pyproject.toml setup.cfg | .venv/test/bin/python
	$(call PIP,.venv/test) $(TORCH_PIP) -e '.[test,lint]'
	$(call PIP,.venv/test) --no-deps $(TORCH_PIP) torchvision==0.28.0
	@touch $@

setup: .venv/models/.done .venv/client/.done .venv/server/.done ## Create the environments in .venv/

# ---- the pipeline: plugin library, checkpoint, engine, server ------------------------------------

plugins: ## Compile the plugin library for sm_90a, sm_100a and PTX: out/libm3_plugins.so
	JOBS=$(JOBS) PYTHON=$(PYTHON) plugins/compile.sh full

build: plugins ## The same as `plugins` (so `make build engine` does all)

out/libm3_plugins.so: $(wildcard plugins/CMakeLists.txt plugins/plugin_list.inc plugins/*/*.h plugins/*/*.cpp plugins/*/*.cu*)
	JOBS=$(JOBS) PYTHON=$(PYTHON) plugins/compile.sh $(if $(wildcard out/plugins/full),full,portable)

tiny: out/tiny/config.json ## Write a tiny random M3 checkpoint: out/tiny

out/tiny/config.json: convert/tiny.py .venv/models/.done
	rm -rf out/tiny
	$(MODELS) -m m3trt.convert.tiny --output_dir out/tiny --geometry demo

engine: .venv/models/.done $(if $(filter out/tiny,$(MODEL_DIR)),out/tiny/config.json) ## Convert MODEL_DIR and build its engines for TP ranks: OUTPUT
	$(if $(filter out/engine,$(OUTPUT)),rm -rf out/engine out/engine.checkpoint)
	$(MODELS) -m m3trt.convert --model_dir $(MODEL_DIR) --output_dir $(CHECKPOINT) --tp_size $(TP)
	$(MODELS) -m m3trt.build --checkpoint_dir $(CHECKPOINT) --output_dir $(OUTPUT) $(BUILD_ARGS)

demo: setup out/libm3_plugins.so ## From nothing to answers on a machine with no GPU: two questions to a real server
	@$(MAKE) engine MODEL_DIR=out/tiny OUTPUT=out/engine
	$(MODELS) -m m3trt.serve --engine_dir out/engine --http_port 0 --run $(CLIENT) triton_repo/serve/demo.py

serve: setup out/libm3_plugins.so ## Serve OUTPUT until Ctrl-C
	@[ -e $(OUTPUT)/config.json ] || $(MAKE) engine
	$(MODELS) -m m3trt.serve --engine_dir $(OUTPUT) --http_port $(HTTP_PORT) --grpc_port $(GRPC_PORT) \
	  --metrics_port $(METRICS_PORT)

# ---- checks --------------------------------------------------------------------------------------

test: setup .venv/test/.done out/libm3_plugins.so lint test-numpy1 ## Lint and the smoke and full tests (CI)
	$(TEST) -m pytest -m "smoke or full"

test-numpy1: .venv/models/.done ## Unit tests on numpy 1.26, in the environment of the models
	$(call PIP,.venv/models) pytest==9.2.0 pytest-timeout==2.4.0
	$(MODELS) -m pytest -q -m smoke tests/convert tests/runtime tests/preprocess

test-slow: setup .venv/test/.done out/libm3_plugins.so ## Gigabyte conversions, the real 60-layer build, fuzz, soak
	$(TEST) -m pytest -m slow

test-gpu: .venv/test/.done plugins ## Plugins, engines and full-width layers on this machine's GPU, then compute-sanitizer
	$(TEST) -m pytest -m gpu
	tests/sanitize.sh $(TEST)

verify-gpu: .venv/test/.done plugins ## All that a GPU's owner can check: tests that must run, compute-sanitizer, every bench
	$(TEST) tests/plugins/run_gpu.py
	tests/sanitize.sh $(TEST)
	@$(MAKE) bench

bench: .venv/test/.done plugins ## Times of GEMM, steps and MSA on this machine's GPU: bench/results/
	@failed=0; run() { echo "$(TEST) -m m3trt.bench.$$*"; $(TEST) -m m3trt.bench."$$@" || failed=1; }; \
	run gemm --model_config $(REAL_CONFIG); \
	run norm; run cache_update; run paged_attention; run moe; \
	run slice --model_config $(REAL_CONFIG) slice; \
	run slice --model_config $(REAL_CONFIG) rank; \
	run decode $(addprefix --peers ,$(PEERS)); \
	run prefill $(addprefix --peers ,$(PEERS)); \
	run fp8_effect; run plots; run report; \
	exit $$failed  # all run, whichever misses its goal

report: .venv/test/.done ## Pictures and tables of the records: bench/results/, README.md
	$(TEST) -m m3trt.bench.plots
	$(TEST) -m m3trt.bench.report

lint: .venv/test/.done ## ruff, mypy --strict, clang-format
	.venv/test/bin/ruff check .
	.venv/test/bin/ruff format --check .
	@mkdir -p out/typing/m3trt && for p in convert build runtime preprocess bench; do \
	  ln -sfn ../../../$$p out/typing/m3trt/$$p; done; ln -sfn ../../../triton_repo/serve out/typing/m3trt/serve
	MYPYPATH=out/typing .venv/test/bin/mypy $(addprefix -p m3trt.,convert build runtime preprocess serve bench)
	.venv/test/bin/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

format: .venv/test/.done ## Rewrite the sources in the project's style
	.venv/test/bin/ruff check --fix .
	.venv/test/bin/ruff format .
	.venv/test/bin/clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

clean: ## Remove what was built (not the environments)
	rm -rf out
