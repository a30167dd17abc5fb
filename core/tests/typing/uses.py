"""What a type checker sees of the public names; `make types` checks it, nothing runs it.

An `assert_type` fails where a name is `Any`, as lazily loaded names are without the stubs of docs/generate/stubs.py.
"""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from typing_extensions import assert_type


def training(model: torch.nn.Module) -> None:
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config={"train_batch_size": 1})
    assert_type(engine, deepspeed.DeepSpeedEngine)
    assert_type(optimizer, torch.optim.Optimizer | None)
    assert_type(engine.module, torch.nn.Module)
    assert_type(engine.is_gradient_accumulation_boundary(), bool)
    assert_type(engine.global_steps, int)


def pipeline(layers: list[torch.nn.Module]) -> None:
    assert_type(PipelineModule(layers=layers, num_stages=2), PipelineModule)
    assert_type(deepspeed.PipelineModule(layers=layers, num_stages=2), PipelineModule)


def names(param: torch.nn.Parameter) -> None:
    assert_type(deepspeed.zero.Init(), deepspeed.zero.Init)
    assert_type(deepspeed.utils.safe_get_full_grad(param), torch.Tensor | None)
    assert_type(deepspeed.comm.get_rank(), int)
    assert_type(deepspeed.init_inference(torch.nn.Linear(1, 1)), deepspeed.InferenceEngine)
    assert_type(deepspeed.get_accelerator().device_name(), str)
    assert_type(deepspeed.__version__, str)
