"""The report: what it says, that it loads and runs nothing, that reruns are equal, and its edges."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from costcache._version import __version__
from costcache.binding import Binding
from costcache.cli import cli
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.radix.states import StateTree
from costcache.report import Material, check_outputs, gather, render, write_plot, write_report
from costcache.report.advice import advise, losses
from costcache.report.axes import linear, log
from costcache.report.charts import evicted, first_token_curve, hit_rates, pools_drawn
from costcache.report.choice import Choice
from costcache.report.files import write_whole
from costcache.report.style import COLORS, DARK, DARK_COLORS, LIGHT, styles
from costcache.report.svg import draw
from costcache.report.words import count, listed, points, seconds, share, size
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.sweep import Cell, outcomes
from costcache.sim.trace import Trace
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings
from tests.materials import material_from

POLICIES = ("lru", "slru", "lfu", "optimum", "infinite")
POOLS = {"5%": 0.05, "20%": 0.2}


def chat(requests: int = 300) -> Trace:
    return generate("chat", workload_settings("chat", {"requests": requests}))


def simulator(trace: Trace, *, warmup: int = 0, model: str = "deepseek-v3") -> Simulator:
    served = Deployment(page_size=trace.block_size)
    return Simulator(trace, ModelSpec.preset(model), served, warmup=warmup)


def material_of(
    sim: Simulator,
    policies: tuple[str, ...] = POLICIES,
    pools: dict[str, float] | None = None,
    **settings: Any,
) -> Material:
    page = sim.keys.page_size
    distinct = sim.trace.distinct_pages(page)
    serving = settings.pop("serving", None)
    cells = [
        Cell(
            Settings(policy=name, **settings),
            pool,
            max(1, int(part * distinct)) * page,
            serving=serving,
        )
        for pool, part in (pools or POOLS).items()
        for name in policies
    ]
    return gather(sim, cells, outcomes(sim, cells))


@pytest.fixture(scope="module")
def material() -> Material:
    return material_of(simulator(chat()))


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(chat(120), path)
    return path


class Outline(HTMLParser):
    """What a page consists of: headings, ids, references to ids, tags, text by tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self._open.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if "id" in found:
            self.ids.append(found["id"])
        for name in ("for", "aria-labelledby", "aria-describedby"):
            self.references |= set(found.get(name, "").split())
        if found.get("role") == "img":
            assert found.get("aria-label") or found.get("aria-labelledby")
        assert not {"src", "href", "onclick", "onload"} & found.keys()

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("th", "td"):
            self.cells.append(data)


def simulate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["simulate", "--model", "deepseek-v3", *map(str, arguments)])


def test_the_page_shows_every_policy_and_pool(material: Material) -> None:
    page = render(material)
    outline = Outline(page)
    for policy in POLICIES:
        assert policy in outline.cells
    for pool in POOLS:
        assert f"pool of {pool}" in outline.cells
        assert f">pool of {pool}</label>" in page
    for replay in material.replays:
        assert share(replay.run.token_hit_rate, 2) in outline.cells
    assert outline.ids == [
        "hit-rates-title",
        "hit-rates-text",
        *(f"{name}-{at}-{part}" for at in range(2) for name in ("ttft-curve",) for part in ("title", "text")),
        *(
            f"{name}-{at}-{part}"
            for at in range(2)
            for name in ("regretted", "evicted")
            for part in ("title", "text")
        ),
    ]


def test_the_page_is_in_order(material: Material) -> None:
    outline = Outline(render(material))
    assert outline.levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(outline.levels, outline.levels[1:], strict=False))
    assert outline.levels.count(1) == 1
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.references <= set(outline.ids)


def test_the_page_loads_and_runs_nothing(material: Material) -> None:
    page = render(material)
    assert not {"script", "img", "link", "iframe", "object"} & Outline(page).tags
    assert not re.search(r"@import|url\(", page)
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert "script-src" not in page


def test_the_page_says_what_made_it(trace_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    options = (
        "--policy",
        "lru,slru",
        "--capacity",
        "5%",
        "--set",
        "slru.protected_threshold=3",
        "--seed",
        "7",
    )
    assert simulate(trace_file, *options, "--json", "--report", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    command = re.search(r"<code>(.*?)</code>", text)
    assert command is not None
    given = shlex.join(["costcache", "simulate", str(trace_file), "--model", "deepseek-v3", *options])
    words = shlex.split(html.unescape(command[1]))
    assert words[-2:] == ["--report", "report.html"]
    assert sorted(words[:-2]) == sorted(shlex.split(given))
    assert f"costcache {__version__}" in text
    assert "<dt>Seed</dt><dd>7, of" in text


def test_a_page_of_many_policies_and_pools_stays_small() -> None:
    pools: dict[str, int | None] = {f"{size}%": size * 16_000 for size in range(1, 41)}
    found = material_from(
        pools, {f"policy-{at}": [0.5 + at / 100 + n / 200 for n in range(40)] for at in range(30)}
    )
    page = render(found)
    assert len(page.encode()) < 1_500_000
    advice = advise(found)
    assert advice.chosen is not None
    drawn = pools_drawn(found, advice)
    assert len(drawn) == 8
    assert {"1%", "40%", advice.chosen.run.capacity} <= set(drawn)
    assert "32 pool sizes are left out here" in page
    assert all(f"pool of {name}: " in page for name in pools)  # in the table


def test_charts_show_the_figures_of_the_runs(material: Material) -> None:
    chart = hit_rates(material, advise(material))
    (slru,) = (line for line in chart.lines if line.name == "slru")
    runs = [r.run for r in material.replays if r.run.policy == "slru"]
    assert slru.path == [(run.capacity_tokens, run.token_hit_rate) for run in runs]
    assert [tip for _, _, tip in slru.marks] == [
        f"slru at {run.capacity}: {share(run.token_hit_rate, 2)}" for run in runs
    ]
    assert chart.level is not None
    assert chart.level[0] == material.ceiling
    for run in runs:
        assert f"slru {share(run.token_hit_rate)}" in chart.text
    drawn = draw(chart)
    high = chart.y.high
    for (tokens, rate), tip in zip(slru.path, (mark[2] for mark in slru.marks), strict=True):
        left, top = 100 * chart.x.place(tokens), 100 * (1 - rate / high)
        assert f'<svg x="{round(left, 2):g}%" y="{round(top, 2):g}%"><path class="mark c0"' in drawn
        assert f"<title>{tip}</title>" in drawn


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (3.0, 8.0), (0.001, 90.0), (1e3, 4e9), (0.0, 5.0)])
def test_axes_have_a_few_ticks_within_their_range(low: float, high: float) -> None:
    for axis in (log("x", low, high, str), linear("x", high, str), linear("x", high, str, exact=True)):
        assert axis.place(low) <= axis.place(high) <= 1
        places = [axis.place(value) for value, _ in axis.ticks]
        assert 1 <= len(places) <= 11
        assert places == sorted(set(places))


def test_colours_can_be_told_from_their_page() -> None:
    """As WCAG 2.2 asks: 4.5:1 for text, 3:1 for lines and bars."""
    for named, colors in ((LIGHT, COLORS), (DARK, DARK_COLORS)):
        for text in ("ink", "muted", "accent"):
            for ground in ("page", "card", "code"):
                assert contrast(named[text], named[ground]) >= 4.5
        for color in (*colors, named["lru"], named["edge"]):
            assert contrast(color, named["card"]) >= 3


def contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_curve_of_lru_goes_through_its_runs(material: Material) -> None:
    curve = dict(material.lru)
    assert len(curve) >= 90
    rates = list(curve.values())
    assert rates == sorted(rates)
    for replay in material.replays:
        if replay.run.policy == "lru":
            assert curve[material.pool(replay.run)] == replay.run.token_hit_rate
    assert rates[-1] == material.ceiling


def test_the_curve_of_lru_leaves_the_warm_up_out() -> None:
    found = material_of(simulator(chat(), warmup=100), ("lru",))
    curve = dict(found.lru)
    for replay in found.replays:
        assert curve[found.pool(replay.run)] == pytest.approx(replay.run.token_hit_rate)


def test_an_optimum_added_unasked_is_the_ceiling(material: Material) -> None:
    less = material_of(simulator(chat()), ("lru", "slru"))
    assert less.optimum == material.optimum
    assert [r.gap_closed for r in less.replays] == [
        r.gap_closed for r in material.replays if r.run.policy in ("lru", "slru")
    ]


def test_regretted_tokens_are_the_extra_hits_of_an_unlimited_pool(material: Material) -> None:
    unlimited = material.replays[POLICIES.index("infinite")]
    assert sum(unlimited.regretted) == 0
    for replay in material.replays:
        assert sum(replay.regretted) == unlimited.run.hit_tokens - replay.run.hit_tokens


def test_evictions_over_time_sum_to_those_of_the_run(material: Material) -> None:
    for replay in material.replays:
        if replay.run.policy == "infinite":
            continue
        assert replay.evicted is not None
        assert sum(replay.evicted) == replay.run.evicted_tokens > 0


def test_evictions_that_free_more_than_the_shortfall_are_not_dated() -> None:
    found = material_of(simulator(chat()), ("lfu",), headroom=0.2, trim="off")
    assert all(replay.evicted is None for replay in found.replays)
    assert evicted(found, "5%") is None
    assert "Evicted tokens, at" not in render(found)


def test_a_chart_by_pool_shows_the_advised_pool_first(material: Material) -> None:
    advice = advise(material)
    assert advice.chosen is not None
    page = render(material)
    shown = re.findall(r'<input type="radio" name="\w+" checked>pool of ([^<]+)', page)
    assert shown == [advice.chosen.run.capacity] * 2
    assert page.count('type="radio"') == 2 * len(POOLS)
    for pool in POOLS:
        chart = first_token_curve(material, pool)
        assert [line.name for line in chart.lines] == ["lru", "slru", "lfu"]
        assert f"at {pool}" in chart.title


def test_the_advice_is_the_best_online_policy_with_its_flags(material: Material) -> None:
    advice = advise(material)
    assert advice.chosen is not None
    chosen = advice.chosen.run
    online = [r.run for r in material.replays if r.online]
    assert chosen.capacity == "20%"
    best = max(run.token_hit_rate for run in online if run.capacity == "20%")
    assert best - chosen.token_hit_rate < 0.005
    assert f"--radix-eviction-policy costcache:{chosen.policy}" in advice.command
    assert f"--max-total-tokens {chosen.capacity_tokens}" in advice.command
    assert f"--page-size {material.page_size}" in advice.command
    assert chosen.policy in advice.headline
    assert advice.losses
    assert any("one trace" in caveat for caveat in advice.caveats)
    assert any("one at a time" in caveat for caveat in advice.caveats)


def test_the_advice_keeps_lru_where_nothing_beats_it() -> None:
    table = {"mru": [0.3, 0.604], "lru": [0.5, 0.6], "lfu": [0.45, 0.55]}
    advice = advise(material_from({"5%": 1600, "10%": 3200}, table))
    assert advice.chosen is not None
    assert (advice.chosen.run.policy, advice.chosen.run.capacity) == ("lru", "10%")
    assert "--radix-eviction-policy lru" in advice.command
    assert any("keep it" in reason for reason in advice.reasons)
    assert "lru (tied with mru)" in advice.headline
    assert "At 10%, the pool advised, mru is ahead by 0.4 points, which is a tie." in advice.losses


def test_a_pool_without_limit_is_never_advised_beside_others(trace_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    options = ("--policy", "lru,slru", "--capacity", "5%,unlimited", "--report", page)
    assert simulate(trace_file, *options).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "the pool of 5%" in text.lower()
    assert "Only the pool of 5% was replayed" in text


@pytest.mark.parametrize("share", [None, 0.5])
def test_the_memory_of_a_hybrid_is_divided_as_it_was_replayed(share: float | None) -> None:
    served = Deployment(page_size=16)
    sim = Simulator(chat(40), ModelSpec.preset("qwen3-next"), served, state_share=share)
    memory = 600 * 2**30
    token = sim.cost.token
    pool = memory // token.kv_bytes // 16 * 16
    cells = [Cell(Settings(policy="lru"), "600GiB", pool)]
    found = advise(gather(sim, cells, outcomes(sim, cells)))
    assert "600 GiB per GPU for KV and states" in found.headline
    told = "together" if share is None else "in fixed parts, 50 % of it for states"
    assert any(f"memory for KV and states {told}" in caveat for caveat in found.caveats)
    if share is None:
        assert "--enable-unified-memory" in found.command
        assert "--max-total-tokens" not in found.command
    else:
        tree = StateTree(
            Binding.of(sim.cost.spec, served, Settings()), pool * token.kv_bytes, state_share=share
        )
        sizes = f"--max-total-tokens {tree.capacity} \\\n    --max-mamba-cache-size {tree.state_capacity}"
        assert sizes in found.command


def test_settings_that_were_replayed_are_in_the_command() -> None:
    command = advise(material_of(simulator(chat()), ("slru",), headroom=0.1)).command
    assert """--radix-eviction-policy-config '{"headroom": 0.1}'""" in command


def test_without_lru_the_advice_says_that_the_gain_is_unknown() -> None:
    advice = advise(material_of(simulator(chat()), ("slru", "mru")))
    assert any("LRU was not replayed" in loss for loss in advice.losses)


def test_a_loss_against_lru_is_named() -> None:
    found = material_of(simulator(chat()), ("mru", "lru"))
    mine = found.of("mru")[-1]
    lost = losses(found, Choice(mine, (), (), False))
    behind = set()
    for pool in POOLS:
        mru, lru = (r.run.token_hit_rate for r in found.replays if r.run.capacity == pool)
        named = f"At {pool} it hits less than LRU: {points(mru - lru)} of token hit rate." in lost
        assert named == (mru < lru)
        behind.add(named)
    assert behind == {True, False}


def test_offline_policies_alone_are_not_deployable() -> None:
    found = material_of(simulator(chat()), ("optimum", "infinite"))
    assert advise(found).command == ""
    assert "Nothing to deploy" in render(found)


def test_one_pool_and_one_policy_make_a_page() -> None:
    found = material_of(simulator(chat(40)), ("lru",), {"10%": 0.1})
    page = render(found)
    assert "Gap from LRU" not in page
    assert 'type="radio"' not in page


def test_a_trace_without_reuse_makes_a_page() -> None:
    sizes = np.full(4, 32, np.int64)
    trace = Trace(
        "fresh",
        16,
        np.zeros(4),
        sizes,
        np.ones(4, np.int64),
        np.arange(8, dtype=np.int64),
        np.arange(0, 10, 2, dtype=np.int64),
    )
    found = material_of(simulator(trace), ("lru", "slru"))
    assert found.ceiling == 0
    assert found.bins.unit == "requests"
    page = render(found)
    assert "a cache of any size never hits" in page
    assert "NaN" not in page


def test_a_server_has_no_optimum_beside_it() -> None:
    found = material_of(simulator(chat(100)), ("lru", "slru"), serving=ServingSettings())
    assert found.serving
    assert found.optimum == found.lru == ()
    text = render(found)
    assert "a server with a queue" in text
    assert "dashed line" not in text


def test_names_are_text_and_not_markup() -> None:
    trace = chat(40)
    name = '</script><b>"&'
    named = Trace(**{f: getattr(trace, f) for f in trace.__dataclass_fields__} | {"name": name})
    text = render(material_of(simulator(named), ("lru",)))
    assert "<b>" not in text
    assert "&lt;b&gt;" in text


def test_a_name_that_is_not_utf8_is_shown_without_it(tmp_path: Path) -> None:
    trace = chat(40)
    name = os.fsdecode(b"caf\xe9")
    named = Trace(**{f: getattr(trace, f) for f in trace.__dataclass_fields__} | {"name": name})
    write_report(material_of(simulator(named), ("lru",)), tmp_path / "out.html")
    assert "caf? on deepseek-v3" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_reruns_in_other_processes_give_the_same_bytes(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'plot'")
    written = []
    for seed in ("1", "2"):
        page, picture = tmp_path / f"{seed}.html", tmp_path / f"{seed}.png"
        command = [sys.executable, "-m", "costcache", "simulate", str(trace_file), "--model", "deepseek-v3"]
        command += ["--policy", "lru,slru,optimum", "--report", str(page), "--plot", str(picture)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith(f"report: {page}\nplot: {picture}\n")
        written.append((page.read_bytes(), picture.read_bytes()))
    assert written[0] == written[1]
    assert written[0][1].startswith(b"\x89PNG")


def test_the_table_and_json_are_as_without_a_report(trace_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    plain, reported = simulate(trace_file), simulate(trace_file, "--report", page)
    assert reported.exit_code == 0, reported.output

    def untimed(text: str) -> list[str]:
        # Without the last column, the rule, and the widths that follow the last column's.
        lines = [re.sub(r"\s+[\d,]+$|─+", "", line) for line in text.splitlines()]
        return [" ".join(line.split()) for line in lines]

    assert untimed(reported.stdout) == [*untimed(plain.stdout), f"report: {page}"]
    as_json = simulate(trace_file, "--report", page, "--json")
    assert len(json.loads(as_json.stdout)["runs"]) == 3


def test_a_missing_extra_is_named_before_any_replay(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    out = tmp_path / "out.png"
    result = simulate(trace_file, "--plot", out)
    assert result.exit_code == 1
    assert "pip install 'costcache[plot]'" in result.stderr
    assert "matplotlib" in result.stderr
    assert result.stdout == ""
    assert not out.exists()


def test_a_wrong_place_is_refused_before_any_replay(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no folder"):
        check_outputs(report=tmp_path / "none" / "out.html")
    with pytest.raises(SettingsError, match="is a folder"):
        check_outputs(report=tmp_path)


def test_a_report_replaces_the_old_one_whole(material: Material, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    path.write_text("old")
    write_report(material, path)
    assert path.read_text(encoding="utf-8") == render(material)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.html"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match=f"disk full: '{path}'"):
        write_whole(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_drawn_alike_each_time(material: Material, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'plot'")
    first, second = tmp_path / f"1.{ending}", tmp_path / f"2.{ending}"
    write_plot(material, first)
    write_plot(material, second)
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(SettingsError, match=r"\.png"):
        write_plot(material, tmp_path / "out.gif")


def test_policies_look_different_from_each_other() -> None:
    names = [f"p{i}" for i in range(30)] + ["lru"]
    looks = styles(names)
    assert next(iter(looks)) == "lru"
    assert len({(s.color, s.dash) for s in looks.values()}) == len(names)


def test_figures_in_words() -> None:
    assert share(0.1234) == "12.3 %"
    assert [listed(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert points(-0.012) == "-1.2 points"
    assert seconds(0.0314) == "31 ms"
    assert seconds(12.34) == "12.3 s"
    assert size(1536) == "1.5 KiB"
    assert size(5 * 2**40) == "5.0 TiB"
    assert [count(n) for n in (7, 1200, 5e6, 2e9)] == ["7", "1.2k", "5M", "2G"]
