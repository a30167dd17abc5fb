"""Tries a real torch_npu without CANN and without a device: is what we call there, and do its meta kernels take it?

    pip download --no-deps torch-npu==2.13.0 && unzip torch_npu-*.whl -d unpacked
    python tests/try_vendor.py unpacked

CANN's libraries are replaced by stubs whose functions all return 0, so that the package can be imported; it finds no
device. Then every operator of this extension runs on tensors of `meta`, by the vendor's rules for shapes and dtypes.
Needs gcc and nm, and the torch that the wheel was made for.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
OF_CANN = ("acl", "Hccl", "rt", "ge", "_ZN2ge", "_ZNK2ge", "HCCL", "aml", "prof", "Msprof", "dcmi")


def make_stubs(unpacked, folder):
    """Libraries with CANN's names that export what the vendor's libraries want of it."""
    wanted = [*Path(unpacked).glob("torch_npu/lib/*.so"), *Path(unpacked).glob("torch_npu/_C*.so")]
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *wanted], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names) if name.startswith(OF_CANN))
    source = folder / "stubs.c"
    source.write_text(functions)
    for name in LIBRARIES:
        subprocess.run(["gcc", "-w", "-shared", "-fPIC", source, "-o", folder / f"lib{name}.so"], check=True)


def main(unpacked):
    with tempfile.TemporaryDirectory() as name:
        make_stubs(unpacked, Path(name))
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": name,
            "PYTHONPATH": os.pathsep.join([str(unpacked), str(SOURCE), os.environ.get("PYTHONPATH", "")]),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        return subprocess.run([sys.executable, __file__], env=environment, check=False).returncode


def try_all():
    """In the process that has the stubs. Raises where the vendor's package refuses something."""
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)  # not every function has a stub
    import torch
    from ds_ext_npu.accelerator import NPU_Accelerator
    from ds_ext_npu.op_builder import builders

    accelerator = NPU_Accelerator()
    print("devices:", accelerator.device_count(), "library:", accelerator.communication_backend_name())
    for name, kind in builders().items():
        builder = kind()
        assert builder.is_compatible(), builder.reason
        print(name, "over", ", ".join(builder.calls))
    for grad, copy in itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=2):
        try_adam(grad, copy)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for weights in (None, dtype, torch.float32):
            try_norms(dtype, weights)
        try_gelu_and_rotary(dtype)
    print("the vendor's meta kernels take every call")


def try_adam(grad_dtype, copy_dtype):
    import torch
    from ds_ext_npu.operators.adam import adam_step_

    shapes = ((3, 4), (5,), ())
    lists = [[torch.empty(shape, dtype=dtype, device="meta") for shape in shapes] for dtype in _dtypes(grad_dtype)]
    steps = [torch.tensor(0.0) for _ in shapes]
    copies = [torch.empty(shape, dtype=copy_dtype, device="meta") for shape in shapes]
    modes = {"adam_w_mode": True, "bias_correction": True, "maximize": False, "grad_scale": 0.5}
    adam_step_(*lists, steps, copies, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, **modes)


def _dtypes(grad_dtype):
    import torch

    return torch.float32, grad_dtype, torch.float32, torch.float32


def try_norms(dtype, weights):
    import torch
    from ds_ext_npu.operators import inference

    x = torch.empty(2, 3, 8, dtype=dtype, device="meta")
    weight = None if weights is None else torch.empty(8, dtype=weights, device="meta")
    results = [
        inference.layer_norm(x, weight, weight, 1e-5),
        *inference.layer_norm_residual(x, x, weight, weight, 1e-5),
        inference.rms_norm(x, weight, 1e-5),
        *inference.rms_norm_residual(x, x, weight, 1e-5),
    ]
    assert all((result.shape, result.dtype) == (x.shape, x.dtype) for result in results)


def try_gelu_and_rotary(dtype):
    import torch
    from ds_ext_npu.operators import inference

    x = torch.empty(2, 3, 4, 8, dtype=dtype, device="meta")
    results = []
    for flag in (False, True):
        results += [inference.gelu(x, flag), inference.bias_gelu(x, x[0, 0, 0].float(), flag)]
        for seq_dim in (1, 2):
            table = torch.empty(x.shape[seq_dim], 4, device="meta")
            results.append(inference.rotary(x, table, table, flag, seq_dim))
    assert all((result.shape, result.dtype) == (x.shape, x.dtype) for result in results)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 1 else try_all())
