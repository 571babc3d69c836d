"""What all jobs run on: files are whole or absent, and programs end with their run and a line."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_posenc import files, folders
from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading import checkpoints
from fairseq_posenc.workbench.running import options, programs, progress
from fairseq_posenc.workbench.running.devices import choose_device, choose_dtype, count_cores, place
from tests.helpers.waiting import is_running, wait_until


def hold_file(path: Path) -> subprocess.Popen[str]:
    """Start a process that is writing a file and does not come to its end."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from fairseq_posenc import files\n"
        "with files.written_whole(Path(sys.argv[1])) as new:\n"
        "    new.write_text('half'); print(new.name, flush=True); time.sleep(60)"
    )
    return subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)


class TestFiles:
    def test_what_else_lies_there_stays(self, tmp_path):
        for name in ("a.new", "a.partial", "a.posenc-1234"):
            (tmp_path / name).write_text("mine")
        files.write_whole(tmp_path / "a", "whole")
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert found.pop("a") == "whole"
        assert list(found.values()) == ["mine"] * 3

    def test_a_link_is_replaced_and_its_target_stays(self, tmp_path):
        (tmp_path / "elsewhere").write_text("mine")
        (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
        files.write_whole(tmp_path / "a", "whole")
        assert not (tmp_path / "a").is_symlink()
        assert (tmp_path / "a").read_text() == "whole"
        assert (tmp_path / "elsewhere").read_text() == "mine"

    @pytest.mark.parametrize("way", ["itself", "by a link"])
    @pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
    def test_a_place_that_is_none_for_a_file(self, kind, way, tmp_path):
        place = Path("/dev/null") if kind == "device" else tmp_path / "a"
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "folder":
            place.mkdir()
        with socket.socket(socket.AF_UNIX) as opened:
            if kind == "socket":
                opened.bind(str(place))
            if way == "by a link":
                (tmp_path / "link").symlink_to(place)
                place = tmp_path / "link"
            before = place.lstat()[:7]  # but for times: following a link is an access
            with pytest.raises(UserError, match=rf"{place}: .*{kind}"):
                files.write_whole(place, "whole")
        assert place.lstat()[:7] == before

    def test_links_in_the_folder_of_devices_are_not_replaced(self, tmp_path):
        with open(tmp_path / "out", "w", encoding="utf-8") as output:
            code = "import pathlib; from fairseq_posenc.files import write_whole; "
            code += "write_whole(pathlib.Path('/dev/stdout'), 'whole')"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
        assert b"UserError: /dev/stdout: name a file: this is a device" in done.stderr
        assert Path("/dev/stdout").is_symlink()

    def test_a_file_that_cannot_be_written_has_the_name_that_the_user_gave(self, tmp_path):
        def fill_disk() -> None:
            with files.written_whole(tmp_path / "a") as new:
                new.write_text("half")
                with open("/dev/full", "wb", buffering=0) as full:
                    full.write(b"whole")

        with pytest.raises(OSError, match="No space left on device") as caught:
            fill_disk()
        assert str(find_message(caught.value)).startswith(f"{tmp_path / 'a'} could not be written")
        assert os.listdir(tmp_path) == []

    def test_permissions_are_those_of_any_new_file_or_of_the_old_one(self, tmp_path):
        before = os.umask(0o027)
        try:
            files.write_whole(tmp_path / "a", "")
        finally:
            os.umask(before)
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
        (tmp_path / "a").chmod(0o604)
        files.write_whole(tmp_path / "a", "")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o604

    def test_two_writers_of_one_file_do_not_mix(self, tmp_path):
        path = tmp_path / "a"
        with files.written_whole(path) as first, files.written_whole(path) as second:
            first.write_text("first")
            second.write_text("second")
        assert path.read_text() == "first"  # which was the last to end
        assert os.listdir(tmp_path) == ["a"]

    def test_what_a_killed_writer_left_is_deleted_and_a_living_one_goes_on(self, tmp_path):
        living, killed = (hold_file(tmp_path / "a") for _ in range(2))
        try:
            kept, left = living.stdout.readline().strip(), killed.stdout.readline().strip()
            killed.kill()
            killed.wait()
            assert set(os.listdir(tmp_path)) == {kept, left}
            files.write_whole(tmp_path / "a", "whole")
            assert set(os.listdir(tmp_path)) == {kept, "a"}
        finally:
            living.kill()
            living.wait()


class TestOptions:
    @staticmethod
    def parse(*words: str) -> argparse.Namespace:
        parser = options.Parser(prog="ours")
        options.add_seeds(parser, "1,2,3")
        options.add_count(parser, "--jobs", "runs at a time")
        parser.add_argument("--lengths", type=options.positive_ints, default="8,16")
        options.add_precision(parser)
        return parser.parse_args(words)

    def test_values(self):
        found = self.parse("--seeds", "3, 1", "--lengths", f"{2**33}, 4", "--jobs", "2")
        assert (found.seeds, found.lengths, found.jobs) == ((1, 3), (4, 2**33), 2)
        assert (self.parse().seeds, self.parse().lengths) == ((1, 2, 3), (8, 16))

    @pytest.mark.parametrize(
        ("words", "printed"),
        [
            ("--seeds 1,01", "argument --seeds: 1,01: a number occurs twice"),
            ("--seeds 4294967296", "argument --seeds: must be at most 4,294,967,295, not '42949"),
            (f"--jobs {10**4000}", "argument --jobs: must be at most 1,000,000,000,000, not '1"),
            ("--jobs 0", "argument --jobs: must be a whole number of at least 1, not '0'"),
            ("--lengths 4,x", "argument --lengths: must be a whole number of at least 1, not 'x'"),
            ("--fp16 --bf16", "argument --bf16: not allowed with argument --fp16"),
            ("--job 2 more", "unrecognized arguments: more"),
        ],
    )
    def test_a_mistake_is_a_line(self, words, printed):
        with pytest.raises(UserError) as refused:
            self.parse(*words.split())
        assert str(refused.value).startswith(printed)
        assert str(refused.value).endswith(" (see ours --help)")

    def test_names_may_be_specs(self):
        found = options.parse_named(["m4(max_distance=8)=a=b", "n(a=(1))=c", " .x.md = y"], "N=F")
        assert found == {"m4(max_distance=8)": "a=b", "n(a=(1))": "c", ".x.md": "y"}

    @pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), (None, torch.float32)])
    def test_a_model_is_placed_as_asked_for(self, name, dtype):
        model = place(torch.nn.Linear(2, 2).double(), choose_dtype(False, name == "bf16"))
        assert model.weight.dtype == dtype
        assert not model.training


def test_without_a_terminal_there_are_lines_but_no_bar(capsys):
    with progress.bar(total=10, unit=" tokens") as shown:
        shown.update(5)
        progress.say("half of it")
    assert capsys.readouterr() == ("", "half of it\n")


def test_a_folder_has_the_updates_of_its_last_checkpoint_unless_that_is_torn(tmp_path):
    """A kill while fairseq copies a checkpoint leaves a newer best one, or half of the last."""
    assert checkpoints.updates_done(tmp_path) == 0
    for name, updates in (("_1_20", 20), ("_last", 30), ("_best", 40)):
        state = {"optimizer_history": [{"num_updates": updates}]}
        torch.save(state, tmp_path / f"checkpoint{name}.pt")
    assert checkpoints.updates_done(tmp_path) == 30
    os.truncate(tmp_path / "checkpoint_last.pt", 500)
    assert checkpoints.updates_done(tmp_path) == 0


class TestDevices:
    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has affinities")
    def test_cores_that_others_keep_do_not_count(self):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, [min(before)])
        try:
            assert count_cores() == 1
        finally:
            os.sched_setaffinity(0, before)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there_is_shown(self):
        assert choose_device() == "cpu"
        with pytest.raises(UserError, match="--fp16 is for GPUs, and torch finds none here"):
            choose_dtype(fp16=True, bf16=False)


HYDRA = "Error executing job with overrides: ['a=1']\n"


class TestPrograms:
    @pytest.fixture
    def lock(self, tmp_path: Path):
        with folders.lock_folder(tmp_path / "out") as lock:
            yield lock

    @staticmethod
    def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        path = tmp_path / "fairseq-try"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def test_failure_shows_the_end_of_the_log_and_where_it_is(self, tmp_path, monkeypatch, lock):
        self.script(tmp_path, monkeypatch, "seq 100; echo went wrong >&2; exit 3")
        log = tmp_path / "log"
        with pytest.raises(UserError, match="fairseq-try failed with exit status 3") as caught:
            programs.run_logged(["fairseq-try"], log, lock)
        assert str(log) in str(caught.value)
        assert "went wrong" in str(caught.value)
        assert "\n  10\n" not in str(caught.value)

    def test_failure_that_a_program_explained_is_one_line(self, tmp_path, monkeypatch, lock):
        self.script(tmp_path, monkeypatch, "echo usage; echo fairseq-train: error: no; exit 2")
        with pytest.raises(UserError) as caught:
            programs.run_logged(["fairseq-try"], tmp_path / "log", lock)
        assert str(caught.value) == f"fairseq-try: no (its log: {tmp_path / 'log'})"
        self.script(tmp_path, monkeypatch, "kill -9 $$")  # an earlier try's words are not its error
        with pytest.raises(UserError, match="was ended by signal 9"):
            programs.run_logged(["fairseq-try"], tmp_path / "log", lock)

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            ("fairseq-posenc: error: too wide", "too wide"),
            ("first\nfairseq-train: error: no\nfairseq-train: error: too wide\n", "too wide"),
            (f"{HYDRA}too wide\n\nSet the environment variable HYDRA_FULL_ERROR=1", "too wide"),
            (f"{HYDRA}Traceback (most recent call last):\nKeyError: 1", None),
            (f"{HYDRA}Traceback (most):\n\nfairseq_posenc.errors.UserError: too wide", "too wide"),
            ("it said fairseq-train: error: in the middle", None),
        ],
    )
    def test_mistakes_are_found_in_what_a_program_says(self, output, message):
        assert programs.find_error_line(output) == message

    def test_interruption_ends_the_program(self, tmp_path, monkeypatch, lock):
        self.script(tmp_path, monkeypatch, "echo $$; sleep 60")
        seen = []

        def stop(line: str) -> None:
            seen.append(int(line))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            programs.run_logged(["fairseq-try"], tmp_path / "log", lock, stop)
        with pytest.raises(ProcessLookupError):
            os.kill(seen[0], 0)

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone ends orphans")
    def test_a_program_ends_with_a_run_that_was_killed(self, tmp_path):
        made = tmp_path / "made"
        forever = f"import os, time; print(os.getpid(), file=open({str(made)!r}, 'w'), flush=True)"
        forever += "; time.sleep(600)"
        run = "import pathlib, sys; from fairseq_posenc.workbench.running import programs; "
        run += "programs.run_logged(['python', '-c', sys.argv[1]], pathlib.Path(sys.argv[2]), 0)"
        process = subprocess.Popen([sys.executable, "-c", run, forever, str(tmp_path / "log")])
        wait_until(lambda: made.exists() and made.read_text(), process)
        process.kill()
        process.wait()
        wait_until(lambda: not is_running(int(made.read_text())))

    def test_missing_command(self):
        with pytest.raises(UserError, match="fairseq-nonsense"):
            programs.find_command("fairseq-nonsense")
