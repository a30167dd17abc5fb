"""`FusedBlock` computes a transformer layer by fused parts, for all families; `policies.py` holds the differences.

The block replaces the layer's `forward`. The layer and its parameters stay in the model, so the model's state dict, the
hooks on layers and the layer's class do not change.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.inference.generate import cache_of
from deepspeed.inference.injection.attention import (
    AttendingCache,
    attend,
    rotate_halves,
    rotate_pairs,
    split_heads,
    with_alibi,
    within_window,
)
from deepspeed.inference.injection.policies import InjectionPolicy
from deepspeed.inference.injection.weights import FusedExperts, FusedLinear, output_linear
from deepspeed.ops.transformer import layer_norm, layer_norm_residual, rms_norm, rms_norm_residual
from deepspeed.tensor_parallel.layers import ColumnParallelLinear

# Tensor arguments of a layer that a fused block uses, or that have no effect.
_UNDERSTOOD = ("hidden_states", "attention_mask", "alibi", "position_ids", "position_embeddings", "cache_position")
# modules whose hooks need not run for each token
_OBSERVERS = (
    *("transformers.utils.output_capturing", "deepspeed.inference.engine"),
    *("deepspeed.tensor_parallel.divide", "deepspeed.tensor_parallel.layers"),
)


class FusedBlock:
    """Replaces a layer's `forward`, and is called like it.

    The layer's own forward runs if the fused forward would not be equivalent: in training mode, if a gradient is
    needed, for attention weights, for masks that are no 4-dimensional tensor, for tensor arguments with unknown names
    (such as those of cross-attention), and if a part of the layer was replaced or got hooks, as adapters do.

    Args:
        layer: the layer; its linears become views of fused weights.
        policy: policy of the layer's class.

    Raises:
        ConfigError: the layer does not match its policy; the message begins with the difference.
    """

    def __init__(self, layer: nn.Module, policy: InjectionPolicy) -> None:
        self.layer, self.policy = layer, policy
        self.original: Callable[..., Any] = layer.forward
        self.attention = found(layer, policy.attention)
        self.head_dim = int(found(self.attention, policy.head_dim))
        self.layer_index = int(found(self.attention, policy.layer_index)) if policy.layer_index else 0
        self.scale = self._scale()
        self.activation = found(layer, policy.activation)
        self.norm_attention = norm_of(found(layer, policy.norm_attention))
        self.norm_mlp = norm_of(found(layer, policy.norm_mlp)) if policy.norm_mlp else None
        self.norm_query, self.norm_key = (
            norm_of(getattr(self.attention, path.rpartition(".")[2]))
            if path and hasattr(self.attention, path.rpartition(".")[2])
            else None
            for path in (policy.norm_query, policy.norm_key)
        )
        self.norm_attention_out, self.norm_mlp_out = (
            norm_of(found(layer, path)) if path else None for path in (policy.norm_attention_out, policy.norm_mlp_out)
        )
        softcap = found(self.attention, policy.softcap) if policy.softcap else None
        self.softcap = None if softcap is None else float(softcap)
        self.window = self._window()
        self.sliding_window = self._sliding_window()
        names = list(inspect.signature(type(layer).forward).parameters)[1:]
        self._names = names[: names.index("kwargs")] if "kwargs" in names else names
        self._check_names()
        self._params = list(layer.parameters())
        self._make_linears()
        self._parts = [Part(*each) for each in _modules_of(layer, policy)]

    def _check_names(self) -> None:
        """Refuse a layer whose forward lacks a required argument: the block would silently give wrong tokens."""
        policy = self.policy
        needed = ["hidden_states", "attention_mask"] if self._names[1:] else ["hidden_states"]
        if policy.alibi:
            needed.append("alibi")
        if policy.rotary_table:
            found(self.layer, policy.rotary_table)
            needed.append("position_ids")
        elif policy.rotary:
            needed.append("position_embeddings")
        for name in needed:
            if name not in self._names:
                raise ConfigError(f"its forward has no argument {name!r}, only {', '.join(self._names)}")

    def _make_linears(self) -> None:
        """Fuse the linears. This step is last, because it changes the layer: mismatches are found before."""
        layer, policy = self.layer, self.policy
        linears = [found(layer, path) for path in (*policy.qkv, policy.out, *policy.up, policy.down) if path]
        for each in linears:
            if each._forward_hooks or each._forward_pre_hooks:
                raise ConfigError("one of its linears has forward hooks, which a fused layer would not call")
        num_qkv, num_up = len(policy.qkv), len(policy.up)
        self.ranks = next((each.ranks for each in linears if isinstance(each, ColumnParallelLinear)), None)
        self.qkv = FusedLinear(linears[:num_qkv])
        self.out = output_linear(linears[num_qkv])
        self.experts = FusedExperts(found(layer, policy.experts), self.activation) if policy.experts else None
        self.up = FusedLinear(linears[num_qkv + 1 : num_qkv + 1 + num_up]) if policy.up else None
        self.down = output_linear(linears[-1]) if policy.down else None
        self._qkv_sizes = self.qkv.sizes
        if policy.layout == "grouped":
            self._qkv_sizes = (0, self._num_groups())

    def _num_groups(self) -> int:
        """Return this rank's number of key-value heads in a grouped product."""
        config: Any = self.layer.config
        heads, groups = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1
        if groups == 1:
            return 1
        return int(self.qkv.sizes[0]) // (self.head_dim * (heads // groups + 2))

    def _scale(self) -> float:
        scale = self.policy.scale
        if isinstance(scale, str):
            return float(found(self.attention, scale)) if scale else self.head_dim**-0.5
        return scale

    def _window(self) -> int | None:
        if self.policy.local is None:
            return None
        name, value, size = self.policy.local
        return int(getattr(self.attention.config, size)) if found(self.attention, name) == value else None

    def _sliding_window(self) -> int | None:
        """Return the number of tokens that a query sees, including its own; None: all earlier tokens."""
        if self.window is not None:
            return self.window
        has_own = hasattr(self.attention, "sliding_window")  # None for a layer that sees all tokens
        owner: Any = self.attention if has_own else getattr(self.attention, "config", None)
        size = getattr(owner, "sliding_window", None)
        return None if size is None else int(size)

    @property
    def num_kv_heads(self) -> int:
        """The number of key-value heads on this rank."""
        if self.policy.layout == "grouped":
            return self._num_groups()
        width = self.qkv.sizes[1] if self.policy.layout == "separate" else self.qkv.sizes[0] // 3
        return width // self.head_dim

    # ----- the forward -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not self._serves(given):
            return self.original(*args, **kwargs)
        hidden = self.compute(given["hidden_states"], given)
        return hidden if self.policy.returns == "tensor" else (hidden, None)

    def _serves(self, given: dict[str, Any]) -> bool:
        mask = given.get("attention_mask")
        if not self.is_whole():
            return False
        if given.get("output_attentions"):
            return False
        if any(isinstance(value, Tensor) and name not in _UNDERSTOOD for name, value in given.items()):
            return False
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
            return False
        if self.policy.alibi == "in_mask" and given.get("alibi") is not None:
            config: Any = self.layer.config
            if config._attn_implementation != "sdpa":  # then the mask does not have it
                return False
        if torch.is_grad_enabled():
            return not (given["hidden_states"].requires_grad or any(each.requires_grad for each in self._params))
        return True

    def is_whole(self) -> bool:
        """Return whether the layer is in evaluation mode, and no part of it was replaced or got hooks."""
        if self.layer.training or (self.ranks is not None and self.ranks.sequence_is_divided):
            return False
        return all(part.is_as_it_was() for part in self._parts)

    def compute(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        """Return the layer's output, [B, T, features]; `given` holds the arguments of its forward by name."""
        if self.policy.placement == "post":
            attended = self.norm_attention(self.out(self._context(x, given)), x)[0]
            assert self.norm_mlp is not None
            return self.norm_mlp(self._mlp(attended), attended)[0]
        normed = self.norm_attention(x)
        attended = self.out(self._context(normed, given))
        if self.policy.placement == "parallel":
            mlp_input = normed if self.norm_mlp is None else self.norm_mlp(x)
            return attended.add_(self._mlp(mlp_input)).add_(x)
        assert self.norm_mlp is not None
        if self.norm_attention_out is not None:
            attended = self.norm_attention_out(attended)
        normed, total = self.norm_mlp(attended, x)
        fed = self._mlp(normed)
        return (fed if self.norm_mlp_out is None else self.norm_mlp_out(fed)).add_(total)

    def _mlp(self, x: Tensor) -> Tensor:
        if self.experts is not None:
            return self.experts(x)
        assert self.up is not None
        assert self.down is not None
        wide = self.up(x)
        if len(self.policy.up) == 2:
            gate, value = wide.split(self.up.sizes, -1)
            return self.down(self.activation(gate).mul_(value))
        return self.down(self.activation(wide))

    def _context(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        """Return the attention output before its last linear, [B, T, heads x D]."""
        policy = self.policy
        mask, alibi = self._per_head(given)
        query, key, value = split_heads(self.qkv(x), policy.layout, self.head_dim, self._qkv_sizes)
        if self.norm_query is not None and self.norm_key is not None:
            query, key = self.norm_query(query), self.norm_key(key)
        if policy.rotary and alibi is None:
            query, key = self._rotated(query, key, given)
        cache = cache_of(given)
        if isinstance(cache, AttendingCache):
            slopes = (
                (alibi[:, 0, 1] - alibi[:, 0, 0]).float() if policy.alibi == "added" and alibi is not None else None
            )
            return cache.attend(
                query,
                key,
                value,
                self.layer_index,
                scale=self.scale,
                alibi_slopes=slopes,
                window=self.sliding_window,
                softcap=self.softcap,
            )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_index)
        num_new, num_seen = query.shape[2], key.shape[2]
        if self.window is not None and num_seen > self.window:
            if num_new == 1:
                key, value = key[:, :, -self.window :], value[:, :, -self.window :]
                mask = None if mask is None else mask[..., -self.window :]
            else:
                mask = within_window(mask, num_new, num_seen, self.window, query)
        if policy.alibi == "added" and alibi is not None:
            mask = with_alibi(mask, alibi, query.shape[0], policy.is_causal, num_new)
        return attend(query, key, value, mask, scale=self.scale, is_causal=policy.is_causal, softcap=self.softcap)

    def _per_head(self, given: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Return mask and ALiBi for this rank's heads; the hooks of a divided model's attention module slice them."""
        mask, alibi = given.get("attention_mask"), given.get("alibi")
        if self.ranks is None or (alibi is None and (mask is None or mask.shape[1] == 1)):
            return mask, alibi
        kwargs: dict[str, Any] = {"attention_mask": mask, "alibi": alibi}
        for hook in self.attention._forward_pre_hooks.values():
            _, kwargs = hook(self.attention, (), kwargs)
        return kwargs["attention_mask"], kwargs["alibi"]

    def _rotated(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self.policy.rotary == "halves":
            cos, sin = (part.unsqueeze(1) for part in given["position_embeddings"])
            return rotate_halves(query, cos, sin), rotate_halves(key, cos, sin)
        if self.policy.rotary_table:
            table = found(self.layer, self.policy.rotary_table)
            sin, cos = table[given["position_ids"]].to(query.dtype).unsqueeze(1).chunk(2, -1)
        else:
            sin, cos = (part.unsqueeze(1) for part in given["position_embeddings"])
        return rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin)

    def release(self) -> None:
        """Restore the layer's own forward, and give every parameter its own memory."""
        del self.layer.forward
        for each in (self.qkv, self.up, self.out, self.down):
            if each is not None:
                each.release()


class Part:
    """A module inside a layer, as recorded when the layer is fused."""

    def __init__(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self._parent, self._name, self._module, self._class = parent, name, module, type(module)
        self._forward = vars(module).get("forward")
        self._num_hooks = num_hooks(module)

    def is_as_it_was(self) -> bool:
        """Return whether the parent still has this module, with the same class, forward and number of hooks."""
        module = self._module
        return (
            self._parent._modules.get(self._name) is module
            and type(module) is self._class  # parametrizations change it
            and vars(module).get("forward") is self._forward
            and num_hooks(module) == self._num_hooks
        )


def num_hooks(module: nn.Module) -> int:
    """Count the hooks of a module. Hooks without an effect on results do not count: transformers' hooks that capture
    attention weights, the engine's hooks that measure times, and a divided model's hooks around its forward."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return sum(getattr(hook, "__module__", "") not in _OBSERVERS for hook in hooks)


def part_of(root: nn.Module, path: str) -> Part:
    """Return a `Part` for the module at `path`."""
    parent, _, name = path.rpartition(".")
    holder = found(root, parent) if parent else root
    return Part(holder, name, found(holder, name))


def _modules_of(layer: nn.Module, policy: InjectionPolicy) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, name, module) of each module inside `layer` that a fused block computes itself."""
    paths = [*policy.qkv, policy.out, *policy.up, policy.down, policy.norm_attention, policy.norm_mlp]
    paths += [f"{policy.experts}.gate", f"{policy.experts}.experts"] if policy.experts else []
    paths += [policy.norm_query, policy.norm_key, policy.activation, policy.norm_attention_out, policy.norm_mlp_out]
    modules: dict[str, tuple[nn.Module, str, nn.Module]] = {}
    for path in paths:
        parent: Any = layer
        names = path.split(".")
        for depth, name in enumerate(names):
            module = parent._modules.get(name)
            if module is None:  # a function, or a norm that this layer lacks
                break
            modules[".".join(names[: depth + 1])] = (parent, name, module)
            parent = module
    return list(modules.values())


def found(root: Any, path: str) -> Any:
    """Return the attribute at `path`.

    Raises:
        ConfigError: an attribute of the path is missing.
    """
    at = root
    for name in path.split("."):
        if not hasattr(at, name):
            raise ConfigError(f"its policy names {path!r}, and {type(at).__name__} has no {name!r}")
        at = getattr(at, name)
    return at


def norm_of(module: Any) -> "FusedNorm":
    """Return the fused norm for a norm module.

    Raises:
        ConfigError: the module has hooks, or is of an unsupported kind.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        raise ConfigError("one of its norms has forward hooks, which a fused layer would not call")
    if isinstance(module, nn.LayerNorm) or (
        type(module).__name__.endswith("RMSNorm")
        and (hasattr(module, "variance_epsilon") or type(module).__name__ in _FROM_ONE)
    ):
        return FusedNorm(module)
    raise ConfigError(f"its norm is a {type(module).__name__}; torch.nn.LayerNorm or an RMSNorm is fused")


# RMS norms that multiply by 1 + weight, in fp32
_FROM_ONE = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")


class FusedNorm:
    """Computes norm(x), or (norm(x + residual), x + residual) if called with a residual."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.centered = isinstance(module, nn.LayerNorm)
        self.is_from_one = type(module).__name__ in _FROM_ONE
        self.eps = float(module.eps if self.centered or self.is_from_one else module.variance_epsilon)

    @property
    def weight(self) -> Tensor | None:
        """The factor of normalized rows: weight, or 1 + weight if `is_from_one`; None without a weight."""
        weight: Tensor | None = self.module.weight
        return 1 + weight.float() if self.is_from_one and weight is not None else weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        weight = self.weight
        if self.centered:
            bias = self.module.bias
            if residual is None:
                return layer_norm(x, weight, bias, self.eps)
            return layer_norm_residual(x, residual, weight, bias, self.eps)
        if residual is None:
            return rms_norm(x, weight, self.eps)
        return rms_norm_residual(x, residual, weight, self.eps)
