"""Files come whole or not at all, and what was there before stays until then."""

import io

import pytest

from capsule_zoo.data.files import fetch, write_whole, written_whole


def test_what_breaks_off_leaves_the_old_file_and_no_litter(tmp_path):
    file = tmp_path / "deep" / "file"
    write_whole(file, b"old")
    with pytest.raises(KeyboardInterrupt), written_whole(file) as stream:
        stream.write(b"new")
        raise KeyboardInterrupt
    assert file.read_bytes() == b"old" and list(file.parent.iterdir()) == [file]
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"


def test_others_may_read_what_they_could_read_of_any_new_file(tmp_path):
    write_whole(tmp_path / "ours", b"1")
    (tmp_path / "plain").write_bytes(b"1")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_download_that_came_in_part_is_not_kept(tmp_path, monkeypatch):
    class Reply(io.BytesIO):
        headers = {"Content-Length": "10"}

    monkeypatch.setattr("capsule_zoo.data.files.urlopen", lambda *_, **__: Reply(b"short"))
    with pytest.raises(OSError, match="5 bytes of 10 came"):
        fetch("http://example.org/file", tmp_path / "file")
    assert not list(tmp_path.iterdir())
