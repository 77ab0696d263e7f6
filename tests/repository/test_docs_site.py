"""The documentation builds without a warning, no page is left out or points nowhere, and every
class and function of docs/reference.md has a page, and an example that runs."""

from __future__ import annotations

import dataclasses
import doctest
import html
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hvd_adaptive
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Of pages outside the site, whose links mkdocs does not see.
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def test_it_builds_strictly(tmp_path):
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in DOCS.glob("*.md"):
        built = (tmp_path / page.with_suffix(".html").name).read_text(encoding="utf-8")
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert title.split("`")[0].split(":")[0] in built
        assert "md-footer__link--" in built  # to the page before or after
    assert 'data-md-color-scheme="slate"' in built  # dark
    check_reference(tmp_path / "reference")
    # Nothing is fetched from elsewhere by whoever reads them.
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link)[^>]+(src|href)=\"https?://(?!127)", index)


def check_reference(folder: Path) -> None:
    """Signatures have values, each page has an example, and no formula has become bold."""
    texts = {}
    for path in folder.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        article = page[page.index("<article") : page.index("</article")]
        texts[path.stem] = html.unescape(re.sub(r"<[^>]+>", "", article))
        bold = re.findall(r"<(?:strong|em)>(.*?)</(?:strong|em)>", article, re.DOTALL)
        told = {re.sub(r"<[^>]+>", "", part) for part in bold if not part.endswith(":")}
        assert not any(re.search(r"[*=^ ]", name) for name in told), path  # names of arguments
        assert ">>>" in texts[path.stem] or path.stem == "custom", path
    assert "bucket_size: int = 8192" in texts["Settings"]
    assert "2**bits - 1 levels" in texts["ALQ"]
    assert "wire_bytes" in texts["GradientCompressor"]
    assert len(texts) > 30


def test_the_menu_and_the_home_page_have_the_same_groups():
    groups = yaml.safe_load(navigation())["nav"][1:]
    home = (DOCS / "index.md").read_text(encoding="utf-8")
    told = {
        title: re.findall(r"\]\((\w+\.md)\)", text)
        for title, text in re.findall(r"^\*\*([\w ]+)\.\*\*(.*?)(?:\n\n|\Z)", home, re.M | re.S)
    }
    listed = {
        t: [p for e in entries for p in e.values()] for g in groups for t, entries in g.items()
    }
    assert told == listed


def navigation() -> str:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return text[text.index("\nnav:") :]


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_of_pages_outside_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = LINK.findall(text)
    assert links
    for target, _ in links:
        assert (ROOT / target).exists(), target


def test_files_that_pages_name_exist():
    """Paths in backticks, of this repository's folders."""
    count = 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        folders = "docs|examples|research|benchmarks|slurm|requirements|tests|hvd_adaptive"
        for path in re.findall(rf"`((?:{folders})/[\w./]*\w)(?:::[\w\[\]-]+)?`", text):
            assert (ROOT / path).exists(), (page.name, path)
            count += 1
    assert count > 50


def test_links_have_titles():
    """No file names: readers of the built pages see none. A page that is named is a link."""
    for page in [*(ROOT / name for name in OUTSIDE), *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"\[`?[\w/.]+\.md`?\]\(", text)
        code = r"```.*?```|^    .*?$|`[^`]*`|\]\([^)]*\)"
        prose = re.sub(code, "", text, flags=re.DOTALL | re.MULTILINE)
        named += re.findall(r"\b[\w/]+\.md\b", prose)
        assert not named, (page.name, named)


def test_modules_of_architecture_exist():
    """But for those of the path as it was before."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    text = re.sub(r"\nBefore \(commit .*?\n## ", "\n## ", text, flags=re.DOTALL)
    package = ROOT / "hvd_adaptive"
    sources = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    code = "".join(path.read_text(encoding="utf-8") for path in sources.values())
    for name in re.findall(r"`([\w/]+\.py)`", text):
        if not name.startswith(("tests/", "benchmarks/")):
            assert any(f"/{path}".endswith(f"/{name}") for path in sources), name
    classes = re.findall(r"`([A-Z][a-z]\w+)", text)
    assert len(classes) > 5
    for name in classes:
        assert re.search(rf"^class {name}\b", code, re.MULTILINE), name


def test_reports_keys_are_listed():
    listed = re.findall(r"^ +- (``.*``):", GradientCompressor.report.__doc__, re.MULTILINE)
    keys = [key for line in listed for key in re.findall(r"``(\w+)``", line)]
    assert sorted(keys) == sorted(hvd_adaptive.ALQ(bits=3).report())


def test_shared_keywords_have_types(monkeypatch):
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(DOCS))
    docstrings = importlib.import_module("mkdocs_docstrings")
    text = docstrings.typed(inspect.cleandoc(Settings.__doc__))
    attributes = re.findall(r"^    (\w+) \((.+)\): ", text, re.MULTILINE)
    known = dict(attributes)
    assert set(known) == {f.name for f in dataclasses.fields(Settings)}
    assert known["bucket_size"] == "int"
    assert known["error_feedback"] == "float | Literal['auto'] | None"


@pytest.mark.parametrize("page", ["docs/choosing.md", "docs/reference.md"])
def test_every_scheme_is_on_the_page(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    names = dir(hvd_adaptive)
    schemes = [name for name in names if hasattr(getattr(hvd_adaptive, name), "compress")]
    assert len(schemes) >= 14
    for name in schemes:
        assert re.search(rf"`{name}\(|^\| `hvd_adaptive\.{name}` ", text, re.MULTILINE), name


def test_commands_of_make_that_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        named = re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= targets, page.name


def test_the_citation_file():
    """It has the keys that its format requires, and our own version."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["version"] == hvd_adaptive.__version__
    assert all({"type", "title", "authors", "year"} <= set(work) for work in cited["references"])


@pytest.fixture
def reference(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("mkdocs_reference")


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def found(path: str) -> object:
    module, _, name = path.rpartition(".")
    if module == "":
        return importlib.import_module(name)
    holder = found(module)
    return getattr(holder, name) if hasattr(holder, name) else importlib.import_module(path)


def examples(path: str) -> doctest.DocTest:
    """Return the example of a class or function, with what a user has at hand."""
    net = torch.nn.Linear(64, 32)
    names = {
        "torch": torch,
        "net": net,
        "inputs": torch.randn(8, 64),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    }
    return doctest.DocTestParser().get_doctest(
        inspect.getdoc(found(path)) or "", names, path, None, None
    )


def test_examples_run(reference, one_rank):
    torch.manual_seed(0)
    without = []
    for path, methods in reference.listed().items():
        described = [path, *(f"{path}.{name}" for name in methods)]
        tests = [examples(name) for name in described]
        if not any(test.examples for test in tests) and not inspect.ismodule(found(path)):
            without.append(path)
        for test in tests:
            runner = doctest.DocTestRunner(verbose=False)
            said: list[str] = []
            runner.run(test, out=said.append)
            assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert without == []


def test_methods_of_the_tables_exist_and_are_described(reference):
    listed = reference.listed()
    assert len(listed) > 30
    for path, methods in listed.items():
        for name in methods:
            method = getattr(found(path), name)
            assert (method.fget if isinstance(method, property) else method).__doc__, (path, name)


def test_links_to_methods_lead_to_their_pages(reference):
    report = "hvd_adaptive.compressor.GradientCompressor.report"
    page = type("Page", (), {"file": type("File", (), {"src_uri": "monitoring.md"})})
    linked = reference.on_page_markdown(f"[keys](reference.md#{report})", page)
    assert linked == f"[keys](reference/GradientCompressor.md#{report})"
