"""One model in several forms is one function: scanned, recomputed, over devices, and in pieces with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import jaxqla
from jaxqla.flax import make_mesh, use_mesh
from jaxqla.models import load, next_token_loss, save
from tests import checkpoints
from tests.compiled import collectives
from tests.language_models import FAST, VOCAB, relative

IDS = np.repeat([[1, 1, 2, 2, 3], [0, 1, 1, 1, 1], [1, 2, 2, 0, 0], [4, 4, 0, 4, 5]], 5, axis=1).astype(np.int32)
TOKENS = np.random.default_rng(0).integers(1, VOCAB, IDS.shape).astype(np.int32)


def mean_loss(model, tokens, segment_ids):
    return next_token_loss(model, tokens, segment_ids=segment_ids)[0]


loss_and_gradients = jax.jit(jax.value_and_grad(mean_loss), compiler_options=FAST)


def assert_same(results, others, tmp_path):
    """Gradients are compared under the names of the checkpoint, as if they were weights."""
    np.testing.assert_allclose(results[0], others[0], rtol=1e-6)
    save(results[1], tmp_path / "got")
    save(others[1], tmp_path / "want")
    got, want = (load_file(tmp_path / side / "model.safetensors") for side in ("got", "want"))
    assert got.keys() == want.keys()
    assert {name: e for name in got if not (e := relative(got[name], want[name])) < 1e-5} == {}


def test_scanned_and_computed_again_on_eight_devices(checkpoint, tmp_path, capfd):
    plain = loss_and_gradients(load(checkpoint("dense"))[0], TOKENS, IDS)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    options = {"scan_layers": True, "remat": True, "remat_policy": jaxqla.save_residuals}
    model, _ = load(checkpoint("dense"), mesh=mesh, **options)
    blocks, D, heads, width = model.blocks.layers[0].linear_attn.in_proj_qkvz.kernel.shape
    part = model.blocks.layers[0].linear_attn.in_proj_qkvz.kernel[...].addressable_shards[0].data
    assert part.shape == (blocks, D // 2, heads // 2, width)
    with use_mesh(mesh, sizes=model.config.axis_sizes()):
        batch = jax.device_put((TOKENS, IDS), NamedSharding(mesh, P(("data", "fsdp"))))
        found = collectives(loss_and_gradients, model, *batch)
        results = loss_and_gradients(model, *batch)
    assert_same(results, plain, tmp_path)
    # Weights are gathered, sums are reduced; nothing moves from device to device otherwise.
    assert found.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def small(tmp_path, *layer_types, **options):
    config = checkpoints.config("dense", num_hidden_layers=len(layer_types), layer_types=list(layer_types))
    return load(checkpoints.write(tmp_path / "small", config, checkpoints.tensors(config)), **options)[0]


def test_scanned(tmp_path):
    layers = ["full_attention"] * 2
    scanned, plain = (
        loss_and_gradients(small(tmp_path, *layers, scan_layers=scan), TOKENS, IDS) for scan in (True, False)
    )
    assert_same(scanned, plain, tmp_path)


def test_logits_of_the_last_places(tmp_path):
    model = small(tmp_path, "full_attention")

    def several(model):
        return [model(TOKENS, segment_ids=IDS, logits_to_keep=n) for n in (None, 1, 3, 99)]

    every, one, three, more = jax.jit(several, compiler_options=FAST)(model)
    assert every.shape == (*IDS.shape, VOCAB)
    assert every.dtype == jnp.float32
    assert one.shape == (len(IDS), 1, VOCAB)
    np.testing.assert_allclose(one, every[:, -1:], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(three, every[:, -3:], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(more, every, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="logits_to_keep must be at least 0, got -1"):
        model(TOKENS, logits_to_keep=-1)


def test_pieces_and_then_tokens_are_one_call(tmp_path):
    model = small(tmp_path, "linear_attention", "full_attention")
    tokens = np.random.default_rng(1).integers(1, VOCAB, (2, 103)).astype(np.int32)
    call = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache), compiler_options=FAST)
    whole = jax.jit(lambda model, tokens: model(tokens), compiler_options=FAST)(model, tokens)
    caches = []
    for pieces in ((37, 1, 62), (1, 2, 97)):
        cache, parts, begin = model.init_cache(2, 103), [], 0
        for T in (*pieces, 1, 1, 1):
            logits, cache = call(model, tokens[:, begin : begin + T], cache)
            parts.append(logits)
            begin += T
        assert relative(np.concatenate(parts, axis=1), whole) < 1e-5
        np.testing.assert_array_equal(cache.lengths, [103, 103])
        caches.append(cache)
    for x, y in zip(*map(jax.tree.leaves, caches), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
