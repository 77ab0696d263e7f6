"""Find the ranks that share a node."""

from __future__ import annotations

import torch

from hvd_adaptive.transport.world import World


def nodes_of(ranks_per_node: int | None, ranks: int) -> tuple[int, ...]:
    """Return the node of each rank if consecutive ranks share one; () for None.

    Raises:
        ValueError: ``ranks_per_node`` does not divide ``ranks``.
    """
    if ranks_per_node is None:
        return ()
    if ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node}: must divide the {ranks} ranks")
    return tuple(rank // ranks_per_node for rank in range(ranks))


def find_nodes(world: World, name: str) -> tuple[int, ...]:
    """Return each rank's node, or () if nodes run different numbers of ranks; a collective."""
    # cross_rank numbers nodes only if all run equally many ranks.
    own = torch.tensor(world.node(), device="cpu")
    everyone = world.gather_equal(own, f"{name}.nodes").tolist()
    nodes = tuple(node for node, _ in everyone)
    if len({nodes.count(node) for node in nodes}) > 1 or len({size for _, size in everyone}) > 1:
        return ()
    return nodes
