"""Do the models compute what transformers computes from the same checkpoint, in float32 on a CPU?"""

import functools

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxqla.models import generate, load, save
from tests import checkpoints
from tests.language_models import DOCUMENTS, SEGMENT_IDS, TOKENS, T, forward, relative, step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NEW = 64
# Prompts of several lengths, padded on the left.
MASK = (np.arange(T) >= np.array([[0], [17], [68], [33]])).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def theirs(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert {what: names for what, names in info.items() if names} == {}
    return model.eval()


@pytest.fixture(scope="module")
def pair(checkpoint):
    """Both models of a kind."""
    return functools.cache(lambda kind: (load(checkpoint(kind))[0], theirs(checkpoint(kind))))


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_documents_of_a_batch_are_those_alone(kind, pair, tmp_path):
    ours, reference = pair(kind)
    (loss, logits), gradients = step(ours, TOKENS, SEGMENT_IDS)
    total, count = 0, 0
    for row, where in DOCUMENTS:
        tokens = torch.from_numpy(TOKENS[row : row + 1, where]).long()
        expected = reference(input_ids=tokens, use_cache=False).logits[0]
        assert relative(logits[row, where], expected.detach()) < 1e-5
        total = total + torch.nn.functional.cross_entropy(expected[:-1], tokens[0, 1:], reduction="sum")
        count += tokens.shape[1] - 1
    np.testing.assert_allclose(loss, (total / count).item(), rtol=1e-5)

    # Gradients under the names of the checkpoint, as if they were weights.
    reference.zero_grad()
    (total / count).backward()
    weights = [p.data for p in reference.parameters()]
    for p in reference.parameters():
        p.data = p.grad
    reference.save_pretrained(tmp_path / "theirs")
    for p, x in zip(reference.parameters(), weights, strict=True):
        p.data = x
    save(gradients, tmp_path / "ours")
    got, expected = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert got.keys() == expected.keys()
    assert {name: e for name in got if not (e := relative(got[name], expected[name])) < 1e-4} == {}


def test_a_batch_without_padding(pair):
    ours, reference = pair("dense")
    expected = reference(input_ids=torch.from_numpy(TOKENS).long(), use_cache=False).logits
    assert relative(forward(ours, TOKENS), expected.detach()) < 1e-5


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_greedy_continuations_of_ragged_prompts(kind, pair):
    ours, reference = pair(kind)
    new = generate(ours, TOKENS, segment_ids=MASK, max_new_tokens=NEW)
    expected = reference.generate(
        torch.from_numpy(TOKENS * MASK).long(),
        attention_mask=torch.from_numpy(MASK).long(),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    np.testing.assert_array_equal(new, expected[:, T:].numpy())


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_what_is_saved_loads_there_and_is_the_same_model(kind, pair, tmp_path):
    ours, reference = pair(kind)
    save(ours, tmp_path)
    again = theirs(tmp_path)
    assert type(again) is type(reference)
    tokens = torch.from_numpy(TOKENS).long()
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=tokens, use_cache=False).logits for model in (again, reference)))


def test_gradients_are_a_model_that_can_be_saved(pair):
    # What the comparison above rests on.
    ours, _ = pair("tied")
    assert nnx.state(ours).keys() == nnx.state(step(ours, TOKENS, SEGMENT_IDS)[1]).keys()
