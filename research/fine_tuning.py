"""Fine-tuning of a small BERT, whole and by LoRA, in codes against float32.

python research/fine_tuning.py [--page docs/fine_tuning.md]

Each seed has a language of its own: chains of tokens in several styles. A BERT learns masked
tokens of it, and is then fine-tuned to name the style of a text, by all methods from the same
weights, with the same batches and dropout. Gradients are averaged by hvd_adaptive.simulate.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from compare_tables import markdown
from peft import LoraConfig, get_peft_model
from torch import nn
from tqdm import tqdm
from verdicts import Interval

from hvd_adaptive import ALQ, EDEN, simulate
from hvd_adaptive.tools.output import script_parser

TOKENS, STYLES, LENGTH, RANKS, BATCH = 200, 6, 24, 4, 8
FIRST = 2  # the tokens before it are the padding and the mask
EMBEDDINGS = {"*embeddings*": None}
METHODS: dict[str, Callable[..., Any] | None] = {
    "float32": None,
    "ALQ(bits=3)": functools.partial(ALQ, bits=3),
    "ALQ(bits=4)": functools.partial(ALQ, bits=4),
    "ALQ(bits=3, warmup_steps=10)": functools.partial(ALQ, bits=3, warmup_steps=10),
    'ALQ(bits=3, parameter_bits={"*embeddings*": None})': functools.partial(
        ALQ, bits=3, parameter_bits=EMBEDDINGS
    ),
    'ALQ(bits=3, norm="l2", symmetric=True)': functools.partial(
        ALQ, bits=3, norm="l2", symmetric=True
    ),
    "EDEN(bits=3)": functools.partial(EDEN, bits=3),
}
TASKS = {"BERT": 1e-3, "LoRA": 1e-2}  # and AdamW's rate
HEADINGS = (
    "method",
    "bits a coordinate",
    "early loss",
    "minus float32",
    "last loss",
    "minus float32",
    "largest jump",
    "accuracy, points",
)


class Classifier(nn.Module):
    """A model of transformers as a function of its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).logits


def texts(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and their styles. In each style a token has three successors of its own, and a third of
    the tokens are drawn from Zipf's law, whose order of tokens is the style's own."""
    draw = np.random.default_rng(seed)
    words = TOKENS - FIRST
    successors = draw.integers(words, size=(STYLES, words, 3))
    frequency = 1 / np.arange(1, words + 1)
    frequency /= frequency.sum()
    orders = np.stack([draw.permutation(words) for _ in range(STYLES)])
    styles = draw.integers(STYLES, size=count)

    def drawn() -> np.ndarray:
        return orders[styles, draw.choice(words, size=count, p=frequency)]

    made = np.empty((count, LENGTH), dtype=np.int64)
    made[:, 0] = drawn()
    for place in range(1, LENGTH):
        following = successors[styles, made[:, place - 1], draw.integers(3, size=count)]
        made[:, place] = np.where(draw.random(count) < 1 / 3, drawn(), following)
    return torch.from_numpy(made + FIRST), torch.from_numpy(styles)


def config() -> transformers.BertConfig:
    """A BERT of two layers."""
    return transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=STYLES,
    )


def pretrained(tokens: torch.Tensor, seed: int, steps: int) -> dict[str, torch.Tensor]:
    """The body of a BERT that has learned masked tokens."""
    torch.manual_seed(seed)
    model = transformers.BertForMaskedLM(config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = tokens[torch.randint(len(tokens), (RANKS * BATCH,))]
        masked = torch.rand(chosen.shape) < 0.15
        labels = torch.where(masked, chosen, -100)
        optimizer.zero_grad()
        model(torch.where(masked, 1, chosen), labels=labels).loss.backward()
        optimizer.step()
    return model.bert.state_dict()


def tuned(
    task: str, method: str, body: dict[str, torch.Tensor], seed: int, data: Any, steps: int
) -> list[float]:
    """A fine-tuning: bits, early and last loss, the largest jump of the loss, accuracy."""
    torch.manual_seed(seed)
    model: Any = transformers.BertForSequenceClassification(config())
    model.bert.load_state_dict(body, strict=False)
    if task == "LoRA":
        own = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
        model = get_peft_model(model, own)
    make = METHODS[method]
    # Matrices of LoRA are small; by default they travel in full precision.
    compressor = None if make is None else make(min_numel=1 if task == "LoRA" else 1024)
    test, train = [tuple(part[:512] for part in data), tuple(part[512:] for part in data)]
    rows = simulate.train(
        Classifier(model),
        train,
        optimizer=lambda parameters: torch.optim.AdamW(
            [p for p in parameters if p.requires_grad], lr=TASKS[task]
        ),
        compressor=compressor,
        workers=RANKS,
        steps=steps,
        batch_size=BATCH,
        seed=seed,
        validation=test,
        progress=False,
    ).rows
    loss = np.array([row["loss"] for row in rows])
    smooth = np.convolve(loss, np.full(5, 0.2), "valid")
    bits = np.mean([row["bits_per_coordinate"] for row in rows])
    accuracy = 100 * rows[-1]["validation_accuracy"]
    return [bits, loss[30:40].mean(), loss[-20:].mean(), float(np.diff(smooth).max()), accuracy]


def lines(ends: dict[str, list[list[float]]]) -> list[list[str]]:
    """The table's lines; differences are paired by seed."""
    exact = np.array(ends["float32"])
    made = []
    for method, values in ends.items():
        own = np.array(values)
        bits, early, last, jump, _ = own.mean(0)
        gaps = [str(Interval.of(own[:, i] - exact[:, i])) for i in (1, 2, 4)]
        if method == "float32":
            gaps = ["-", "-", f"{exact[:, 4].mean():.2f}"]
        cells = [f"{bits:.2f}", f"{early:.3f}", gaps[0], f"{last:.3f}", gaps[1], f"{jump:.2f}"]
        made.append([f"`{method}`", *cells, gaps[2]])
    return made


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds (5)")
    parser.add_argument("--steps", type=int, default=80, help="of a fine-tuning (80)")
    parser.add_argument("--pretraining", type=int, default=200, help="steps (200)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="(all)")
    parser.add_argument("--page", type=Path, help="file that gets the page")
    args = parser.parse_args()
    for name in ("hvd_adaptive", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ends: dict[str, dict[str, list[list[float]]]]
    ends = {task: {method: [] for method in args.methods} for task in TASKS}
    total = args.seeds * len(TASKS) * len(args.methods)
    with tqdm(total=total, unit="run", leave=False, disable=None) as bar:
        for seed in range(args.seeds):
            data = texts(seed, 4096)
            body = pretrained(data[0][512:], seed, args.pretraining)
            for task, of in ends.items():
                for method, found in of.items():
                    found.append(tuned(task, method, body, seed, data, args.steps))
                    bar.update()
    tables = {task: markdown(HEADINGS, lines(of)) for task, of in ends.items()}
    text = PAGE.format(steps=args.steps, seeds=args.seeds, **tables)
    print(text)
    if args.page is not None:
        args.page.write_text(text, encoding="utf-8")


PAGE = f"""# Fine-tuning

`python research/fine_tuning.py --page docs/fine_tuning.md` makes this page, in some minutes.

A BERT of two layers (width 64) learns masked tokens of a made-up language, and is then fine-tuned
to distinguish {STYLES} styles of texts, by {RANKS} simulated ranks of {BATCH} texts each, with
AdamW, in {{steps}} steps. All methods start from the same weights, with the same batches and
dropout. There are {{seeds}} paired seeds; intervals are 95 %.

*Early loss* is the mean of the training losses of steps 31 to 40, *last loss* that of the last 20.
*Largest jump* is the largest rise of the loss from one step to the next, averaged over 5 steps.
*Accuracy* is that of 512 other texts, in points; that of the codes is the difference to float32.

## The whole model

A rate of {TASKS["BERT"]:g}. Tensors of less than 1,024 coordinates travel in full precision, as by
default.

{{BERT}}
## LoRA

Adapters of rank 4 of the queries and values, and the classifier, with a rate of {TASKS["LoRA"]:g}.
These adapters are small, so `min_numel=1`; with the default of 1,024 they would travel in full
precision.

{{LoRA}}"""


if __name__ == "__main__":
    main()
