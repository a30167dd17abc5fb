"""The accelerator: it names the package of its builders, as DeepSpeed's documentation says."""

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


class XPU_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name = "cpu"  # so that it runs on every machine
        self._communication_backend_name = "gloo"
        self._compile_backend = "inductor"

    def op_builder_dir(self):
        return "ds_intel_style.op_builder"

    def create_op_builder(self, op_name):
        builder_class = self.get_op_builder(op_name)
        return None if builder_class is None else builder_class()

    def get_op_builder(self, class_name):
        from ds_intel_style import op_builder

        return getattr(op_builder, class_name, op_builder.NotImplementedBuilder)
