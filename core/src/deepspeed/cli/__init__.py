"""Shell commands other than the launcher, one file per command.

They may import everything below the engine, but each command imports torch only if it needs torch.
Read next: `report.py` (`ds_report`).
"""
