"""The section of compare.py's page on methods at equal wire bits."""

from __future__ import annotations

import argparse

import numpy as np
from compare_budgets import BUDGETS
from compare_claims import CLOSE
from compare_equal_claims import check_equal_claims
from compare_runs import Outcome
from compare_scores import Scores, budget_scores
from compare_studies import beside, budget_tasks
from compare_tables import markdown
from compare_tasks import TASKS
from verdicts import Claim

EQUAL_HEADINGS = (
    "bits a quantised coordinate",
    "method",
    "accuracy, %",
    "± deviation",
    "deficit to SuperSGD, points",
    "95% interval",
    "relative error",
    "bits a coordinate",
)


def equal_section(
    args: argparse.Namespace, outcomes: list[Outcome], images: str
) -> list[str | list[Claim]]:
    """Tables, figure, claims; empty where no budgets were asked for."""
    tasks = budget_tasks(args)
    if not args.budgets or not tasks:
        return []
    scores = {task: budget_scores(args, outcomes, task) for task in tasks}
    parts: list[str | list[Claim]] = [INTRODUCTION.format(bits=args.bits)]
    for task in tasks:
        rows = [row for budget in args.budgets for row in _rows(args, budget, scores[task])]
        parts += [f"### At equal bits: {TASKS[task].title}\n", markdown(EQUAL_HEADINGS, rows)]
    parts += [
        FIGURE.format(images=images),
        CLOSE_METHODS.format(close=CLOSE),
        markdown(
            ["bits", *(TASKS[task].title for task in tasks)],
            [_close(args, budget, scores) for budget in args.budgets],
        ),
        "### Claims at equal bits",
        check_equal_claims(scores),
    ]
    return parts


INTRODUCTION = """## At equal wire bits

Methods of all papers, their free parameters (gain, density, levels) chosen so that a quantised
coordinate costs the same; headers, scales, levels and tensors in full precision come on top, alike
for all, and are in the measured bits (means over the steps and seeds). The same rates, seeds and
minibatches as above. In italics: the methods above at {bits} bits (TernGrad: 1.6), for reference.
The relative error is that of the average of all workers' gradients, median of the steps: averaging
divides an unbiased method's, not a biased one's; with error feedback it counts what was added.

- *ORQ-s*, *Linear-s*, *QSGDinf-s*: s levels, of each bucket's own distribution (ORQ paper, greedy;
  its Linear-s), or uniform to the L∞ norm with zero (that paper's QSGD-s). *-clip*: at 2.5
  deviations; all others are not clipped, TernGrad is.
- *SignSGD*: scaled by the mean magnitude. *BinGrad-pb*, *-b*: partially biased, biased.
  *OneBitSGD* carries its error on, as its paper does.
- *-EF*: error feedback, β = 1, and for *QCS-32-EF*, unbiased, β = 1/(1 + γ), the paper's optimum.
- *QCS-g*: quantized compressive sampling at gain g, unbiased. *-MMSE*: its estimate is the
  unbiased one times 1/(γ + 1), so its steps are shorter at the task's rate; *-rate*: the rate is
  the task's times 1 + γ, which makes up for that, but lengthens the steps of tensors in full
  precision as well, and multiplies weight decay.
- Reconstructions of least squared error (SignSGD, BinGrad-b, OneBitSGD, MMSE) have ⟨ĝ, g⟩ = ‖ĝ‖²:
  along the gradient each is too short by its own relative error. At the task's rate, which was
  tuned for none of them, and in runs this short, that costs accuracy where error feedback does not
  bring it back in time.
- *SparseSGD*: random sparsification, its density chosen for each task.
- *ECDQ-b*: entropy-coded dithered quantization, its wire budget b bits, its steps' own included.
- *EDEN-b*: rotated, b bits.
- QSVRG is an optimizer for convex problems, and has its own script, `research/qsvrg.py`. The QCS
  paper's claims are on [its own page](qcs.md).
"""

FIGURE = """![deficit against bits]({images}/equal_bits.png)

Mean deficits with 95% intervals; the axis is linear up to 1 point and logarithmic beyond. Methods
of equal bits are drawn a little apart.
"""

CLOSE_METHODS = """Methods whose own interval ends within {close:g} points of SuperSGD, the closest
first (a list, not a verdict: no correction for the number of methods):
"""


def _rows(args: argparse.Namespace, budget: str, scores: Scores) -> list[tuple[str, ...]]:
    rows = []
    for name in (*BUDGETS[budget].methods, *beside(args, budget)):
        accuracy, deficit = scores.accuracy(name), scores.deficit(name)
        many = len(accuracy) > 1
        lost = f" ({scores.lost(name)} diverged)" if scores.lost(name) else ""
        rows.append(
            (
                "" if rows else BUDGETS[budget].title,
                name if name in BUDGETS[budget].methods else f"*{name}*",
                f"{accuracy.mean():.2f}{lost}",
                f"{accuracy.std(ddof=1):.2f}" if many else "-",
                f"{deficit.mean:+.2f}",
                f"{deficit.low:+.2f} to {deficit.high:+.2f}" if many else "-",
                f"{np.mean(scores.error(name)):.3g}",
                f"{scores.bits(name):.2f}",
            )
        )
    return rows


def _close(args: argparse.Namespace, budget: str, scores: dict[str, Scores]) -> list[str]:
    row = [BUDGETS[budget].title]
    for of_task in scores.values():
        names = (*BUDGETS[budget].methods, *beside(args, budget))
        close = [name for name in names if of_task.deficit(name).high <= CLOSE]
        row.append(", ".join(sorted(close, key=lambda n: of_task.deficit(n).mean)) or "none")
    return row
