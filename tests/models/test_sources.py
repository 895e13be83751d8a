"""What a user may name: a directory, an embedded checkpoint, a repository on the hub."""

import huggingface_hub
import pytest

from models import sources
from models.config import CheckpointError
from models.sources import embedded_names, resolve_source
from tests.models.tiny import M2, write


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route to host\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_source(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_source(tmp_path.name) == tmp_path


def test_an_embedded_name_is_found_in_the_package(tmp_path, monkeypatch):
    write(tmp_path / "tiny-model", M2)
    (tmp_path / "no-checkpoint").mkdir()
    monkeypatch.setattr(sources, "_embedded", lambda: tmp_path)
    assert embedded_names() == ("tiny-model",)
    assert resolve_source("tiny-model") == tmp_path / "tiny-model"


def test_a_hub_name_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_source("someone/model-4B.1") == tmp_path
    assert asked[0][0] == "someone/model-4B.1"
    assert "*.safetensors" in asked[0][1]


def test_a_hub_name_without_network_is_one_sentence(offline):
    with pytest.raises(CheckpointError) as problem:
        resolve_source("someone/model")
    assert "someone/model is no directory and could not be fetched" in str(problem.value)
    assert "(no route to host)" in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("name", ["/no/such/dir", "./no-such-dir", "a/b/c", ""])
def test_what_can_only_be_a_path_asks_no_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    if name == "":
        assert resolve_source(name) == tmp_path, "the empty path is the current directory"
        return
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        resolve_source(name)


def test_a_file_is_refused(tmp_path):
    file = write(tmp_path, M2) / "config.json"
    with pytest.raises(CheckpointError, match="config.json is a file; name the checkpoint's directory"):
        resolve_source(file)
