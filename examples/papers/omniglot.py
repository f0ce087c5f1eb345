"""Omniglot's characters as few-shot tasks; digits that come with scikit-learn where the archives are not at hand."""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import PLACES
from torch import Tensor

ARCHIVES = ("omniglot_background_small1.zip", "omniglot_background_small2.zip")
SIDE = 28
WAYS = 5


@dataclass(frozen=True)
class Characters:
    """Images of classes.

    Attributes:
        images: (classes, images, pixels), strokes 1 on 0.
        what: where they are from.
    """

    images: Tensor
    what: str

    def tasks(self, count: int, generator: torch.Generator, *, rotated: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Training and test images (count, 5, pixels), one of each of five classes in a random order, and labels (5,).

        With ``rotated`` a class is a character in one of four orientations.
        """
        classes, each, pixels = self.images.shape
        side = round(pixels**0.5)
        pick = torch.rand(count, classes * (4 if rotated else 1), generator=generator).argsort(1)[:, :WAYS]
        character, turn = pick % classes, pick // classes
        two = torch.rand(count, WAYS, each, generator=generator).argsort(2)[..., :2]
        found = self.images[character[..., None], two].view(count, WAYS, 2, side, side)
        if rotated:
            turned = torch.stack([found.rot90(k, (3, 4)) for k in range(4)])
            found = turned.gather(0, turn[None, ..., None, None, None].expand(1, *found.shape))[0]
        found = found.reshape(count, WAYS, 2, pixels)
        return found[:, :, 0], found[:, :, 1], torch.arange(WAYS)


def characters(data: Path | None) -> tuple[Characters, Characters]:
    """Those to train on and those to test on: the two small background sets of Omniglot, or the ten digits for both.

    Raises:
        SystemExit: ``data`` is named and has no archives.
    """
    for folder in (data,) if data else PLACES:
        if all((folder / name).exists() for name in ARCHIVES):
            train, test = (_read(folder / name) for name in ARCHIVES)
            return Characters(train, f"Omniglot, {len(train)} characters"), Characters(test, "Omniglot")
    if data:
        raise SystemExit(f"no {' and '.join(ARCHIVES)} in {data}")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    least = min(np.bincount(labels))
    images = np.stack([pixels[labels == digit][:least] for digit in range(10)]) / 16
    half = least // 2
    return tuple(  # type: ignore[return-value]
        Characters(torch.tensor(part, dtype=torch.float32), "scikit-learn's digits")
        for part in (images[:, :half], images[:, half:])
    )


def _read(archive: Path) -> Tensor:
    """(characters, 20, 784) images, strokes 1, each pixel the mean of those it stands for.

    How images are made smaller matters to kernels: the linear one's accuracy is 40 % (nearest) to 45 % (bilinear).
    """
    from PIL import Image

    found: dict[str, list[Tensor]] = defaultdict(list)
    with zipfile.ZipFile(archive) as file:
        for name in sorted(file.namelist()):
            if name.endswith(".png"):
                image = Image.open(io.BytesIO(file.read(name))).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
                found[name.rpartition("/")[0]].append(1 - torch.tensor(np.array(image)).float().flatten() / 255)
    return torch.stack([torch.stack(images) for images in found.values()])
