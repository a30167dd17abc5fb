"""`MoE` is a layer of experts that replaces a feed-forward layer.

    self.mlp = deepspeed.moe.layer.MoE(hidden_size=1024, expert=mlp, num_experts=8, ep_size=4, k=2)
    ...
    y, l_aux, exp_counts = self.mlp(x)
    loss = loss + 0.01 * sum_of_all(l_aux)

`deepspeed.initialize` connects the layers of a model to the ranks of its mesh (`connect_moe_layers`). The parts:
`gate.py` chooses experts, `dispatch.py` moves rows by an all-to-all, `experts.py` computes, and `send_experts` sends
experts from the ranks that made them to the ranks that hold them.

A layer is built before its engine. The engine's mesh may differ from the mesh that `parallel/groups.py` returned when
the layer was built, for example after `tp_model_init` of another model. So experts are sent when layers are connected.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

import deepspeed.comm as dist
from deepspeed._absent import absent_members
from deepspeed.comm.backend import GroupBackend, broadcast_together
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.moe.dispatch import dispatch, token_ranks
from deepspeed.moe.experts import Experts, ExpertSource, StackedExperts, hold_experts, make_experts
from deepspeed.moe.gate import TopKGate
from deepspeed.parallel import groups
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import EXPERT_PREFIX, building_experts, is_tensor_parallel


@absent_members("moe.sharded_moe:MOELayer")
class MOELayer(nn.Module):
    """The gate and this rank's experts.

    Attributes:
        l_aux: the losses of the gate in the last forward.
        exp_counts: choices of each expert by this rank's tokens in the last forward, [E], int64.
    """

    def __init__(self, gate: TopKGate, experts: Experts | StackedExperts, ep_size: int, made_for: int | None) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_size = ep_size
        self._made_for = made_for  # the part of the layer's experts that was made; None: copies, which fit any part
        self.ranks: GroupBackend | None = None
        self.l_aux = torch.zeros(())
        self.exp_counts = torch.zeros(gate.num_experts, dtype=torch.int64)

    def __getstate__(self) -> dict[str, Any]:
        # Do not copy or pickle the ranks (a copy's own engine connects it) and the last forward's graph.
        return {**vars(self), "ranks": None, "l_aux": self.l_aux.detach()}

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """[..., H] -> [..., H]. A collective of the ranks that hold the experts."""
        if self.ep_size > 1 and self.ranks is None:
            raise ConfigError(
                f"MoE: the experts are divided over {self.ep_size} ranks, which are not connected; pass the model to "
                "deepspeed.initialize, or call set_deepspeed_parallelism() of the layer on all ranks"
            )
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        routing = self.gate(x_TH, used_token)
        self.l_aux, self.exp_counts = routing.loss, routing.counts
        out_TH = dispatch(x_TH, routing, self.experts, self.ranks)
        return out_TH.view(*hidden.shape[:-1], out_TH.shape[-1])

    def built(self) -> "BuiltExperts":
        """Return the experts, and the part that they were made for."""
        return BuiltExperts(self.experts, self.ep_size, self._made_for)

    def connect(self, mesh: Mesh, path: str) -> None:
        """Connect the ranks of `mesh` that hold the experts. A collective of these ranks.

        Args:
            path: the path of this module in the model, for the names of experts in checkpoints.
        """
        if self.ep_size == 1:
            return
        self.ranks = token_ranks(mesh, self.ep_size)
        self._made_for = None if self._made_for is None else self.ranks.rank  # `send_experts` has sent this part
        self.experts.mark(f"{path}.experts".lstrip("."), self.ranks.rank, self.ep_size)


class MoE(nn.Module):
    """A mixture of experts.

    Args:
        hidden_size: H, the width of inputs and outputs.
        expert: a module from [n, H] to [n, H] that is copied for every expert; or a function that creates such a
            module, for experts with different initial weights. `ExpertMLP`s of `experts.py` are computed together.
        num_experts: E, the number of experts on all ranks.
        ep_size: number of ranks over which the experts are divided.
        k: experts per token.
        capacity_factor: see `TopKGate` for this and the other arguments of the gate.
        eval_capacity_factor: the capacity factor in evaluation.
        min_capacity: the minimum capacity of an expert.
        use_residual: PR-MoE (arXiv 2201.05596, section 4.1): a dense expert runs on every token, and a learned
            softmax of two coefficients weighs it against the chosen experts.
        noisy_gate_policy: None, "Jitter" or "RSample".
        drop_tokens: False: unlimited capacity, no token is dropped.
        use_rts: random token selection.
        use_tutel: accepted with a warning; tokens are always dispatched by sorting.
        enable_expert_tensor_parallelism: divide each expert over the tensor-parallel ranks, as AutoTP divides a
            feed-forward layer; otherwise each tensor-parallel rank holds whole experts. Experts with their own tensor
            parallelism, whose parameters have Megatron's marks, stay unchanged.
        top2_2nd_expert_sampling: sample the second expert.
        z_loss_coefficient: the coefficient of the z loss in `l_aux`; not in DeepSpeed.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: ExpertSource,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        z_loss_coefficient: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("num_experts", num_experts), ("ep_size", ep_size)):
            if not isinstance(value, SupportsIndex):
                raise ConfigError(f"MoE: found {name} {value!r}; give a whole number")
        if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
            raise ConfigError(
                f"MoE: found num_experts {num_experts} with ep_size {ep_size}; give an ep_size that divides the experts"
            )
        if use_tutel:
            warn_once("MoE: found use_tutel True, ignored: tokens are dispatched by sorting, without Tutel")
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"{EXPERT_PREFIX}{ep_size}"
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
            z_loss_coefficient=z_loss_coefficient,
        )
        part = None if isinstance(expert, nn.Module) else part_to_make(ep_size)
        first = (part or 0) * self.num_local_experts
        with building_experts(ep_size):
            experts = make_experts(expert, num_experts, range(first, first + self.num_local_experts))
            held = hold_experts(experts, ep_size, one_by_one=enable_expert_tensor_parallelism)
        self.deepspeed_moe = MOELayer(gate, held, ep_size, part)
        if use_residual:
            (self.mlp,) = make_experts(expert, 1, range(1))
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer; a collective of the ranks that hold the experts.

        Args:
            hidden_states: [..., H].
            used_token: one element per token, 0 for padding. None: use all tokens.

        Returns:
            output [..., H]; the gate's loss, a scalar; choices of each expert by this rank's tokens before dropping,
            [E] int64.
        """
        if hidden_states.shape[-1] != self.hidden_size:
            raise ConfigError(
                f"MoE: found inputs of width {hidden_states.shape[-1]}, and hidden_size {self.hidden_size}; give the "
                "layer the width of its inputs"
            )
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = self.coefficient(hidden_states).softmax(-1)
            output = output * share[..., :1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool | None = None) -> None:
        """Connect the ranks that hold the experts, with the mesh of `deepspeed.utils.groups`; for use without an
        engine. A collective of all ranks.

        Args:
            use_data_before_expert_parallel_: neighboring ranks hold the same experts. None: the mesh's default.

        Raises:
            ConfigError: if `ep_size` does not divide the ranks.
        """
        mesh = groups.viewed_mesh()
        mesh.experts(self.ep_size, data_before_expert=use_data_before_expert_parallel_)
        _connect({"": self}, mesh, None)


#: divides an expert over the tensor-parallel ranks of a mesh, in place
DivideExpert = Callable[[nn.Module, Mesh], None]


def connect_moe_layers(module: nn.Module, mesh: Mesh, divide: DivideExpert | None) -> None:
    """Connect every layer of experts in a model to its ranks; called by `initialize`. A collective of all ranks.

    Args:
        divide: called for each expert of layers with `enable_expert_tensor_parallelism`, by all "tp" ranks together.
            None if "tp" has one rank.

    Raises:
        ConfigError: on every rank, if an `ep_size` does not fit the mesh.
    """
    _connect({path: layer for path, layer in module.named_modules() if isinstance(layer, MoE)}, mesh, divide)


def _connect(layers: Mapping[str, MoE], mesh: Mesh, divide: DivideExpert | None) -> None:
    send_experts({path: layer.deepspeed_moe.built() for path, layer in layers.items()}, mesh)
    for path, layer in layers.items():
        experts = layer.deepspeed_moe.experts
        if layer.enable_expert_tensor_parallelism and mesh.size("tp") > 1:
            assert isinstance(experts, Experts)
            experts.divide(mesh, divide)
        layer.deepspeed_moe.connect(mesh, f"{path}.deepspeed_moe".lstrip("."))


def moe_layers(module: nn.Module) -> list[MoE]:
    """Return the `MoE` layers of a model."""
    return [layer for layer in module.modules() if isinstance(layer, MoE)]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether the module has `MoE` layers, and the number of experts of the first one (0 if none)."""
    found = moe_layers(m)
    return bool(found), found[0].num_experts if found else 0


class BuiltExperts(NamedTuple):
    """`BuiltExperts` holds the experts of a layer as they were built on this rank."""

    module: nn.Module
    ep_size: int
    made: int | None
    """The part of the layer's experts whose weights these are; None: of any, they are copies of one module."""


def part_to_make(ep_size: int) -> int:
    """Return the part of a new layer's experts that this rank makes, which is the part that it will likely hold.

    It uses the mesh of `deepspeed.utils.groups`; if `ep_size` does not fit that mesh, the mesh for whole models.

    Raises:
        ConfigError: torch.distributed is not initialized, or `ep_size` fits neither mesh.
    """
    if ep_size == 1:
        return 0
    if not dist.is_initialized():
        raise ConfigError(
            f"MoE: found ep_size {ep_size} before deepspeed.init_distributed(), which says which of the experts this "
            "rank holds; call it first"
        )
    mesh = groups.viewed_mesh()
    if mesh.size("dp", "sp") % ep_size:
        mesh = groups.mesh_of_whole_models()
    made = mesh.expert_grids.get(ep_size)
    layout = mesh.layout.experts(ep_size) if made is None else made.layout
    return layout.line(dist.get_rank(), "ep").index(dist.get_rank())


def send_experts(layers: Mapping[str, BuiltExperts], mesh: Mesh) -> None:
    """Send experts to the ranks that hold them on `mesh`, if other ranks made them. A collective of the mesh.

    Args:
        layers: the layers by their paths in the model; each pipeline stage passes its own.

    Raises:
        ConfigError: on every rank, if an `ep_size` does not fit the mesh, or experts cannot be sent.
    """
    held = {path: mesh.experts(built.ep_size).rank("ep") for path, built in layers.items()}
    elsewhere = [path for path, built in layers.items() if built.made not in (None, held[path])]
    paths = dict.fromkeys(path for each in all_gather_values(elsewhere, mesh.norm_group) for path in each)
    if not paths:
        return
    own = {path: [layers[path].made, held[path], _sendable(layers[path].module)] for path in paths if path in layers}
    everyone = all_gather_values(own, mesh.norm_group)
    by_rank = dict(zip(mesh.ranks(*mesh.layout.axes), everyone, strict=True))
    for path in paths:
        _check(path, {rank: each[path] for rank, each in by_rank.items() if path in each})
    axes = ("dp", "sp", "tp")
    members, ranks = mesh.ranks(*axes), dist.group_backend(mesh.group(*axes))
    ranks.connect()
    for path in own:
        makers = {by_rank[rank][path][0]: place for place, rank in reversed([*enumerate(members)])}
        _take(layers[path].module, held[path], makers, ranks)


def _sendable(module: nn.Module) -> str | None:
    """Describe the names, shapes and dtypes of the experts' tensors; None: they are divided and cannot be sent."""
    if any(hasattr(param, "ds_id") or is_tensor_parallel(param) for param in module.parameters()):
        return None
    named = (*module.named_parameters(), *module.named_buffers())
    return ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)


def _check(path: str, places: Mapping[int, Any]) -> None:
    """Raise ConfigError if the ranks' experts are of different kinds or divided, or no rank made a needed part."""
    kinds = {kind for _, _, kind in places.values()}
    made = {part for part, _, _ in places.values()}
    if len(kinds) == 1 and None not in kinds and made >= {part for _, part, _ in places.values()}:
        return
    rank, (was, part, _) = next((rank, each) for rank, each in places.items() if each[0] != each[1])
    why = "were sharded or divided since" if None in kinds else "are not all there, or not all alike"
    raise ConfigError(
        f"MoE {path or 'layer'}: rank {rank} made part {was} of the experts, and on this mesh it holds part {part}. "
        f"They cannot be sent, as they {why}; lay the ranks out with deepspeed.utils.groups.set_mesh(...) before the "
        "model is built"
    )


def _take(module: nn.Module, part: int, makers: Mapping[int, int], ranks: GroupBackend) -> None:
    """Copy the experts of `part` into `module`. A collective.

    Args:
        makers: by part, the rank within `ranks` of one rank that made the part.
    """
    own = [each.detach() for each in (*module.parameters(), *module.buffers()) if each.numel()]
    found: list[Tensor] = []
    for index, source in sorted(makers.items()):
        values = [each.clone() if ranks.rank == source else torch.empty_like(each) for each in own]
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for value in values:
            by_kind.setdefault((value.dtype, value.device), []).append(value)
        for same_kind in by_kind.values():
            broadcast_together(same_kind, ranks, source, tag="experts")
        found = values if index == part else found
    for tensor, value in zip(own, found, strict=True):
        tensor.copy_(value)
