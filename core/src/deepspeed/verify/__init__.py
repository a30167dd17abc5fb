"""A verdict on a script: does it train as plain torch would? The command is `ds_verify` (`cli/verify.py`).

`recording.py` records a run as it is, `plain.py` makes the same steps by plain torch, `verdict.py` judges differences.
"""
