"""Builders that break their promise; `HonestAdam` keeps it, so that it is the lie that is caught."""

from types import SimpleNamespace

import torch
from ds_ext_sim.accelerator import Sim_Accelerator


def _adam_step_(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    steps,
    copies,
    *,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    adam_w_mode,
    bias_correction,
    maximize,
    grad_scale,
):
    for param, grad, first, second, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        step += 1
        gradient = grad.to(param.dtype) * (-grad_scale if maximize else grad_scale)
        if adam_w_mode:
            param.mul_(1 - lr * weight_decay)
        else:
            gradient = gradient.add(param, alpha=weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correct_1, correct_2 = (1 - beta ** step.item() if bias_correction else 1.0 for beta in (beta1, beta2))
        param.sub_(first / correct_1 * lr / ((second / correct_2).sqrt() + eps))
    for copy, param in zip(copies, params, strict=bool(copies)):
        copy.copy_(param)


def _uncorrected(*lists, **numbers):
    _adam_step_(*lists, **{**numbers, "bias_correction": False})


def _first_of_the_list(params, grads, *rest, **numbers):
    _adam_step_(params[:-1], grads[:-1], *[each[:-1] for each in rest], **numbers)


def _copies_forgotten(*lists, **numbers):
    _adam_step_(*lists[:-1], [], **numbers)


class _Builder:
    NAME = "fused_adam"
    op = staticmethod(_adam_step_)

    def is_compatible(self, verbose=False):
        return True

    def load(self, verbose=False):
        return SimpleNamespace(adam_step_=torch.no_grad()(self.op))


class _WithBuilder(Sim_Accelerator):
    """Has one builder, for fused Adam."""

    builder = _Builder

    def get_op_builder(self, class_name):
        return self.builder if class_name == "FusedAdamBuilder" else None

    def _builder_names(self):
        return ["FusedAdamBuilder"]


class HonestAdam(_WithBuilder):
    pass


class CorrectsNoBias(_WithBuilder):
    builder = type("FusedAdamBuilder", (_Builder,), {"op": staticmethod(_uncorrected)})


class UpdatesAllButTheLast(_WithBuilder):
    builder = type("FusedAdamBuilder", (_Builder,), {"op": staticmethod(_first_of_the_list)})


class WritesNoHalfWeights(_WithBuilder):
    builder = type("FusedAdamBuilder", (_Builder,), {"op": staticmethod(_copies_forgotten)})


class IsSilentlyIncompatible(_WithBuilder):
    builder = type("FusedAdamBuilder", (_Builder,), {"is_compatible": lambda self, verbose=False: False})


class PromisesAnOpAndHasNone(_WithBuilder):
    builder = type("FusedAdamBuilder", (_Builder,), {"load": lambda self, verbose=False: None})


class GivesABuilderForEveryName(_WithBuilder):
    def get_op_builder(self, class_name):
        return self.builder
