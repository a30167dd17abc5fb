"""`UlyssesSPAttentionHF` runs Ulysses inside the attention of transformers' models; `SequenceParallelUnit` is its mpu.

    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
    )
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)

`deepspeed.initialize` reads the layout of the ranks from the `mpu`. transformers finds attention functions and mask
functions by name. Registering replaces both: the new mask covers the whole sequence, and all-to-alls redistribute heads
and tokens around the original attention function. All models of the process with that implementation then work on
divided sequences, until `unregister_from_transformers`. Batches come from `UlyssesSPDataLoaderAdapter`, which adds the
positions of each part.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError, counted, either
from deepspeed.parallel import groups
from deepspeed.parallel.layout import read_layout
from deepspeed.parallel.mesh import Mesh
from deepspeed.sequence.exchange import channel, check_layout, divide_heads, gather_heads, scatter_heads
from deepspeed.sequence.layer import repeat_heads


class SequenceParallelUnit:
    """`SequenceParallelUnit` exposes a mesh under the names of Megatron's `mpu`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Ranks that share a sequence."""
        return self.mesh.group("sp")

    def get_sequence_parallel_world_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.mesh.size("sp")

    def get_sequence_parallel_rank(self) -> int:
        """This rank's part of the sequence."""
        return self.mesh.rank("sp")

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks that see different samples."""
        return self.mesh.group("dp")

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that see different samples."""
        return self.mesh.size("dp")

    def get_data_parallel_rank(self) -> int:
        """This rank's index among the data-parallel ranks."""
        return self.mesh.rank("dp")

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Ranks that average a gradient."""
        return self.mesh.gradient_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Number of ranks that average a gradient."""
        return self.mesh.size("dp", "sp")

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's index among the ranks that average a gradient."""
        return self.mesh.rank("dp", "sp")

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Ranks that hold the parts of one layer."""
        return self.mesh.group("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks that hold the parts of one layer; 1 without tensor parallelism."""
        return self.mesh.size("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's index among the ranks that hold the parts of one layer."""
        return self.mesh.rank("tp")

    # Megatron's older names
    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank


def sequence_parallel_unit(sequence_parallel_size: int) -> SequenceParallelUnit:
    """Return the unit of a mesh with `sequence_parallel_size` neighbors per sequence. A collective of all ranks.

    An existing mesh of that size is reused, with its other axes. Otherwise a new mesh has the remaining ranks data
    parallel, and `deepspeed.utils.groups` returns this mesh from now on.

    Raises:
        ConfigError: if the size does not divide the number of ranks.
    """
    world_size = dist.get_world_group().size()
    if sequence_parallel_size < 1 or world_size % sequence_parallel_size:
        divisors = either(size for size in range(1, world_size + 1) if world_size % size == 0)
        raise ConfigError(
            f"sequence_parallel_size: found {sequence_parallel_size} for {counted(world_size, 'rank')}; give {divisors}"
        )
    mesh = groups.viewed_mesh()
    if mesh.size("sp") != sequence_parallel_size:
        mesh = Mesh(read_layout({"sp": sequence_parallel_size}, world_size))
        groups.view(mesh)
    return SequenceParallelUnit(mesh)


SUPPORTED = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# [batch, heads, tokens, width] of query, key and value; [batch, tokens, heads, width] of the context
_INPUT_DIMS = {"sequence_dim": 2, "head_dim": 1}
_OUTPUT_DIMS = {"sequence_dim": 1, "head_dim": 2}


@dataclass(frozen=True)
class _Former:
    """`_Former` keeps the original functions registered under a name; attention is None if there was none."""

    attention: Callable[..., Any] | None
    mask: Callable[..., Any]


_former: dict[str, _Former] = {}


@absent_members("runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF")
class UlyssesSPAttentionHF(torch.nn.Module):
    """An attention function of transformers over divided sequences.

    Args:
        attn: the core attention, as transformers calls it; it gets all tokens of this rank's heads.
        batch_size: sequences per micro-batch; only stored.
        attn_head_count: query heads of a layer.
        attn_head_size: width of a head; only stored.
        kv_head_count: key and value heads of a layer.
        num_hidden_layers: layers of the model; only stored.
        process_group: the ranks that share a sequence.
        seq_length_is_variable: False: every batch has `local_seq_length` tokens here, so ranks do not compare shapes.
        local_seq_length: tokens of a sequence on this rank, if the length is not variable.
        global_seq_length: tokens of a sequence.
        disable_in_eval: modules in eval mode attend only to this rank's tokens, so pass them whole sequences.

    Raises:
        ValueError: if there are fewer heads than ranks.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: ProcessGroup,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        divide_heads(attn_head_count, kv_head_count, process_group.size())
        self.attn = attn
        self.batch_size = batch_size
        self.attn_head_count = attn_head_count
        self.attn_head_size = attn_head_size
        self.kv_head_count = kv_head_count
        self.num_hidden_layers = num_hidden_layers
        self.process_group = process_group
        self.seq_length_is_variable = seq_length_is_variable
        self.local_seq_length = local_seq_length
        self.global_seq_length = global_seq_length
        self.disable_in_eval = disable_in_eval
        self._model: Callable[[], torch.nn.Module | None] = lambda: None

    def forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the context of this rank's tokens, [B, T, H, K], and None for the attention weights.

        Args:
            module: the model's attention layer.
            query: [B, H, T, K] with this rank's tokens.
            key: [B, KV heads, T, K].
            value: as `key`.
            attention_mask: the mask of the whole sequence from `mask`, or None.
            args: for the core attention.
            kwargs: for the core attention.

        Raises:
            ValueError: on every rank, for shapes that differ between ranks, a number of tokens other than
                `local_seq_length`, position biases, attention sinks, or keys of another length.
        """
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)  # type: ignore[no-any-return]
        backend = channel(self.process_group)
        self._check(module, query, key, attention_mask, kwargs)
        if self.seq_length_is_variable:
            check_layout(backend, (query, key, value), "Ulysses attention")
        heads = divide_heads(query.shape[1], key.shape[1], backend.world_size)
        parts = (heads.query, heads.key_value, heads.key_value)
        query, key, value = scatter_heads(backend, (query, key, value), parts, **_INPUT_DIMS)
        key, value = (repeat_heads(each, heads, backend.rank, 1) for each in (key, value))
        local = _with_groups(module, query.shape[1] // key.shape[1])
        context, _ = self.attn(local, query, key, value, attention_mask, *args, **kwargs)
        return gather_heads(backend, context, heads.query, **_OUTPUT_DIMS), None

    def mask(self, make: Callable[..., Any], **arguments: Any) -> Any:
        """Make the mask of the whole sequence with transformers' function `make`, from the arguments for one part."""
        if not self._is_active() or arguments["q_length"] != arguments["kv_length"]:
            return make(**arguments)
        if _reads_tensors(arguments["mask_function"]):
            raise ValueError(
                "Ulysses attention: the model asks for a mask that depends on the tokens of this rank (several "
                "documents packed into a sequence, or blocks of image tokens); give one document per sequence"
            )
        backend = channel(self.process_group)
        padding = arguments["attention_mask"]
        if padding is not None:
            check_layout(backend, (padding,), "Ulysses attention, attention_mask")
            padding = padding.to(torch.uint8).t().contiguous()  # tokens first, so that parts follow each other
            whole = backend.allocate(padding.numel() * backend.world_size, padding.dtype, padding.device)
            backend.all_gather(whole, padding.view(-1), tag="padding").wait()
            padding = whole.view(-1, padding.shape[1]).t().bool()
        lengths = {name: arguments[name] * backend.world_size for name in ("q_length", "kv_length")}
        return make(**{**arguments, **lengths, "attention_mask": padding})

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> SequenceParallelUnit:
        """Wrap an attention implementation of transformers with Ulysses. A collective of all ranks.

        Args:
            model_name_or_path: a model, its config, or a name or path of one; gives the numbers of heads.
            core_attn_implementation: the implementation that the model uses, one of `SUPPORTED`.
            sequence_parallel_size: number of neighboring ranks that share a sequence; divides the number of ranks.
            micro_batch_size: sequences per micro-batch.
            seq_length: tokens of a sequence; needed only if the length is not variable.
            seq_length_is_variable: False saves the comparison of shapes in each layer.
            disable_in_eval: attend only to this rank's tokens in eval mode, for whole sequences on each rank. Given a
                name, path or config instead of a model, masks depend on `torch.is_grad_enabled()` instead.

        Returns:
            the mpu for `deepspeed.initialize(mpu=...)`.

        Raises:
            ConfigError: an argument does not fit; the error names it and what would fit.
            ImportError: transformers is not installed.
        """
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = core_attn_implementation
        config = _text_config(model_name_or_path)
        _check_implementation(name, config)
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        _check_sizes(num_heads, num_kv_heads, sequence_parallel_size, seq_length, seq_length_is_variable)
        mpu = sequence_parallel_unit(sequence_parallel_size)
        cls.unregister_from_transformers(name)
        attention = ALL_ATTENTION_FUNCTIONS.get(name) if name != "eager" else None
        former = _Former(attention, ALL_MASK_ATTENTION_FUNCTIONS[name])
        ulysses = cls(
            _eager_of_model if attention is None else attention,
            micro_batch_size or 0,
            num_heads,
            getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            num_kv_heads,
            config.num_hidden_layers,
            mpu.get_sequence_parallel_group(),
            seq_length_is_variable=seq_length_is_variable,
            local_seq_length=None if seq_length is None else seq_length // sequence_parallel_size,
            global_seq_length=seq_length,
            disable_in_eval=disable_in_eval,
        )
        if isinstance(model_name_or_path, torch.nn.Module):
            ulysses._model = ref(model_name_or_path)
        _former[name] = former
        ALL_ATTENTION_FUNCTIONS.register(name, ulysses)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda **kwargs: ulysses.mask(former.mask, **kwargs))
        return mpu

    @staticmethod
    def unregister_from_transformers(core_attn_implementation: str) -> None:
        """Restore transformers' original functions; does nothing if none was replaced."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        former = _former.pop(core_attn_implementation, None)
        if former is None:
            return
        ALL_MASK_ATTENTION_FUNCTIONS.register(core_attn_implementation, former.mask)
        if former.attention is None:
            del ALL_ATTENTION_FUNCTIONS._global_mapping[core_attn_implementation]
        else:
            ALL_ATTENTION_FUNCTIONS.register(core_attn_implementation, former.attention)

    def _is_active(self) -> bool:
        """Whether to make masks for divided sequences."""
        model = self._model()
        return not self.disable_in_eval or (torch.is_grad_enabled() if model is None else model.training)

    def _check(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        layer = type(module).__name__
        added = next((name for name, value in kwargs.items() if _is_values(value)), None)
        if added is not None or hasattr(module, "sinks"):
            raise ValueError(
                f"Ulysses attention: {layer} adds a position bias or attention sinks ({added or 'sinks'}), which "
                "belong to heads and tokens of the whole sequence; use another model, or leave its sequences whole"
            )
        length = query.shape[2]
        if key.shape[2] != length:
            raise ValueError(
                f"Ulysses attention: {layer} has {counted(length, 'query', 'queries')} and "
                f"{counted(key.shape[2], 'key')} on this rank; cross-attention and generation with a cache need whole "
                "sequences, as in eval mode with disable_in_eval"
            )
        if not self.seq_length_is_variable and length != self.local_seq_length:
            raise ValueError(
                f"Ulysses attention: found {counted(length, 'token')} on this rank, but seq_length "
                f"{self.global_seq_length} over {self.process_group.size()} ranks is {self.local_seq_length}; pad to "
                "it, or register with seq_length_is_variable=True"
            )
        whole = length * self.process_group.size()
        if mask is not None and mask.shape[-1] != whole:
            raise ValueError(
                f"Ulysses attention: the attention mask has {counted(mask.shape[-1], 'token')}, the sequence {whole}; "
                "pass the 2-D attention_mask of this rank's tokens, or a 4-D one of the whole sequence"
            )


def _with_groups(module: torch.nn.Module, num_groups: int) -> Any:
    """Return `module`, or a wrapper, with this rank's query heads per KV head as `num_key_value_groups`."""
    return module if getattr(module, "num_key_value_groups", 1) == num_groups else _Regrouped(module, num_groups)


class _Regrouped:
    """A view of an attention layer with another `num_key_value_groups`, for its core attention."""

    def __init__(self, module: torch.nn.Module, num_groups: int) -> None:
        self._module = module
        self.num_key_value_groups = num_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _eager_of_model(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the eager attention, which each model of transformers has in its own file."""
    layer = type(getattr(module, "_module", module))
    eager = getattr(sys.modules[layer.__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f'Ulysses attention: {layer.__name__} has no eager attention function; use "sdpa"')
    return eager(module, *args, **kwargs)


def _is_values(value: Any) -> bool:
    """Whether `value` is a floating-point tensor with dims, such as a bias; names of such arguments vary."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _reads_tensors(function: Any) -> bool:
    """Whether a mask function closes over tensors."""
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    nested = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
    return any(isinstance(value, torch.Tensor) or (callable(value) and _reads_tensors(value)) for value in nested)


def _text_config(model_name_or_path: Any) -> Any:
    if isinstance(model_name_or_path, str) or hasattr(model_name_or_path, "__fspath__"):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_name_or_path)
    else:
        config = getattr(model_name_or_path, "config", model_name_or_path)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(config, "num_attention_heads"):
        raise ConfigError(
            f"register_with_transformers: model_name_or_path is {type(model_name_or_path).__name__}, which does not "
            "say num_attention_heads; pass a model of transformers, its config, or a name or path of one"
        )
    return config


def _check_implementation(name: str, config: Any) -> None:
    if name not in SUPPORTED:
        raise ConfigError(
            f"register_with_transformers: core_attn_implementation is {name!r}; there are {', '.join(SUPPORTED)}"
        )
    if not hasattr(config, "_attn_implementation"):
        raise ConfigError(
            f"register_with_transformers: {type(config).__name__} does not say which attention the model uses "
            f"(_attn_implementation), so it could be another than {name!r}; use the tested version of transformers"
        )
    uses = config._attn_implementation
    if uses is not None and uses != name:
        raise ConfigError(
            f"register_with_transformers: core_attn_implementation is {name!r}, but the model uses {uses!r}, and each "
            f"rank would attend to its own tokens alone; make the model with attn_implementation={name!r}"
        )


def _check_sizes(num_heads: int, num_kv_heads: int, num_ranks: int, length: int | None, is_variable: bool) -> None:
    try:
        divide_heads(num_heads, num_kv_heads, num_ranks)
    except ValueError as error:
        raise ConfigError(f"register_with_transformers: {error}") from error
    if length is not None and length % num_ranks:
        raise ConfigError(
            f"register_with_transformers: seq_length is {length}, which {num_ranks} ranks cannot divide; pad to "
            f"{length + -length % num_ranks}"
        )
    if length is None and not is_variable:
        raise ConfigError("register_with_transformers: seq_length_is_variable is False without a seq_length; give one")
