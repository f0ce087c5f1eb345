"""The page on verdict quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from benchmarks.recipes.outcome import RUINS, WORSE, Faulty, Healthy, first_words, shares
from benchmarks.recipes.recipe import Half

INTRODUCTION = """\
# How good are the verdicts?

You train a healthy recipe or a faulty one: how often is the monitor right? The table shows how many healthy recipes it
flags, how many faults it finds, and whether its advice helps. Below it are the misses and all runs.

The suite in `benchmarks/recipes` has small versions of published recipes, and faults that people make. Rules and limits
of the verdicts were found on one half of the suite. This page is about the other half, which was run after they were
fixed. It has {recipes} healthy recipes in {healthy} runs and {faults} faults, measured at the default schedule (steps
1, 2, 4, 8, ... and every 100). The runs report their loss, as Lightning does. The figures are for the current rules.
This half is [no longer unseen](#how-unseen-this-half-is).

`python -m benchmarks.recipes --width --write docs/verdict_quality.md` makes this page; `--half development` makes the
same of the first half.
"""

MEANING = """
* A fault *ruins* a run that diverges, or whose loss ends more than 10 % above the healthy run's.
* A separate run follows the advice of the first verdict to the letter. The advice made it *worse* if the loss ends more
  than 3 % higher than without it. If the first seed shows this, the mean of five seeds counts.
* Advice to look at something that no setting repairs counts as followed if the cause is right.
"""

WIDTH = """\
A narrow run's [profile](verdicts.md#another-reference) is the reference of the same network, 8 times wider. *Divisor*
is the advised divisor of the learning rate.
"""

HISTORY = """
## How unseen this half is

Its misses were known when later rules were made:

* **At the first run**, 40 of 47 faults that ruin a run were found. Of 67 causes 64 were right, and of 62 pieces of
  advice 2 made it worse.
* **Found on the first half and on 21 recipes written for the purpose**: targets out of scale, first layers that are cut
  off, gradients that are used again. Rates of two optimizers are now reported from 20 times apart, not from 32. There
  is no advice if a rate makes an update like the others' in the natural norm. One former fault, an optimizer with the
  parameters of a copy, is refused today.
* **Weight decay that is too large**: limits were found on 21 recipes of the first half. Their decay removed the weights
  within the run, within a tenth of it or a hundredth. The 36 recipes of this half were run at the first two of these.
  All 55 runs that cost more than 10 % were named, one of the 17 others, and no healthy run. Later the second seed of a
  graph attention network was flagged falsely. Therefore most weights must shrink under Adam.
* **Found on 15 recipes that somebody else wrote, with their own mistakes**: the rates of temperatures and of single
  modules, gradients below Adam's eps, starts that were not measured.
* **A limit on the decrease of the loss that steps predict**: found on the first half and on runs of other people. It
  finds a tanh network of this half at 30 times its rates, which was a known miss.
* **Embeddings keep their rates** when steps are too large: found on the first half.
"""


def page(half: Half, base: Sequence[Healthy], runs: Sequence[Faulty], width: str = "") -> str:
    """Return the page as Markdown; ``width``: the table on width, if it was made."""
    recipes = len({run.recipe.name for run in base})
    words = first_words(runs)
    parts = [
        INTRODUCTION.format(recipes=recipes, healthy=len(base), faults=len(runs)),
        "" if half == "held out" else "**This is the development half.**\n",
        "| question | hits | of | share | 95 % interval | goal |\n|---|---|---|---|---|---|",
        *(
            f"| {share.name} | {share.hits} | {share.total} | {100 * share.hits / max(share.total, 1):.0f} % | "
            f"{100 * share.interval[0]:.0f} to {100 * share.interval[1]:.0f} % | {share.goal} |"
            for share in shares(base, runs)
        ),
        f"| median step of the first verdict | {median(words) if words else math.nan:.0f} | | | | 8 |",
        MEANING,
        "\n## Healthy recipes that were flagged\n",
        *(_flagged(base) or ["None."]),
        "\n## Faults that were missed or misread\n",
        "| fault | recipe | loss | first verdict |\n|---|---|---|---|",
        *(_fault(run) for run in runs if run.right_root is None),
        "\n## Advice that made it worse\n",
        *([_advice(run) for run in runs if run.advised > WORSE] or ["None."]),
        f"\n## Width\n\n{WIDTH}\n{width}" if width else "",
        HISTORY,
        "## Every fault\n",
        "*Loss against healthy* compares with the healthy run, *loss with the advice* with the faulty one.\n",
        "| fault | recipe | loss against healthy | named at step | cause | loss with the advice |",
        "|---|---|---|---|---|---|",
        *(_row(run) for run in runs),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _flagged(base: Sequence[Healthy]) -> list[str]:
    return [
        f"* {run.recipe.name}, seed {run.seed}"
        + (f" (deliberate: {run.recipe.deliberate})" if run.recipe.deliberate else "")
        + f": {root.verdict.layer} at step {root.step}: {root.verdict.sentence}"
        for run in base
        for root in run.roots[:2]
    ]


def _fault(run: Faulty) -> str:
    first = run.roots[0] if run.roots else None
    diagnosis = f"step {first.step}, {first.verdict.layer}: `{first.verdict.cause}`" if first else "nothing"
    return f"| {run.fault.name} | {run.fault.recipe} | {_change(run.cost)} | {diagnosis} |"


def _advice(run: Faulty) -> str:
    return f"* {run.fault.name}, {run.fault.recipe}: {_change(run.advised)} ({run.roots[0].verdict.sentence})"


def _row(run: Faulty) -> str:
    bold = "**" if run.cost > RUINS else ""
    root = run.right_root or (run.roots[0] if run.roots else None)
    at = str(root.step) if root else "-"
    cause = "-" if root is None else f"`{root.verdict.cause}`" + ("" if run.right_root else " (wrong)")
    advised = "-" if math.isnan(run.advised) else _change(run.advised)
    return f"| {run.fault.name} | {run.fault.recipe} | {bold}{_change(run.cost)}{bold} | {at} | {cause} | {advised} |"


def _change(share: float) -> str:
    if math.isinf(share):
        return "diverged" if share > 0 else "saved"
    return f"{100 * share:+.0f} %" if abs(share) < 10 else f"x{1 + share:.0f}"
