"""Tables and page of defaults.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import verdicts
from compare_tables import markdown
from defaults_runs import BATCH, CLASSES, LENGTH, RANKS, ROWS, TASKS, TRAINED, WORDS, Run
from verdicts import Claim, Comparison, Interval, paired

from hvd_adaptive.simulate import Result

FLOAT32 = "float32"
NAMES = ("ALQ(bits=3, norm='l2', symmetric=True", "EDEN(bits=1", "EDEN(bits=2", "ECDQ(bits=2")
ROUNDED, KEPT = ([f"{name}, keep_zeros={keep})" for name in NAMES] for keep in (False, True))
PAPER, DEFAULT = ROUNDED[0], "ALQ(bits=3, norm='linf', symmetric=False)"
METHODS = (PAPER, DEFAULT, *ROUNDED[1:], *KEPT)
TABLE_METHODS = (
    FLOAT32,
    "ALQ(bits=3, norm='l2', symmetric=True, update_steps=(0, 100))",
    "ALQ(bits=3, norm='linf', symmetric=False, update_steps=(0, 100))",
    "ALQ(bits=3, norm='linf', symmetric=True, update_steps=(0, 100))",
    "EDEN(bits=2)",
)
WINDOW = 100  # steps whose median error is a cell
HEADINGS = (
    "method",
    "bits a\ncoordinate",
    "training\nloss",
    "difference\nto float32",
    "accuracy,\n%",
    "difference\nto float32",
    "rms change of\nunused rows",
    "unused rows\nunchanged",
    "padding\nunchanged",
)

Runs = Sequence[tuple[Run, Result]]


class Seeds:
    """A task's results by method, in the order of the seeds."""

    def __init__(self, runs: Runs) -> None:
        self.results: dict[str, list[Result]] = {}
        for run, result in sorted(runs, key=lambda pair: pair[0].seed):
            self.results.setdefault(run.method, []).append(result)

    def losses(self, method: str) -> np.ndarray:
        """Training loss at the end."""
        return np.array([result.settings["training_loss"] for result in self.results[method]])

    def accuracies(self, method: str) -> np.ndarray:
        """Test accuracy at the end, in %."""
        return np.array([accuracy(result) for result in self.results[method]])

    def rows(self, method: str, what: str) -> list[float]:
        """An entry of defaults_runs.movement."""
        return [result.settings["rows"][what] for result in self.results[method]]

    def are_unchanged(self, method: str) -> bool:
        """Whether no seed moves a row that no text uses, nor that of padding."""
        return all(self.rows(method, "unchanged") + self.rows(method, "padding_unchanged"))


def accuracy(result: Result) -> float:
    """Return the test accuracy at the end, in %."""
    return 100 * result.rows[-1]["validation_accuracy"]


def headings(runs: Runs) -> tuple[str, ...]:
    """Return a table's headings."""
    if TASKS[runs[0][0].task].model != "lenet":
        return HEADINGS
    ends = range(WINDOW, runs[0][0].steps + WINDOW, WINDOW)
    return ("method", *(f"to step\n{min(end, runs[0][0].steps)}" for end in ends), "accuracy,\n%")


def rows(runs: Runs) -> list[tuple[str, ...]]:
    """Return a line for each method: means over seeds, and paired differences to float32."""
    seeds, lines = Seeds(runs), []
    for method, results in seeds.results.items():
        figures = [seeds.losses(method), seeds.accuracies(method)]
        own = [seeds.losses(FLOAT32), seeds.accuracies(FLOAT32)]
        gaps = [Interval.of(paired(*both)) for both in zip(figures, own, strict=True)]
        loss, points = (
            "-" if method == FLOAT32 else written(gap, digits)
            for gap, digits in zip(gaps, (3, 2), strict=True)
        )
        bits = np.mean([np.mean(result.column("bits_per_coordinate")) for result in results])
        change = float(np.mean(seeds.rows(method, "rms")))
        kept = [told(seeds.rows(method, what)) for what in ("unchanged", "padding_unchanged")]
        numbers = f"{figures[0].mean():.3f}", loss, f"{figures[1].mean():.2f}", points
        lines.append((method, f"{bits:.2f}", *numbers, f"{change:.2g}", *kept))
    return lines


def written(interval: Interval, digits: int) -> str:
    """Return a mean and half of its interval."""
    return f"{interval.mean:+.{digits}f} ± {interval.half:.{digits}f}"


def told(seeds: Sequence[float]) -> str:
    """Return how many seeds there are of which something is true."""
    true = sum(map(bool, seeds))
    return {0: "no", len(seeds): "yes"}.get(true, f"{true} of {len(seeds)}")


def window_rows(runs: Runs) -> list[tuple[str, ...]]:
    """Return a line for each method: median errors of successive steps, and the accuracy."""
    lines = []
    for run, result in runs:
        errors = np.array(result.column("relative_error"))
        windows = np.split(errors, range(WINDOW, len(errors), WINDOW))
        medians = [f"{np.median(window):.3f}" for window in windows]
        lines.append((run.method, *medians, f"{accuracy(result):.1f}"))
    return lines


def page(command: str, found: Mapping[str, Runs], tables: Mapping[str, list]) -> str:
    """Return the page: texts, tables, claims."""
    parts: list[str | list[Claim]] = [INTRODUCTION.format(command=command)]
    for task, runs in found.items():
        about = LENET if TASKS[task].model == "lenet" else ""
        setting = f"{TASKS[task].optimizer}, rate {TASKS[task].rate:g}, {runs[0][0].steps} steps."
        code = [(f"`{method}`", *cells) for method, *cells in tables[task]]
        parts.append(f"## {TASKS[task].title}\n\n{about}{setting}")
        parts.append(
            markdown([heading.replace("\n", " ").strip() for heading in headings(runs)], code)
        )
    decided = claims({task: Seeds(runs) for task, runs in found.items()})
    return verdicts.page([*parts, *(["## Claims\n\n{rule}", decided] if decided else [])])


def claims(seeds: Mapping[str, Seeds]) -> list[Claim]:
    """Return what is decided, if all tasks and methods are there."""
    of_texts = {task: own for task, own in seeds.items() if TASKS[task].model != "lenet"}
    if len(of_texts) < len(TASKS) - 1 or not all(
        {FLOAT32, *METHODS} <= set(own.results) for own in of_texts.values()
    ):
        return []
    keep = [FLOAT32, *(m for m in METHODS if m not in ROUNDED)]
    names = ", ".join(f"`{method}`" for method in keep)
    bags = [of_texts["bags-sgd"], of_texts["bags-adam"]]
    little, much = of_texts["sums-20"], of_texts["sums-200"]
    costs = {m: paired(little.accuracies(m), much.accuracies(m)) for m in (*METHODS, FLOAT32)}
    less = [paired(own.losses(PAPER), own.losses(DEFAULT)) for own in bags]
    return [
        Claim(
            f"rows that no rank uses, and that of padding, keep their bits with {names}",
            "Counted over all tasks and seeds.",
            computed=all(own.are_unchanged(m) for own in of_texts.values() for m in keep),
        ),
        Claim(
            f"with these, padding to {TASKS['sums-200'].padded} changes no run's accuracy",
            "Compared seed by seed.",
            computed=not any(costs[method].any() for method in keep),
        ),
        *(
            Claim(
                f"padding to {TASKS['sums-200'].padded} costs accuracy with `{method}`",
                f"It costs {Interval.of(costs[method])} points.",
                (Comparison(costs[method]),),
            )
            for method in ROUNDED
        ),
        Claim(
            f"`{DEFAULT}` has less training loss than `{PAPER}` with means of embeddings",
            f"With SGD and Adam: {', '.join(written(Interval.of(each), 3) for each in less)} less.",
            tuple(Comparison(differences) for differences in less),
        ),
    ]


INTRODUCTION = f"""# Defaults in training

Everything here is made by

    {{command}}

from simulated training (`hvd_adaptive.simulate`) of {RANKS} ranks, with {BATCH} examples a rank and
step. Keywords that are not named have their defaults.

An embedding of {ROWS:,} rows and a linear classifier of {CLASSES} classes learn synthetic texts.
A text is {LENGTH} independent words, drawn by the frequencies of its class. {WORDS} words occur.
Their rows are spread over the embedding. There are {TRAINED:,} texts to train with. Row 0 is that
of padding (`padding_idx=0`). Without compression, this row and those of words that do not occur
keep their bits. A scheme without a level at zero adds noise to them, unless it leaves zeros out
(`keep_zeros=True`). Under Adam they then move by about the rate at each step, however small the
noise is.

Equal seeds start from equal weights, and see equal batches. Differences are paired by seed; of
accuracies they are in points. Intervals are 95 %, Student's t. *Unchanged* means bit for bit, with
all seeds.
"""

LENET = f"""Tables are fitted at steps 0 and 100 only. A cell is the median of the relative error
‖average - exact‖²/‖exact‖² of the averaged gradient, over {WINDOW} steps. One seed.

"""
