"""`Deployment`: what it derives, and its errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from costcache.deployment import Deployment
from costcache.errors import SettingsError


@pytest.mark.parametrize(
    ("dp", "attention_dp", "attention_tp"), [(False, 1, 8), (True, 8, 1), (1, 1, 8), (2, 2, 4), (8, 8, 1)]
)
def test_attention_ranks(dp: bool | int, attention_dp: int, attention_tp: int) -> None:
    deployment = Deployment(tp=8, dp_attention=dp)
    assert (deployment.attention_dp, deployment.attention_tp) == (attention_dp, attention_tp)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1)])
def test_element_sizes(dtype: str, size: int) -> None:
    assert Deployment(kv_dtype=dtype).kv_bytes == size


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp is 0; input should be greater than 0"),
        ({"tp": 10**400}, "input should be less than or equal to 1048576"),
        ({"pp": "two"}, "pp is 'two'; input should be a valid integer"),
        ({"page_size": -1}, "page_size is -1; input should be greater than 0"),
        (
            {"kv_dtype": "int4"},
            "kv_dtype is 'int4'; input should be 'bf16', 'fp16', 'fp8_e4m3', 'fp8_e5m2' or 'fp4_e2m1'",
        ),
        ({"flops_per_second": float("nan")}, "flops_per_second is nan"),
        ({"host_link_bytes_per_second": 0}, "host_link_bytes_per_second is 0"),
        ({"tp": 8, "dp_attention": 3}, "dp_attention is 3, which does not divide tp 8; use a divisor of tp"),
        ({"dp_attention": -1}, "dp_attention is -1"),
        ({"dp_attention": "some"}, "dp_attention is 'some'"),
        ({"tpp": 8}, "tpp is not a field of a deployment; use tp, dp_attention, pp"),
        ({"tp": 0, "pp": 0}, "tp is 0; input should be greater than 0; pp is 0"),
    ],
)
def test_errors_name_field_value_and_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Deployment(**values)
    assert message in str(caught.value)
    # Within another model's validation, pydantic's own error carries the same words.
    with pytest.raises(ValidationError, match=re.escape(message)):
        Deployment.model_validate(values)


def test_defaults_are_one_h100_in_bf16() -> None:
    deployment = Deployment()
    assert (deployment.tp, deployment.pp, deployment.page_size, deployment.kv_dtype) == (1, 1, 1, None)
    assert deployment.flops_per_second == 989.4e12
    assert deployment.host_link_bytes_per_second == 64e9
    assert deployment.disk_bytes_per_second is None
