"""LocalSGD over torch.distributed."""

from changed_groups import *  # noqa: F403
from fragment_rounds import *  # noqa: F403
from local_rounds import *  # noqa: F403
