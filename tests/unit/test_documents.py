"""The documents as a whole: what is typed is tested, links lead somewhere, paragraphs are short, and what is
made from the code is what the code says now."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.worlds.pages import DOCS, LANGUAGES, PAGES_TEST, ROOT, RUN_BY, TYPED, Block, blocks, pages
from tools import reference

from postroad.cli import app

EVERY = [str(path.relative_to(ROOT)) for path in pages()]
BLOCKS = [block for page in EVERY for block in blocks(page)]
CONSOLE = [block for block in BLOCKS if block.language == "console"]


@pytest.mark.parametrize("page", EVERY)
def test_every_block_says_what_it_is(page: str) -> None:
    assert [block for block in blocks(page) if block.language not in LANGUAGES] == []


def test_every_page_with_something_to_type_is_typed_by_a_test() -> None:
    """A page without a test of its own is typed by the one for all of them."""
    typed = {block.page for block in BLOCKS if block.language in TYPED}
    assert RUN_BY.keys() <= typed
    for page in sorted(typed):
        test = (ROOT / RUN_BY.get(page, PAGES_TEST)).read_text()
        assert page.removeprefix("docs/") in test or "pages_to_type()" in test, page


@pytest.mark.parametrize("block", CONSOLE, ids=[f"{block.page}:{block.line}" for block in CONSOLE])
def test_commands_for_other_machines_exist(block: Block) -> None:
    """What no test runs, because it takes hours or root, is spelled right."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("postroad "):
            check_command(line)


def check_command(line: str) -> None:
    command = typer.main.get_command(app)
    options: set[str] = set()
    for word in shlex.split(line, comments=True)[1:]:
        inner = getattr(command, "commands", {})
        if word in inner:
            command = inner[word]
            options = {option for parameter in command.params for option in parameter.opts}
        elif word.strip("[").startswith("--"):
            assert word.strip("[]") in options, f"{line}: {word} is no option"
        else:
            assert not inner or word in options, f"{line}: {word} is no command"


def test_the_site_is_built_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    build = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    written = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")} - {"404.md"}
    assert written == {page.removeprefix("docs/") for page in EVERY if page.startswith("docs/")}
    navigation = (ROOT / "zensical.toml").read_text()
    assert written == set(re.findall(r'= "([\w/-]+\.md)"', navigation))
    for page in written:  # what Markdown did not understand is left as it was typed
        article = (site / page).with_suffix(".html").read_text().partition("<article")[2]
        texts = [part.rpartition("<p>")[2] for part in article.partition("</article>")[0].split("</p>")[:-1]]
        assert [text for text in texts if re.search(r"```|\n(- |\d+\. |\|)", text)] == [], page
    first = (site / "index.html").read_text()
    assert "Messaging that knows where every message went" in first
    assert "fonts.googleapis" not in first


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", ["commands.md", "settings.md", "errors.md", "evidence.md"])
def test_pages_made_from_the_code_are_not_old(name: str) -> None:
    """Metrics are compared where there is a broker: tests/process/test_operations.py."""
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run `make reference`"


MAX_PARAGRAPH = 600  # characters: five lines of 120


def paragraphs(text: str) -> list[str]:
    """Paragraphs and items of lists, without tables, headings and blocks."""
    found: list[list[str]] = [[]]
    for line in re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        if not line.strip() or line.startswith(("|", "#", "<!--")):
            found.append([])
        elif re.match(r"\s*([-*]|\d+\.) ", line):
            found.append([line.strip()])
        else:
            found[-1].append(line.strip())
    return [" ".join(lines) for lines in found if lines]


def test_paragraphs_are_found() -> None:
    text = "# A\none\ntwo\n\n| a |\n```sh\nx\n\n```\n- three\n  four\n- five\n"
    assert paragraphs(text) == ["one two", "- three four", "- five"]


@pytest.mark.parametrize("page", EVERY)
def test_paragraphs_are_short(page: str) -> None:
    long = [part[:80] for part in paragraphs((ROOT / page).read_text()) if len(part) > MAX_PARAGRAPH]
    assert long == []
