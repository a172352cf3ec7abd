"""The script that fetches emoji, without a network: what it picks, and what it says."""

import io
import json
import subprocess
import tarfile

import pytest

from tools import emoji


def test_things_of_the_categories_are_written(tmp_path):
    listing = [
        dict(short_name="cat", image="1.png", category="Animals & Nature", has_img_twitter=True),
        dict(short_name="flag", image="2.png", category="Flags", has_img_twitter=True),
        dict(short_name="axe", image="3.png", category="Objects", has_img_twitter=False),
    ]
    files = {
        "package/emoji.json": json.dumps(listing).encode(),
        "package/img/twitter/64/1.png": b"one",
        "package/img/twitter/64/2.png": b"two",
    }
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as package:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            package.addfile(entry, io.BytesIO(content))
    assert emoji.write_pictures(tmp_path / "package.tgz", tmp_path / "out") == 1
    assert (tmp_path / "out/cat.png").read_bytes() == b"one"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"cat.png", "SOURCE.txt"}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (FileNotFoundError(), "npm is not installed"),
        (subprocess.CompletedProcess([], 1, "", "npm error code EX\nmore"), r"npm error code EX\)"),
        (subprocess.CompletedProcess([], 0, "", ""), "connect to the network, or set npm's"),
    ],
)
def test_a_package_that_cannot_be_fetched_is_one_line(monkeypatch, tmp_path, failure, message):
    def run(*_, **__):
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=message) as refusal:
        emoji.main([str(tmp_path / "out")])
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine.png").touch()
    with pytest.raises(SystemExit, match="is not an empty folder; name a new one"):
        emoji.main([str(tmp_path)])
