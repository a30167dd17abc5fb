"""Builder of the library for asynchronous file I/O."""

from pathlib import Path
from typing import Any

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class AsyncIOBuilder(CPUOpBuilder):
    """A Python module with the class `aio_handle`, for `deepspeed.ops.aio`."""

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
        """Return the engine that a new handle would use, for example `"io_uring, O_DIRECT"`."""
        from ds_ext_cpu.aio.probing import describe_engine

        return describe_engine()

    def _loaded_from(self, library: Path, package: str = "") -> Any:
        from ds_ext_cpu.aio.handle import make_handle_class

        module = super()._loaded_from(library, package)
        module.aio_handle = make_handle_class(module)
        return module
