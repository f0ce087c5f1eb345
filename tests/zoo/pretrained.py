"""Architectures of Hugging Face's transformers, built from their configurations; nothing is downloaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from torch import nn

from tests.zoo import language, perception
from tests.zoo.case import Case


def build(head: str, kind: str, settings: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **settings)
    builder = getattr(transformers, head)
    return builder.from_config(config) if head.startswith("Auto") else builder(config)


RAN_LAST = {"SigLIP": "text_model.head"}
"""Where the operator that is registered last is not the one that runs last: which one does."""

PRETRAINED = [
    Case(name, family, partial(build, head, kind, settings), batch, ran_last=RAN_LAST.get(name, ""))
    for family, rows in {**language.FAMILIES, **perception.FAMILIES}.items()
    for name, head, kind, settings, batch in rows
]
