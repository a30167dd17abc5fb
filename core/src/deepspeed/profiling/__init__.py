"""Measuring a run: timers by phase.

May import `accelerator` and below. Read `timer.py`.
"""
