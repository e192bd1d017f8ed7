"""The code in README.md runs as it stands there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture
def namespace() -> dict:
    return {}


def test_thirty_lines_train_and_the_policy_exports(namespace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, _, export = _blocks()
    assert len([line for line in train.splitlines() if line.strip()]) <= 36
    exec(train.replace("131_072", "4096"), namespace)
    assert set(namespace["metrics"]) == {"objective", "critic"}
    exec(export, namespace)
    assert (tmp_path / "policy_bundle" / "c" / "policy.c").is_file()


def test_the_graph_of_the_readme_is_drawn_as_shown(namespace, capsys):
    _, graph, _ = _blocks()
    exec("import torch\nimport graphrl as grl\n" + graph, namespace)
    drawn = capsys.readouterr().out.strip()
    assert drawn in README.read_text()
    assert namespace["actor_only"].out_keys == ["action"]
