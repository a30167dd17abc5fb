"""Builder of the library for communication between processes of one host."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class CCLCommBuilder(CPUOpBuilder):
    """A Python module with the class `ProcessGroupCCL`, for `ds_ext_cpu.comm.ccl`.

    The class derives from a class of torch's C++ API, so a build fits one torch: the stable ABI has no process groups.
    """

    BUILD_VAR = "DS_BUILD_CCL_COMM"
    NAME = "deepspeed_ccl_comm"
    op_namespace = None
    needs_linux = True

    def sources(self) -> list[str]:
        return [cpu_kernel_path(f"comm/{name}.cpp") for name in ("ccl", "collectives", "group", "messages", "reduce")]

    def extra_ldflags(self) -> list[str]:
        return [*super().extra_ldflags(), "-pthread"]
