"""A builder that compiles by its own means, as vendors with a compiler of their own do."""

import ctypes
import os
import subprocess
import tempfile

from .builder import XYZOpBuilder, xyz_kernel_path


class UtilsBuilder(XYZOpBuilder):
    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"

    def sources(self):
        return [xyz_kernel_path("csrc/utils/count.cpp")]

    def jit_load(self, verbose=True):
        folder = tempfile.mkdtemp(prefix="xyz_", dir=os.environ.get("TORCH_EXTENSIONS_DIR"))
        library = os.path.join(folder, "utils.so")
        includes = [f"-I{path}" for path in self.strip_empty_entries(self.include_paths())]
        flags = self.strip_empty_entries(self.cxx_args())
        subprocess.run(["c++", *flags, *includes, "-fPIC", "-shared", *self.sources(), "-o", library], check=True)
        return ctypes.CDLL(library)
