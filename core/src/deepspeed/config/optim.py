"""`optimizer` and `scheduler`: a name and its parameters. Whether a name exists is known to `deepspeed.optim`.

Read by `engine/build.py`.
"""

from typing import ClassVar

from deepspeed.config.base import Flag, Free, Section, Text, key, quiet, refused

_NOT_HERE = ("onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd")


class OptimizerConfig(Section):
    """`optimizer`."""

    type: Text = key(
        ...,
        "Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, or any class of torch.optim. Not yet: 1-bit and mu-optimizers.",
    )
    params: Free = key(dict, "Arguments of the optimizer: lr, betas, eps, weight_decay, ...")
    legacy_fusion: Flag = key(False, "The first fused implementation.", support=quiet("there is one implementation"))

    closed: ClassVar[bool] = True

    def refusal(self) -> str | None:
        """Return why this version cannot train with the optimizer; None when nothing is known against it."""
        known_elsewhere = self.type.lower().replace("_", "") in _NOT_HERE
        return "it is not in this version; use 'AdamW' or 'Lamb'" if known_elsewhere else None


class SchedulerConfig(Section):
    """`scheduler`."""

    type: Text = key(..., "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR.")
    params: Free = key(dict, "Arguments of the schedule: warmup_min_lr, warmup_max_lr, warmup_num_steps, ...")

    closed: ClassVar[bool] = True


class ProgressiveLayerDropConfig(Section):
    """`progressive_layer_drop`."""

    enabled: Flag = key(False, "Drop layers while training.", support=refused("layer drop is not in this version"))
    theta: float = key(1.0, "Keep ratio in the limit.", support=quiet("see enabled"))
    gamma: float = key(0.001, "How fast the keep ratio falls.", support=quiet("see enabled"))


class EigenvalueConfig(Section):
    """`eigenvalue`: curvature estimates which steer quantized training."""

    enabled: Flag = key(False, "Estimate eigenvalues.", support=refused("eigenvalues are not in this version"))
    verbose: Flag = key(False, "Print them.", support=quiet("see enabled"))
    max_iter: int = key(100, "Power iterations, at most.", support=quiet("see enabled"))
    tol: float = key(0.01, "Relative tolerance.", support=quiet("see enabled"))
    stability: float = key(1e-6, "Added to norms.", support=quiet("see enabled"))
    gas_boundary_resolution: int = key(1, "Updates between estimates.", support=quiet("see enabled"))
    layer_name: str = key("bert.encoder.layer", "Where the layers are.", support=quiet("see enabled"))
    layer_num: int = key(0, "How many layers.", support=quiet("see enabled"))
