"""Muon: one optimizer with orthogonalized momentum for hidden matrices and AdamW for all other parameters.

`orthogonalize` approximates the nearest semi-orthogonal matrix by the Newton-Schulz iteration (matrix products only).
"""

from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.adam.adam import adam_step, create_state
from deepspeed.ops.optimizer import ReferenceOptimizer, check_not_sparse, check_options, check_params

NS_METHODS = ("gram", "standard")
# Coefficients of the quintic (K. Jordan et al., "Muon", 2024). It is steep at 0: five steps bring every singular value
# of a matrix with spectral norm <= 1 into about [0.7, 1.2]. It does not converge to 1, and does not need to.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrix: Tensor, steps: int = 5, method: str = "gram", eps: float = 1e-7) -> Tensor:
    """Return approximately U V^T for `matrix` = U S V^T. The singular values of the result are in about [0.7, 1.2].

        X <- G / (|G|_F + eps);   steps times:  X <- a X + b (X X^T) X + c (X X^T)^2 X

    "gram" accumulates the polynomials on the small square matrix R = X X^T and applies the product once. The result is
    equal up to rounding, and cheaper for rectangular matrices. The arithmetic is fp32 on the host and for "gram";
    "standard" on a device runs in bf16, like the reference implementation. `muon_update` calls this.

    Args:
        matrix: a floating-point tensor (..., M, N); leading dimensions are a batch.
        steps: number of iterations.
        method: "gram" or "standard".
        eps: added to the Frobenius norm.

    Returns:
        A tensor of the matrix's shape and dtype.

    Raises:
        ConfigError: `method` is unknown.

    >>> singular_values = torch.linalg.svdvals(orthogonalize(torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 5.0]])))
    >>> bool((singular_values > 0.6).all() and (singular_values < 1.3).all())
    True
    """
    if method not in NS_METHODS:
        raise ConfigError(f"ns_method: found {method!r}, but it must be one of {', '.join(NS_METHODS)}")
    if matrix.numel() == 0:
        return matrix.clone()
    tall = matrix.size(-2) > matrix.size(-1)
    use_gram = method == "gram" and matrix.size(-2) != matrix.size(-1)
    on_host = matrix.device.type == "cpu"
    wide = matrix.to(torch.float32 if use_gram or on_host else torch.bfloat16)
    wide = wide.mT if tall else wide
    wide = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + eps)
    result = _by_gram(wide, steps) if use_gram else _by_products(wide, steps)
    return (result.mT if tall else result).to(matrix.dtype)


def _by_products(wide: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = _A * wide + (_B * gram + _C * gram @ gram) @ wide
    return wide


def _by_gram(wide: Tensor, steps: int) -> Tensor:
    # p = aI + bR + cR^2 commutes with R, so X_{k+1} = p X_k gives R_{k+1} = p R_k p; `product` accumulates all p
    gram = wide @ wide.mT
    product = identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    for _ in range(steps):
        polynomial = _A * identity + _B * gram + _C * gram @ gram
        product = polynomial @ product
        gram = polynomial @ gram @ polynomial
    return product @ wide


def muon_update(
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """Return Muon's direction for one full matrix, and update `momentum_buffer` in place.

        m <- beta * m + (1 - beta) * g
        u  = orthogonalize((1 - beta) * g + beta * m)          with nesterov, else orthogonalize(m)
        u  = sqrt(max(1, rows / columns)) * u

    A gradient of more than two dimensions (a convolution) is flattened to (first, rest). With `is_expert_group` it is a
    stack of matrices along the first. With `num_heads` the rows are divided into that many equal blocks, and each block
    is a matrix of its own. The result has the shape of `grad`.
    """
    update = _advance(grad, momentum_buffer, beta=beta, nesterov=nesterov)
    return _direction(update, ns_steps=ns_steps, ns_method=ns_method, is_stack=is_expert_group, num_heads=num_heads)


def _advance(grad: Tensor, momentum_buffer: Tensor, *, beta: float, nesterov: bool) -> Tensor:
    """Update `momentum_buffer` in place and return what is orthogonalized. Each element depends on itself alone."""
    momentum_buffer.lerp_(grad, 1 - beta)
    return torch.lerp(grad, momentum_buffer, beta) if nesterov else momentum_buffer


def _direction(update: Tensor, *, ns_steps: int, ns_method: str, is_stack: bool, num_heads: int | None) -> Tensor:
    """Return the scaled semi-orthogonal matrix nearest to `update`, or one for each head, or for each of a stack."""
    if update.dim() < 2:
        raise ConfigError(
            f"Muon needs whole matrices, but found a parameter of shape {tuple(update.shape)}: put it into a group "
            "with use_muon=False, or keep the optimizer's parameters unflattened"
        )
    matrix = update.flatten(2 if is_stack else 1)
    if num_heads is not None:
        _check_heads(num_heads, update.shape, "a parameter", is_stack=is_stack)
        matrix = matrix.view(num_heads, -1, matrix.size(1))
    result = orthogonalize(matrix, ns_steps, ns_method)
    rows, columns = result.shape[-2:]
    return result.mul_(max(1.0, rows / max(columns, 1)) ** 0.5).reshape(update.shape)


def _num_heads_of(param: Tensor) -> int | None:
    """Return how many heads the rows of a parameter hold, each of which is orthogonalized by itself; None: it is one
    matrix. `mark_muon_parameters` sets the attribute, or users do."""
    heads: int | None = getattr(param, "muon_num_heads", None)
    return heads


def _check_heads(num_heads: Any, shape: torch.Size, what: str, *, is_stack: bool) -> None:
    """Raise ConfigError if the rows of a weight are not that many heads of equally many rows."""
    if is_stack:
        raise ConfigError(
            f"Muon: found muon_num_heads {num_heads!r} on {what} of shape {tuple(shape)}, which is a stack of matrices "
            "(muon_is_stack), and only the rows of one matrix can be heads; set one of the two"
        )
    if type(num_heads) is not int or num_heads < 1 or shape[0] % num_heads != 0:
        raise ConfigError(
            f"Muon: found muon_num_heads {num_heads!r} on {what} of shape {tuple(shape)}, whose rows it does not "
            "divide; set the number of heads of equally many rows"
        )


def _is_stack(param: Tensor) -> bool:
    """Return whether a parameter holds one matrix for each index of its first dimension, such as those of experts."""
    return bool(getattr(param, "muon_is_stack", False))


class WholeMatrices(Protocol):
    """`WholeMatrices` orthogonalizes matrices of which several ranks have parts, or equal copies."""

    def directions(self) -> MutableMapping[Tensor, Tensor]:
        """Advance the momentum of every parameter that has a gradient, with `Muon.advance`, and return the directions
        by parameter. A collective."""


class Muon(ReferenceOptimizer):
    """Muon (K. Jordan et al., "Muon: an optimizer for hidden layers", 2024) with AdamW for the other parameters.

    The optimizer factory creates it for "Muon"; users may create it too:

        Muon([{"params": hidden_matrices, "use_muon": True, "lr": 0.02},
              {"params": the_rest, "use_muon": False, "lr": 3e-4}])

    A group with `use_muon=True` does p <- p * (1 - lr * wd), p <- p - lr * `muon_update`(g); state `momentum_buffer`.
    A group with `use_muon=False` does AdamW; state `step`, `exp_avg`, `exp_avg_sq`. A plain list of parameters, or a
    group without `use_muon`, is divided: parameters with `p.use_muon=True`, or without this attribute and with two or
    more dimensions, use Muon. This is the torch reference.

    An engine may keep flat parts of matrices in the groups. Then it sets `matrices` while it calls `step`.

    Args:
        lr: learning rate of both kinds of groups, unless `muon_lr` or `adam_lr` overrides it.
        momentum, ns_steps, nesterov, ns_method: see `muon_update`, `orthogonalize`.
        betas, eps: options of AdamW.
        weight_decay: decoupled weight decay of both kinds of groups.

    Raises ConfigError for a value out of range, and in `step` for a Muon parameter that is not a matrix.
    """

    #: finds the directions of matrices together with other ranks; None: every Muon parameter is a whole matrix
    matrices: WholeMatrices | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        nesterov: bool = True,
        ns_method: str = "gram",
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        lrs = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
        check_params(params)
        check_options(lr=lr, muon_lr=lrs[True], adam_lr=lrs[False], betas=betas, eps=eps, weight_decay=weight_decay)
        check_options(momentum=momentum, ns_steps=ns_steps, nesterov=nesterov)
        if ns_method not in NS_METHODS:
            raise ConfigError(f"ns_method: found {ns_method!r}, but it must be one of {', '.join(NS_METHODS)}")
        muon_keys = {"momentum": momentum, "ns_steps": ns_steps, "nesterov": nesterov, "ns_method": ns_method}
        adam_keys = {"betas": tuple(betas), "eps": eps}
        self._options = {
            True: {"lr": lrs[True], "weight_decay": weight_decay, **muon_keys},
            False: {"lr": lrs[False], "weight_decay": weight_decay, **adam_keys},
        }
        super().__init__(divide_groups(params), {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must have `use_muon`. Missing keys are filled in."""
        if not isinstance(param_group.get("use_muon"), bool):
            raise ConfigError(f"use_muon: found {param_group.get('use_muon')!r}, but a group must say true or false")
        check_options(**{key: value for key, value in param_group.items() if key != "params"})
        for key, value in self._options[param_group["use_muon"]].items():
            param_group.setdefault(key, value)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if not group["use_muon"]:
            states = [self.state[param] for param in params]
            for param, state in zip(params, states, strict=True):
                if not state:
                    state.update(create_state(param, amsgrad=False))
            adam_step(params, states, {**group, "adam_w_mode": True, "bias_correction": True})
            return
        for param in params:
            if param.numel() == 0:
                continue
            if self.matrices is not None:
                update = self._directions.pop(param)
            else:
                update = self.direction(self.advance(param, group), group, param)
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.sub_(update.mul_(group["lr"]))

    def before_update(self) -> None:
        if self.matrices is not None:
            self._directions = self.matrices.directions()

    def advance(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the momentum of a Muon parameter, or of any part of it, by `param.grad`; return what `direction`
        takes, in the shape of `param`. The caller must not write to it."""
        assert param.grad is not None
        check_not_sparse(param.grad, "Muon")
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        return _advance(param.grad, state["momentum_buffer"], beta=group["momentum"], nesterov=group["nesterov"])

    def direction(self, update: Tensor, group: dict[str, Any], param: Tensor) -> Tensor:
        """Return the direction of a whole matrix from the result of `advance`. `param` is the model's parameter, or one
        with its attributes."""
        return _direction(
            update,
            ns_steps=group["ns_steps"],
            ns_method=group["ns_method"],
            is_stack=_is_stack(param),
            num_heads=_num_heads_of(param),
        )

    @staticmethod
    def cost(param: Tensor, shape: torch.Size) -> int:
        """Return about how long `direction` takes for a parameter of `shape`, in multiplications of an iteration."""
        first = 1 if _is_stack(param) else 0
        rows, columns = shape[first], shape[first + 1 :].numel()
        return shape.numel() * min(rows // (_num_heads_of(param) or 1), columns)


# Parts of names of matrices that are not hidden: embeddings and output heads
_NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe")


def mark_muon_parameters(module: torch.nn.Module, *, per_head: bool = False) -> None:
    """Set `p.use_muon` on each parameter that lacks it: True for hidden matrices. Set `p.muon_is_stack` on those of
    three dimensions that are no convolution's: they are stacks of matrices, such as experts.

    A hidden matrix has 2 or more dimensions, is not in an `Embedding` or `EmbeddingBag`, and has no "embed", "lm_head",
    "wte" or "wpe" in its name. The engine calls this before it creates "Muon". Users may set `p.use_muon` first.

    Args:
        per_head: set `p.muon_num_heads` on attention projections, too, if they lack it: see `_heads_in`.

    Raises:
        ConfigError: `p.muon_num_heads` does not divide the rows; or `per_head`, and no projection whose rows are known
            to be heads.
    """
    embedded = {
        id(param)
        for child in module.modules()
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for param in child.parameters(recurse=False)
    }
    convolved = {
        id(param)
        for child in module.modules()
        if isinstance(child, torch.nn.modules.conv._ConvNd)
        for param in child.parameters(recurse=False)
    }
    for name, param in module.named_parameters():
        if len(_shape(param)) == 3 and id(param) not in convolved and not hasattr(param, "muon_is_stack"):
            param.muon_is_stack = True  # type: ignore[attr-defined]
        if not hasattr(param, "use_muon"):
            is_matrix = len(_shape(param)) >= 2
            hidden = is_matrix and id(param) not in embedded and not any(word in name for word in _NOT_HIDDEN)
            param.use_muon = hidden  # type: ignore[attr-defined]
        heads = _num_heads_of(param)
        if param.use_muon and heads is not None:  # type: ignore[attr-defined]
            _check_heads(heads, _shape(param), name, is_stack=_is_stack(param))
    if per_head:
        _mark_heads(module)


def _shape(param: Tensor) -> torch.Size:
    """Return the full shape of a parameter, even if ZeRO-3 has sharded it."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


# Names of the layers whose rows are heads: one after the other, as many rows each
_QUERIES = frozenset({"q_proj", "query", "query_proj", "q_lin", "wq", "q_b_proj"})
_KEYS = frozenset({"k_proj", "key", "key_proj", "k_lin", "wk"})
_VALUES = frozenset({"v_proj", "value", "value_proj", "v_lin", "wv"})
_KEYS_AND_VALUES = "kv_b_proj"  # of latent attention: a head's keys and values follow each other


def _mark_heads(module: torch.nn.Module) -> None:
    """Set `p.muon_num_heads` on the Muon weights of attention projections.

    The nearest module around the layer whose `config` has `num_attention_heads` describes the heads.
    """
    num_marked = 0
    configs: dict[str | None, Any] = {}  # by path
    for path, owner in module.named_modules():
        parent = path.rpartition(".")[0] if path else None
        own = getattr(owner, "config", None)
        configs[path] = own if _number(own, "num_attention_heads") else configs.get(parent)
        weight = getattr(owner, "weight", None)
        if not isinstance(weight, torch.nn.Parameter) or not getattr(weight, "use_muon", False):
            continue
        shape = _shape(weight)
        heads = _num_heads_of(weight)
        if heads is None and len(shape) == 2 and configs[path] is not None:
            heads = _heads_in(path.rpartition(".")[2], shape[0], configs[path])
        if heads is None:
            continue
        weight.muon_num_heads = heads  # type: ignore[attr-defined]
        num_marked += 1
    if num_marked == 0:
        raise ConfigError(
            f"per_head_muon: found true, and no attention projection in {type(module).__name__} whose rows are known "
            "to be heads: layers called q_proj, k_proj, v_proj (or query, key, value; q_b_proj, kv_b_proj), in a model "
            "whose config has num_attention_heads. Set weight.muon_num_heads on the projections, or per_head_muon to "
            "false"
        )


def _heads_in(name: str, num_rows: int, config: Any) -> int | None:
    """Return how many heads the rows of the layer `name` are; None if it is no projection to heads, or if another
    number of rows is expected.

    A fused projection of queries, keys and values stays one matrix, and so does the output projection, whose columns
    are heads.
    """
    num_queries = _number(config, "num_attention_heads")
    assert num_queries is not None
    num_keys = _number(config, "num_key_value_heads") or num_queries
    width = _number(config, "head_dim") or (_number(config, "hidden_size") or num_rows) // num_queries
    value_width = _number(config, "v_head_dim") or width
    if (key_width := _number(config, "qk_nope_head_dim")) is not None:  # latent attention: all heads have their keys
        num_keys, width = num_queries, key_width + (_number(config, "qk_rope_head_dim") or 0)
        if name == _KEYS_AND_VALUES:
            return num_queries if num_rows == num_queries * (key_width + value_width) else None
    if name in _QUERIES:
        return num_queries if num_rows == num_queries * width else None
    if name in _KEYS or name in _VALUES:
        return num_keys if num_rows == num_keys * (width if name in _KEYS else value_width) else None
    return None


def _number(config: Any, key: str) -> int | None:
    found = getattr(config, key, None)
    return found if type(found) is int and found > 0 else None


def divide_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups that all have `use_muon`. A group without it is divided by `p.use_muon` or number of dimensions."""
    entries = list(params)
    groups = [entry if isinstance(entry, dict) else None for entry in entries]
    if not entries or None in groups:
        groups = [{"params": entries}]
    divided = []
    for group in groups:
        assert group is not None
        if "use_muon" in group:
            divided.append(group)
            continue
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        rest = {key: value for key, value in group.items() if key != "params"}
        for use_muon in (True, False):
            chosen = [param for param in members if _uses_muon(param) is use_muon]
            if chosen or not members:
                divided.append({**rest, "params": chosen, "use_muon": use_muon})
                if not members:
                    break
    return divided


def _uses_muon(param: Tensor) -> bool:
    return bool(getattr(param, "use_muon", len(_shape(param)) >= 2))
