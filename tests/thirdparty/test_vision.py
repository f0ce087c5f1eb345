"""timm's vision transformers."""

import pytest
from torch.nn import functional

from tests.thirdparty.running import run
from tests.thirdparty.stand_in import import_timm
from tests.thirdparty.vision import like_timm, of_timm, pictures


def built(kind, size):
    if kind == "like timm":
        return like_timm(size)
    timm = import_timm()
    if timm is None:
        pytest.skip("timm is not installed")
    return of_timm(timm, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("kind", ["like timm", "timm"])
def test_roles_and_features(kind, size):
    model = built(kind, size)
    x, y = pictures()
    ran = run(model, lambda: functional.cross_entropy(model(x), y))
    assert ran.guess == ran.readouts == {"head"}
    assert ran.bare == []
    assert ran.unmeasured() == {}
    layers = {layer.info.name: layer for layer in ran.anatomy.layers}
    assert layers["pos_embed"].info.role == "embedding"
    assert layers["cls_token"].info.role == "vector"
    assert layers["blocks.0.attn.qkv"].info.blocks == 3
