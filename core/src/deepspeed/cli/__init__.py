"""Commands beside the launcher, one file each: what a user types in a shell.

May import everything below the engine, but each command imports torch only where it shows something of torch.
Read next: `report.py` (`ds_report`).
"""
