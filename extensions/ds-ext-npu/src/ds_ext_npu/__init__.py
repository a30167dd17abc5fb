"""Ascend NPUs as a DeepSpeed accelerator. Importing this package loads nothing.

May import `deepspeed`, torch and, inside functions, the vendor's `torch_npu`. Read next: `plugin.py` (the only entry
point), `vendor.py` (checks the vendor's package), `accelerator.py`, `operators/` (run on the device), `op_builder/`.
"""
