"""The examples run as they stand, and the README shows what they say."""

import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs an example as `python examples/NAME` would, in this process, and returns what it printed."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_quickstart_prints_loss_gradients_and_explanation(capsys):
    out = run("quickstart.py", capsys)
    assert "loss 0." in out
    assert "bfloat16[2, 512, 4, 128]" in out
    assert "gated_delta runs path" in out


def test_packing_agrees_with_separate_calls(capsys):
    out = run("packing.py", capsys)
    assert "packed and alone differ by at most " in out
    assert re.search(r"packed is [\d.]+ times as fast as padded, [\d.]+ times as one by one", out)


def test_dlpack_shares_torch_tensors_without_copies(capsys):
    pytest.importorskip("torch", reason="the example is about PyTorch tensors; torch is not installed")
    assert "pointers equal" in run("dlpack_torch.py", capsys)


def test_dlpack_without_torch_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="PyTorch must be installed"):
        run("dlpack_torch.py", capsys)


@pytest.mark.gpu
def test_dlpack_shares_torch_cuda_tensors(capsys):
    import torch

    assert torch.cuda.is_available()
    assert "torch cuda tensors" in run("dlpack_torch.py", capsys)


def test_readme_shows_the_quickstart():
    _, code = (EXAMPLES / "quickstart.py").read_text().split('"""\n\n')
    readme = (ROOT / "README.md").read_text()
    block = readme.split("<!-- quickstart:begin -->\n")[1].split("<!-- quickstart:end -->")[0]
    assert block == f"```python\n{code}```\n"


def test_readme_names_only_files_that_exist():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_examples_do_not_need_the_build_tools():
    # An example that imported torch for everyone would break a user who has none.
    for path in EXAMPLES.glob("*.py"):
        top_level = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not [line for line in top_level if "torch" in line or "tilelang" in line or "kernels" in line], path


def train(folder: Path, cache: Path) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    options = ["--steps", "40", "--save-every", "1", "--batch", "2", "--length", "32"]
    command = [sys.executable, str(EXAMPLES / "train.py"), "--out", str(folder), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return text


def test_training_killed_in_a_save_goes_on_to_the_same_bits(tmp_path):
    pytest.importorskip("grain")
    pytest.importorskip("orbax.checkpoint")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(train(whole, tmp_path / "cache"))
    process = train(killed, tmp_path / "cache")
    saves = killed / "checkpoints"
    while process.poll() is None:
        names = [path.name for path in saves.glob("*")] if saves.exists() else []
        if any("tmp" in name for name in names) and any(name.isdigit() for name in names):
            process.kill()
            break
        time.sleep(1e-3)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it must have been killed, between two saves"
    assert "going on from step" in finish(train(killed, tmp_path / "cache"))

    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, killed)
    ]
    assert len(losses[0]) == 40
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    for file in (whole / "model").glob("*.safetensors"):
        assert file.read_bytes() == (killed / "model" / file.name).read_bytes()
    assert (killed / "loss.png").stat().st_size > 0


def imports(path: Path) -> set[str]:
    """The top-level packages that a file imports outside functions."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("names", "extras"),
    [
        (["demo", "tiny_model"], ["demo"]),
        (["generate"], ["models"]),
        (["convert"], ["models", "examples"]),
        (["train"], ["examples"]),
        (["quickstart", "packing"], []),
    ],
)
def test_the_extras_bring_what_the_examples_import(names, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    # numpy comes with jax.
    brought = {re.split(r"[^\w-]", item)[0] for group in groups for item in group} | {"numpy", "jaxqla"}
    files = [EXAMPLES / f"{name}.py" for name in names]
    needed = set().union(*map(imports, files))
    for package in ("flax", "models"):
        if any(f"jaxqla.{package}" in file.read_text() for file in files):
            needed |= set().union(*map(imports, (ROOT / "jaxqla" / package).glob("*.py")))
    assert {{"orbax": "orbax-checkpoint"}.get(name, name) for name in needed} <= brought
