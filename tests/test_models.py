"""The layouts in which the weights of one model are published load as that model."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxqla.models import load
from tests import checkpoints


def assert_same(model, other):
    pairs = zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other)), strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_several_files_are_one(kind, checkpoint, tmp_path):
    config = checkpoints.config(kind)
    model, report = load(checkpoints.write(tmp_path, config, checkpoints.tensors(config), files=3))
    assert sorted(report.mapped) == sorted(checkpoints.tensors(config))
    assert_same(model, load(checkpoint(kind))[0])


def test_fused_experts_are_those_one_by_one(checkpoint, tmp_path):
    config = checkpoints.config("moe")
    folder = checkpoints.write(tmp_path, config, checkpoints.fused(checkpoints.tensors(config)))
    assert_same(load(folder)[0], load(checkpoint("moe"))[0])


def test_a_vision_tower_is_skipped_and_told(checkpoint, tmp_path):
    config = checkpoints.config("dense")
    folder = checkpoints.write(tmp_path, *checkpoints.multimodal(config, checkpoints.tensors(config)))
    model, report = load(folder)
    assert report.skipped == ["model.visual.patch_embed.proj.weight"]
    assert report.unknown == []
    assert_same(model, load(checkpoint("dense"))[0])


def test_a_head_for_more_tokens_is_loaded(tmp_path):
    config = checkpoints.config("dense", mtp_num_hidden_layers=1)
    predictor = checkpoints.predictor(config)
    _, report = load(checkpoints.write(tmp_path, config, checkpoints.tensors(config) | predictor))
    assert {name for name in report.mapped if name.startswith("mtp.")} == predictor.keys()
    assert report.skipped == report.unknown == []
