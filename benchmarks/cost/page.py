"""docs/cost.md from docs/cost.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.cost.cases import FROBENIUS, FULL, LIGHT, STANDARD, UNMEASURED
from benchmarks.cost.further import SMALL
from benchmarks.cost.peers import PEERS

INTERVALS = (10, 50, 100)
COLUMNS = {
    "operators": "operators",
    "read": "MB read",
    "allocations": "tensors made",
    "peak": "MB more at the peak",
    "crossings": "waits for the device",
    "forwards": "forwards",
    "passes of W, mean": "passes over `W`",
    "passes of dW, mean": "over `dW`",
    "passes of drift, mean": "over `W - W0`",
}
SINKS = {"TensorBoard": "TensorBoard", "JSON lines": "the run's own file (JSON lines)", "W&B, offline": "W&B, offline"}

HEAD = """# What it costs

*Made by `python -m benchmarks.cost` (`make bench`) from [cost.json](cost.json), {mode}, {date}.*

An unmeasured step costs one comparison. The table shows what a measured step costs, in plain steps. The model is a
{millions:.1f}-million-parameter character transformer ({depth} blocks, width {width}, batch {batch} x {context}) under
Lightning, whose plain step takes {plain:.2f} s:
"""
MACHINE = """Measured on {where}; {system}, Python {python}, torch {torch}, Lightning {lightning},
threads: {threads}, {precision}, {date}. Plain and measured steps take turns in one run, and each measured step is
compared with the plain step right before it. The table gives the median, the least and the most of {rounds} rounds
(slow ones: one). The system's load was {load} before it began{busy}.

The ratios depend on how fast a machine multiplies matrices compared with how fast it reads memory. A plain step does
hundreds of multiplications for each weight that it reads; a norm does a few. This machine does {gflop:,} billion
multiplications and additions a second (1024 x 1024) and copies {copy} GB/s (read and written). The ratios also depend
on the batch: the larger it is, the less a measured step costs compared with a plain one.
"""
SPECTRAL = """
Finding the largest singular values of `W`, `dW` and `W - W0` (tier `"light"` less Frobenius norms alone) takes as long
as reading all weights {reads:.0f} times at that speed.
"""
INTERVAL = """
The lines are 1 + (ratio - 1) / every_n_steps. The point is measured: whole intervals of {every} steps, one of them
measured, took {ratio:.3f} ({low:.3f} to {high:.3f}) of the time of as many plain steps; the line says {expected:.3f}.
"""
TURN = """## What to turn down first

* **Measure less often.** `every_n_steps` divides the whole cost.
  {default}
* **Replay few samples**, as the default does. `replay_samples=None` runs the whole forward again after the step, to see
  how features change, and takes longer; `replay_samples=2` runs two samples.
* **Measure less.** `quantities="light"` needs no extra forward and no hooks on modules. A list of keys costs only what
  these keys need ([quantities](quantities.md) says what each takes). `exclude=["*.bias"]` leaves out vectors.
* **Leave tier `"full"` for short runs of small models.** {full}
  Most of the cost is `bfk_ratio`, which goes back from every layer to the first eight times, so that it grows with the
  square of the depth. This was timed on an MLP of ten layers (batch 128, 128 and 512 wide, one thread, 2026-11-22). A
  step at `"full"` took 3 to 6 times as long as one at
  `"standard"`. Without `bfk_ratio` it took about as long as `"standard"` and one more step.
"""
COUNTS = """## Counted

What one measured step of the same model does beyond a plain one. These counts are the same on every machine, but for
rounding. A pass is one reading of a whole matrix. Finding the largest singular value takes two passes for each step of
block Lanczos, and as many steps as the matrix needs. `make bench-check` counts again, and fails if a count has grown.
"""
FURTHER = """## What each further quantity adds

These quantities come with tier `"full"` or by name. Each is counted alone on top of tier `"standard"`. Counts are the
same on every machine, but for rounding. The transformer has {millions:.1f} million parameters ({label}). The
counted step includes a second look at the run's first batch.

* Work that several quantities share is paid for once: those of Adam's state together cost as much as one of them.
* A backward pass goes through the model or a part of it.
* The last column includes norms, whose number of steps depends on the matrices; the other columns leave norms out.
* Below 0: with that quantity the rows of all layers are gathered differently, by fewer operators, which read less.
"""
VISION = """## Images

Convolutions, depthwise ones among them, and patches; random images, AdamW. The share of training time is that of tier
`"standard"`; where it exceeds 1 %, `max_overhead` keeps it below that.
"""
COMPILED = """## Compiled models and half precision

The transformer of the first table, with its forward compiled, under autocast, and both. Features come from a few
samples that run [beside the step](how_it_works.md#how-a-step-is-measured-without-changing-it), forward twice and once
backward, eagerly and in full precision. The plain step is compiled or under autocast in the same way.
"""
WRITING = """## Writing it down

`benchmarks/cost/writing.py` times how long it takes, per measured step, until everything is in the file. The network
has {matrices} matrices, and all quantities are measured. TensorBoard and W&B get the
[essential numbers](panels.md#what-is-logged), the run's own file gets all of them. Means include pictures at every 20th
measurement. They do not include the page of some 5 MB that W&B gets once:
"""
NAMES = """Most of what TensorBoard and W&B write is the names of the numbers, repeated at every step: 40 and 56 bytes a
number. Neither file format can avoid that. With `log="all"`, all 3,000 numbers, it is a hundred kilobytes and more.
W&B's own process gets every key once, which takes some 15 s of another core's time.
"""
RANKS = """## Several processes

DistributedDataParallel over gloo, one thread each, on {cores} cores. If there are fewer cores than processes, the times
include waiting. The page on [communication](scaling.md) counts what is sent.
"""
NO_GPU = """## GPUs

Ratios on a GPU, waits of the host and the share of training time are on [a page of their own](gpu.md).
`python -m benchmarks.cost --device cuda` compares with peers there: GPT-2 with 124 and 350 million parameters in
bf16-mixed.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def ratio(row: Mapping[str, Any]) -> str:
    """Median, least and most."""
    if 0 <= row["ratio"] - 1 < 5e-3:
        return f"{row['ratio']:.5f}"
    spread = f" ({row['low']:.2f} to {row['high']:.2f})" if row["rounds"] > 1 else ""
    return f"{row['ratio']:.2f}{spread}"


def amortized(row: Mapping[str, Any], every: int) -> str:
    """Return what training takes longer by, in percent."""
    if row["mean"] <= 1:
        return "in the noise"
    share = 100 * (row["mean"] - 1) / every
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %" if share >= 0.01 else "< 0.01 %"


def _where(machine: Mapping[str, Any]) -> str:
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"one {machine['device']} ({cpu})" if machine["device"] else cpu


def _headline(results: Mapping[str, Any]) -> str:
    headline = results["headline"]
    head = ["", "measured / plain", *(f"training, every {n} steps" for n in INTERVALS)]
    body = []
    for name, row in headline["rows"].items():
        if name in PEERS:
            continue
        spread = ["" for _ in INTERVALS] if name == UNMEASURED else [amortized(row, n) for n in INTERVALS]
        body.append([name, ratio(row), *spread])
    body += [[name, reason, "", "", ""] for name, reason in headline["skipped"].items() if name not in PEERS]
    size = headline["size"]
    opening = HEAD.format(
        mode=results["mode"], date=results["machine"]["date"], plain=headline["plain"], **size, **_millions(headline)
    )
    return opening + "\n" + table(head, body)


def _millions(headline: Mapping[str, Any]) -> dict[str, float]:
    return {"millions": headline["parameters"] / 1e6}


def _machine(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    rounds = max(row["rounds"] for row in results["headline"]["rows"].values())
    words = {key: machine[key] for key in ("system", "python", "torch", "lightning", "threads", "precision", "date")}
    speeds = {"gflop": machine["gflop_per_s"], "copy": machine["copy_gb_per_s"], "load": machine["load"]}
    busy = (machine["load"] or 0) > machine["cores"] / 2
    warning = ": **it was busy with other work, so these times are not to be relied on**" if busy else ""
    text = MACHINE.format(where=_where(machine), rounds=rounds, busy=warning, **words, **speeds)
    spectral = results["headline"]["rows"][LIGHT]["extra"] - results["headline"]["rows"][FROBENIUS]["extra"]
    return text + SPECTRAL.format(reads=spectral / results["headline"]["read_seconds"])


def _turn(results: Mapping[str, Any]) -> str:
    row = results["headline"]["rows"][STANDARD]
    default = (
        f'At the default, every hundredth step once training is under way, tier `"standard"` makes training '
        f"{amortized(row, 100)} longer."
    )
    full = results["headline"]["rows"].get(FULL)
    times = (
        ""
        if full is None
        else f'Here its step takes {full["ratio"] / row["ratio"]:.0f} times as long as one at `"standard"`.'
    )
    text = TURN.format(default=default, full=times) + "\n![Cost against the interval](img/cost/interval.png)\n"
    one = results.get("interval")
    if one is not None:
        expected = 1 + (row["mean"] - 1) / one["every"]
        text += INTERVAL.format(expected=expected, **one)
    return text


def _peers(results: Mapping[str, Any]) -> str:
    headline = results["headline"]
    body = []
    for name in (LIGHT, STANDARD, FULL):
        if name in headline["rows"]:
            row = headline["rows"][name]
            body.append(
                [f"this monitor, {name}", "[all its quantities](quantities.md)", ratio(row), f"{row['extra']:.3f}"]
            )
    for name, scope in headline["what"].items():
        row = headline["rows"].get(name)
        body.append(
            [name, scope, *((ratio(row), f"{row['extra']:.3f}") if row else (headline["skipped"].get(name, "-"), ""))]
        )
    text = "## What others cost\n\nOn the same model in the same run, each compared with its own plain steps:\n\n"
    text += table(["", "what it measures", "its step / plain step", "seconds more"], body)
    return text + "\n![Cost of a step, beside others](img/cost/peers.png)\n"


def _growth(results: Mapping[str, Any]) -> str:
    text = "## How it grows\n\nIn each series one thing grows, the rest stays:\n\n![Growth](img/cost/growth.png)\n\n"
    head = ["", "parameters", "plain step, s", LIGHT, STANDARD, "operators", "MB read"]
    body = []
    for name, points in results["series"].items():
        for point in points:
            cells = [f"{name}: {point['label']}", f"{point['parameters'] / 1e6:.1f} M"]
            if "skipped" in point:
                body.append([*cells, point["skipped"], "", "", "", ""])
                continue
            cells += [f"{point['plain']:.3f}", *(ratio(point["rows"][kind]) for kind in (LIGHT, STANDARD))]
            counts = [point["counts"][kind] for kind in (LIGHT, STANDARD)] if "counts" in point else []
            cells.append(", ".join(f"{count['operators']:,}" for count in counts))
            cells.append(", ".join(f"{count['read'] / 1e6:,.0f}" for count in counts))
            body.append(cells)
    text += table(head, body)
    return text + "\nOperators and bytes are what a measured step needs beyond a plain one, at both tiers.\n"


def _vision(results: Mapping[str, Any]) -> str:
    head = ["", "parameters", "plain step, s", LIGHT, STANDARD, "training, every 100 steps", "operators"]
    body = []
    for point in results["vision"]:
        row = point["rows"][STANDARD]
        operators = ", ".join(f"{point['counts'][kind]['operators']:,}" for kind in (LIGHT, STANDARD))
        cells = [point["label"], f"{point['parameters'] / 1e6:.1f} M", f"{point['plain']:.2f}"]
        cells += [ratio(point["rows"][LIGHT]), ratio(row), amortized(row, 100), operators]
        body.append(cells)
    return VISION + "\n" + table(head, body)


def _compiled(results: Mapping[str, Any]) -> str:
    head = ["", "plain step, s", LIGHT, STANDARD, "training, every 100 steps"]
    body = []
    for point in results["beside"]:
        row = point["rows"][STANDARD]
        cells = [point["label"], f"{point['plain']:.2f}", ratio(point["rows"][LIGHT]), ratio(row), amortized(row, 100)]
        body.append(cells)
    return COMPILED + "\n" + table(head, body)


def _counts(results: Mapping[str, Any]) -> str:
    body = []
    for name, counts in results["counts"].items():
        cells = []
        for key in COLUMNS:
            value = counts.get(key)
            in_mb = key in ("read", "peak")
            cells.append("" if value is None else f"{value / 1e6:,.1f}" if in_mb else f"{value:,}")
        body.append([name, *cells])
    return COUNTS + "\n" + table(["", *COLUMNS.values()], body)


def _further(results: Mapping[str, Any]) -> str:
    head = ["", "operators", "MB read", "waits for the device", "forwards", "backward passes", "MB read with norms"]
    body = []
    for key, row in results["further"].items():
        cells = [f"{row['operators_fixed']:,}", f"{row['read_fixed'] / 1e6:,.1f}"]
        cells += [str(row[name]) for name in ("crossings", "forwards", "backwards")]
        cells.append(f"{row['read'] / 1e6:,.1f}")
        body.append([f"`{key}`" + ("" if row["known"] else ", which no layer here has"), *cells])
    text = FURTHER.format(millions=SMALL.parameters / 1e6, label=SMALL.describe())
    return text + "\n" + table(head, body)


def _writing(results: Mapping[str, Any]) -> str:
    points = results["writing"]
    body = [
        [
            SINKS[point["sink"]],
            f"{'with' if point['biases'] else 'without'}, {point['numbers']:,} numbers",
            f"{point['median']:.0f}",
            f"{point['mean']:.0f}",
            f"{point['size'] / 1e3:.0f}",
        ]
        for point in sorted(points, key=lambda point: list(SINKS).index(point["sink"]))
    ]
    head = ["", "biases", "ms, median", "ms, mean", "kB per measured step"]
    return WRITING.format(matrices=points[0]["matrices"]) + "\n" + table(head, body) + "\n" + NAMES


def _ranks(results: Mapping[str, Any]) -> str:
    body = [
        [
            f"`{point['tier']}`",
            str(point["ranks"]),
            f"{point['ratio']:.2f} ({point['low']:.2f} to {point['high']:.2f})",
            f"{point['plain']:.2f}",
            str(point["collectives"]),
        ]
        for point in results["ranks"]
    ]
    head = ["tier", "processes", "measured / plain", "plain step, s", "sums over processes"]
    return RANKS.format(cores=results["machine"]["cores"]) + "\n" + table(head, body)


def _gpu(results: Mapping[str, Any]) -> str:
    parts = [_headline(results).replace("# What it costs", "## GPUs"), _machine(results)]
    points = [point for points in results["series"].values() for point in points if "rows" in point]
    head = ["", "parameters", "plain step, s", LIGHT, STANDARD]
    body = [
        [
            point["label"],
            f"{point['parameters'] / 1e6:.0f} M",
            f"{point['plain']:.3f}",
            *(ratio(point["rows"][kind]) for kind in (LIGHT, STANDARD)),
        ]
        for point in points
    ]
    return "\n".join([*parts, table(head, body)])


def page(all_results: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    results = all_results["cpu"]
    parts = [_headline, _machine, _turn, _peers, _growth, _vision, _compiled, _counts, _further, _writing, _ranks]
    texts = [part(results).strip("\n") for part in parts]
    texts.append((_gpu(all_results["cuda"]) if "cuda" in all_results else NO_GPU).strip("\n"))
    return "\n\n".join(texts) + "\n"
