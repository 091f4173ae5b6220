"""Files and folders are whole or absent."""

import math
from pathlib import Path

import pytest

from tost_lm.files import make_temp_folder, manifest_bytes, publish_folder, read_rows, write_atomically, write_rows


def test_rows_come_back_whatever_their_text(tmp_path: Path):
    rows = [{"text": 'a\u2028b\x85c\r\n"é\U0001f600'}, {"text": ""}]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "unfini')
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert read_rows(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, number: float):
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest_bytes({"deep": [{"number": number}]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_rows(tmp_path / "rows.jsonl", [{"a": 1.0}, {"a": number}])
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path):
    write_atomically(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "f", "\ud800")
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_replaces_an_older_one_whole(tmp_path: Path):
    for content in ("one", "two"):
        aside = make_temp_folder(tmp_path / "folder")
        (aside / content).touch()
        publish_folder(aside, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]
    (make_temp_folder(tmp_path / "folder") / "left over").touch()
    assert list(make_temp_folder(tmp_path / "folder").iterdir()) == []


def test_a_file_that_cannot_be_written_is_named_and_not_the_temporary_one():
    with pytest.raises(OSError, match=r"'/sys/report\.md'$"):
        write_atomically(Path("/sys/report.md"), "")
