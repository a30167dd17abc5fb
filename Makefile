# A thin door to nox: noxfile.py is the one place where tasks are defined.
#   make demo               train a small GPT on two ranks (make demo ARGS=--resume goes on from its checkpoint)
#   make test               everything a pull request must pass
#   make <session>          any other session of noxfile.py: lint types unit ext ranks simulated parity template examples docs downstream sycl bench build
PYTHON ?= python3
NOX := .venv/bin/nox

.PHONY: test demo lint types unit ext ranks simulated parity template examples docs downstream sycl bench build clean

test: $(NOX)
	@$(NOX)

demo lint types unit ext ranks simulated parity template examples docs downstream sycl bench build: $(NOX)
	@$(NOX) -s $@ -- $(ARGS)

$(NOX):
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"Python 3.10 or newer is needed, found {v}: make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nox

clean:
	rm -rf .venv .nox runs build dist
