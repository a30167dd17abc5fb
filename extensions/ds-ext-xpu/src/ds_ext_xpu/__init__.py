"""Intel GPUs as a DeepSpeed accelerator. Importing this package loads nothing.

May import `deepspeed` and torch. Read next: `plugin.py` (the only entry point), then `devices.py`, `accelerator.py`,
`op_builder/sycl_op_builder.py`, `csrc/common/kernel.h`.
"""
