"""The page on verdict quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from benchmarks.recipes.outcome import RUINS, WORSE, Faulty, Healthy, first_words, shares
from benchmarks.recipes.recipe import Half

INTRODUCTION = """\
# How good are the verdicts?

The suite in `benchmarks/recipes` has recipes with the hyper-parameters that people publish, in small, and faults that
people make. Rules and limits of the judge were found on one half of it. This page is about the other half, which was
run once they were fixed: {recipes} healthy recipes in {healthy} runs and {faults} faults, measured at the default
schedule (steps 1, 2, 4, 8, ... and every 100). It is made by `python -m benchmarks.recipes --width --write
docs/verdict_quality.md`; `--half development` makes the same of the first half.

This half is no longer unseen. When it was first run, 40 of 47 faults that ruin a run were found. Of 67 causes 64 were
right, and of 62 pieces of advice 2 made it worse. Later the judge learned of targets out of scale, of first layers
that are cut off and of gradients that are used again. Rates of two optimizers are now
told from 20 times on rather than 32. No advice is given where a rate makes an update like the others' in the natural
norm. Those rules were found on the first half and on 21 recipes written for the purpose. The misses of this half were
known by then. An optimizer with the parameters of a copy, once among the faults, is refused today.

Weight decay that is too large is named since then. Its limits were found on 21 recipes of the first half. Decays were
such that weights were forgotten within the run, a tenth of it or a hundredth. The 36 recipes of this half were run at
the first two of these. All 55 runs that cost more than 10 % were named, one of the 17 others, and none of the healthy
ones. Then the second seed of a graph attention network was told falsely. Under Adam most weights must shrink since.

Other rules were found on 15 recipes that somebody else wrote, with mistakes of their own: the rates of temperatures and
of single modules, gradients below Adam's eps, starts that were not measured.

A limit on what steps promise was found on the first half and on runs of others. It tells a tanh network here, whose
rates were known to be missed, at 30 times its rates. That embeddings keep their rates where steps are too large was
found on the first half.

The figures are of the judge as it is now, and the runs tell it their loss, as Lightning does.
"""

MEANING = """
A fault *ruins* a run whose loss ends more than 10 % above the healthy one's, or diverges. The advice of the first
verdict is followed to the letter in a separate run. It made things *worse* where the loss ends more than 3 % higher
than without it. Where it did with the first seed, the mean of five counts. Advice to look at something that no
setting mends counts as followed where the cause is right.
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
        f"\n## Width\n\nA narrow run's profile, and the same network 8 times wider.\n\n{width}" if width else "",
        "\n## Every fault\n",
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
