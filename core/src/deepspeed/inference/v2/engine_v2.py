"""`InferenceEngineV2` computes the new tokens of any sequences in one forward, with one key-value cache for all.

    engine = build_hf_engine(folder, {"state_manager": {"memory_config": {"mode": "allocate", "size": 512}}})
    logits = engine.put([7, 8], [prompt, other_prompt])         # [2, vocabulary], of the last token of each
    logits = engine.put([7, 8], [next_token, other_token])
    engine.flush(7)

A failed call does not change the sequences. Ranks that share a model must make the same calls.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._absent import complete
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.values import all_gather_values
from deepspeed.config import read_config
from deepspeed.config.inference import RaggedInferenceEngineConfig, RaggedQuantizationConfig
from deepspeed.config.intake import parse_section
from deepspeed.config.supported import check_supported
from deepspeed.errors import ConfigError, counted, first_line, whole_number
from deepspeed.inference.engine import InferenceEngine
from deepspeed.inference.entry import init_inference
from deepspeed.inference.generate import cache_argument
from deepspeed.inference.injection.block import FusedBlock
from deepspeed.inference.quantized import dtype_of
from deepspeed.inference.v2.paged_cache import (
    CachedSequence,
    LayerShape,
    PagedCache,
    RaggedBatch,
    SchedulingError,
    SchedulingResult,
    as_pairs,
    check_distinct,
)
from deepspeed.zero.construct import OnDevice

# quantization_mode -> keys of init_inference
_PACKED: dict[str, dict[str, Any]] = {
    "int8": {"dtype": torch.int8},
    "int4": {"dtype": torch.int8, "quant": {"weight": {"num_bits": 4}}},
    "fp8": {"dtype": "fp8"},
    "fp6": {"dtype": "fp6"},
    "wf6af16": {"dtype": "fp6"},
}
_ROTARY_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest sequence of a forward


class InferenceEngineV2:
    """The engine computes the new tokens of many sequences at once; schedulers (`scheduler.py`) or users call it.

    Args:
        policy: a causal language model of transformers, or the engine that `init_inference` returned for it with
            `replace_with_kernel_inject`. The argument has DeepSpeed's name.
        engine_config: `RaggedInferenceEngineConfig`, dict, or path of a JSON file.

    Raises:
        ConfigError: a key is invalid, or the model does not support continuous batching.
    """

    def __init__(self, policy: nn.Module, engine_config: Any = None) -> None:
        self._config = _settings(engine_config)
        check_supported(self._config)
        self._engine = _prepared(policy, self._config)
        module: Any = self._engine.module
        blocks = _fused_blocks(module)
        limits = self._config.state_manager
        self._dtype = dtype_of(module)
        self._vocabulary = int(module.config.vocab_size)
        self._max_context = min(
            limits.max_context, getattr(module.config, "max_position_embeddings", limits.max_context)
        )
        self._forward_keys = set(signature(type(module).forward).parameters)
        cache_name = cache_argument(type(module).forward)
        if cache_name is None:
            raise ConfigError(
                f"policy: the forward of {type(module).__name__} takes a cache neither as 'past_key_values' nor as "
                "'cache', so its tokens would be computed without those before them; install a version of transformers "
                "that has one of both"
            )
        self._cache_argument = cache_name
        self._has_alibi = any(block.policy.alibi for block in blocks)
        shapes = [LayerShape(block.num_kv_heads, block.head_dim) for block in blocks]
        device = module.get_input_embeddings().weight.device
        self._cache = PagedCache(
            shapes,
            self._num_blocks(shapes),
            limits.kv_block_size,
            dtype=self._dtype,
            device=device,
        )
        self._sequences: dict[int, CachedSequence] = {}
        # 4-dimensional, so that models accept it as a complete mask and do not create one
        self._mask = None if self._has_alibi else torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=device)

    def _num_blocks(self, shapes: Sequence[LayerShape]) -> int:
        limits = self._config.state_manager
        if limits.memory_config.mode == "allocate":
            return limits.memory_config.size
        of_block = sum(shape.num_bytes(limits.kv_block_size, self._dtype) for shape in shapes)
        available = get_accelerator().available_memory()
        group = self._engine.mp_group
        if group is not None:
            available = min(all_gather_values(available, group)) // self._engine.mp_world_size
        most = limits.max_tracked_sequences * -(-self._max_context // limits.kv_block_size)
        found = min(most, (available - limits.memory_config.size) // of_block)
        if found < 1:
            raise ConfigError(
                f"state_manager.memory_config: {available} bytes are free on a rank, and size reserves "
                f"{limits.memory_config.size} of them; reserve fewer, or give the number of blocks with mode "
                f'"allocate" ({of_block} bytes each)'
            )
        return found

    # ----- attributes ------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model of transformers, with fused blocks."""
        return self._engine.module

    @property
    def config(self) -> RaggedInferenceEngineConfig:
        """The engine's configuration, with defaults for missing keys."""
        return self._config

    @property
    def max_context(self) -> int:
        """The maximum length of a sequence, in tokens: from the configuration, but at most the model's positions."""
        return self._max_context

    @property
    def vocabulary(self) -> int:
        """The size of the model's vocabulary."""
        return self._vocabulary

    @property
    def block_size(self) -> int:
        """The number of tokens per block."""
        return self._cache.block_size

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the cache."""
        return self._cache.num_blocks

    @property
    def free_blocks(self) -> Tensor:
        """The number of free blocks, as a tensor [n_kv_cache_groups] on the host."""
        return torch.tensor([self._cache.num_free])

    @property
    def n_kv_cache_groups(self) -> int:
        """Always 1, because all layers use the same block numbers."""
        return 1

    @property
    def tracked_uids(self) -> tuple[int, ...]:
        """The uids of the sequences in the cache, in the order of their first `put`."""
        return tuple(self._sequences)

    def num_tokens(self, uid: int) -> int:
        """Return the number of a sequence's tokens in the cache; 0 if the sequence is not tracked."""
        return self._tracked(whole_number("num_tokens: uid", uid, least=None)).num_tokens

    # ----- one forward -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def put(self, batch_uids: Iterable[int], batch_tokens: Iterable[Tensor], do_checks: bool = True) -> Tensor:
        """Append new tokens to sequences, and compute them in one forward. An untracked uid starts a sequence.

        Args:
            batch_uids: uids of the sequences, each once.
            batch_tokens: the new tokens of each sequence, [tokens].
            do_checks: False skips the check of token values; limits are always checked.

        Returns:
            [sequences, vocabulary], in the order of `batch_uids`: the logits after each sequence's last token.

        Raises:
            ConfigError: a uid is no integer, or a token is not in the vocabulary.
            SchedulingError: a limit of the engine is exceeded.
        """
        uids = [whole_number("put: uid", uid, least=None) for uid in batch_uids]
        check_distinct(uids)
        new_tokens = [self._as_tokens(uid, given) for uid, given in as_pairs(uids, list(batch_tokens))]
        if do_checks:
            self._check_values(uids, new_tokens)
        result, text = self._fits(uids, [len(each) for each in new_tokens])
        if result is not SchedulingResult.Success:
            raise SchedulingError(result, f"put: {text}")
        sequences = [self._tracked(uid) for uid in uids]
        had = [len(sequence.blocks) for sequence in sequences]
        try:
            for sequence, new in zip(sequences, new_tokens, strict=True):
                self._cache.extend(sequence, len(new))
            logits = self._forward(RaggedBatch(sequences, new_tokens, self._cache.block_size, self._cache.device))
        except BaseException:
            for sequence, count in reversed(list(zip(sequences, had, strict=True))):
                self._cache.shrink(sequence, count)
            raise
        for uid, sequence, new in zip(uids, sequences, new_tokens, strict=True):
            sequence.num_tokens += len(new)
            self._sequences[uid] = sequence
        return logits

    def _forward(self, batch: RaggedBatch) -> Tensor:
        keys: dict[str, Any] = {
            "input_ids": batch.tokens,
            "attention_mask": self._mask,
            self._cache_argument: self._cache,
        }
        keys |= {"position_ids": batch.positions, "logits_to_keep": batch.last, "use_cache": True}
        self._cache.begin(batch)
        try:
            found = self._engine.module(**{name: value for name, value in keys.items() if name in self._forward_keys})
        finally:
            self._cache.begin(None)
        logits: Tensor = found.logits[0]
        return logits if "logits_to_keep" in self._forward_keys else logits[batch.last]

    @staticmethod
    def _as_tokens(uid: int, given: Any) -> Tensor:
        try:
            tokens = torch.as_tensor(given).flatten()
        except (TypeError, ValueError, RuntimeError) as error:  # text, or lists of several lengths
            raise ConfigError(
                f"put: the tokens of uid {uid} are a {type(given).__name__} that makes no tensor "
                f"({first_line(error)}); give a tensor of one or more integers, as a tokenizer returns it"
            ) from error
        if not tokens.numel() or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ConfigError(
                f"put: the tokens of uid {uid} are {tokens.dtype} of shape {tuple(tokens.shape)}; give a tensor of one "
                "or more integers"
            )
        return tokens.to("cpu", torch.int64)

    def _check_values(self, uids: Sequence[int], new_tokens: Sequence[Tensor]) -> None:
        for uid, tokens in zip(uids, new_tokens, strict=True):
            least, greatest = (int(each) for each in tokens.aminmax())
            if least < 0 or greatest >= self._vocabulary:
                found = least if least < 0 else greatest
                raise ConfigError(
                    f"put: the tokens of uid {uid} hold {found}, but the model knows 0 to {self._vocabulary - 1}"
                )

    # ----- limits ----------------------------------------------------------------------------------------------------

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Return whether `put` could compute these numbers of new tokens for these sequences now.

        Raises:
            ConfigError: a uid or length is no integer.
        """
        known = [whole_number("can_schedule: uid", uid, least=None) for uid in uids]
        counts = [
            whole_number(f"can_schedule: the new tokens of uid {uid}", length, least=0)
            for uid, length in as_pairs(known, list(lengths))
        ]
        return self._fits(known, counts)[0]

    def _fits(self, uids: Sequence[int], lengths: Sequence[int]) -> tuple[SchedulingResult, str]:
        limits, cache = self._config.state_manager, self._cache
        num_new = sum(uid not in self._sequences for uid in uids)
        if len(self._sequences) + num_new > limits.max_tracked_sequences:
            return SchedulingResult.EngineSequenceLimitExceeded, (
                f"found {counted(num_new, 'new sequence')} beside {len(self._sequences)} that the engine tracks, but "
                f"state_manager.max_tracked_sequences is {limits.max_tracked_sequences}; flush sequences that are done"
            )
        if len(uids) > limits.max_ragged_sequence_count:
            return SchedulingResult.BatchSequenceLimitExceeded, (
                f"found {counted(len(uids), 'sequence')}, but state_manager.max_ragged_sequence_count is "
                f"{limits.max_ragged_sequence_count}; give fewer at once"
            )
        if sum(lengths) > limits.max_ragged_batch_size:
            return SchedulingResult.BatchTokenLimitExceeded, (
                f"found {counted(sum(lengths), 'new token')}, but state_manager.max_ragged_batch_size is "
                f"{limits.max_ragged_batch_size}; give parts of the prompts, one after the other"
            )
        for uid, length in zip(uids, lengths, strict=True):
            seen = self._tracked(uid).num_tokens
            if seen + length > self._max_context:
                return SchedulingResult.SequenceTokenLimitExceeded, (
                    f"uid {uid} has {counted(seen, 'token')}, and {length} would be new, but a sequence has at most "
                    f"{self._max_context} (state_manager.max_context, and the model's positions)"
                )
        needed = sum(cache.missing(self._tracked(uid), length) for uid, length in zip(uids, lengths, strict=True))
        if needed > cache.num_free:
            return SchedulingResult.KVCacheLimitExceeded, (
                f"the batch needs {counted(needed, 'more block')} of {counted(cache.block_size, 'token')}, but "
                f"{cache.num_free} of {cache.num_blocks} are free; flush a sequence, or give "
                "state_manager.memory_config more"
            )
        return SchedulingResult.Success, ""

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: int) -> tuple[int, int]:
        """Return how many new tokens the sequence can take within both limits, and the number of blocks needed.

        Return (0, 0) if it can take none, also for an untracked uid if the engine can track no further sequence.
        """
        uid = whole_number("query: uid", uid, least=None)
        if uid not in self._sequences and len(self._sequences) >= self._config.state_manager.max_tracked_sequences:
            return 0, 0
        sequence, cache = self._tracked(uid), self._cache
        room = (len(sequence.blocks) + int(max_request_blocks)) * cache.block_size - sequence.num_tokens
        tokens = max(0, min(int(max_request_tokens), self._max_context - sequence.num_tokens, room))
        return tokens, cache.missing(sequence, tokens)

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Return how many tokens the sequence can take without another block; 0 if it is not tracked."""
        sequence = self._tracked(whole_number("get_remaining_block_capacity: uid", uid, least=None))
        return len(sequence.blocks) * self._cache.block_size - sequence.num_tokens

    def flush(self, uid: int) -> None:
        """Remove a sequence, and free its blocks.

        Raises:
            ConfigError: the sequence is not tracked. It is tracked from its first `put` to its `flush`.
        """
        sequence = self._sequences.pop(whole_number("flush: uid", uid, least=None), None)
        if sequence is None:
            tracked = ", ".join(map(str, list(self._sequences)[:8])) or "none"
            raise ConfigError(
                f"flush: uid {uid} is not tracked: nothing was put for it, or it was flushed before; tracked are "
                f"{tracked}{', ...' if len(self._sequences) > 8 else ''}"
            )
        self._cache.shrink(sequence, 0)

    def _tracked(self, uid: int) -> CachedSequence:
        """Return the sequence, or a new empty one if it is not tracked."""
        found = self._sequences.get(uid)
        return CachedSequence() if found is None else found

    # ----- the model on disk -----------------------------------------------------------------------------------------

    def serialize(self, save_path: str | os.PathLike[str]) -> None:
        """Write a plain transformers model into a folder for `build_engine_from_ds_checkpoint` and `from_pretrained`.
        A collective of the ranks that share the model.

        Raises:
            ConfigError: see `InferenceEngine.export`.
        """
        self._engine.export(save_path)


def build_hf_engine(path: str, engine_config: Any = None, debug_level: int = logging.INFO) -> InferenceEngineV2:
    """Create an engine for a transformers model in a folder, or with a name that `from_pretrained` knows.

    From a folder, each rank reads only its part of the weights.

    Args:
        engine_config: see `InferenceEngineV2`.
        debug_level: accepted without effect; `DS_LOG_LEVEL` sets the log level.

    Raises:
        ConfigError: see `InferenceEngineV2`; also if transformers is not installed.
        CheckpointError: a file or a weight is missing, damaged or of another model; the message names it.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("build_hf_engine: transformers is not installed; pip install transformers") from error
    if not os.path.isdir(path):
        return InferenceEngineV2(AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval(), engine_config)
    config = AutoConfig.from_pretrained(path)
    dtype = config.dtype or torch.float32
    with OnDevice(dtype=dtype, device="meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    settings = _settings(engine_config)
    engine = _initialized(model, settings, checkpoint=path)
    done = {"quantization": RaggedQuantizationConfig()}
    return InferenceEngineV2(engine, settings.model_copy(update=done))


def build_engine_from_ds_checkpoint(
    path: str, engine_config: Any = None, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """Create an engine for a folder that `serialize` wrote. For the arguments see `build_hf_engine`.

    Raises:
        ConfigError: the folder has no config.json; see also `build_hf_engine`.
    """
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(
            f"build_engine_from_ds_checkpoint: found no config.json in {path}; give a folder that serialize() wrote, "
            "which is plain transformers (files that DeepSpeed's own serialize wrote are not read)"
        )
    return build_hf_engine(path, engine_config, debug_level)


# ----- the model -----------------------------------------------------------------------------------------------------


def _settings(given: Any) -> RaggedInferenceEngineConfig:
    if isinstance(given, RaggedInferenceEngineConfig):
        return given
    if given is None or isinstance(given, Mapping):
        return parse_section(RaggedInferenceEngineConfig, given or {})
    return parse_section(RaggedInferenceEngineConfig, read_config(given))


def _prepared(model: nn.Module, config: RaggedInferenceEngineConfig) -> InferenceEngine:
    """Return an `InferenceEngine` with fused blocks for `model`, or `model` itself if it is one already."""
    tp_size = _tp_size(config)
    mode = config.quantization.quantization_mode
    if isinstance(model, InferenceEngine):
        if mode is not None or tp_size not in (1, model.mp_world_size):
            found = f"quantization_mode {mode!r}" if mode is not None else f"tp_size {tp_size}"
            raise ConfigError(
                f"InferenceEngineV2: found an engine of init_inference, and {found} in the config; give it to "
                "init_inference, or give the model itself"
            )
        return model
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"InferenceEngineV2: found {type(model).__name__}; give a causal language model of transformers, or what "
            "init_inference returned for it"
        )
    return _initialized(model, config)


def _initialized(model: nn.Module, config: RaggedInferenceEngineConfig, **keys: Any) -> InferenceEngine:
    """Call `init_inference` with kernel injection and the settings of `config`; `keys` are further arguments."""
    _check_model(model)
    check_supported(config)
    mode = config.quantization.quantization_mode
    keys["dtype"] = dtype_of(model)
    if mode is not None:
        keys |= _PACKED[mode]
    tp_size = _tp_size(config)
    if tp_size > 1:
        keys["tensor_parallel"] = {"tp_size": tp_size}
    return init_inference(model, replace_with_kernel_inject=True, **keys)


def _tp_size(config: RaggedInferenceEngineConfig) -> int:
    return config.tensor_parallel.tp_size if config.tensor_parallel.enabled else 1


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"InferenceEngineV2: {name} is no causal language model of transformers")
    by_length = next((kind for kind in _rotary_types(model.config) if kind in _ROTARY_BY_LENGTH), None)
    if by_length is not None:
        raise ConfigError(
            f"InferenceEngineV2: {name} has rotary embeddings of type {by_length!r}, which depend on the longest "
            "sequence of a forward; sequences of a batch would change each other. Use init_inference and generate"
        )


def _rotary_types(config: Any) -> Iterator[Any]:
    """Yield the rotary types of all layers. transformers before 5.0 has `rope_scaling`, whose type is "type" in older
    files; later versions may have a table for each kind of layers."""
    for key in ("rope_parameters", "rope_scaling"):
        table = getattr(config, key, None)
        if isinstance(table, Mapping):
            for each in (table, *(inner for inner in table.values() if isinstance(inner, Mapping))):
                yield each.get("rope_type", each.get("type"))


def _fused_blocks(model: Any) -> list[FusedBlock]:
    """Return the fused blocks of all layers, in order.

    Raises:
        ConfigError: a layer has no fused block, or its attention does not work with a paged cache.
    """
    _check_model(model)
    name = type(model).__name__
    found = [module.forward for module in model.modules() if isinstance(vars(module).get("forward"), FusedBlock)]
    blocks = [each for each in found if isinstance(each, FusedBlock)]
    total = int(getattr(model.config, "num_hidden_layers", len(blocks)))
    if len(blocks) < max(total, 1):
        raise ConfigError(
            f"InferenceEngineV2: {len(blocks)} of {total} layers of {name} compute by fused blocks, which all have to; "
            "see docs/howto/run-inference.md for the families, and give init_inference "
            "replace_with_kernel_inject=True"
        )
    for block in blocks:
        if not block.policy.is_causal:
            raise ConfigError(f"InferenceEngineV2: {name} is an encoder; call the engine of init_inference")
        if block.policy.alibi == "in_mask" and getattr(model.config, "alibi", True):
            raise ConfigError(
                f"InferenceEngineV2: {name} has ALiBi in its masks, which are not made here; use init_inference and "
                "generate"
            )
    return sorted(blocks, key=lambda block: block.layer_index)


complete(__name__)
