# A thin front end of nox: noxfile.py is the one place where tasks are defined.
#   make demo        train a small GPT on two ranks (make demo ARGS=--resume goes on from its checkpoint)
#   make test        run what a pull request must pass: every behavior once
#   make test-all    run the same with the sweeps: every world, kill, planted fault, template language, sanitizers
#   make clean       remove the environment and everything that was built
#   make <session>   run another session of noxfile.py: lint types unit extensions ext processes ranks simulated parity template examples docs site downstream deepspeed torch libraries sanitize sycl bench gpu build release
PYTHON ?= python3
NOX := .venv/bin/nox

.PHONY: help test test-all demo lint types unit extensions ext processes ranks simulated parity template examples docs site downstream deepspeed torch libraries sanitize sycl bench gpu build release clean

help:
	@sed -n 's/^#   //p' Makefile

test: $(NOX)
	@$(NOX)

demo test-all lint types unit extensions ext processes ranks simulated parity template examples docs site downstream deepspeed torch libraries sanitize sycl bench gpu build release: $(NOX)
	@$(NOX) -s $@ -- $(ARGS)

$(NOX):
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"Python 3.10 or newer is needed, found {v}: make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	@echo "creating .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nox

clean:
	rm -rf .venv .nox runs build dist
