"""Blocks of documents are replaced by what benches print."""

from pathlib import Path

import pytest

from bench import documents
from bench.measurement import BenchError

DOCUMENT = """# Title

By hand.

<!-- python -m bench.one -->

```
old
old

old
```

Between. `python -m bench.one` prints that.

<!-- python -m bench.two: Go 1 -->
```
old
```

```
by hand
```
<!-- python -m bench.one: second -->

```
```
"""
REPLACED = """# Title

By hand.

<!-- python -m bench.one -->

```
first \\1

second
  line
```

Between. `python -m bench.one` prints that.

<!-- python -m bench.two: Go 1 -->

```
Go 1.27
 a

Go 1.24
```

```
by hand
```
<!-- python -m bench.one: second -->

```
second
  line
```
"""
OUTPUT = {"one": "first \\1\n\nsecond\n  line\n", "two": "head\n\nGo 1.27\n a\n\n\nGo 1.24\n"}


def test_benches_are_named_in_order_and_once() -> None:
    assert documents.benches_named(DOCUMENT) == ["one", "two"]


def test_blocks_are_replaced_and_nothing_else(tmp_path: Path) -> None:
    path, ran = tmp_path / "a.md", []
    path.write_text(DOCUMENT)

    def run(name: str) -> str:
        ran.append(name)
        return OUTPUT[name]

    documents.write(run, [path])
    assert ran == ["one", "two"]
    assert path.read_text() == REPLACED
    documents.write(run, [path])
    assert path.read_text() == REPLACED


def test_one_bench_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(DOCUMENT)
    documents.write(OUTPUT.__getitem__, [path], only=["two"])
    assert path.read_text() == documents.with_output(DOCUMENT, "two", OUTPUT["two"]) != DOCUMENT
    with pytest.raises(BenchError, match="no document shows three"):
        documents.write(OUTPUT.__getitem__, [path], only=["three"])


@pytest.mark.parametrize(
    "marker", ["<!-- python -m bench.one -->\n\ntext\n", "<!-- python -m bench --write -->\n\n```\n```\n"]
)
def test_a_marker_that_replaces_nothing_is_refused(marker: str) -> None:
    with pytest.raises(BenchError, match="a marker without a block"):
        documents.benches_named(f"{DOCUMENT}\n{marker}")


def test_a_section_that_is_not_there_is_refused() -> None:
    with pytest.raises(BenchError, match="'third'"):
        documents.section(OUTPUT["one"], "third")


def test_every_bench_that_is_shown_is_there() -> None:
    for path in documents.DOCUMENTS:
        shown = documents.benches_named(path.read_text())
        assert shown, path
        assert all((documents.ROOT / f"bench/{name}.py").exists() for name in shown)
