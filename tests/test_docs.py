"""The code of the tutorials runs as it stands, and prints what the pages say."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).parent.parent / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
# A block of code, and below it what it prints, if anything.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@pytest.fixture
def _quick_to_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_quick_to_compile")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_blocks_run_and_print_what_is_below_them(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    # Blocks with a typo in their fence would not be found.
    assert len(blocks) == text.count("```python") > 0
    assert sum(block[2] is not None for block in blocks) == text.count("```text")
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        out = io.StringIO()
        # Line numbers of errors are those of the page.
        code = compile("\n" * text.count("\n", 0, block.start(1)) + block[1], str(page), "exec")
        with contextlib.redirect_stdout(out):
            exec(code, names)
        assert out.getvalue() == (block[2] or ""), block[1]


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_public_function_and_class_is_in_the_reference():
    import jaxqla
    import jaxqla.flax
    import jaxqla.models

    for module, page in ((jaxqla, "operators"), (jaxqla.flax, "flax"), (jaxqla.models, "models")):
        listed = re.findall(rf"^::: {module.__name__}\.(\w+)$", (DOCS / "api" / f"{page}.md").read_text(), re.MULTILINE)
        assert {name for name in module.__all__ if callable(getattr(module, name))} <= set(listed)
