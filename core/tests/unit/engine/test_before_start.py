"""What `initialize` says when torch.distributed should be there and is not. No process group in this file."""

import deepspeed
import pytest
from deepspeed import comm
from deepspeed.errors import ConfigError
from torch import nn


def test_dist_init_required_false_without_a_group():
    assert not comm.is_initialized()
    with pytest.raises(ConfigError, match=r"dist_init_required is False.*call deepspeed\.init_distributed\(\) first"):
        deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1}, dist_init_required=False)
    assert not comm.is_initialized()
