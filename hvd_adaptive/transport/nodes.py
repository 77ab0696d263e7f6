"""Which ranks share a node."""

from __future__ import annotations

import torch

from hvd_adaptive.transport.world import World


def nodes_of(ranks_per_node: int | None, ranks: int) -> tuple[int, ...]:
    """Each rank's node, where so many ranks that follow each other share one; nothing for None."""
    if ranks_per_node is None:
        return ()
    if ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node}: must divide the {ranks} ranks")
    return tuple(rank // ranks_per_node for rank in range(ranks))


def find_nodes(world: World, name: str) -> tuple[int, ...]:
    """Each rank's node, as the world numbers them; every rank must ask. Nothing where nodes hold
    different numbers of the ranks."""
    # cross_rank numbers nodes where all run as many ranks.
    own = torch.tensor(world.node(), device="cpu")
    everyone = world.gather_equal(own, f"{name}.nodes").tolist()
    nodes = tuple(node for node, _ in everyone)
    if len({nodes.count(node) for node in nodes}) > 1 or len({size for _, size in everyone}) > 1:
        return ()
    return nodes
