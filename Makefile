# Every target sets up .venv by itself: `make demo` and `make test` are all a new machine needs.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test soak fuzz check bench docs format clean

demo: .venv/ready          ## the main job: majority labels -> instance classifier -> report
	$(BIN)/headcount demo --out demo

test: .venv/ready          ## the test suite, under 6 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not soak"

soak: .venv/ready          ## campaigns of kills and fuzzing, under 20 minutes
	$(BIN)/python -m pytest -m soak

fuzz: .venv/ready          ## new examples for every reader each time, as long as one likes to repeat it
	HEADCOUNT_FUZZ=search $(BIN)/python -m pytest tests/readers/test_read_fuzz.py -m "soak or not soak"

check: .venv/ready         ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check
	$(BIN)/python -m pytest tests/test_layers.py

bench: .venv/ready         ## what an epoch costs here
	$(BIN)/python benchmarks/cpu.py

docs: .venv/ready          ## the documentation's site, in docs/_build
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv demo build dist docs/_build
