"""The examples of whole models do what they say, on a model of one layer of each kind."""

import importlib.util
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxqla.models import load
from tests import checkpoints

EXAMPLES = Path(__file__).parent.parent / "examples"
VOCAB = 256


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"jaxqla_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly():
    # What is compiled here runs a few times; half the time to compile.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    layers = ["linear_attention", "full_attention"]
    config = checkpoints.config("dense", vocab_size=VOCAB, num_hidden_layers=2, layer_types=layers)
    return checkpoints.write(tmp_path_factory.mktemp("tiny"), config, checkpoints.tensors(config))


# ---- generate.py

PROMPTS = [[5, 6, 7], [200, 1, 30, 4, 17]]
NEW = 10


@pytest.fixture(scope="module")
def greedy(folder) -> list[list[int]]:
    """Continuations of the prompts without a cache, padding or scan: the whole row again for each token."""
    model, _ = load(folder)
    length = NEW + max(map(len, PROMPTS))
    logits = jax.jit(lambda tokens, at: model(tokens)[0, at])
    rows = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(NEW):
            # What stands to the right of a token does not reach it.
            tokens = jnp.asarray([row + [0] * (length - len(row))])
            row.append(int(jnp.argmax(logits(tokens, len(row) - 1))))
        rows.append(row)
    return rows


def test_generate_continues_ragged_prompts(folder, greedy, capsys):
    arguments = [str(folder), "--ids", "--max-new-tokens", str(NEW), *(" ".join(map(str, row)) for row in PROMPTS)]
    example("generate").main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [f"[{i}] {' '.join(map(str, row))}" for i, row in enumerate(greedy, 1)]
    assert lines[3].startswith("prefill: 8 tokens of 2 prompts in ")
    assert lines[4].startswith("decode:  18 tokens in ")
    assert all("tokens/s" in line for line in lines[3:5])


def test_generate_streams_one_prompt_and_stops_where_the_folder_says(folder, greedy, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    new = range(len(PROMPTS[1]) + 3, len(greedy[1]))
    end = next(i for i in new if greedy[1][i] not in greedy[1][len(PROMPTS[1]) : i])
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{greedy[1][end]}, 999]}}')
    example("generate").main([str(tmp_path), "--ids", " ".join(map(str, PROMPTS[1])), "--max-new-tokens", str(NEW)])
    assert capsys.readouterr().out.splitlines()[1] == " ".join(map(str, greedy[1][:end]))


def test_generate_draws_the_same_for_the_same_seed(folder, capsys):
    def draw(seed: int) -> str:
        options = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.99", "--max-new-tokens", str(NEW)]
        example("generate").main([str(folder), "--ids", " ".join(map(str, PROMPTS[1])), *options, "--seed", str(seed)])
        return capsys.readouterr().out.splitlines()[1]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_generate_reads_tokenizers_and_bytes(folder, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    generate = example("generate")
    codec = generate.codec_of(folder, VOCAB, ids=False)
    assert codec.encode("né") == list("né".encode())
    assert codec.decode([*"né".encode(), 300, 0xC3]) == "né<300>\ufffd"

    words = {"the": 0, "state": 1, "decays": 2, "?": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = generate.codec_of(tmp_path, 4, ids=False)
    assert codec.encode("the state decays now") == [0, 1, 2, 3]
    assert codec.decode([1, 2]) == "state decays"

    # A character of two bytes that come one after the other is printed once it is whole.
    screen = generate.Screen(["n"], "")
    for text in ("\ufffd", "é", "é!"):
        screen.update([text])
    screen.finish(["é!\ufffd"])
    assert capsys.readouterr().out == "né!\ufffd\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent", "hi"], "config.json"),
        (["tiny", "--ids", "1 x"], "numbers with --ids, got '1 x'"),
        (["tiny", "--ids", "1 256"], "below 256, got 1 to 256"),
        (["tiny", ""], "at least one token"),
        (["tiny", "hi", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["tiny", "hi", "--temperature", "1", "--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["tiny", "hi", "--tensor", "64"], "tensor = 64"),
    ],
)
def test_generate_says_what_is_wrong(arguments, words, folder, tmp_path):
    place = {"tiny": folder, "absent": tmp_path / "absent"}[arguments[0]]
    with pytest.raises(SystemExit, match=words):
        example("generate").main([str(place), *arguments[1:]])


def test_generate_needs_a_tokenizer_for_few_tokens(folder, tmp_path):
    with pytest.raises(ValueError, match=r"a vocabulary of 96 and no .*tokenizer\.json"):
        example("generate").codec_of(tmp_path, 96, ids=False)


# ---- convert.py


@pytest.mark.parametrize("options", [["--check"], ["--scan-layers"]])
def test_convert_goes_to_orbax_and_back_to_the_same_bits(options, folder, tmp_path, capsys):
    pytest.importorskip("orbax.checkpoint")
    convert = example("convert")
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    convert.main([str(source), str(tmp_path / "orbax"), *options])
    assert not list((tmp_path / "orbax").rglob("*.safetensors"))
    convert.main([str(tmp_path / "orbax"), str(tmp_path / "back")])
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert capsys.readouterr().out.count("equal to the bit") == ("--check" in options)

    expected, got = (load_file(path / "model.safetensors") for path in (source, tmp_path / "back"))
    assert expected.keys() == got.keys()
    assert [
        name for name, x in expected.items() if x.dtype != got[name].dtype or x.tobytes() != got[name].tobytes()
    ] == []


def test_convert_notices_a_bit(folder):
    pytest.importorskip("orbax.checkpoint")
    convert = example("convert")
    model, other = load(folder)[0], load(folder)[0]
    # Zero and minus zero are equal numbers.
    model.norm.scale[...] = jnp.zeros_like(model.norm.scale[...])
    other.norm.scale[...] = -model.norm.scale[...]
    with pytest.raises(ValueError, match=r"to the bit, got others: \['norm.scale'\]"):
        convert.check(model, other)
    with pytest.raises(ValueError, match=r"got others: \['embed_tokens.embedding', "):
        convert.check(model, load(folder, param_dtype="bfloat16")[0])


def test_convert_says_what_is_wrong(folder, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    convert = example("convert")
    with pytest.raises(SystemExit, match=f"not be there yet, or be an empty folder, got {folder}"):
        convert.main([str(folder), str(folder)])
    with pytest.raises(SystemExit, match=r"config\.json"):
        convert.main([str(tmp_path / "absent"), str(tmp_path / "new")])
    # The configuration of another model beside the parameters.
    convert.write_orbax(load(folder)[0], tmp_path / "orbax")
    config = json.loads((tmp_path / "orbax" / "config.json").read_text())
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(SystemExit, match=r"parameters of its config\.json, got others.*'embed_tokens.embedding'"):
        convert.main([str(tmp_path / "orbax"), str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="left out on the way back"):
        convert.main([str(tmp_path / "orbax"), str(tmp_path / "new"), "--scan-layers"])
    assert not (tmp_path / "new").exists()


# ---- tiny_model.py


def test_a_tiny_model_learns(monkeypatch):
    tiny = example("tiny_model")
    text = tiny.Text()
    assert text.decode(text.encode(tiny.PROMPT)) == tiny.PROMPT
    assert text.share_of_words("Qxqx, the decay? zzz") == pytest.approx(0.5)
    for name, value in {"STEPS": 40, "BATCH": 6, "LENGTH": 48}.items():
        monkeypatch.setattr(tiny, name, value)
    assert text.rows(0).shape == (6, 48)
    _, losses = tiny.train(tiny.new_model(len(text.bytes)), text)
    assert len(losses) == 40
    # Before the first step every byte is as likely as another.
    assert losses[0] == pytest.approx(math.log(len(text.bytes)), rel=0.1)
    assert np.mean(losses[-5:]) < 0.75 * losses[0], losses


def test_a_tiny_model_trains_for_a_time_and_says_where_it_has_not_learnt():
    tiny = example("tiny_model")
    assert tiny.share_over(tiny.STEPS, 0.0) == 1
    assert tiny.share_over(tiny.STEPS // 2, 2 * tiny.SECONDS) == 1
    assert tiny.share_over(tiny.FEWEST // 2, 2 * tiny.SECONDS) == 0.5
    assert tiny.share_over(tiny.FEWEST, tiny.SECONDS / 4) == 0.25
    tiny.check(4.0, 1.9, 0.6)
    with pytest.raises(AssertionError, match=r"below 0\.5 of 4\.00, got 2\.10"):
        tiny.check(4.0, 2.1, 0.6)
    with pytest.raises(AssertionError, match="words of the documents, got 40%"):
        tiny.check(4.0, 1.9, 0.4)


# ---- packing.py


def test_packing_lays_documents_where_there_is_room():
    packing = example("packing")
    places = packing.first_fit([3, 9, 4, 7, 2, 3], 10)
    assert [row for row, _ in places] == [1, 0, 2, 1, 2, 2]
    numbers = [np.full(n, i) for i, n in enumerate([3, 9, 4, 7, 2, 3], 1)]
    expected = [[2] * 9 + [0], [4] * 7 + [1] * 3, [3] * 4 + [6] * 3 + [5] * 2 + [0]]
    np.testing.assert_array_equal(packing.lay_out(numbers, places, 10), expected)


# ---- train.py


def test_train_goes_on_from_a_folder(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("grain")
    pytest.importorskip("orbax.checkpoint")
    layers = ["linear_attention", "full_attention"]
    config = checkpoints.config("dense", num_hidden_layers=2, layer_types=layers, mtp_num_hidden_layers=1)
    tensors = checkpoints.tensors(config) | checkpoints.predictor(config)
    folder, out = checkpoints.write(tmp_path / "source", config, tensors), tmp_path / "out"
    words = {word: i for i, word in enumerate(["?", "the", "state", "decays", "first", "."], 7)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text").write_text("the state decays first .\n\nfirst the state .\n\n" * 4)

    options = [
        "--dtype",
        "bfloat16",
        "--rate",
        "1e-2",
        "--warmup",
        "1",
        "--steps",
        "6",
        "--batch",
        "2",
        "--length",
        "16",
    ]
    arguments = ["--out", str(out), "--load", str(folder), "--text", str(tmp_path / "text"), *options]
    example("train").main(arguments)
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert (out / "model" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    got = load_file(out / "model" / "model.safetensors")
    assert got.keys() == tensors.keys()
    # Every weight has moved, except for the head that the loss does not see.
    assert {name for name, x in tensors.items() if np.array_equal(x, got[name])} == {
        n for n in tensors if n[:4] == "mtp."
    }

    with pytest.raises(SystemExit, match=r"must be those of the run that is saved there.*--batch 4 instead of 2"):
        example("train").main([*arguments, "--batch", "4"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "qwen0"], "name must be one of qwen3.5-0.8b, .*got 'qwen0'"),
        (["--load", "absent"], "config.json"),
        (["--load", "a", "--preset", "b"], "not allowed with"),
        (["--text", "absent"], "must be files, got absent"),
        (["--text", __file__, "--tokenizer", __file__], "must be a tokenizer.json, got .*test_examples_models.py"),
        (["--tokenizer", __file__], "must come with --text"),
        (["--batch", "6", "--data", "2", "--fsdp", "2"], r"multiple of --data x --fsdp = 4, got 6"),
        (["--tensor", "64"], "tensor = 64"),
        (["--save-every", "0"], "--save-every must be at least 1, got 0"),
        (["--length", "1"], "--length must be at least 2, got 1"),
    ],
)
def test_train_says_what_is_wrong(arguments, words, tmp_path, capsys):
    pytest.importorskip("grain")
    pytest.importorskip("orbax.checkpoint")
    with pytest.raises(SystemExit) as error:
        example("train").main(["--out", str(tmp_path), *arguments])
    assert re.search(words, f"{error.value.code} {capsys.readouterr().err}")


def test_train_refuses_tokens_that_the_model_has_not(tmp_path):
    pytest.importorskip("grain")
    pytest.importorskip("orbax.checkpoint")
    (tmp_path / "text").write_text("zebra")
    with pytest.raises(ValueError, match="below the model's vocabulary of 96, got 122"):
        example("train").Paragraphs([tmp_path / "text"], 16, None, 96)
    (tmp_path / "text").write_text("\n\n")
    with pytest.raises(ValueError, match="at least one paragraph"):
        example("train").Paragraphs([tmp_path / "text"], 16, None, 96)


def test_demo_says_what_the_tiny_model_lacks(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("optax", "tqdm") else there(name))
    example("demo").show_a_model()
    assert "left out, optax, tqdm must be installed (pip install 'jaxqla[demo]')" in capsys.readouterr().out
