"""Times the exchange of a network's gradients on hosts at a given rate, all on this machine.

    python benchmarks/network.py --hosts 4 --rate 1gbit --model resnet18

Needs Linux, root and iproute2: hosts are network namespaces, their links are shaped by tc. They
are removed at the end, after an error, Ctrl-C and SIGTERM; the next run removes what a killed one
left.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from laboratory import methods as asked
from laboratory.figure import draw
from laboratory.hosts import Hosts, LaboratoryError
from laboratory.launch import check_programs
from laboratory.measure import Settings, measure
from laboratory.shapes import SIZES
from laboratory.tables import conditions, print_tables
from tqdm import tqdm

from hvd_adaptive.tools.output import script_parser, whole


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = script_parser(__doc__)
    parser.epilog = f"methods:\n{asked.__doc__.partition(chr(10))[2]}"
    parser.add_argument("--hosts", type=whole(2), default=4)
    parser.add_argument("--ranks-per-host", type=whole(1), default=1, help="that share its link")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it: 1gbit")
    parser.add_argument("--model", choices=SIZES, default="resnet18")
    parser.add_argument(
        "--trained",
        action="store_true",
        help="gradients of a ResNet-18 that is being trained, not drawn ones",
    )
    parser.add_argument("--methods", nargs="+", default=asked.DEFAULTS, metavar="METHOD")
    parser.add_argument("--steps", type=whole(1), default=10, help="timed, in each round")
    parser.add_argument("--rounds", type=whole(1), default=3, help="each runs every method")
    parser.add_argument(
        "--backward-ms",
        type=whole(0),
        default=0,
        metavar="MS",
        help="let the backward pass take so long, the processor idle, as where a GPU computes",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the seconds as bars (matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    return parser.parse_args()


def _end(number: int, frame: Any) -> NoReturn:
    """A signal ends the program as an exception does, so that everything is cleaned up."""
    sys.exit(128 + number)


def _bar(launches: int) -> tqdm:
    """A progress bar where somebody looks."""
    return tqdm(total=launches, unit="launch", leave=False, disable=not sys.stderr.isatty())


def main() -> int:
    """Measure, print, draw, write; 1 where nothing could be measured."""
    args = arguments()
    told = vars(args) | {"methods": list(args.methods)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        methods = asked.parse(told["methods"])
        backends = {method.backend for method in methods}
        check_programs(backends)
        if args.trained and args.model != "resnet18":
            raise ValueError(f"--model {args.model}: must be resnet18 with --trained")
        settings = Settings(
            args.model,
            args.steps,
            args.rounds,
            backward_s=args.backward_ms / 1e3,
            ranks_per_host=args.ranks_per_host,
            trained=args.trained,
        )
        with Hosts(args.hosts, args.rate) as hosts, _bar(args.rounds * len(backends)) as bar:
            results = measure(hosts, methods, settings, bar.set_description, bar.update)
    except (LaboratoryError, ValueError) as error:
        print(f"network.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("network.py: interrupted; the hosts are removed", file=sys.stderr)
        return 130
    print_tables(results, told)
    if args.json:
        rows = [result.to_json() for result in results]
        written = {"arguments": told, "conditions": conditions(), "results": rows}
        Path(args.json).write_text(json.dumps(written, indent=1), encoding="utf-8")
    measured = [result for result in results if result.seconds]
    if args.plot and measured:
        draw(measured, told, args.plot)
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
