"""Cross-checks of our records against SGLang's own tree, leaf sets, locks and lists."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

FULL = ComponentType.FULL
LISTS = {"swa": ComponentType.SWA, "state": ComponentType.MAMBA}


def check_records(cache: Any) -> None:
    """Every record says what the tree says; every value has a record; nothing else has one."""
    core, pools = cache.tree_core, cache.pools
    kv = pools.kv
    nodes = [node for node in core._collect_all_nodes() if node is not core.root_node]
    on_device = [node for node in nodes if node.component_data[FULL].value is not None]
    assert {id(node.kv) for node in on_device} == {id(record) for record in kv.records()}
    for node in on_device:
        record, parent = node.kv, node.parent
        assert record.node is node
        assert record.parent is parent.kv
        assert record.tokens == len(node.key) == len(node.component_data[FULL].value)
        assert record.depth == parent.kv.depth + parent.kv.tokens
        children = [child for child in node.children.values() if child.component_data[FULL].value is not None]
        assert record.live_children == len(children)
        assert bool(record.locks) == (node.component_data[FULL].lock_ref > 0)
        assert record.is_evictable == (node in core.evictable_device_leaves)
        assert record.uses >= 1
    assert all(node.kv is None for node in nodes if node.component_data[FULL].value is None)
    assert [r.serial for r in kv.records()] == sorted(r.serial for r in kv.records())
    for name, component in LISTS.items():
        if name not in pools.by_name:
            continue
        held = [node for node in nodes if node.component_data[component].value is not None]
        if pools.ranks_states:
            assert {id(node) for node in held} == {id(r.node) for r in kv.records() if r.state is not None}
            for node in held:
                assert node.state is None
                assert node.kv.state.locks == node.component_data[component].lock_ref
                assert node.kv.state.uses >= 1
            continue
        assert {id(getattr(node, name)) for node in held} == {id(r) for r in pools.by_name[name].records()}
        for node in held:
            record = getattr(node, name)
            assert record.node is node
            assert record.tokens == (1 if name == "state" else len(node.key))
            assert record.depth + record.tokens == node.end
            # Locks are found out when a victim is named.
            assert not record.locks or record.serial in cache.victims(name)._parked
    if "host" in pools.by_name:
        hosted = [node for node in nodes if node.component_data[FULL].value is None]
        host = pools.by_name["host"]
        assert {id(node.host) for node in hosted} == {id(record) for record in host.records()}
        for node in hosted:
            assert node.host.node is node
            assert node.host.tokens == len(node.key)
            assert node.host.depth + node.host.tokens == node.end
            assert node.host.is_evictable == (node in core.evictable_host_leaves)
        assert core.evictable_host_leaves.tokens == sum(len(n.key) for n in core.evictable_host_leaves)
    for name, component in LISTS.items():
        if f"host_{name}" not in pools.by_name:
            continue
        records, values = pools.by_name[f"host_{name}"], core.host_lru_lists[component]
        held = [
            (node, data)
            for node in nodes
            if (data := node.component_data[component]).value is None and data.host_value is not None
        ]
        assert {id(getattr(node, f"host_{name}")) for node, _ in held} == {
            id(record) for record in records.records()
        }
        for node, data in held:
            record = getattr(node, f"host_{name}")
            assert record.node is node
            assert record.tokens == len(data.host_value) == (1 if name == "state" else len(node.key))
            assert record.depth + record.tokens == node.end
            assert record.locks or values.in_list(node)
            parked = cache.victims(records.name)._parked
            assert not record.locks or data.host_lock_ref or record.serial in parked
        assert values.tokens == sum(len(data.host_value) for node, data in held if values.in_list(node))
    for pool in pools.by_name.values():
        assert pool.request is None
        assert not pool.fallbacks
