"""Flags that the examples share, and how each of them begins."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from compression import OPTIONS, make_compression, names


def make_parser(description: str | None, **defaults: object) -> argparse.ArgumentParser:
    """With a group of flags for the compression; ``defaults`` are its values unless told otherwise.

    What ``make_compression`` takes and no flag sets is None: the scheme's own default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    method = parser.add_argument_group("compression")
    method.add_argument(
        "--compression",
        choices=names(),
        default="alq",
        metavar="NAME",
        help=f"one of {', '.join(names())} (%(default)s)",
    )
    method.add_argument(
        "--fp16-allreduce",
        dest="compression",
        action="store_const",
        const="fp16",
        help="the same as --compression fp16",
    )
    method.add_argument("--bits", type=number, help="of a code, sign included; also fractions")
    method.add_argument("--levels", type=int, help="of ORQ and LinearQuantile")
    method.add_argument("--norm", choices=("l2", "linf"), help="that buckets are divided by")
    method.add_argument(
        "--symmetric",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a level table without zero, or with it",
    )
    method.add_argument("--density", type=float, help="share of coordinates that SparseSGD sends")
    method.add_argument("--gain", type=float, help="QCS's compression gain")
    method.add_argument("--bucket-size", type=int, help="coordinates that share one scale")
    method.add_argument("--tail", choices=("quantize", "full"), help="of the last, partial bucket")
    method.add_argument(
        "--clip", type=float, help="first clip to this number of deviations of the bucket"
    )
    method.add_argument(
        "--error-feedback",
        type=weight,
        metavar="WEIGHT",
        help="of what earlier steps lost, above 0 to 1, or auto",
    )
    method.add_argument(
        "--update-steps",
        type=int,
        nargs="+",
        metavar="STEP",
        help="steps at which the level table is refitted",
    )
    method.add_argument("--coding", help="lossless coding of the codes (fixed)")
    travel = "how payloads travel (allgather up to 3 ranks, scatter_reduce beyond)"
    method.add_argument("--exchange", help=travel)
    parser.add_argument("--no-cuda", action="store_true", help="run on the CPU")
    parser.set_defaults(**dict.fromkeys(OPTIONS) | defaults)
    return parser


def number(text: str) -> int | float:
    """An integer where it is one."""
    return int(text) if text.isdecimal() else float(text)


def weight(text: str) -> float | str:
    """Of error feedback: a number, or "auto"."""
    return text if text == "auto" else float(text)


def parse(
    parser: argparse.ArgumentParser,
    words: list[str] | None = None,
    make: Callable[[argparse.Namespace, int], Any] = make_compression,
) -> argparse.Namespace:
    """Parse the command line; flags that ``make`` refuses are a usage error."""
    args = parser.parse_args(words)
    try:
        make(args, args.seed)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def start(args: argparse.Namespace) -> torch.device:
    """Horovod's first steps: initialise, log on one rank, choose this rank's device."""
    # Horovod: initialize library.
    hvd.init()
    logging.basicConfig(level=logging.INFO if hvd.rank() == 0 else logging.ERROR)
    if not args.no_cuda and torch.cuda.is_available():
        # Horovod: pin GPU to local rank.
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        return torch.device("cuda")
    if hvd.local_size() >= len(os.sched_getaffinity(0)):
        # Threads of ranks that share cores only get in each other's way.
        torch.set_num_threads(1)
    return torch.device("cpu")


def say(*words: object) -> None:
    """On one rank."""
    if hvd.rank() == 0:
        print(*words, flush=True)
