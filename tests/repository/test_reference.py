"""Every class and function of docs/reference.md has a page, and an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("mkdocs")
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("mkdocs_reference")


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def found(path: str) -> object:
    """Return what has this dotted path."""
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
