"""Every causal language model that transformers knows, read as its own classes cache it, or refused.

A new version of transformers shows its new models here: they agree, or they fail until they are read,
refused or listed in `reasons`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import transformers

from costcache.errors import ConfigError
from costcache.model import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    StateSpace,
)
from tests.transformers.oracle import COMPLETED, Facts, LayerFacts, default_config, examine, names, plain
from tests.transformers.reasons import DIFFERENT, REFUSED, UNBUILT, UNREAD

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = names()
ACTIVE_TOLERANCE = 0.01


@pytest.mark.parametrize("name", NAMES)
def test_a_default_config_is_read_as_its_classes_cache_it(name: str) -> None:
    try:
        config = default_config(name)
        raw = plain(config)
    except Exception as error:
        _unbuilt(name, repr(error))
    spec, refusal = _read(raw)
    if spec is None:
        assert name in REFUSED, f"{name} is refused and not listed: {refusal}"
        field, _ = REFUSED[name]
        assert f": {field} " in refusal, f"{name} is refused for another reason: {refusal}"
        return
    assert name not in REFUSED, f"{name} is read by now: take it from the list of refused ones"
    try:
        facts = examine(config)
    except Exception as error:
        _unbuilt(name, repr(error))
    assert (name in UNREAD) == bool(facts.why), f"{name} {facts.why or 'runs by now: take it from the list'}"
    problems = disagreements(spec, facts, raw)
    if name in DIFFERENT:
        assert problems, f"{name} agrees by now: take it from the list"
        return
    assert not problems, f"{name}: {'; '.join(problems)}"


def _read(config: dict[str, Any]) -> tuple[ModelSpec | None, str]:
    try:
        return ModelSpec.from_config(config), ""
    except ConfigError as error:
        return None, str(error)


def _unbuilt(name: str, error: str) -> NoReturn:
    assert name in UNBUILT, f"{name} cannot be built: {error}; complete its config, or list it"
    pytest.skip(f"transformers {transformers.__version__} cannot build {name}: {UNBUILT[name]}")


def disagreements(spec: ModelSpec, facts: Facts, config: dict[str, Any]) -> list[str]:
    problems = []
    if facts.layers is not None:
        ours = [_ours(spec, index) for index in range(spec.num_layers)]
        theirs = [_known(layer, config) for layer in facts.layers]
        theirs += [LayerFacts()] * (len(ours) - len(theirs))  # shared layers at the end have no entry
        for index, (own, other) in enumerate(zip(ours, theirs, strict=False)):
            if own != other:
                problems.append(f"layer {index} is {own}, and its classes say {other}")
                break
        if len(theirs) > len(ours):
            problems.append(f"{len(ours)} layers, and its classes have {len(theirs)}")
    share = spec.active_params / facts.active - 1
    if abs(share) > ACTIVE_TOLERANCE:
        problems.append(f"{spec.active_params:,} active parameters, {share:+.1%} off {facts.active:,}")
    return problems


def _known(layer: LayerFacts, config: dict[str, Any]) -> LayerFacts:
    """Drop a window that is as long as the longest context: it never slides."""
    text = config.get("text_config")
    longest = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    if layer.window is not None and isinstance(longest, int) and layer.window >= longest:
        return LayerFacts(layer.values, None, layer.index, layer.conv, layer.state)
    return layer


def _ours(spec: ModelSpec, index: int) -> LayerFacts:
    parts = [layer for number, layer in zip(spec.layer_ids, spec.layers, strict=True) if number == index]
    found = LayerFacts()
    for part in parts:
        found = _merged(found, part)
    return found


def _merged(found: LayerFacts, part: LayerSpec) -> LayerFacts:
    values, window, key, conv, state = found.values, found.window, found.index, found.conv, found.state
    if isinstance(part, StateSpace):
        conv += part.conv_dim * (part.conv_kernel - 1)
        state += part.heads * part.head_dim * part.state_size
    elif isinstance(part, CompressedAttention):
        if part.window is not None:  # the window is what transformers shows as this layer's keys
            values, window = part.head_dim, part.window
    elif isinstance(part, LatentAttention):
        values, window = 0 if part.kv_shared else part.latent_dim, part.window
    elif not part.kv_shared:
        values = part.kv_heads * (part.head_dim + part.v_head_dim)
        window = getattr(part, "window", None)
    if isinstance(part, FullAttention | LatentAttention):
        key = part.index_head_dim or 0
    return LayerFacts(values, window, key, conv, state)


def test_every_listed_model_has_one_reason() -> None:
    listed = [*REFUSED, *DIFFERENT, *UNREAD]
    assert len(listed) == len(set(listed)), "a model is listed twice"
    assert all(reason for _, reason in REFUSED.values())
    assert all([*DIFFERENT.values(), *UNBUILT.values(), *UNREAD.values()])


# Fields whose loss is read otherwise than the class would fill it in.
LEFT_OUT = {
    ("mistral", "sliding_window"): "published configs that leave it out, or set it to null, have no window",
    ("exaone4", "max_position_embeddings"): "a window is as long as the longest context by default",
    ("exaone_moe", "max_position_embeddings"): "a window is as long as the longest context by default",
    ("olmo3", "max_position_embeddings"): "a window is as long as the longest context by default",
}


def test_what_a_class_fills_in_is_not_read_as_none() -> None:
    """A default config without one of its fields is the same model: it reads as that, or is refused."""
    problems = []
    for name in NAMES:
        try:
            whole = plain(default_config(name))
        except Exception:  # `UNBUILT` has those that must not fail
            continue
        spec, _ = _read(whole)
        if spec is None:
            continue
        for field in set(whole) - {"model_type", "architectures"} - set(COMPLETED.get(name, ())):
            less, _ = _read({key: value for key, value in whole.items() if key != field})
            same = less is None or (
                less.layers == spec.layers
                and abs(less.active_params / spec.active_params - 1) < ACTIVE_TOLERANCE
            )
            if not same and (name, field) not in LEFT_OUT:
                problems.append(f"{name} without {field}")
    assert not problems, f"read as other models: {', '.join(sorted(problems))}"
