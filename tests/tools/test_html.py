"""The report: one file without a network, that shows what was measured, whatever the user's text is; and, where a browser is installed, what a person
sees of it and does with it."""
import fnmatch
import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import tokamak
from benchmarks import page
from tokamak.tools import html, profile as profiling

from . import samples
from .browser import MISSING, Browser, found
from .measured import PEAKS, measured  # noqa: F401 (a fixture)

needs_browser = pytest.mark.skipif(found() is None, reason=MISSING)
BOARD = ".boards canvas"


# -- the file ----------------------------------------------------------------------------------------------------------------
class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def test_the_data_is_the_profile(measured):
    page = Elements(html.page(measured.data()))
    assert [t for t, _ in page.tags].count("script") == 2
    assert json.loads(page.scripts[0]) == json.loads(measured.to_json())


def test_it_needs_no_other_file(measured, tmp_path):
    path = measured.html(tmp_path / "report.html")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    page = Elements(text)
    assert not [a for _, a in page.tags if {"src", "href", "srcset", "data", "action"} & a.keys()]
    assert not {"link", "iframe", "img", "object"} & {t for t, _ in page.tags}
    ours = text.replace(page.scripts[0], "")
    assert set(re.findall(r"\w+://[^\s\"'`)]*", ours)) == {"http://www.w3.org/2000/svg"}           # the name of a language
    assert "@import" not in ours and "url(" not in ours
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_its_parts_are_in_the_package():
    root = Path(__file__).parent.parent.parent
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tokamak.tools"]
    parts = {f.relative_to(root / "tokamak/tools").as_posix() for f in (root / "tokamak/tools/page").iterdir()}
    assert {f"page/{name}.js" for name in html.SCRIPTS} | {"page/report.html", "page/report.css"} == parts
    assert all(any(fnmatch.fnmatch(f, p) for p in patterns) for f in parts)


def test_any_text_is_text():
    data = samples.profile(20, samples.NASTY)
    page = Elements(html.page(data))
    assert [t for t, _ in page.tags].count("script") == 2 and "img" not in {t for t, _ in page.tags}
    assert json.loads(page.scripts[0])["sources"] == data["sources"]


def test_no_number_that_json_has_not():
    data = samples.profile(4)
    data["first"], data["took"] = float("inf"), float("nan")
    held = json.loads(Elements(html.page(data)).scripts[0])
    assert held["first"] is None and held["took"] is None


def test_nothing_is_made_of_text_but_text():
    for name in html.SCRIPTS:
        text = (html.files("tokamak.tools") / "page" / f"{name}.js").read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|fetch\(|XMLHttp|import\(", text), name


# -- in a browser ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def shown(tmp_path):
    """show(data, ...): a browser with the page of `data`."""
    made = []

    def show(data, **how):
        path = tmp_path / "report.html"
        path.write_text(html.page(data), encoding="utf-8")
        b = Browser(**how)
        made.append(b)
        b.seconds = b.open(path)
        return b
    yield show
    for b in made:
        assert not b.errors and not [r for r in b.requests if not r.startswith(("file:", "about:", "data:"))]
        b.__exit__()


def painted(b: Browser, selector: str) -> int:
    """How many colours a canvas shows."""
    return b.run(f"""(() => {{ const c = document.querySelector({selector!r}), s = new Set();
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < d.length; i += 4) s.add(d[i] << 24 | d[i + 1] << 16 | d[i + 2] << 8 | d[i + 3]); return s.size; }})()""")


@needs_browser
@pytest.mark.parametrize("how", [{}, {"dark": True}, {"width": 390, "height": 844}], ids=["light", "dark", "phone"])
def test_it_shows_everything_at_any_size(shown, measured, how):
    b = shown(measured.data(), **how)
    ids = b.run("[...document.querySelectorAll('main > section')].map(e => e.id)")
    assert ids == ["summary", "kernels", "fusion", "limits", "timeline", "lines", "edges", "torch", "compiling", "how"]
    assert b.run("document.documentElement.scrollWidth <= innerWidth")                    # nothing sticks out
    for name in ("fusion", "timeline"):
        b.run(f"document.getElementById('{name}').scrollIntoView()")
        b.settle()
        assert painted(b, f"#{name} canvas") > 8
    assert b.run("document.querySelectorAll('#limits circle').length") == 2 * len([r for r in measured.rows if r.flops])
    text = b.run("document.body.innerText")
    for words in ("bound by " + measured.bound, "fewest possible", "predicted", "estimate", "measured", "counted", "some CPU", "programs.py:42"):
        assert words in text, words


@needs_browser
def test_a_kernel_shows_its_lines_its_ir_and_its_code(shown, measured):
    b = shown(measured.data())
    names = "[...document.querySelectorAll('#kernels .row .cell:first-child')].map(e => e.innerText)"
    n = next(n for n, name in enumerate(b.run(names)) if name.startswith("per_fused_native_layer_norm"))
    b.click_on("#kernels .row", n)
    panes = b.run("[...document.querySelectorAll('.drawer .pane')].map(e => e.innerText)")
    assert len(panes) == 3 and "self.fc(self.norm(x)).relu()" in panes[0] and "native_layer_norm.default" in panes[1] and "sum[i2]" in panes[1]
    assert "parallel(i0)" in panes[2] and "float *p" in panes[2]
    assert b.run("document.querySelectorAll('#kernels .row.picked').length") == 1
    assert b.run("document.querySelectorAll('#limits circle.picked').length") == 2
    assert b.run("document.querySelector('#fusion .tabs .on').innerText").startswith("forward")
    b.click_on(".drawer header button[aria-label=close]")
    assert b.run("document.querySelector('.drawer').hidden")


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js to run the function in")
def test_a_graph_that_is_too_wide_opens_with_no_box_cut_at_its_left():
    """Rows of boxes of 190 by turns of 40; the window shows the middle one and nothing beside the graph, also where every place cuts some box."""
    text = (Path(html.__file__).parent / "page/graph.js").read_text()
    function = text[text.index("function leftmost("):text.index("const FONT")]
    rows = lambda shift: [{"x": 230 * i + shift * row, "w": 190} for row in range(3) for i in range(9)]
    cases = [(rows(shift), across) for shift in (0, 15, 60) for across in (400, 700, 1300)] + [([{"x": 0, "w": 5000}], 400)]
    graphs = [{"boxes": b, "across": a, "extent": {"x": 0, "w": max(x["x"] + x["w"] for x in b)}} for b, a in cases]
    script = f"{function}; console.log(JSON.stringify({json.dumps(graphs)}.map(g => leftmost(g.boxes, g.extent, g.across))))"
    lefts = json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True).stdout)
    for (boxes, across), left, graph in zip(cases, lefts, graphs):
        middle = sorted(b["x"] + b["w"] / 2 for b in boxes)[len(boxes) // 2]
        assert left <= middle <= left + across and 0 <= left <= graph["extent"]["w"]
        clean = [b["x"] for b in boxes if not any(o["x"] < b["x"] < o["x"] + o["w"] for o in boxes) and middle - across < b["x"] <= middle]
        assert not clean or not any(b["x"] < left < b["x"] + b["w"] for b in boxes)


@needs_browser
def test_a_click_into_the_graph_selects_a_kernel_and_the_wheel_zooms(shown):
    b = shown(samples.profile(60))
    b.run("document.getElementById('fusion').scrollIntoView({behavior: 'instant'})")
    b.settle()
    place = f"(() => {{ const r = document.querySelectorAll('{BOARD}')[1].getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; }})()"
    x, y, w, t = b.run(place)
    for down in range(20, int(t) - 20, 10):
        b.click(x + w / 2, y + down)
        if not b.run("document.querySelector('.drawer').hidden"):
            break
    name = b.run("document.querySelector('.drawer .name').innerText")
    assert name.startswith(("poi_fused", "mm.default"))
    b.run("document.getElementById('fusion').scrollIntoView({behavior: 'instant'})")
    b.settle()
    before = b.run(f"document.querySelectorAll('{BOARD}')[1].toDataURL()")
    x, y, *_ = b.run(place)
    b.wheel(x + 60, y + 60, -300)
    assert b.run(f"document.querySelectorAll('{BOARD}')[1].toDataURL()") != before


@needs_browser
def test_tables_sort_and_filter(shown):
    data = samples.profile(300)
    b = shown(data)
    names = "[...document.querySelectorAll('#kernels .row .two > div:first-child')].map(e => e.innerText)"
    b.click_on("#kernels .th button", 0)
    assert b.run(names)[0] == min(r["name"] for r in data["rows"]) + "torch"
    b.run("(() => { const e = document.querySelector('#kernels .search'); e.value = 'mul_17 backward'; e.dispatchEvent(new Event('input')); })()")
    assert set(b.run(names)) == {r["name"] for r in data["rows"] if "mul_17" in r["name"] and r["phase"] == "backward"}


@needs_browser
def test_any_text_is_text_in_a_browser(shown):
    b = shown(samples.profile(20, samples.NASTY))
    for n in range(3):
        b.click_on("#kernels .row", n)
    assert b.run("document.title") not in ("broken", "1") and b.run("document.querySelectorAll('img').length") == 0
    assert "<img src=x" in b.run("document.querySelector('.drawer').innerText")


@needs_browser
@pytest.mark.parametrize("fn, x", [(lambda x: x + 1, torch.empty(0, 4)), (lambda x: x, torch.ones(2)), (lambda x: x.view(2, 8).t(), torch.ones(16)),
                                   (lambda x: (x * 2).abs(), torch.ones(4, dtype=torch.complex64))], ids=["empty", "nothing", "views", "complex"])
def test_programs_with_little_to_show(shown, monkeypatch, fn, x):
    torch._dynamo.reset()
    monkeypatch.setattr(profiling, "peaks", lambda device: PEAKS)
    b = shown(tokamak.profile(fn, x, seconds=0.0).data())
    assert b.run("document.querySelector('#summary .big').innerText").endswith("×") and "NaN" not in b.run("document.body.innerText")


@needs_browser
@pytest.mark.parametrize("others", [0.0, 0.4])
def test_peaks_that_are_too_low_are_said_to_be(shown, others):
    data = samples.profile(20)
    text = shown({**data, "peaks": {**data["peaks"], "others": others}}).run("document.querySelector('#how').textContent")
    assert ("while other work took 40% of the cores" in text) == (others > 0)


@needs_browser
def test_what_to_do_first_and_what_is_to_be_said_of_the_steps_are_shown(shown):
    data = samples.profile(10)
    data.update(next="mend it", step="a step: all of it", notes=["other work took 80% of the cores"])
    text = shown(data).run("document.body.innerText")
    assert "next: mend it" in text and "a step: all of it" in text and "\nother work took 80%" in text


@needs_browser
def test_opening_a_report_is_measured_by_a_command(capsys, tmp_path):
    assert page.main(["--kernels", "20", "--times", "1", "--screenshot", str(tmp_path / "seen.png")]) == 0
    assert capsys.readouterr().out.startswith("20 kernels: made in ") and (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")


@needs_browser
def test_many_kernels_open_at_once(shown):
    b = shown(samples.profile(5000))
    assert b.run("document.querySelectorAll('#kernels .row').length") < 60
    assert b.run("document.querySelector('#kernels .search + .muted').innerText") == "5,000 rows"
    b.run("document.getElementById('fusion').scrollIntoView({behavior: 'instant'})")
    b.settle()
    assert painted(b, BOARD) > 8
    b.click_on("#kernels .row", 3)
    assert not b.run("document.querySelector('.drawer').hidden")
