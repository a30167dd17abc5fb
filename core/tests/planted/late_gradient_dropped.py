"""A gradient that comes after the launch of its bucket is dropped."""

from deepspeed.zero.bucket import Bucket

CONFIG = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1}}
USES = ("twice",)
FIRST = ("gradient", "layers.2.down.bias")


def plant(patches):
    write = Bucket.write

    def dropping(self, grads):
        if not self.was_launched:
            write(self, grads)

    patches.setattr(Bucket, "write", dropping)
