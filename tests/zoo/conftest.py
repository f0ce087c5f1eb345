"""One thread, as small models want it; the recorder of everything a run leaves behind is the one next door."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "noninterference"))
