"""Prepare methods to exchange a network's gradients on the ranks of a launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.tools.bench.backward import FakeNetwork, Still
from laboratory.methods import BFLOAT16, NOTHING, POWERSGD, Method
from laboratory.sharded import ShardedNetwork

# PowerSGD starts at this step; the worker's untimed steps must go beyond it.
POWERSGD_START = 2
ONE_BUCKET_MB = 4096

# What to call forward, the optimizer, and the compressor or None.
Prepared = tuple[Any, Any, Any]
Network = FakeNetwork | ShardedNetwork


class Exchanger:
    """Exchange a network's gradients by a method: ``fill`` makes them, ``step`` exchanges them."""

    def __init__(
        self,
        network: Network,
        forward: Callable[[], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scheme: Any = None,
    ) -> None:
        self.network, self.forward, self.optimizer = network, forward, optimizer
        self.report: Callable[[], dict[str, float]] = dict if scheme is None else scheme.report
        self.close: Callable[[], object] = list if scheme is None else scheme.close

    def fill(self, variant: int) -> None:
        """Free the last gradients and make new ones, which is no part of an exchange."""
        self.optimizer.zero_grad()
        self.network.fill(variant)

    def step(self) -> None:
        """Exchange, so that the parameters' ``grad`` are averages over ranks."""
        self.forward().backward()
        self.optimizer.step()


def make_exchanger(ranks: Any, method: Method, network: Network) -> Exchanger:
    """Return the method on these ranks (one of ``RANKS``)."""
    still = Still(network.parameters(), lr=1.0)
    return Exchanger(network, *ranks.prepare(method, network, still, network.named()))


def alone(network: Network) -> Exchanger:
    """Return the backward pass without any exchange."""
    forward = network.output if isinstance(network, ShardedNetwork) else network
    return Exchanger(network, forward, Still(network.parameters(), lr=1.0))


class Nothing:
    """A compression of Horovod's that leaves gradients as they are, and reduces one number each."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a number for Horovod, and the gradient."""
        return torch.zeros(1), tensor

    def decompress(self, output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return tensor


def returned(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Return a bucket of DDP as it is."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class HorovodRanks:
    """Run ranks under Horovod, on MPI or Gloo as they were launched."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()

    def barrier(self) -> None:
        self.hvd.barrier()

    def prepare(self, method: Method, model: Any, optimizer: Any, named: Any) -> Prepared:
        """Give ``hvd.DistributedOptimizer`` the method's compression."""
        stock = self.hvd.Compression
        compression = Nothing() if method.is_nothing else method.method.compression(stock)
        distributed = self.hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        return model, distributed, compression if method.is_scheme else None

    def close(self) -> None:
        self.hvd.shutdown()


class DdpRanks:
    """Run ranks under torch.distributed's Gloo, which Open MPI only starts."""

    def __init__(self) -> None:
        import torch.distributed as dist

        rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
        address = os.environ["LABORATORY_FIRST_HOST"]
        dist.init_process_group(
            "gloo", init_method=f"tcp://{address}:29400", rank=rank, world_size=size
        )
        self.dist, self.rank, self.size = dist, rank, size

    def barrier(self) -> None:
        self.dist.barrier()

    def prepare(self, method: Method, model: Any, optimizer: Any, named: Any) -> Prepared:
        """Wrap a network in DistributedDataParallel, with the method's buckets and hook.

        PowerSGD gets one bucket: its hook starts each bucket's later collectives from the threads
        on which the earlier ones end, so that with several buckets ranks start them in different
        orders, and Gloo aborts ("Received data size doesn't match expected size").
        """
        from torch.nn.parallel import DistributedDataParallel

        cap = ONE_BUCKET_MB if method.is_powersgd else method.bucket_cap_mb
        wrapped = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=cap)
        if method.is_scheme:
            scheme = method.method.scheme()
            wrapped.register_comm_hook(CompressionState(scheme, named), compression_hook)
            return wrapped, optimizer, scheme
        hooks = {
            "float32": None,
            "float16": self._fp16,
            POWERSGD: self._powersgd,
            # A function without annotations, which DDP would compare with types.
            NOTHING: lambda ddp: ddp.register_comm_hook(None, lambda _, bucket: returned(bucket)),
        }
        if (register := hooks[method.name]) is not None:
            register(wrapped, **method.method.keywords)
        return wrapped, optimizer, None

    def close(self) -> None:
        self.dist.destroy_process_group()

    def _fp16(self, wrapped: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def _powersgd(self, wrapped: Any, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_START,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class FsdpRanks(DdpRanks):
    """Run ranks of a model that FSDP2 shards."""

    def prepare(self, method: Method, model: Any, optimizer: Any, named: Any) -> Prepared:
        """Shard each block; blocks keep their parameters from forward to backward.

        FSDP2 gathers parameters in the forward pass, which is not timed, and reduces gradients.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtypes = {BFLOAT16: torch.bfloat16, "float16": torch.float16}
        policy = MixedPrecisionPolicy(reduce_dtype=dtypes.get(method.name))
        mesh = init_device_mesh("cpu", (self.size,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        still, scheme = Still(model.parameters(), lr=1.0), None
        if method.is_scheme:
            from hvd_adaptive.fsdp import compress_reduce_scatter

            scheme = method.method.scheme()
            compress_reduce_scatter(model, scheme)
        return model.output, still, scheme


RANKS = {"mpi": HorovodRanks, "gloo": HorovodRanks, "ddp": DdpRanks, "fsdp": FsdpRanks}
