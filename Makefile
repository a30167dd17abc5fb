# A thin door to nox: noxfile.py is the one place where tasks are defined.
PYTHON ?= python3
NOX := .venv/bin/nox

.PHONY: demo test clean
demo: $(NOX)
	@$(NOX) --no-error-on-missing-interpreters -s demo -- $(ARGS)
test: $(NOX)
	@$(NOX) -s lint types unit ranks parity examples

$(NOX): constraints.txt
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nox
	@touch $(NOX)

clean:
	rm -rf .venv .nox runs
