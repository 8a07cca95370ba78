"""Settings: what is taken, and errors that name the field, the value and the fix."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costcache import CostcacheError, RadixCache, Settings, SettingsError
from costcache.settings import DEFAULT_POLICY, PoolSettings, read_settings
from tests.property.kit import MODEL, manager


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    depth: int = Field(1, ge=1)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    share: float = Field(0.5, ge=0, lt=1)
    mode: Literal["a", "b"] = "a"
    inner: Inner = Inner()
    name: str


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"headroom": 1.0}, "'headroom' is 1.0: ", "less than 1"),
    ({"headroom": -0.1}, "'headroom' is -0.1: ", "greater than or equal to 0"),
    ({"headroom": "lots"}, "'headroom' is 'lots': ", "valid number"),
    ({"headroom": math.nan}, "'headroom' is nan: ", ""),
    ({"headroom": None}, "'headroom' is None: ", "valid number"),
    ({"trim": "some"}, "'trim' is 'some': ", "'auto', 'exact', 'chunk' or 'off'"),
    ({"trim_chunk": 0}, "'trim_chunk' is 0: ", "greater than or equal to 1"),
    ({"trim_chunk": 2.5}, "'trim_chunk' is 2.5: ", "integer"),
    ({"policy": 3}, "'policy' is 3: ", "string"),
    ({"core": "c"}, "'core' is 'c': ", "'auto', 'python' or 'rust'"),
    ({"architecture": 3}, "'architecture' is 3: ", "dictionary"),
    ({"policy_settings": [1]}, "'policy_settings' is [1]: ", "dictionary"),
    ({"headrom": 0.1}, "unknown setting 'headrom': ", "headroom"),
]


@pytest.mark.parametrize(("values", "said", "fix"), WRONG)
def test_an_error_names_field_value_and_fix(values: dict[str, Any], said: str, fix: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(Settings, values)
    assert said in str(caught.value)
    assert fix in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("values", "said", "fix"), [case for case in WRONG if "policy" not in case[0]])
def test_a_cache_says_the_same(values: dict[str, Any], said: str, fix: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RadixCache(MODEL, 10, plugins=manager(), **values)
    assert said in str(caught.value)
    assert fix in str(caught.value)


def test_every_wrong_field_is_named() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(Settings, {"headroom": 2, "trim": "no", "zzz": 1})
    text = str(caught.value)
    assert all(part in text for part in ("'headroom' is 2", "'trim' is 'no'", "unknown setting 'zzz'"))


def test_nested_fields_have_their_whole_path() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(Outer, {"inner": {"depth": 0}, "share": 1}, "architecture.")
    text = str(caught.value)
    assert "'architecture.inner.depth' is 0" in text
    assert "'architecture.share' is 1" in text
    assert "setting 'architecture.name' is missing" in text


def test_an_unknown_field_gets_the_known_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(Outer, {"name": "x", "shares": 1}, "policy_settings.")
    assert str(caught.value) == (
        "unknown setting 'policy_settings.shares': known settings are policy_settings.inner, "
        "policy_settings.mode, policy_settings.name, policy_settings.share"
    )


def test_valid_settings_are_accepted() -> None:
    found = read_settings(Outer, {"name": "x", "share": "0.25", "inner": {"depth": 3}})
    assert found == Outer(name="x", share=0.25, inner=Inner(depth=3))


def test_settings_errors_are_value_errors() -> None:
    assert issubclass(SettingsError, ValueError)
    assert issubclass(SettingsError, CostcacheError)


def test_settings_do_not_change() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.headroom = 0.5  # type: ignore[misc] # the point
    assert PoolSettings(0.0).architecture is None


def test_defaults_are_exact_shortfall() -> None:
    settings = Settings()
    assert (settings.headroom, settings.trim, settings.policy) == (0.0, "auto", "costcache")
    assert RadixCache(MODEL, 10, plugins=manager()).policy == DEFAULT_POLICY


def test_every_field_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("settings", "policy", "said"),
    [
        ({"threshold": 5, "next_prompt_estimate": 5}, "tlru", "threshold (5) must be above"),
        ({"threshold": 5, "next_prompt_estimate": 9}, "tlru", "next_prompt_estimate (9)"),
        ({"threshold": -1}, "tlru", "policy_settings.threshold' is -1"),
        ({"protected_threshold": 0}, "slru", "policy_settings.protected_threshold' is 0"),
        ({"protected": 3}, "slru", "policy_settings.protected_threshold"),
    ],
)
def test_policies_settings_are_checked(settings: dict[str, int], policy: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RadixCache(MODEL, 10, policy=policy, plugins=manager(), policy_settings=settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pool_size": 0}, "pool_size is 0"),
        ({"pool_size": 3, "page_size": 4}, "at least one page of 4 tokens"),
        ({"pool_size": 10, "page_size": 0}, "page_size is 0"),
        ({"pool_size": 10, "page_size": -2}, "page_size is -2"),
    ],
)
def test_sizes_are_checked(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RadixCache(MODEL, plugins=manager(), **arguments)


def test_one_page_size() -> None:
    from costcache.deployment import Deployment

    with pytest.raises(ValueError, match=r"page_size is 4 but deployment\.page_size is 16"):
        RadixCache(MODEL, 64, 4, plugins=manager(), deployment=Deployment(page_size=16))
    assert RadixCache(MODEL, 64, 16, plugins=manager(), deployment=Deployment(page_size=16)).page_size == 16
