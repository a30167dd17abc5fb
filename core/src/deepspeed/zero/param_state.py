"""`ZeroParamStatus`: whether the parameters of a unit are whole on this rank (`param.ds_status`, stage 3)."""

import enum


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's documented states; libraries compare `param.ds_status` with them.

    In stages 0, 1 and 2 parameters are whole and carry no `ds_status`.

        NOT_AVAILABLE --launch--> INFLIGHT --finish--> AVAILABLE --release--> NOT_AVAILABLE
    """

    AVAILABLE = 1  # whole on this rank
    NOT_AVAILABLE = 2  # only this rank's shard is here
    INFLIGHT = 3  # its all-gather was issued


#: the moves that are legal; `ParamUnit._move` is the only writer
LEGAL_MOVES = {
    (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT),
    (ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE),
    (ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE),
}
