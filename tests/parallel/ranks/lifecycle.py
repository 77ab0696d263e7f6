"""Programs for several ranks that start or end Horovod themselves (tests/parallel/test_lifecycle.py
launches them by name): ``mpirun -np 2 python tests/parallel/ranks/lifecycle.py subsets``."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import itertools
import os
import sys
import threading
import time
import weakref

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from training import (
    assert_same_everywhere,
    distributed,
    flat_parameters,
    give_up,
    hash_of,
    make_model,
    take_step,
    train,
)

from hvd_adaptive import ALQ, ECDQ, QSGD, BinGrad
from hvd_adaptive.transport.horovod_world import HorovodWorld

SCHEMES = {
    "alq": lambda: ALQ(bucket_size=256, update_steps=[0, 2], error_feedback=1.0),
    "qsgd": lambda: QSGD(bucket_size=256, exchange="scatter_reduce"),
    "ecdq": lambda: ECDQ(bits=2.5, bucket_size=256),
}


def train_and_compare(construct, steps: int = 3, seed: int = 0, **options):
    """The network; parameters are the same on all ranks (of a process set)."""
    net = make_model()
    train(net, distributed(net, construct(), **options), steps, seed)
    assert_same_everywhere(net, **options)
    return net


def shutdown_and_init() -> None:
    """One compressor over three lives of Horovod. Stock Horovod lives again over MPI where mpi4py
    has started MPI (or it ends MPI, too, for good), and over Gloo in elastic jobs only."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    for name in ("alq", "qsgd"):
        hvd.init()
        compressor = SCHEMES[name]()
        net = make_model()
        optimizer = distributed(net, compressor)
        train(net, optimizer, 2)
        if name == "qsgd":  # a backward that is given up; its collectives end in an error
            # Where another rank shut down first.
            with contextlib.suppress(HorovodInternalError, RuntimeError, ValueError):
                net(torch.ones(1, 100)).sum().backward()
                if hvd.rank() == 0:  # the other one need not have sent any group
                    compressor._training.connection.drive.step.release(1.0)
            handles = optimizer._handles
            optimizer.load_state_dict(optimizer.state_dict())
            handles.clear()
        hvd.shutdown()
        hvd.init()
        for p in net.parameters():
            p.grad = None
        train(net, optimizer, 2)
        assert compressor.step == 4
        assert_same_everywhere(net)
        hvd.shutdown()
        hvd.init()
        train_and_compare(lambda same=compressor: same, 2)
        assert compressor.step == 6
        hvd.shutdown()


def subsets() -> None:
    """hvd.init(comm=...): first ranks in reversed order, then parts that train on their own."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hvd.init(comm=world.Split(0, key=-world.Get_rank()))
    assert hvd.rank() == world.Get_size() - 1 - world.Get_rank()
    for construct in SCHEMES.values():
        train_and_compare(construct)
    hvd.shutdown()
    half = world.Get_rank() % 2
    hvd.init(comm=world.Split(half, key=world.Get_rank()))
    assert hvd.size() == len(range(half, world.Get_size(), 2))
    for construct in (SCHEMES["qsgd"], SCHEMES["ecdq"]):
        net = train_and_compare(construct, seed=half)
        assert len(set(world.allgather(hash_of(net)))) == 2
    hvd.shutdown()


def static_process_sets() -> None:
    """Sets given to hvd.init(), found from the optimizer or given to the compressor."""
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet([1, 2, 3])
    hvd.init(process_sets=[first, rest])
    mine = first if hvd.rank() == 0 else rest
    for construct in SCHEMES.values():
        net = train_and_compare(construct, process_set=mine)
        assert len(set(hvd.allgather_object(hash_of(net), name="apart"))) == 2
    compressor = QSGD(bits=8, norm="linf", bucket_size=256, process_set=rest)
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="this rank is not a member of ProcessSet"):
            hvd.allreduce(torch.ones(2000), compression=compressor, name="of_rest")
    else:
        values = torch.full((2000,), float(hvd.rank()))
        result = hvd.allreduce(values, compression=compressor, name="of_rest", process_set=rest)
        torch.testing.assert_close(result, torch.full((2000,), 2.0))
    hvd.barrier()
    hvd.shutdown()


def stalled() -> None:
    """Rank 1 begins its backward pass late: Horovod names its gradients. Then all is well."""
    hvd.init()
    spare = ALQ(bucket_size=256)
    spare.decode(spare.encode(torch.randn(3050)))  # loads kernels, which may take longer than that
    torch.manual_seed(0)
    net = torch.nn.Linear(60, 50)
    optimizer = distributed(net, ALQ(bucket_size=256))
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(2.5)
    take_step(optimizer, net(torch.full((8, 60), 1.0 + hvd.rank())).square().mean())
    assert_same_everywhere(net)
    hvd.shutdown()


def alone() -> None:
    """A world of one rank: without HOROVOD_ELASTIC Horovod calls no compressor; with it, gradients
    are quantised as if there were others."""
    hvd.init()
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
    for name, construct in SCHEMES.items():
        compressor = construct()
        net = make_model()
        optimizer = distributed(net, compressor)
        exact, start = copy.deepcopy(net), flat_parameters(net)
        train(net, optimizer, 3)
        train(exact, torch.optim.SGD(exact.parameters(), lr=0.1), 3)
        assert compressor.step == (3 if elastic else 0), name
        moved, expected = (flat_parameters(of) - start for of in (net, exact))
        assert torch.equal(moved, expected) != elastic, name
        assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.3, name
        result = hvd.allreduce(expected, compression=construct(), op=hvd.Sum, name=f"alone.{name}")
        assert torch.nn.functional.cosine_similarity(result, expected, dim=0) > 0.3, name
    hvd.join()
    hvd.shutdown()


def closed() -> None:
    """close() lets go of parameters and gradients; on all ranks together, at any time between
    steps, and the compressor goes on afterwards. A spare one, made on one rank, is nobody's."""
    hvd.init()
    if hvd.rank() == 1:
        spares = [construct() for construct in SCHEMES.values()]
        spares[0].fit(torch.randn(4096))
        spares[0].decode(spares[0].encode(torch.randn(1000)))
    for construct in SCHEMES.values():
        compressor = construct()
        net = make_model()
        optimizer = distributed(net, compressor)
        train(net, optimizer, 2)
        tables = compressor.state_dict()
        parameter = weakref.ref(net[0].weight)
        del net, optimizer
        compressor.close()
        compressor.close()
        gc.collect()
        assert parameter() is None, "the compressor holds a parameter"
        assert compressor.state_dict().keys() == tables.keys()
        net = make_model()
        optimizer = distributed(net, compressor)
        train(net, optimizer, 1)
        # In the middle of a step: its gradients are given up.
        net(torch.ones(1, 100)).sum().backward()
        compressor.close()
        give_up(optimizer)
        train(net, optimizer, 1)
        assert compressor.step == 4
        assert_same_everywhere(net)
    hvd.shutdown()


# Few kernels: rank 1 compiles all of them, the first time.
UNLIKE = {
    "alq": lambda: ALQ(bits=3, bucket_size=256, update_steps=[0, 2]),
    "qsgd": lambda: QSGD(bits=3, symmetric=True, bucket_size=256),
    "bingrad": lambda: BinGrad(bucket_size=256, error_feedback=1.0),
    "ecdq": lambda: ECDQ(bits=2, bucket_size=256),
}


def unlike_processors() -> None:
    """Rank 1's code is compiled and chosen for another processor (see ``main``): averages are the
    same bits, and so are payloads of the same gradients. (Parameters are not: torch's optimizers
    round otherwise on other processors, whatever the gradients travel by.)"""
    # Not of torch.randn, which depends on the processor.
    values = ((torch.arange(5000) * 7919 % 10007 - 5000) / 5000) ** 3
    digests = {}
    for name, construct in UNLIKE.items():  # before rank 0 begins to wait for collectives
        codec = construct()
        payload = codec.encode(values, seed=1)
        whole = torch.cat([payload, codec.decode(payload).view(torch.uint8)])
        digests[name] = hash_of(whole)
    hvd.init()
    processor = os.environ.get("NUMBA_CPU_NAME"), torch.backends.cpu.get_cpu_capability()
    assert len(set(hvd.allgather_object(processor))) == 2
    one, other = hvd.allgather_object(digests)
    assert one == other
    for construct in UNLIKE.values():
        net = make_model()
        optimizer = distributed(net, construct())
        for _ in range(4):
            train(net, optimizer, 1)
            assert_same_everywhere(*(p.grad for p in net.parameters()))
    hvd.shutdown()


def ended_in_flight() -> None:
    """Horovod fails on rank 1 while one thread of rank 0 waits for collectives and another submits
    them: both threads end with an error. Without ``Handles`` of
    transport/horovod_world.py, they wait forever."""
    from mpi4py import MPI

    hvd.init()
    model = torch.nn.ParameterList(torch.ones(3) for _ in range(1000))
    optimizer = distributed(model, QSGD(bucket_size=256))
    world, errors = HorovodWorld(), []

    def submit() -> None:
        try:
            for number in itertools.count():
                world.allgather(torch.zeros(4), f"submitted.{number}")
                time.sleep(0.0002)
        except (HorovodInternalError, RuntimeError, ValueError) as error:
            errors.append(error)

    if hvd.rank() == 0:
        handles = [world.allgather(torch.zeros(4), f"waiting.{i}") for i in range(1000)]
        sum(p.sum() for p in model.parameters()).backward()
        thread = threading.Thread(target=submit, daemon=True)
        thread.start()
        MPI.COMM_WORLD.Barrier()
        for handle in handles:
            try:
                world.synchronize(handle)
            except HorovodInternalError as error:
                errors.append(error)
        try:
            optimizer.synchronize()
        except HorovodInternalError as error:
            errors.append(error)
        thread.join()
        assert len(errors) == len(handles) + 2, errors[-1]
        optimizer._handles.clear()
    else:
        MPI.COMM_WORLD.Barrier()  # everything is in flight
        time.sleep(0.5)
    hvd.shutdown()


SECONDS = 360
PROGRAMS = (
    shutdown_and_init,
    stalled,
    ended_in_flight,
    subsets,
    static_process_sets,
    alone,
    closed,
    unlike_processors,
)

# A processor of 2003, for everything that chooses its instructions when it starts.
OLD_PROCESSOR = {
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CPU_FEATURES": "",
    "ATEN_CPU_CAPABILITY": "default",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX2_Usable,-FMA_Usable",
}


def main(names: list[str]) -> None:
    """Run programs; on rank 1 of ``unlike_processors`` under the old processor's environment."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK"))
    if names == ["unlike_processors"] and rank == "1" and "NUMBA_CPU_NAME" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | OLD_PROCESSOR)
    faulthandler.dump_traceback_later(SECONDS)  # where it hangs, if it does
    for program in PROGRAMS:
        if program.__name__ in names:
            begin = time.perf_counter()
            program()
            print(f"{program.__name__} passed in {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
