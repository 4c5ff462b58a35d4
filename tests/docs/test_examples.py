"""What docs/examples.py adds to docstrings runs, and each public object has parameters, returns and an example."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import headcount

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = [n for n in headcount.__all__ if callable(getattr(headcount, n))]


@pytest.fixture
def extra(monkeypatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(DOCS))
    import examples

    return examples.EXTRA


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_of_the_docs_runs(name, extra):
    test = doctest.DocTestParser().get_doctest(extra.get(name, ""), {}, name, None, 0)
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=output.append)
    assert result.failed == 0, "".join(output)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_object_is_documented(name, extra):
    public = getattr(headcount, name)
    text = (inspect.getdoc(public) or "") + extra.get(name, "")
    assert ">>>" in text
    if name != "HeadcountError":
        assert "Parameters\n---" in text or "Attributes\n---" in text
    if inspect.isfunction(public):
        assert "Returns\n---" in text


def test_nothing_is_documented_that_is_not_public(extra):
    assert set(extra) <= set(PUBLIC)
