# Every target sets up .venv by itself: `make demo` and `make test` are all a new machine needs.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# what most changes break first: bags, mathematics, heads, the loop, readers, records, errors, structure
QUICK := tests/test_layers.py tests/bags tests/majority tests/models/heads/test_against_oracles.py tests/training/test_loop.py \
	tests/readers/test_read.py tests/experiments/test_recipe.py tests/cli/test_cli_errors.py
LOWEST := $(QUICK) tests/estimators tests/models tests/inference tests/reporting tests/selection


.PHONY: demo test quick soak campaign fuzz mutants lowest check bench docs dist sbom format clean

demo: .venv/ready          ## the main job: majority labels -> instance classifier -> report
	$(BIN)/headcount demo --out demo

test: .venv/ready          ## the test suite, under 6 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not soak"

quick: .venv/ready         ## the core for daily work, under 90 s on 2 cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not soak" $(QUICK)

soak: .venv/ready          ## campaigns of kills and fuzzing, under 20 minutes
	$(BIN)/python -m pytest -m soak

campaign: .venv/ready      ## 1,500 kills and I/O faults in all commands, 10,000 hostile inputs: hours; OPTIONS="--minutes 10 --seed 7"
	$(BIN)/python tests/campaign $(OPTIONS)

fuzz: .venv/ready          ## new random examples for every reader, each time
	HEADCOUNT_FUZZ=search $(BIN)/python -m pytest tests/readers/test_read_fuzz.py -m "soak or not soak"

mutants: .venv/ready       ## small mutations of every package, each of which the tests must notice
	$(BIN)/python benchmarks/mutants.py

lowest: .venv/ready        ## the core with the lowest versions that pyproject.toml declares, in .venv-lowest
	$(BIN)/pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct -e '.[ray,slides,onnx,test]'
	.venv-lowest/bin/python -m pytest -n 2 --dist worksteal -W default -m "not soak" $(LOWEST)  # old versions warn of new ones

check: .venv/ready         ## format, lint, types, structure
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check
	$(BIN)/python -m pytest tests/test_layers.py

bench: .venv/ready         ## what an epoch costs here
	$(BIN)/python benchmarks/cpu.py

dist: .venv/ready          ## the source distribution and the wheel, in dist
	rm -rf dist
	$(BIN)/python -m build

sbom: .venv/ready          ## the software bill of materials (CycloneDX) of what is installed, in dist
	$(BIN)/python benchmarks/sbom.py

docs: .venv/ready          ## the documentation's site, in docs/_build
	$(BIN)/python docs/command_line.py
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
