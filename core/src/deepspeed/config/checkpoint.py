"""`checkpoint` and `nebula`: saving and loading of checkpoints. `engine/build.py` reads both for the checkpointer."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from deepspeed.config.base import Finite, Flag, Free, Int, Says, Section, Text, key, one_of, quiet, refused, warned

_MODES = ("Ignore", "Warn", "Fail")


def _mode(value: Any) -> Any:
    if isinstance(value, str) and value.capitalize() in _MODES:
        return value.capitalize()
    raise ValueError("not a mode")


TagValidation = Annotated[str, BeforeValidator(_mode), Says('"Ignore" or "Warn" or "Fail"'), one_of(*_MODES)]


Format = Annotated[
    Literal["ds_core", "deepspeed"],
    Says('"ds_core" or "deepspeed" (`ds_ckpt convert DIR OUT --to dcp` makes files of torch.distributed.checkpoint)'),
]


class ParallelWriteConfig(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Flag = key(
        False, "Let pipeline stages write at the same time.", support=quiet("it concerns pipelines only")
    )


class StoreConfig(Section):
    """`checkpoint.store`: the store that writes and reads the files of a checkpoint."""

    type: Text = key("torch", "`torch`, or a name that a plugin knows (hook `ds_checkpoint_store`).")
    params: Free = key(dict, "Arguments of a plugin's store.")


class CheckpointConfig(Section):
    """`checkpoint`."""

    tag_validation: TagValidation = key("Warn", "What to do when ranks save under different tags, before that fails.")
    verify: Flag = key(
        True, "Compare the checksums of the files that a load reads; without it only their sizes are compared."
    )
    format: Format = key("ds_core", "Of the files: `deepspeed` writes what DeepSpeed 0.19 loads too, in stages 1 to 3.")
    keep_last: Int | None = key(
        None, "After a save, remove the oldest tags of the directory, so that this many stay.", ge=1
    )
    async_save: Flag = key(
        False,
        "Let save_checkpoint return when every rank has copied its states to host memory; a process per rank writes "
        "them meanwhile.",
    )
    on_sigterm: Flag = key(
        False,
        "At SIGTERM, which may reach one rank only, all ranks save after the next step, in the directory of the last "
        "save_checkpoint or load_checkpoint, and exit with code 143.",
    )
    wait_s: Finite = key(
        300.0,
        "How long a save or a load waits for ranks that have not called it, and an asynchronous save for a rank of "
        "which nothing is heard, before it fails.",
        unit="s",
        gt=0,
    )
    load_universal: Flag = key(
        False,
        "Load a universal checkpoint.",
        support=quiet("every checkpoint loads at any number of ranks, any stage and any precision"),
    )
    use_node_local_storage: Flag = key(
        False,
        "Every node keeps whole checkpoints on its own disk.",
        support=refused("checkpoints need one shared folder in this version"),
    )
    store: StoreConfig = key(StoreConfig, "What writes and reads the files.")
    parallel_write: ParallelWriteConfig = key(ParallelWriteConfig, "Writing at the same time.")
    checkpoint_serialization: Flag = key(
        True, "torch.save's zip format.", support=quiet("the zip format is always used")
    )
    writer: Free | None = key(None, "A faster writer: type, io_buffer_size, ...", support=warned("torch.save writes"))

    @property
    def tag_validation_enabled(self) -> bool:
        """Whether tags are compared at all."""
        return self.tag_validation != "Ignore"

    @property
    def tag_validation_fail(self) -> bool:
        """Whether different tags make the save fail."""
        return self.tag_validation == "Fail"


class NebulaConfig(Section):
    """`nebula`: asynchronous saving in tiers, with the keys of Azure's service. The service itself is not used."""

    enabled: Flag = key(
        False, "Save asynchronously, as checkpoint.async_save does, and copy versions to persistent_storage_path."
    )
    persistent_storage_path: str | None = key(
        None, "A folder or URL to which whole versions are copied from the directory of save_checkpoint."
    )
    persistent_time_interval: Int = key(
        100, "Least time between the beginnings of two copies; the newest version is copied.", unit="s", ge=1
    )
    num_of_version_in_retention: Int = key(
        2, "How many versions stay in persistent_storage_path; and checkpoint.keep_last, where that is not set.", ge=1
    )
    enable_nebula_load: Flag = key(
        True,
        "Load the newest whole version of the directory of load_checkpoint and persistent_storage_path; false: of the "
        "former alone.",
    )
    load_path: str | None = key(
        None,
        "With enable_nebula_load: the directory to load from, in place of both.",
        json_key="nebula_load_path",
    )

    @property
    def persistent_dir(self) -> str | None:
        """The farther tier; None: there is none."""
        return self.persistent_storage_path if self.enabled else None

    def load_dirs(self, load_dir: str) -> list[str]:
        """Return the directories of a load, the nearest first.

        Args:
            load_dir: argument of `load_checkpoint`.
        """
        if not (self.enabled and self.enable_nebula_load):
            return [load_dir]
        if self.load_path:
            return [self.load_path]
        return list(dict.fromkeys(filter(None, [load_dir, self.persistent_storage_path])))

    @property
    def keep_last(self) -> int | None:
        """The number of tags to keep if `checkpoint.keep_last` is not set; None: keep all."""
        return self.num_of_version_in_retention if self.enabled else None
