"""Which metrics the report draws together, and how each chart is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from src.report.read import Curve
from src.report.svg import Series


@dataclass(frozen=True)
class Line:
    """One metric in a chart. `colour` is a class of the page's style."""

    metric: str
    label: str
    colour: str = "c1"
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share axes; `note` says in a sentence what to look for."""

    title: str
    note: str
    lines: tuple[Line, ...]
    from_zero: bool = True
    """Whether the vertical axis starts at 0, so that heights compare."""

    def series(self, curves: Mapping[str, Curve]) -> list[Series]:
        """The lines that the run has values for."""
        return [
            Series(line.label, curves[line.metric], line.colour, line.faint)
            for line in self.lines
            if curves.get(line.metric)
        ]


LEARNING = Chart(
    "Reward over iterations",
    "Held-out prompts with fixed seeds. The judge was trained apart from the reward and is never optimised; "
    "a gap that opens between them would be reward hacking.",
    (
        Line("train/reward", "training reward", "c3", faint=True),
        Line("eval/judge", "independent judge, held out", "c2"),
        Line("eval/reward", "reward, held out"),
    ),
    from_zero=False,
)

EXPLORATION = (
    Chart(
        "Contrast of the trained seeds",
        "Variance of reward within a group: seeds chosen by exploration against as many random ones.",
        (
            Line("explore/variance_kept", "kept seeds"),
            Line("explore/variance_random", "random seeds", "c2"),
        ),
    ),
    Chart(
        "How well stale weights rank",
        "Rank correlation of stale and fresh rewards, from a few uniformly drawn seeds of each iteration.",
        (Line("explore/spearman", "Spearman correlation"),),
    ),
    Chart(
        "Seeds per iteration",
        "Candidates that the workers were asked to explore, and those that came before training ended.",
        (Line("explore/explored", "explored in time"), Line("explore/requested", "asked for", "c3")),
    ),
)

SECONDS = Chart(
    "Seconds per iteration",
    "Where the trainer's time goes.",
    (
        Line("time/rollout_s", "rollout", "rollout"),
        Line("time/train_s", "train", "train"),
        Line("time/recompute_s", "of it recomputing log-probabilities", "c2"),
        Line("time/evaluate_s", "evaluate", "eval"),
    ),
)

OPTIMISATION = (
    Chart(
        "Clipped share",
        "Share of transitions whose probability ratio left the clip range.",
        (Line("train/clip_fraction", "clip fraction"),),
    ),
    Chart("Gradient norm", "Global norm before clipping.", (Line("train/grad_norm", "gradient norm"),)),
    Chart(
        "Ratio before the first update",
        "1 means that old and new log-probabilities agree, as they must.",
        (
            Line("train/ratio_first", "as used", "c1"),
            Line("train/ratio_rollout", "as rolled out", "c2"),
        ),
        from_zero=False,
    ),
    Chart("Distance from the base model", "Divergence from the reference policy.", (Line("train/kl", "KL"),)),
    Chart(
        "Groups without contrast",
        "Prompts whose seeds all got the same reward; they are skipped.",
        (Line("train/zero_variance_groups", "groups"),),
    ),
    Chart(
        "Image statistics",
        "Brightness, contrast and edges of the held-out images: a jump is a sign of reward hacking.",
        (
            Line("images/mean", "mean"),
            Line("images/std", "deviation", "c2"),
            Line("images/edge_energy", "edges", "c4"),
        ),
    ),
)
