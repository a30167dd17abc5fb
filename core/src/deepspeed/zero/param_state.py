"""`ZeroParamStatus`: whether a partitioned parameter is whole on this rank (`param.ds_status`, stage 3)."""

import enum


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's documented states; libraries compare `param.ds_status` with them.

    In stages 0, 1 and 2 parameters are whole and carry no `ds_status`.
    """

    AVAILABLE = 1  # whole on this rank
    NOT_AVAILABLE = 2  # only this rank's shard is here
    INFLIGHT = 3  # being gathered
