"""Folders of results: one command at a time, whole or absent, bound to their request."""

import hashlib
import multiprocessing
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from fairseq_posenc import folders
from fairseq_posenc.errors import RunError, UserError

REQUEST = {"text": "a" * 64, "seeds": [1, 2], "model": {"layers": 2}}


def test_a_checksum_is_that_of_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_BLOCK", 2)
    (tmp_path / "file").write_bytes(b"abcde")
    assert folders.checksum(tmp_path / "file") == hashlib.sha256(b"abcde").hexdigest()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is read twice: name a file"):
        folders.checksum(tmp_path / "pipe")


def test_a_second_command_is_refused(tmp_path):
    out, fault = tmp_path / "out", r"out: process \d+ on .* is running there"
    for _ in range(2):  # the first one released it
        with folders.lock_folder(out), pytest.raises(UserError, match=fault), ExitStack() as locked:
            locked.enter_context(folders.lock_folder(out))


def test_a_forked_process_leaves_the_lock_to_its_parent(tmp_path):
    with ExitStack() as locked:
        locked.enter_context(folders.lock_folder(tmp_path))
        process = multiprocessing.get_context("fork").Process(target=locked.close)
        process.start()
        process.join()
        assert process.exitcode == 0
        with pytest.raises(UserError, match="is running there"), folders.lock_folder(tmp_path):
            pass


def test_a_link_and_a_folder_that_cannot_be_made_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    faults = {"link": "is a link to", "file/out": "Not a directory", f"p/{256 * 'q'}": "too long"}
    for name, reason in faults.items():
        with pytest.raises(UserError, match=reason), folders.lock_folder(tmp_path / name):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"link", "file"}


def test_a_folder_is_bound_to_a_request_by_the_first_thing_that_is_finished(tmp_path):
    with folders.lock_folder(tmp_path):
        folders.claim(tmp_path, REQUEST)
        (tmp_path / "data.partial").mkdir()
        folders.claim(tmp_path, {**REQUEST, "seeds": [3]})  # nothing was finished
        (tmp_path / "data").mkdir()
        folders.claim(tmp_path, {**REQUEST, "seeds": (3,)})
        with pytest.raises(UserError, match=r"other text; other seeds: \[3\], not \[1, 2\]; name"):
            folders.claim(tmp_path, {**REQUEST, "text": "b" * 64})
        with pytest.raises(UserError, match="other model, layers: 2, not 3"):
            folders.claim(tmp_path, {**REQUEST, "seeds": [3], "model": {"layers": 3}})
        for has_results in (True, False):
            with pytest.raises(UserError, match="was made by another command or version; name"):
                folders.claim(tmp_path, {"text": "a" * 64, "options": {}}, has_results)
        folders.claim(tmp_path, {**REQUEST, "text": "b" * 64}, has_results=False)
        assert not (tmp_path / "data").exists()


def test_a_folder_of_other_files_is_not_claimed(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds other files \(notes.txt\)"):
        folders.claim(tmp_path, REQUEST)


def test_a_whole_folder_appears_at_the_end_with_its_request(tmp_path):
    out = tmp_path / "out"
    assert not folders.is_made(out, REQUEST)
    with folders.whole_folder(out, REQUEST) as partial:
        (partial / "part").write_text("1")
        assert not out.exists()
    assert {path.name for path in out.iterdir()} == {"part", folders.REQUEST}
    assert folders.is_made(out, REQUEST)
    with pytest.raises(UserError, match="other seeds"):
        folders.is_made(out, {**REQUEST, "seeds": [1]})
    (tmp_path / "other.partial/mine").mkdir(parents=True)
    faults = {"out": "not empty", "out/..": "name a new folder", "other": "not made by this"}
    for name, fault in faults.items():
        with pytest.raises(UserError, match=fault), folders.whole_folder(tmp_path / name, REQUEST):
            pass
    (tmp_path / "new").mkdir()
    with folders.whole_folder(tmp_path / "new") as partial:
        (partial / "part").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["part"]
    with pytest.raises(UserError, match="not made by this command"):
        folders.is_made(tmp_path / "new", REQUEST)


def test_the_same_request_finds_the_parts_of_a_killed_command_and_another_is_refused(tmp_path):
    def fill_and_die() -> None:
        with folders.whole_folder(tmp_path / "out", REQUEST) as partial:
            (partial / "part").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=fill_and_die)
    process.start()
    process.join()
    other = folders.whole_folder(tmp_path / "out", {**REQUEST, "seeds": [9]})
    with pytest.raises(UserError, match=r"partial: was made with other seeds: \[1, 2\], no"), other:
        pass
    with folders.whole_folder(tmp_path / "out", REQUEST) as partial:
        assert (partial / "part").exists()


@pytest.mark.parametrize(
    ("request_", "error", "is_left"),
    [(REQUEST, RunError, True), (REQUEST, UserError, False), (None, KeyError, False)],
)
def test_what_cannot_be_continued_is_deleted(tmp_path, request_, error, is_left):
    def fail(name, make=Path.mkdir):
        make(tmp_path / name)
        raise error("stopped")

    with pytest.raises(error), folders.whole_folder(tmp_path / "new/folder/out", request_):
        fail("new/folder/out.partial/part")
    assert (tmp_path / "new/folder/out.partial").exists() == (tmp_path / "new").exists() == is_left
    with pytest.raises(error), folders.lock_folder(tmp_path / "p/q/r"):
        fail("p/others")
    with pytest.raises(error), folders.lock_folder(tmp_path / "p/q"):
        fail(f"p/q/{folders.REQUEST}", Path.touch)
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["others"]


def test_a_result_is_found_by_its_request_only(tmp_path):
    path = tmp_path / "result.json"
    assert folders.read_result(path, REQUEST) is None
    folders.write_result(path, REQUEST, {"accuracy": 0.5})
    assert folders.read_result(path, REQUEST) == {"accuracy": 0.5}
    with pytest.raises(UserError, match=r"other seeds: \[1, 2\], not \[1\]"):
        folders.read_result(path, {**REQUEST, "seeds": [1]})
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        folders.read_result(path, REQUEST)
