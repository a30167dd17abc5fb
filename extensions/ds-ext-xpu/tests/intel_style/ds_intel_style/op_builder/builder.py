"""The vendor's base builder: it compiles by means of its own, at the first use and in a wheel."""

import hashlib
import os
import subprocess
from pathlib import Path

import torch
import torch.utils.cpp_extension
from deepspeed.ops.op_builder.builder import TORCH_MAJOR, TORCH_MINOR, OpBuilder


def sycl_kernel_path(code_path):
    """The path of a kernel's source in this package, returned as it is: nothing is copied anywhere."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), code_path)


def sycl_kernel_include(code_path):
    return sycl_kernel_path(code_path)


class SYCLOpBuilder(OpBuilder):
    """What the vendor's builders share."""

    compiler = "icpx"

    def builder(self):
        """The op for a `setup.py`, with the vendor's flags."""
        from setuptools import Extension

        return Extension(
            name=self.absolute_name(),
            sources=self.strip_empty_entries(self.sources()),
            include_dirs=self.strip_empty_entries(self.include_paths()),
            extra_compile_args=self.strip_empty_entries(self.cxx_args()),
            extra_link_args=self.strip_empty_entries(self.extra_ldflags()),
        )

    def version_dependent_macros(self):
        return [f"-DTORCH_VERSION_SEEN={TORCH_MAJOR * 100 + TORCH_MINOR}"]

    def cxx_args(self):
        return ["-fsycl", "-fsycl-targets=spir64", "-O3", "-g", "-std=c++20", "-fPIC", *self.version_dependent_macros()]

    def extra_ldflags(self):
        return ["-fsycl", "-Wl,-export-dynamic"]

    def load(self, verbose=True):
        return self.jit_load(verbose)

    def jit_load(self, verbose=True):
        if not self.is_compatible(verbose):
            raise RuntimeError(f"op {self.name} cannot be built here: {self.error_log}")
        self.jit_mode = True
        sources = [self.deepspeed_src_path(path) for path in self.strip_empty_entries(self.sources())]
        includes = [self.deepspeed_src_path(path) for path in self.strip_empty_entries(self.include_paths())]
        folders = [f"-I{path}" for path in (*includes, *torch.utils.cpp_extension.include_paths())]
        libraries = [f"-L{path}" for path in torch.utils.cpp_extension.library_paths()]
        key = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:12]
        library = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], f"{self.name}_{key}.so")
        if not os.path.exists(library):
            flags = [*self.cxx_args(), *folders, *self.extra_ldflags(), *libraries, "-ltorch_cpu", "-ltorch", "-lc10"]
            subprocess.run([self.compiler, "-shared", *sources, *flags, "-o", library], check=True)
        torch.ops.load_library(library)
        return torch.ops.ds_intel_style
