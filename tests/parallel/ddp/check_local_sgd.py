"""LocalSGD over torch.distributed."""

from fragment_rounds import *  # noqa: F403
from local_rounds import *  # noqa: F403
