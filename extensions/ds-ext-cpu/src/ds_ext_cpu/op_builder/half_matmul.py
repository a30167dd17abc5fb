"""Builder of the kernel that multiplies bf16 and fp16 matrices in fp32."""

from typing import ClassVar

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class HalfMatmulBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.{enable_half_matmul, is_half_matmul_enabled}`, for `ds_ext_cpu.half_matmul`.

    The library replaces torch operators and calls torch's kernels, so a build fits one torch: the stable ABI does not
    give the address of a replaced kernel.
    """

    BUILD_VAR = "DS_BUILD_HALF_MATMUL"
    NAME = "half_matmul"
    min_torch: ClassVar[str | None] = None

    def sources(self) -> list[str]:
        return [cpu_kernel_path("half_matmul/half_matmul.cpp")]
