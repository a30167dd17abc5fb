"""The CPU accelerator does what every accelerator has to do."""

from deepspeed.testing.suite import *  # noqa: F403
