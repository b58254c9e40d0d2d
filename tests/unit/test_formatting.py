"""Text for people: every rule by example, and the limits by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from schedtrace.formatting import (
    WIDTH,
    amount,
    bound,
    columns,
    duration,
    keep_end,
    lines,
    paragraph,
    plural,
    printable,
    rough_duration,
    share,
    short_function,
)
from schedtrace.histogram import BOUNDS_SECONDS


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0"),
        (1, "1 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (9_994, "9.99 µs"),
        (9_996, "10.0 µs"),
        (99_960, "100 µs"),
        (999_499, "999 µs"),
        (999_600, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (1_050_000_000, "1.05 s"),
        (59_949_000_000, "59.9 s"),
        (999_600_000_000, "1,000 s"),
        (41_234_000_000_000, "41,234 s"),
    ],
)
def test_durations(ns: int, text: str) -> None:
    assert duration(ns) == text


@given(st.integers(min_value=1, max_value=10**15))
def test_durations_are_right_to_three_digits(ns: int) -> None:
    number, unit = duration(ns).split(" ")
    scale = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(ns, rel=0.0051)
    assert len(number.replace(".", "").replace(",", "")) <= 3 or unit == "s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 ns"),
        (6.49e-6, "6.5 µs"),
        (9.96e-6, "10 µs"),
        (12.4e-6, "12 µs"),
        (590e-6, "590 µs"),
        (999.7e-6, "1.0 ms"),
        (8.3e-7, "830 ns"),
        (2.04, "2.0 s"),
        (8388.6, "8,389 s"),
    ],
)
def test_rough_durations(seconds: float | None, text: str) -> None:
    assert rough_duration(seconds) == text


def test_bounds_of_all_slots() -> None:
    texts = [bound(seconds) for seconds in BOUNDS_SECONDS[:-1]]
    assert texts[:11] == [
        *("1 µs", "2 µs", "4 µs", "8 µs", "16 µs", "32 µs", "64 µs", "128 µs", "256 µs", "512 µs", "1.02 ms")
    ]
    assert texts[-4:] == ["1.05 s", "2.10 s", "4.19 s", "8.39 s"]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (0.004, "0.004"), (0.0004, "< 0.001"),
        (0.0996, "0.10"), (0.5, "0.50"), (2.0, "2.00"), (12.44, "12.4"),
        (1234.4, "1,234"), (0.3125, "0.31"),
    ],
)  # fmt: skip
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0 %"), (0.0004, "< 0.1 %"), (0.0041, "0.4 %"), (0.0996, "10 %"), (0.623, "62 %"), (1.2, "120 %")],
)
def test_shares(part: float, text: str) -> None:
    assert share(part) == text


def test_plurals() -> None:
    assert (plural(1, "thread"), plural(0, "thread"), plural(1234, "hit")) == (
        *("1 thread", "0 threads", "1,234 hits"),
    )


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("main.main", "main.main"),
        (
            "github.com/nats-io/nats-server/v2/server.(*Server).accept.func1",
            "server.(*Server).accept.func1",
        ),
        (
            "internal/sync.(*HashTrieMap[go.shape.interface {},a/b.T]).All",
            "sync.(*HashTrieMap[go.shape.interface {},a/b.T]).All",
        ),
        ("example.com/x/y.Map[a/b.K,c/d.V].func1", "y.Map[a/b.K,c/d.V].func1"),
        ("gopkg.in/yaml%2ev3.unmarshal", "yaml%2ev3.unmarshal"),
    ],
)
def test_functions_lose_their_packages_directories(name: str, short: str) -> None:
    assert short_function(name) == short


def test_names_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[31mb\n\r\x9bc\udc80µ█") == r"a\x1b[31mb\x0a\x0d\x9bc\xdc80µ█"


def test_a_long_text_keeps_its_end() -> None:
    assert keep_end("abcdef", 6) == "abcdef"
    assert keep_end("abcdefg", 6) == "…cdefg"


def test_columns() -> None:
    table = columns(("name", "note", "hits"), [("a", "", "1,234"), ("longer", "", "5")], "<<>")
    assert table.plain.split("\n") == [
        "  name     hits",
        "  a       1,234",
        "  longer      5",
    ]


@given(
    st.lists(
        st.tuples(st.text(max_size=200), st.text(max_size=12), st.sampled_from(["", "12", "3,456,789,012"])),
        min_size=1,
        max_size=8,
    )
)
def test_columns_are_narrow_and_one_line_a_row(rows: list[tuple[str, str, str]]) -> None:
    table = columns(("one", "two", "three"), rows, "<<>").plain.split("\n")
    assert len(table) == len(rows) + 1
    # column two doesn't give way, and an unprintable character takes up to 8 columns as an escape
    assert all(len(line) <= max(WIDTH, 2 + 8 + 2 + 12 * 8 + 2 + 13) for line in table)
    if all(text.isprintable() for row in rows for text in row):
        assert all(len(line) <= WIDTH for line in table)
    assert all(line == line.rstrip() for line in table)


@given(st.text(alphabet=st.characters(blacklist_categories=["C"]), max_size=400))
def test_paragraphs_are_narrow(text: str) -> None:
    assert all(len(line) <= WIDTH for line in paragraph(text, bullet="- ").plain.split("\n"))


def test_paragraphs_hang_behind_their_bullet() -> None:
    folded = paragraph("word " * 20, bullet="- ").plain.split("\n")
    assert [line[:8] for line in folded] == ["  - word", "    word"]


def test_lines() -> None:
    assert lines([Text("a"), Text(), Text("b", "bold")]).plain == "a\n\nb"
