"""What the first process (`runner.py`) tells the per-node process (`launch.py`), as one word of a command line.

The word is URL-safe base64 of JSON, so that it passes unharmed through any shell between the two.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class LaunchPlan(NamedTuple):
    """What was asked for, validated as far as that goes without asking the accelerator.

    `include` and `exclude` are slots of this node; at most one of `num_ranks`, `include`, `exclude` is set; none
    means every slot. `num_slots` is the hostfile's word on how many slots there are. `log_only`: not on the console.
    """

    num_ranks: int | None = None
    include: Sequence[int] | None = None
    exclude: Sequence[int] | None = None
    num_slots: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None
    log_dir: str | None = None
    log_only: bool = False
    save_pid: bool = False

    def encode(self) -> str:
        return _encode(self._asdict())

    @classmethod
    def decode(cls, word: str) -> "LaunchPlan":
        return cls(**json.loads(base64.urlsafe_b64decode(word)))


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Host -> slots as URL-safe base64 of JSON; the documented helper for tools that build commands of their own."""
    return _encode(world_info)


def _encode(value: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
