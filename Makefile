# make demo    the examples as one table: what eager does, what tokamak makes of it, time and error
# make test    the tests, one process a core (PYTEST_FLAGS= runs them in one)
# Both make .venv at the first call and install into it; later calls find it. What they run with stands in constraints.txt.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_FLAGS ?= -q -n auto --dist worksteal

PIP = $(VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt

.PHONY: demo test clean

demo: $(VENV)/installed
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest tests $(PYTEST_FLAGS)

$(VENV)/installed: pyproject.toml constraints.txt
	@echo 'installing torch and tokamak into $(VENV)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
