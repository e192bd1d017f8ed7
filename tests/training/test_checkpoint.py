import json
import os

import pytest
import torch

from graphrl.errors import CheckpointError
from graphrl.training.checkpoint import check_writable, load_checkpoint, save_checkpoint

TENSORS = {
    "weight": torch.randn(3, 4, dtype=torch.float64),
    "step": torch.tensor(7, dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 2),
}


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path, TENSORS, {"batches": 3, "rates": [0.1, 1e-8]})
    return tmp_path


def tensor_file(folder):
    (path,) = folder.glob("state-*.safetensors")
    return path


def test_comes_back_bit_for_bit(saved):
    tensors, data = load_checkpoint(saved)
    assert data == {"batches": 3, "rates": [0.1, 1e-8]}
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)


def test_tensors_that_share_memory_are_saved(tmp_path):
    base = torch.arange(6.0)
    save_checkpoint(tmp_path, {"a": base, "b": base, "c": base[::2]}, {})
    tensors, _ = load_checkpoint(tmp_path)
    assert torch.equal(tensors["b"], base) and torch.equal(tensors["c"], base[::2])


def test_a_new_checkpoint_replaces_the_old_one(saved):
    save_checkpoint(saved, {"weight": torch.ones(2)}, {"batches": 4})
    tensors, data = load_checkpoint(saved)
    assert data == {"batches": 4} and list(tensors) == ["weight"]
    assert sorted(p.name for p in saved.iterdir()) == sorted(["state.json", tensor_file(saved).name])


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_crash_while_saving_leaves_the_old_checkpoint(saved, monkeypatch, fails_at):
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) > fails_at:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(saved, {"weight": torch.ones(2)}, {"batches": 4})
    monkeypatch.undo()
    assert load_checkpoint(saved)[1]["batches"] == 3
    assert not [p for p in saved.iterdir() if p.name.startswith(".")]
    save_checkpoint(saved, {"weight": torch.ones(2)}, {"batches": 5})
    assert load_checkpoint(saved)[1]["batches"] == 5


@pytest.mark.parametrize("place", [0, 9, -1])
def test_a_flipped_bit_in_the_tensors_is_refused(saved, place):
    path = tensor_file(saved)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(saved)


def test_truncated_tensors_are_refused(saved):
    path = tensor_file(saved)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(saved)


def test_missing_tensors_are_refused(saved):
    tensor_file(saved).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_checkpoint(saved)


def test_an_edited_number_is_refused(saved):
    path = saved / "state.json"
    path.write_text(path.read_text().replace('"batches": 3', '"batches": 4'))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', '{"a": 1}', '{"sha256": "0", "format": "other"}'])
def test_a_foreign_index_is_refused(saved, text):
    (saved / "state.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_checkpoint(saved)


def test_another_version_says_so(saved):
    path = saved / "state.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        load_checkpoint(saved)


def test_an_empty_folder_says_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*state\.json"):
        load_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        check_writable(tmp_path / "file" / "run")


def test_the_probe_leaves_nothing(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())
