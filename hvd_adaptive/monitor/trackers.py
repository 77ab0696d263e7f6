"""Send a monitor's records to trackers of experiments: MLflow, Weights & Biases.

Monitor("runs/1", sinks=[WandB(wandb.init(project="mine"))])
Monitor("runs/1", sinks=[MLflow()])          # the active run
"""

from __future__ import annotations

import math
from typing import Any

from hvd_adaptive.monitor.sinks import SCALARS, Record


class Tracker:
    """Base of sinks that send the figures of each step record, as ``name/figure``.

    Args:
        name: Prefix of the figures' names.
    """

    def __init__(self, name: str = "gradients") -> None:
        self._name = name

    def write(self, record: Record) -> None:
        """Send the figures of a step, and the settings at the start."""
        number = record["compressor"]
        prefix = f"{self._name}/{number}" if number else self._name
        if record["kind"] == "start":
            self.settings({f"{prefix}/{key}": record[key] for key in ("scheme", "ranks")})
        if record["kind"] == "step":
            known = {key: record[key] for key in SCALARS if record[key] is not None}
            finite = {key: float(value) for key, value in known.items() if math.isfinite(value)}
            self.figures({f"{prefix}/{key}": v for key, v in finite.items()}, record["step"])

    def settings(self, settings: dict[str, Any]) -> None:
        """Send what stays the same."""
        raise NotImplementedError

    def figures(self, figures: dict[str, float], step: int) -> None:
        """Send the figures of a step."""
        raise NotImplementedError

    def flush(self) -> None:
        """Do nothing: trackers send by themselves."""

    def close(self) -> None:
        """Do nothing: who began the run ends it."""


class WandB(Tracker):
    """Sink for a run of Weights & Biases.

    Args:
        run: What ``wandb.init`` returned. The run's own step is not used, since a monitor does not
            write at every step; the figures have the axis ``name/step``.
        name: Prefix of the figures' names.
    """

    def __init__(self, run: Any, name: str = "gradients") -> None:
        super().__init__(name)
        self._run = run
        run.define_metric(f"{name}/step")
        run.define_metric(f"{name}/*", step_metric=f"{name}/step")

    def settings(self, settings: dict[str, Any]) -> None:
        self._run.config.update(settings, allow_val_change=True)

    def figures(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures | {f"{self._name}/step": step})


class MLflow(Tracker):
    """Sink for a run of MLflow.

    Args:
        run_id: The run; the active one, or a new one, if None.
        name: Prefix of the figures' names.
    """

    def __init__(self, run_id: str | None = None, name: str = "gradients") -> None:
        super().__init__(name)
        self._run_id = run_id

    def settings(self, settings: dict[str, Any]) -> None:
        import mlflow

        # A parameter of a run cannot change, but a scheme can; tags can.
        tags = {key: str(value) for key, value in settings.items()}
        if self._run_id is None:
            mlflow.set_tags(tags)
            return
        client = mlflow.MlflowClient()
        for key, value in tags.items():
            client.set_tag(self._run_id, key, value)

    def figures(self, figures: dict[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics(figures, step=step, run_id=self._run_id)
