"""Files and folders are whole or absent."""

from pathlib import Path

import pytest

from tost_lm.files import folder_aside, publish_folder, read_rows, write_rows, write_whole


def test_rows_come_back_whatever_their_text(tmp_path: Path):
    rows = [{"text": 'a\u2028b\x85c\r\n"é\U0001f600'}, {"text": ""}]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "unfini')
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert read_rows(tmp_path / "none.jsonl") == []


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path):
    write_whole(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "f", "\ud800")
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_replaces_an_older_one_whole(tmp_path: Path):
    for content in ("one", "two"):
        aside = folder_aside(tmp_path / "folder")
        (aside / content).touch()
        publish_folder(aside, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]
    (folder_aside(tmp_path / "folder") / "left over").touch()
    assert list(folder_aside(tmp_path / "folder").iterdir()) == []
