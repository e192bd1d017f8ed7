import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.cli import main
from graphrl.compiler.drawing import draw


def graph():
    return KeyedGraph(
        (nn.Linear(3, 2), ["x"], ["h"]),
        (lambda h: h.tanh(), ["h"], ["h"]),  # overwrites h
        (lambda h, x: h.sum(-1, keepdim=True) + x, ["h", "x"], ["y"]),
        (lambda h: h < h.mean(), ["h"], [("deep", "<flag>")]),
    )


def rows():
    return TensorDict(x=torch.ones(4, 3), batch_size=[4])


class Checked(HTMLParser):
    """Tags in the order they open; every tag must close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_drawing_has_each_version_of_a_key_with_its_shape():
    drawing = draw(graph(), grl.trace(graph(), rows()).inputs)
    names = [name for name, _ in drawing.boxes]
    assert names[:3] == ["x", "Linear", "<lambda>"] and names[-3:] == ["h", "y", "deep/<flag>"]
    arrows = {(names[a.source], names[a.target], a.label) for a in drawing.arrows}
    assert ("x", "Linear", "x f32[4, 3]") in arrows and ("Linear", "<lambda>", "h f32[4, 2]") in arrows
    assert ("<lambda>", "deep/<flag>", "deep/<flag> bool[4, 2]") in arrows
    assert drawing.to_mermaid().startswith("flowchart LR") and '"y f32[4, 3]"' in drawing.to_mermaid()


def test_drawing_changes_nothing():
    normal = KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"]), (torch.randn_like, ["y"], ["z"]))
    before = torch.get_rng_state()
    draw(normal, grl.trace(normal, rows()).inputs)
    assert normal[0].module.num_batches_tracked == 0 and torch.equal(before, torch.get_rng_state())


def test_boxes_of_a_drawing_do_not_overlap():
    svg = draw(graph(), grl.trace(graph(), rows()).inputs).to_svg()
    boxes = [
        tuple(map(float, found)) for found in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', svg)
    ]
    assert len(boxes) == len(draw(graph()).boxes)
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in boxes)


def test_the_page_stands_alone_and_shows_what_passes_changed(tmp_path):
    twice = KeyedGraph((lambda x: x.tanh() + x.tanh(), ["x"], ["y"]))
    explanation = grl.explain(grl.compile(twice, rows(), backend="eager"))
    target = explanation.write_html(tmp_path / "page.html")
    text = target.read_text()
    checked = Checked(text)
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in checked.tags)
    assert not any(
        value.startswith(("http", "//")) for _, a in checked.tags for n, value in a.items() if n in ("href", "src")
    )
    words = "".join(checked.words)
    for part in (
        "merge_common_subexpressions",
        "1 program",
        "error ",
        "x f32[4, 3]",
        "torch.ops.aten.tanh",
        "cpu",
        "def ",
    ):
        assert part in words
    gone = re.findall(r'class="gone">- (.*?)</span>', text)
    assert any("tanh_1 = torch.ops.aten.tanh" in line for line in gone)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_pages_of_updates_and_of_differentiable_programs(tmp_path):
    network = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(td):
        loss = network(td["x"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, rows(), backend="eager")
    fast = grl.compile(graph().select(out_keys=["y"]), backend="eager")
    fast(rows())
    for thing in (update, fast, grl.trace(graph(), rows())):
        Checked(grl.explain(thing).write_html(tmp_path / "page.html").read_text())
    with pytest.raises(FileNotFoundError):
        grl.explain(update).write_html(tmp_path / "none" / "page.html")


def test_the_command_writes_the_example(tmp_path, capsys):
    page = tmp_path / "actor.html"
    arguments = ["explain", "examples/follow_one_actor.py:actor"]
    assert main([*arguments, "--example", "batch", "--backend", "eager", "--html", str(page)]) == 0
    assert "observation f32[1, 3]" in page.read_text() and str(page) in capsys.readouterr().out
    assert main([*arguments, "--html", str(page)]) == 2 and "--example" in capsys.readouterr().err


def test_assumptions_refusals_and_the_cache_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", str(tmp_path))
    fast = grl.compile(KeyedGraph((torch.sin, ["x"], ["y"])), rows().double(), backend="native")
    (entry,) = fast.entries()
    key = next(iter(fast._entries))
    fast._entries[key] = replace(entry, program=replace(entry.program, assumptions=("n > 3 [as traced]",)))
    text = str(grl.explain(fast))
    assert (
        "assumes    n > 3 [as traced]" in text and "refused by native:" in text and "disk cache miss, now kept" in text
    )
    assert "threads    1 thread" in text
