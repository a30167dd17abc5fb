"""Builder of the asynchronous file I/O."""

from pathlib import Path
from typing import Any

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class AsyncIOBuilder(CPUOpBuilder):
    """A Python module that has the class `aio_handle`, for `deepspeed.ops.aio`."""

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"
    op_namespace = None
    needs_linux = True
    min_torch = None

    def sources(self) -> list[str]:
        return [cpu_kernel_path(f"aio/{name}.cpp") for name in ("async_io", "engine", "ring")]

    def extra_ldflags(self) -> list[str]:
        return [*super().extra_ldflags(), "-pthread"]

    def remark(self) -> str:
        """What a handle would use now, `"io_uring, O_DIRECT"` for example."""
        from ds_ext_cpu.aio.probing import describe_engine

        return describe_engine()

    def _loaded_from(self, library: Path, package: str = "") -> Any:
        from ds_ext_cpu.aio.handle import make_handle_class

        module = super()._loaded_from(library, package)
        module.aio_handle = make_handle_class(module)
        return module
