"""One thread: on small matrices, and on a machine with other work, threads mostly wait for each other."""

import torch

torch.set_num_threads(1)
