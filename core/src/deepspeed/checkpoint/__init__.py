"""Saving training to disk and finding it again, in DeepSpeed's directory layout.

    <save_dir>/latest                                               the tag of the newest whole checkpoint
    <save_dir>/zero_to_fp32.py                                      makes plain fp32 weights of it, without this package
    <save_dir>/<tag>/index.json                                     sizes and checksums of the files beside it
    <save_dir>/<tag>/mp_rank_00_model_states.pt                     module, scheduler, counters, the user's client state
    <save_dir>/<tag>/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt   one rank's shard of the optimizer

The room receives plain dicts and gives plain dicts: it knows neither the engine nor the config. May import `errors`,
`log` and `plugins`, and torch. Read next: `checkpointer.py` (the order of a save and of a load), then `layout.py`
(names), `store.py` (where bytes go; `stores.py` finds one by name), `torch_store.py` (how a folder takes the place of
its former version), `index.py` (sizes and checksums; `verify.py` compares them, `survey.py` lists tags with them),
`prune.py`, `consolidate.py`.
"""

from deepspeed._forward import forward
from deepspeed.checkpoint.checkpointer import Checkpointer
from deepspeed.checkpoint.layout import MODEL_STATE_KEYS
from deepspeed.checkpoint.load import LoadedCheckpoint
from deepspeed.checkpoint.save import save_state_dict_file
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.stores import create_store
from deepspeed.checkpoint.tags import check_new_tag, validate_tag
from deepspeed.checkpoint.torch_store import TorchStore
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

__all__ = [
    "MODEL_STATE_KEYS",
    "Checkpointer",
    "IndexedStore",
    "LoadedCheckpoint",
    "Store",
    "TorchStore",
    "check_new_tag",
    "clone_tensors_for_torch_save",
    "create_store",
    "save_state_dict_file",
    "validate_tag",
]

# Universal checkpoints are not in this version; the name refuses when it is used.
__getattr__, __dir__ = forward(
    __name__, {"DeepSpeedCheckpoint": "deepspeed.checkpoint.deepspeed_checkpoint:DeepSpeedCheckpoint"}
)
