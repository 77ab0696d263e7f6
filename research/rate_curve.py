"""Error against measured wire bits, of every scheme of the package, on real gradients.

    python research/rate_curve.py            # draws docs/images/rate_curve.png, writes docs/rate.md

Gradients of a LeNet on MNIST are recorded at steps 0, 50 and 200 of a training. Each scheme with a
fit is fitted to the gradient, encodes it into one payload, and decodes it again. Measurements are
kept in runs/rate; --redo makes them anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import rate_bound
import torch
import torch.nn.functional as F
from exact_error import exact_error
from from_examples import LeNet, read_images, split
from rate_methods import FAMILIES
from rate_page import draw, write_page
from tqdm import tqdm

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.simulate import Records

ROOT = Path(__file__).resolve().parents[1]
BATCH, RATE, MOMENTUM = 64, 0.02, 0.9
# Of schemes with exact errors, to measure the length of coded payloads.
BIT_DRAWS = 4


def recorded(stages: list[int]) -> dict[int, torch.Tensor]:
    """Step -> gradient of one minibatch, all layers end to end (float32, (431080,))."""
    torch.manual_seed(0)
    train, _ = split(*read_images())
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    generator = torch.Generator().manual_seed(1)
    gradients = {}
    for step in range(max(stages) + 1):
        images, digits = train[torch.randint(len(train), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        F.cross_entropy(model(images), digits).backward()
        if step in stages:
            gradients[step] = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        optimizer.step()
    return gradients


def measured(
    codec: GradientCompressor, gradient: torch.Tensor, draws: int
) -> tuple[float, list[float], bool]:
    """Wire bits per coordinate, header and scales included, mean of some draws; the errors
    ||Q(g) - g||²/||g||² of all draws, or their expectation; and whether it is the expectation.

    Few draws would not do for every scheme: under the L2 norm rare jumps to far levels make up most
    of the variance, so that most samples are far too small.
    """
    if hasattr(codec, "fit"):
        codec.fit(gradient)
    exact = exact_error(codec, gradient)
    count = BIT_DRAWS if exact is not None else draws
    payloads = [codec.encode(gradient, seed=draw_) for draw_ in range(count)]
    bits = sum(8 * payload.numel() / gradient.numel() for payload in payloads) / count
    if exact is not None:
        return bits, [exact], True
    wanted = gradient.double()
    norm = float(wanted.square().sum())
    errors = [float((codec.decode(p).double() - wanted).square().sum()) / norm for p in payloads]
    return bits, errors, False


def measure(stages: list[int], draws: int, limit: int | None) -> Records:
    """Rows (step, scheme, unbiased, parameter, bits, exact, draw, error): a row for each draw, or
    one of the exact error. limit: coordinates that are used."""
    rows = []
    gradients = {step: gradient[:limit] for step, gradient in recorded(stages).items()}
    cases = [(step, family) for step in gradients for family in FAMILIES]
    for step, family in tqdm(cases, unit="scheme"):
        for codec, value in zip(family.members(), family.values or [None], strict=True):
            bits, errors, exact = measured(codec, gradients[step], draws)
            point = {
                "step": step,
                "scheme": family.name,
                "unbiased": int(family.unbiased),
                "parameter": str(value),
                "bits": bits,
                "exact": int(exact),
            }
            rows += [point | {"draw": i, "error": error} for i, error in enumerate(errors)]
    return Records(_settings(stages, draws, limit), rows)


def _settings(stages: list[int], draws: int, limit: int | None) -> dict[str, Any]:
    families = [family.label for family in FAMILIES]
    return {"stages": stages, "draws": draws, "limit": limit, "families": families}


def _kept(path: Path, settings: dict[str, Any]) -> Records | None:
    """Earlier measurements, where they are of these settings."""
    records = Records.read(path) if path.exists() else None
    return records if records is not None and records.settings == settings else None


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 50, 200])
    parser.add_argument("--draws", type=int, default=20, help="where errors have no formula (20)")
    parser.add_argument("--coordinates", type=int, help="of each gradient, all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "rate")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "rate.md")
    parser.add_argument("--redo", action="store_true")
    args = parser.parse_args(arguments)
    wanted = _settings(args.stages, args.draws, args.coordinates)
    records = None if args.redo else _kept(args.folder / "rate.csv", wanted)
    if records is None:
        records = measure(args.stages, args.draws, args.coordinates)
        records.write(args.folder / "rate.csv")
    bound = rate_bound.measure()
    images = args.page.parent / "images"
    draw(records, images / "rate_curve.png")
    write_page(records, bound, args.page)
    print(f"{args.page} and {images / 'rate_curve.png'}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
