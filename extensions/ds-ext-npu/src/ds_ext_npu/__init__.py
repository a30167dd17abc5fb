"""Ascend NPUs as a DeepSpeed accelerator. Importing this package loads nothing.

May import `deepspeed`, torch and, inside functions, the vendor's `torch_npu`. Read next: `plugin.py` (the only door),
`vendor.py` (is the vendor's package whole?), `accelerator.py`, `operators/` (what runs on the device), `op_builder/`.
"""
