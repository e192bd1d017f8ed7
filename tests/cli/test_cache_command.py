import pytest
import torch
from tensordict import TensorDict

import graphrl as grl
from graphrl.cli import main
from graphrl.compiler import cache


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", str(tmp_path))
    graph = grl.KeyedGraph((torch.tanh, ["angle"], ["torque"]))
    program = grl.trace(graph, TensorDict(angle=torch.zeros(2, 3), batch_size=[2]))
    key = cache.cache_key(program, "native", None)
    assert cache.store(key, {"program.so": bytes(5000)}, 1.25)
    return key.digest


def test_list(kept, capsys):
    assert main(["cache", "list"]) == 0
    text = capsys.readouterr().out
    for part in (kept[:12], "native", "angle: f32[2, 3]", "kB", "0 s", "1.2", "1 program(s)"):
        assert part in text
    (cache.programs_dir() / kept / "record.json").write_text("{")
    assert main(["cache", "list"]) == 0 and "broken" in capsys.readouterr().out


def test_clear(kept, capsys):
    assert main(["cache", "clear", "--older-than", "1"]) == 0
    assert "0 program(s) deleted" in capsys.readouterr().out
    assert main(["cache", "clear", "nothing"]) == 2
    assert "no entry 'nothing'" in capsys.readouterr().err
    assert main(["cache", "clear", kept[:8]]) == 0
    assert "1 program(s) deleted" in capsys.readouterr().out and list(cache.entries()) == []
