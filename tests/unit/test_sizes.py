"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.errors import SettingsError
from costcache.sizes import BYTES, parse_bytes, parse_capacity


def tokens(text: str, *, distinct: int = 100, page: int = 16, token_bytes: int = 1000) -> int | None:
    return parse_capacity(text).tokens(distinct_pages=distinct, page_size=page, token_bytes=token_bytes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5%", 5 * 16),
        (" 5 % ", 5 * 16),
        ("100%", 100 * 16),
        ("250%", 250 * 16),
        ("1.99%", 16),
        ("14054pages", 14054 * 16),
        ("1page", 16),
        ("1 PAGES", 16),
        ("7195648tok", 7195648),
        ("33tokens", 32),
        ("33 Token", 32),
        ("1MB", 62 * 16),  # 1,000 tokens are 62 pages and a rest
        ("1MiB", 65 * 16),
        ("1mib", 65 * 16),
        ("16000B", 16),
        ("2MB-1MB", 62 * 16),
        ("1MiB - 48576B", 62 * 16),
        ("unlimited", None),
        ("Unlimited", None),
    ],
)
def test_sizes_in_tokens(text: str, expected: int | None) -> None:
    assert tokens(text) == expected


@given(percent=st.integers(1, 300), distinct=st.integers(100, 10**7))
def test_a_share_is_exact(percent: int, distinct: int) -> None:
    # In floats 29 % of 100 is 28.999999999999996.
    assert tokens(f"{percent}%", distinct=distinct, page=1) == percent * distinct // 100
    assert tokens(f"{percent / 10:.1f}%", distinct=distinct * 10, page=1) == percent * distinct // 100


@given(count=st.integers(1, 2**63 - 1))
def test_counts_are_exact(count: int) -> None:
    assert tokens(f"{count}tok", page=1) == count
    assert tokens(f"{count}pages", page=3) == 3 * count
    assert parse_bytes(f"{count}B", "--memory") == count


@given(amount=st.integers(1, 2000), unit=st.sampled_from(sorted(BYTES)), token_bytes=st.integers(1, 400_000))
def test_bytes_are_rounded_down_to_whole_tokens(amount: int, unit: str, token_bytes: int) -> None:
    size = amount * BYTES[unit]
    if size < token_bytes:
        with pytest.raises(SettingsError, match="less than one page"):
            tokens(f"{amount}{unit}", page=1, token_bytes=token_bytes)
        return
    held = tokens(f"{amount}{unit}", page=1, token_bytes=token_bytes)
    assert held is not None
    assert held * token_bytes <= size < (held + 1) * token_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16GiB-16GiB", "capacity '16GiB-16GiB' leaves nothing: the weights take all"),
        ("80GiB-5%", "capacity '5%' is not a size in bytes"),
        ("80%-1GB", "capacity '80%' is not a size in bytes"),
        ("80GiB-", "capacity '' is not a size in bytes"),
    ],
)
def test_memory_less_weights_has_to_leave_something(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_capacity(text)


def test_units_of_bytes_are_decimal_or_binary_as_written() -> None:
    assert parse_bytes("80GB", "--memory") == 80 * 10**9
    assert parse_bytes("80GiB", "--memory") == 80 * 2**30
    assert parse_bytes("1.5TiB", "--memory") == 3 * 2**39
    assert parse_bytes("0B", "--weights") == 0


@pytest.mark.parametrize(
    "text",
    ["", " ", "5", "GB", "%", "-5%", "+5%", "0%", "0tok", "5GBB", "inf%", "nan%", "1e3tok", "5 5%", "5%%"],
)
def test_text_that_is_not_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a size: give 5%, 14054pages") as raised:
        parse_capacity(text)
    assert repr(text.strip()) in str(raised.value)


@pytest.mark.parametrize("text", ["", "80", "5%", "5tok", "5pages", "-1GB", "unlimited", "many GB", "٣GB"])
def test_text_that_is_not_a_size_in_bytes_names_the_option(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^--memory .* is not a size in bytes: give 80GiB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    "text", ["9" * 400 + "pages", "9" * 5000 + "tok", f"{2**63}tok", "1" + "0" * 9 + "TB"]
)
def test_absurd_sizes_are_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(SettingsError, match="larger than any memory") as raised:
        parse_capacity(text)
    assert len(str(raised.value)) < 160


def test_less_than_a_page_names_the_size_and_the_page() -> None:
    with pytest.raises(SettingsError, match="'15tok' is less than one page of 16 tokens"):
        tokens("15tok")
    with pytest.raises(
        SettingsError, match="'5%' of the trace's 0 distinct whole pages is less than one page"
    ):
        tokens("5%", distinct=0)


def test_bytes_of_a_model_that_caches_nothing_per_token() -> None:
    with pytest.raises(SettingsError, match="'1GB' is in bytes, but a token of this model takes none"):
        tokens("1GB", token_bytes=0)
    assert tokens("10%", token_bytes=0) == 160
