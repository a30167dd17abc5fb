"""Verify that a script trains like plain torch. The command is `ds_verify` (`cli/verify.py`).

`script.py` runs the script with other engines, `recording.py` records its run, `plain.py` repeats the steps with plain
torch, `other.py` repeats them with another configuration, and `verdict.py` judges the differences.
"""
