"""Names of a checkpoint's files and of its top-level keys, as in DeepSpeed. Files are only listed here.
A directory of checkpoints is a folder or a URL of an object store; `location` makes a path of either. Imports no torch.

Folders that are being written or removed have names that begin with a dot, so that libraries that look for
`global_step*` do not find them.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from deepspeed.errors import CheckpointError, ConfigError, DeepSpeedError

LATEST_FILE = "latest"
SCRIPT_FILE = "zero_to_fp32.py"
SHARD_SUFFIX = "_optim_states.pt"
UNIVERSAL_FOLDER = "zero"  # of DeepSpeed's universal format, in a tag's folder
INDEX_FILE = "index.json"

#: The checkpoint's own top-level keys in a model file; everything else there is the user's client state.
MODEL_STATE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "moq",
        "local_sgd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_model_parallel",
        "ds_module_files",
        "ds_module_rest",
        "ds_optimizer_file",
        "ds_data_rank",
        "ds_config",
        "ds_version",
    }
)

#: Top-level keys that DeepSpeed 0.19 writes and this package does not use.
DEEPSPEED_KEYS = frozenset({"checkpoint_parallel_dimensions"})

_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(staging|former|pruned|lock|latest|writers)")
_PARTITIONED = re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_\d+_model_states\.pt")
_EXPERTS = re.compile(r"expert_rank_(?P<dp>\d+)_mp_rank_\d+_model_states\.pt")
_EXPP = re.compile(r"expp_rank_\d+_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_MODULE = re.compile(r"layer_\d+(?:-[\w-]+)?-model_states\.pt|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_RANKS = re.compile(
    r"(?:bf16_)?(?:(?:zero_pp|expert|rounding)_rank_(?P<dp>\d+)_|expp_rank_\d+_|layer_\d+_expert_\d+_)?"
    r"mp_rank_(?P<mp>\d+)_"
)
_SHARD = re.compile(r"(?P<prefix>bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")


def model_file(mp_rank: int, dp_rank: int | None = None) -> str:
    """Return the name of a model file; with `dp_rank`, of the file of that data parallel rank under ZeRO stage 3."""
    plain = f"mp_rank_{mp_rank:02d}_model_states.pt"
    return plain if dp_rank is None else f"zero_pp_rank_{dp_rank}_{plain}"


def layer_file(layer: int, place: str = "") -> str:
    """Return the name of a pipeline layer's file; `place` is the rank along other axes, such as "model_01"."""
    return f"layer_{layer:02d}{place and '-'}{place}-model_states.pt"


def moe_file(moe_layer: int, expert: int, mp_rank: int) -> str:
    """Return the name of the file of one expert; `expert` is its number among all of its layer."""
    return f"layer_{moe_layer}_expert_{expert}_{model_file(mp_rank)}"


def expp_file(expp_rank: int, mp_rank: int) -> str:
    """Return the name of the file with the optimizer's state of the ranks that hold some of the experts."""
    return f"expp_rank_{expp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def expert_file(mp_rank: int, dp_rank: int) -> str:
    """Return the earlier versions' name of the model file of experts that the first data parallel rank lacks."""
    return f"expert_rank_{dp_rank}_{model_file(mp_rank)}"


def expert_models_in(folder: Path) -> set[int]:
    """Return the data parallel ranks with an `expert_file` in `folder`."""
    return {int(match["dp"]) for path in folder.iterdir() if (match := _EXPERTS.fullmatch(path.name))}


def expp_files_in(folder: Path, mp_rank: int) -> list[Path]:
    """Return the files of one model-parallel rank that `expp_file` names."""
    found = (path for path in folder.iterdir() if (match := _EXPP.fullmatch(path.name)) and int(match["mp"]) == mp_rank)
    return sorted(found)


def is_expp_file(name: str) -> bool:
    """Whether `name` is one that `expp_file` returns."""
    return _EXPP.fullmatch(name) is not None


def is_module_file(name: str) -> bool:
    """Whether `name` is that of a file with some of the module's weights, of a layer or an expert."""
    return _MODULE.fullmatch(name) is not None


def shard_file(dp_rank: int, mp_rank: int, prefix: str = "") -> str:
    """Return the name of one rank's optimizer shard; `prefix` is `"bf16_"` if the model trains in bf16."""
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def rounding_file(dp_rank: int, mp_rank: int) -> str:
    """Return the name of the file with the rounding errors that one rank has yet to send (`comm.compressed`)."""
    return f"rounding_rank_{dp_rank}_mp_rank_{mp_rank:02d}_states.pt"


def is_rounding_file(name: str) -> bool:
    """Whether `name` is one that `rounding_file` returns."""
    return name.startswith("rounding_rank_")


def is_partitioned(model_file: str) -> bool:
    """Whether `model_file` is the name of a model file of ZeRO stage 3."""
    return _PARTITIONED.fullmatch(model_file) is not None


def partitioned_models_in(folder: Path) -> set[int]:
    """Return the data parallel ranks whose model files of ZeRO stage 3 are in `folder`."""
    return {int(match["dp"]) for path in folder.iterdir() if (match := _PARTITIONED.fullmatch(path.name))}


def is_model_file(name: str) -> bool:
    """Whether `name` is that of a model file of any stage."""
    return name.endswith("_model_states.pt") and not is_module_file(name)


def has_weights(name: str) -> bool:
    """Whether a load of weights alone may read the file of this name."""
    return is_model_file(name) or is_module_file(name) or is_expp_file(name)


def ranks_of(name: str) -> tuple[int, int]:
    """Return the data parallel and the model parallel rank in the name of a checkpoint's file; 0 if it has none."""
    match = _RANKS.match(name)
    return (int(match["dp"] or 0), int(match["mp"])) if match else (0, 0)


def is_universal(folder: Path) -> bool:
    """Whether `folder` has a checkpoint in DeepSpeed's universal format."""
    return (folder / UNIVERSAL_FOLDER).is_dir() and not shards_in(folder)


def shards_in(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the optimizer shards in `folder`, by and in the order of (data parallel rank, model parallel rank)."""
    found = {}
    for path in folder.iterdir():
        if match := _SHARD.fullmatch(path.name):
            found[int(match["dp"]), int(match["mp"])] = path
    return dict(sorted(found.items()))


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name holds states of a checkpoint."""
    return name.endswith("_states.pt")


def is_own_file(name: str) -> bool:
    """Whether a file of this name in a tag's folder belongs to the checkpoint, and to nobody else."""
    return is_checkpoint_file(name) or name == INDEX_FILE


def staging_folder(folder: Path) -> Path:
    """Return the folder in which the next version of `folder` is written."""
    return folder.with_name(f".{folder.name}.staging")


def former_folder(folder: Path) -> Path:
    """Return the name under which the version of `folder` that was just replaced waits to be deleted."""
    return folder.with_name(f".{folder.name}.former")


def pruned_folder(folder: Path) -> Path:
    """Return the name under which an unwanted version of `folder` waits to be deleted; it is never put back."""
    return folder.with_name(f".{folder.name}.pruned")


def lock_file(folder: Path) -> Path:
    """Return the file whose lock keeps other processes out while one saves `folder`."""
    return folder.with_name(f".{folder.name}.lock")


def writers_folder(folder: Path) -> Path:
    """Return the folder in which writer processes of an asynchronous save of `folder` report their progress."""
    return folder.with_name(f".{folder.name}.writers")


def draft_file(folder: Path) -> Path:
    """Return the path at which a save of `folder` writes a file that all tags share, before it replaces that file.

    There is one per tag, since jobs that share a directory save under different tags at the same time.
    """
    return folder.with_name(f".{folder.name}.latest")


def unfinished_in(save_dir: Path) -> list[Path]:
    """Return the folders whose save is running, or was killed and left something behind."""
    names = {match["name"] for path in save_dir.iterdir() if (match := _UNFINISHED.fullmatch(path.name))}
    return [save_dir / name for name in sorted(names)]


def tag_of(folder: Path) -> str:
    """Return the tag whose whole version is in `folder`, which `whole_folder` returned."""
    match = _UNFINISHED.fullmatch(folder.name)
    return match["name"] if match else folder.name


def whole_folder(folder: Path) -> Path | None:
    """Return the folder in which the whole version of `folder` is now; None if there is none.

    It is `folder` itself except between the two renames of `TorchStore.commit`: a save that was killed there leaves the
    whole former version under the name that `former_folder` returns.
    """
    return next((path for path in (folder, former_folder(folder)) if path.is_dir()), None)


def tags_in(save_dir: Path, is_file: Callable[[str], bool] = is_checkpoint_file) -> list[str]:
    """Return the tags that can be loaded from `save_dir`: folders with a file whose name satisfies `is_file`."""
    if not save_dir.is_dir():
        return []
    places = {path for path in save_dir.iterdir() if not path.name.startswith(".")}
    places.update(unfinished_in(save_dir))
    tags = [
        place.name
        for place in places
        if (whole := whole_folder(place)) and any(is_file(path.name) for path in whole.iterdir())
    ]
    return sorted(tags, key=_numbers_by_value)


def _numbers_by_value(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which global_step9 comes before global_step10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def location(directory: "str | Path") -> Path:
    """Return `directory` as a path: of `pathlib`, or for a URL such as `s3://bucket/run` of `universal_pathlib`, which
    has the methods of `pathlib` over fsspec.

    Raises:
        ConfigError: a package that the URL needs is not installed, or fsspec does not know the protocol; or
            `directory` is neither text nor a path.
    """
    if not isinstance(directory, str | os.PathLike) and not hasattr(directory, "iterdir"):
        raise ConfigError(f"directory of a checkpoint: found {directory!r}; give a folder or a URL")
    url = str(directory)
    if "://" not in url or not isinstance(directory, str):
        return cast(Path, directory) if hasattr(directory, "iterdir") else Path(directory)
    try:
        from upath import UPath
    except ImportError:
        raise ConfigError(
            f"{url}: checkpoints in an object store need the packages fsspec and universal_pathlib, which are not "
            "installed; pip install fsspec universal-pathlib, or give a folder"
        ) from None
    try:
        path = UPath(url, use_listings_cache=False)  # other ranks write there too
        path.fs  # noqa: B018 - imports the package of the protocol
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url}: fsspec cannot open it: {error}") from error
    return cast(Path, path)


def is_remote(path: Path) -> bool:
    """Whether `location` made the path of a URL: such a store has no renames and no locks, and writes are atomic."""
    return not isinstance(path, Path)


@contextmanager
def store_failures(directory: object) -> Iterator[None]:
    """Name the store in errors of an object store's client: clients have errors of their own that say little.

    Raises:
        CheckpointError: in place of such an error, where `directory` is a URL.
    """
    try:
        yield
    except DeepSpeedError:
        raise
    except Exception as error:
        of_client = isinstance(error, OSError) or type(error).__module__ != "builtins"
        if "://" not in str(directory) or not of_client:
            raise
        raise CheckpointError(
            f"{directory}: the store failed: {reason_of(error)}. Check its address, the credentials, the permissions "
            "of the bucket and the network."
        ) from error


def reason_of(error: Exception) -> str:
    """Return in one line what failed: stores raise `OSError`s without a number, and time-outs without a text."""
    text = getattr(error, "strerror", None) or str(error).strip()
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}{text and f': {text}'}"


def local_folder(path: "str | Path", what: str) -> Path:
    """Return the folder `path`, for functions that work in folders only; `what` completes "cannot ...".

    Raises:
        CheckpointError: it is a URL.
    """
    if "://" in str(path) and not isinstance(path, Path):
        raise CheckpointError(
            f"cannot {what} {path}, a URL: only folders can be used here. Copy it to or from a folder."
        )
    return Path(path)


METADATA_FILE = ".metadata"


def is_dcp_folder(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint of torch.distributed.checkpoint."""
    return (folder / METADATA_FILE).is_file()
