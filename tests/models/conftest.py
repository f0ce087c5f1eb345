"""One thread, and the recorder of the neighbouring folder."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "noninterference"))
torch.set_num_threads(1)
