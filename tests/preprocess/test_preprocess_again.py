"""Calls after one that failed or was killed: their data are those of a call that came first."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from tests.helpers.commands import script
from tests.helpers.glue_files import write_task
from tests.helpers.products import WHOLE, product_of, some_of
from tests.helpers.programs import true_start
from tests.helpers.waiting import wait_until

PROGRAMS = Path(__file__).parents[2] / "preprocess"
WORDS = ["red", "blue", "green", "a", "bird", "sees", "the", "old", "tree", "and", "sings", "it"]
KILLED = 9
FACTS = [("the old tree sings of a red bird", "which bird sings", "red bird")] * 3


def start(name: str, *words: object) -> None:
    """Run a program as a script, in this process."""
    before = sys.argv
    sys.argv = [str(PROGRAMS / f"{name}.py"), *map(str, words)]
    try:
        runpy.run_path(sys.argv[0])["main"]()
    finally:
        sys.argv = before


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name; a record of paths is compared without them."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != "manifest.json"}


def plan(folder: Path) -> Any:
    manifest = json.loads((folder / "manifest.json").read_text())
    return manifest.get("plan") or manifest["request"]


def write_dictionary(path: Path, words: Sequence[str]) -> Path:
    path.write_text("".join(f"{word} {number}\n" for number, word in enumerate(words, start=1)))
    return path


def write_pieces(folder: Path, size: int) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 30),
        model_prefix=str(folder / f"pieces{size}"),
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / f"pieces{size}.model"


def write_squad(path: Path, marks: str = "?") -> Path:
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": f"q{number}",
                    "question": question + marks,
                    "answers": [{"text": answer, "answer_start": context.index(answer)}],
                }
            ],
        }
        for number, (context, question, answer) in enumerate(FACTS)
    ]
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write texts, dictionaries, sentencepieces and the files of tasks, good and other ones."""
    text = "".join(f"{' '.join(WORDS[n % 5 :])}\n" for n in range(40))
    (tmp_path / "text").write_text(text)
    (tmp_path / "other").write_text(text.replace("bird", "tree"))
    (tmp_path / "broken").write_bytes(text.encode() + b"a \xff b\n")
    write_dictionary(tmp_path / "good.txt", WORDS)
    write_dictionary(tmp_path / "wrong.txt", WORDS[::-1])
    write_squad(tmp_path / "train.json")
    write_squad(tmp_path / "dev.json", "??")
    return tmp_path


TEXT = ["--workers", 1, "--train", "text", "--out", "n"]
Call = tuple[str, list[object]]


def words(call: Call, place: Path, out: str = "n") -> list[object]:
    """Return the words of a call: names of files as paths, ``n`` as the folder to make."""
    names = {"n", *(path.name for path in place.iterdir())}
    files = {name: place / (out if name == "n" else name) for name in names}
    return [files.get(str(word), word) for word in call[1]]


FAILURES: dict[str, tuple[Call, Call]] = {
    "another dictionary, after a broken text": (
        ("plain_text", [*TEXT, "--valid", "broken", "--words", "--dict", "wrong.txt"]),
        ("plain_text", [*TEXT, "--valid", "other", "--words", "--dict", "good.txt"]),
    ),
    "another dictionary alone": (
        ("plain_text", [*TEXT, "--test", "broken", "--words", "--dict", "wrong.txt"]),
        ("plain_text", [*TEXT, "--words", "--dict", "good.txt"]),
    ),
    "a counted dictionary": (
        ("plain_text", [*TEXT, "--valid", "broken", "--words"]),
        ("plain_text", [*TEXT, "--valid", "other", "--words", "--min-count", 20]),
    ),
    "a given dictionary after a counted one": (
        ("plain_text", [*TEXT, "--valid", "broken", "--words"]),
        ("plain_text", [*TEXT, "--words", "--dict", "good.txt"]),
    ),
    "skipped lines": (
        ("plain_text", [*TEXT, "--valid", "broken", "--words"]),
        ("plain_text", [*TEXT, "--valid", "broken", "--words", "--invalid-lines", "skip"]),
    ),
    "characters": (
        ("chinese", [*TEXT, "--valid", "broken"]),
        ("chinese", [*TEXT, "--valid", "other", "--keep-spaces"]),
    ),
    "a mixture": (
        ("mix", ["--out", "n", "--workers", 1, "--corpus", "plain", "text", "size=200B",
                 "--corpus", "plain", "broken"]),
        ("mix", ["--out", "n", "--workers", 1, "--corpus", "plain", "text", "--files", 3]),
    ),
    "a mixture that wants too much": (
        ("mix", ["--out", "n", "--workers", 1, "--corpus", "plain", "text", "lines=4000"]),
        ("mix", ["--out", "n", "--workers", 1, "--corpus", "plain", "text", "hold-out=0"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_call_that_failed_does_not_stand_in_the_way_of_its_correction(place, case):
    failing, corrected = FAILURES[case]
    with pytest.raises(UserError):
        start(failing[0], *words(failing, place))
    assert not [path for path in place.iterdir() if path.name.startswith("n")]
    start(corrected[0], *words(corrected, place))
    start(corrected[0], *words(corrected, place, "first"))
    assert tree(place / "n") == tree(place / "first")
    assert plan(place / "n") == plan(place / "first")


def die_at(moment: int, place: Path, call: Call) -> bool:
    """Run a call in a process that dies before its change of a file of this number.

    Returns:
        Whether it died.
    """
    if (child := os.fork()) == 0:
        left = [moment]

        def watch(event: str, args: tuple[Any, ...]) -> None:
            name = str(args[0]) if args else ""
            writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
            if (writes or changes) and (str(place) in name or isinstance(args[0], int)):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)

        sys.addaudithook(watch)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            start(call[0], *words(call, place))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


KILLS: dict[str, tuple[Call, Call]] = {
    "given dictionary": (
        ("plain_text", [*TEXT, "--valid", "other", "--words", "--dict", "wrong.txt"]),
        ("plain_text", [*TEXT, "--words", "--dict", "good.txt"]),
    ),
    "counted dictionary": (
        ("plain_text", [*TEXT, "--words"]),
        ("plain_text", ["--workers", 1, "--train", "other", "--out", "n", "--words"]),
    ),
    "sentencepieces": (
        ("plain_text", [*TEXT, "--sentencepiece-model", "pieces30.model"]),
        ("plain_text", [*TEXT, "--sentencepiece-model", "pieces40.model"]),
    ),
    "mixture": (
        ("mix", ["--out", "n", "--workers", 1, "--files", 2, "--corpus", "plain", "text"]),
        ("mix", ["--out", "n", "--workers", 1, "--files", 1, "--corpus", "plain", "other"]),
    ),
    "squad": (
        ("squad", ["--train", "train.json", "--valid", "dev.json", "--out", "n",
                   "--sentencepiece-model", "pieces30.model", "--dict", "wrong.txt"]),
        ("squad", ["--train", "dev.json", "--valid", "train.json", "--out", "n",
                   "--sentencepiece-model", "pieces30.model", "--dict", "good.txt"]),
    ),
    "glue": (
        ("glue", ["glue_data", "--tasks", "RTE", "--out", "n",
                  "--sentencepiece-model", "pieces30.model"]),
        ("glue", ["glue_data", "--tasks", "RTE", "--out", "n", "--max-tokens", 9,
                  "--sentencepiece-model", "pieces40.model"]),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLS)
def test_killed_at_any_moment_another_call_makes_its_own_data_or_is_refused(place, case):
    if case in ("sentencepieces", "squad", "glue"):
        for size in (30, 40):
            write_pieces(place, size)
        write_task(place / "glue_data", "RTE", {"train": 9, "valid": 5, "test": 4})
    first, second = KILLS[case]
    start(second[0], *words(second, place, "first"))
    start(first[0], *words(first, place, "same"))
    outcomes = set()
    for moment in range(0, 200, 1 if WHOLE else 8):
        if not die_at(moment, place, first):
            break
        kept = place / "kept"
        if (place / "n.partial").exists():
            shutil.copytree(place / "n.partial", kept)
        try:
            start(second[0], *words(second, place))
        except UserError as error:
            outcomes.add(str(error).partition("was made with other")[1])
        else:
            outcomes.add("made")
            assert tree(place / "n") == tree(place / "first")
            shutil.rmtree(place / "n")
        for left in ("n", "n.partial"):
            shutil.rmtree(place / left, ignore_errors=True)
        if kept.exists():  # and the same call goes on
            kept.rename(place / "n.partial")
            start(first[0], *words(first, place))
            assert tree(place / "n") == tree(place / "same")
            shutil.rmtree(place / "n")
    assert moment > 5
    assert outcomes <= {"made", "was made with other"}
    assert "made" in outcomes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    ("program", "library"),
    product_of(
        some_of(["plain_text", "mix"], ["plain_text", "squad", "glue", "mix"]),
        ["_multiarray_umath", "libtorch_cpu"],
    ),
)
def test_ctrl_c_while_modules_are_imported_is_a_line(tmp_path, program, library):
    command = [str(script("fairseq-posenc")), "preprocess", program, "--out", str(tmp_path / "n")]
    with subprocess.Popen(
        command, env=true_start(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: library in maps.read_text())
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert (process.returncode, told) == (STOPPED, "fairseq-posenc: stopped\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_while_workers_are_started_is_not_lost():
    """In the callbacks of a fork Python prints a KeyboardInterrupt, and goes on."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(PROGRAMS)!r})
from binarize.pool import Pool
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    with Pool(2, len) as pool:
        print(list(pool.map([(0, b"a")])))
except KeyboardInterrupt:
    print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("stopped\n", "")
