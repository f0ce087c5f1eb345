"""Draw docs/quickstart.png from what examples/quickstart.py logged: `python docs/make_figure.py [RUN_DIR]`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PANELS = {
    "update_natural": ("Are updates the right size?", "natural norm of dW", True),
    "feature_change": ("Are features moving?", "relative change per step", True),
    "alignment": ("Are inputs and weights aligned?", "alignment", False),
}


def main() -> None:
    runs = Path("runs/quickstart")
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else max(runs.iterdir(), key=lambda p: p.stat().st_mtime)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(".bias")]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    for axis, (key, (title, label, logarithmic)) in zip(axes, PANELS.items(), strict=True):
        lines = [tag for tag in tags if tag.startswith(f"spectral/{key}/")]
        for k, tag in enumerate(lines):
            scalars = events.Scalars(tag)
            color = plt.get_cmap("viridis")(k / max(len(lines) - 1, 1) * 0.9)
            steps, values = [s.step for s in scalars], [s.value for s in scalars]
            axis.plot(steps, values, marker="o", ms=3, color=color, label=tag.rsplit("/", 1)[1])
        axis.set(title=title, xlabel="optimizer step", ylabel=label, yscale="log" if logarithmic else "linear")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), title="layer", loc="outside right center", frameon=False)
    target = Path(__file__).with_name("quickstart.png")
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
