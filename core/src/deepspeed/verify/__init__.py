"""A verdict on a script: does it train as plain torch would? The command is `ds_verify` (`cli/verify.py`).

`script.py` runs it with other engines, `recording.py` records a run as it is, `plain.py` makes the same steps by plain
torch and `other.py` by another configuration, `verdict.py` judges differences.
"""
