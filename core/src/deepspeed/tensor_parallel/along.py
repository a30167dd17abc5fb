"""What lies along the divided dim of a linear layer, read from the model where no table says it."""

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from deepspeed.tensor_parallel.plans import Along, heads_of_model

_KEY_NAMES = ("k", "v", "key", "value", "k_proj", "v_proj", "k_lin", "v_lin", "key_proj", "value_proj", "wk", "wv")
_QUERY_NAMES = ("q", "query", "q_proj", "q_lin", "query_proj", "wq")
_FUSED_NAMES = ("qkv", "qkv_proj", "query_key_value", "c_attn", "wqkv", "in_proj")


def role_of(name: str) -> str:
    """ "query", "key", "fused" or "" by the last name of a module's path, as models name the layers of attention."""
    last = name.rpartition(".")[2].lower()
    return "query" if last in _QUERY_NAMES else "key" if last in _KEY_NAMES else "fused" if last in _FUSED_NAMES else ""


def along_of(model: nn.Module, path: str, placement: Placement) -> Along:
    """Heads for the layers of attention, if the model's config has their numbers; else features.

    A column-parallel layer is told by its name, a row-parallel one by a query layer in the module around it.
    """
    if heads_of_model(model) is None:
        return Along.FEATURES
    role = role_of(path)
    if placement == Shard(0):
        return {"query": Along.QUERIES, "key": Along.KEYS}.get(role, Along.FEATURES)
    parent = model.get_submodule(path.rpartition(".")[0])
    layer: Any = model.get_submodule(path)
    for name, child in parent.named_children():
        if role_of(name) == "query" and getattr(child, "out_features", None) == getattr(layer, "in_features", 0):
            return Along.QUERIES
    return Along.FEATURES
