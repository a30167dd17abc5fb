"""What every accelerator has to answer and to do, as ds-core asks it. `ds_conformance` writes a report of the same."""

from deepspeed.testing.suite import *  # noqa: F403
