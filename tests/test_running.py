"""What all jobs run on: stamps, locks, programs, progress."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.running import logs as curves
from fairseq_posenc.running import programs, progress, steps


class TestSteps:
    @staticmethod
    def run(folder: Path, inputs: dict, goal: int = 0, **options: bool) -> tuple[list[str], dict]:
        """Do a step that adds a line to a file; return whether it ran, and its facts."""
        step = steps.Step(folder, inputs, goal)
        ran = []

        def work() -> dict:
            with open(folder / "made", "a") as made:
                made.write("x")
            ran.append((folder / "made").read_text())
            return {"made": len(ran[0])}

        return ran, step.do(work, **options)

    def test_done_once(self, tmp_path: Path) -> None:
        assert self.run(tmp_path / "s", {"a": (1, 2)}) == (["x"], {"made": 1})
        assert self.run(tmp_path / "s", {"a": (1, 2)}) == ([], {"made": 1})

    def test_changed_inputs_start_afresh(self, tmp_path: Path) -> None:
        self.run(tmp_path / "s", {"a": 1}, keep_unfinished=True)
        ran, _ = self.run(tmp_path / "s", {"a": 2}, keep_unfinished=True)
        assert ran == ["x"]

    @pytest.mark.parametrize(("keep", "left"), [(True, "xx"), (False, "x")])
    def test_interrupted_work_is_kept_if_it_can_be_continued(
        self, tmp_path: Path, keep: bool, left: str
    ) -> None:
        step = steps.Step(tmp_path / "s", {"a": 1})

        def stop() -> dict:
            (step.folder / "made").write_text("x")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            step.do(stop)
        assert step.facts is None
        assert self.run(tmp_path / "s", {"a": 1}, keep_unfinished=keep)[0] == [left]

    def test_longer_run_continues_and_shorter_starts_afresh(self, tmp_path: Path) -> None:
        self.run(tmp_path / "s", {}, goal=10)
        assert self.run(tmp_path / "s", {}, goal=20, keep_unfinished=True)[0] == ["xx"]
        assert self.run(tmp_path / "s", {}, goal=15, keep_unfinished=True)[0] == ["x"]

    @pytest.mark.parametrize("stamp", ["", "{", "[]", '{"inputs": {"a": 2}}'])
    def test_damaged_stamp_counts_as_not_done(self, tmp_path: Path, stamp: str) -> None:
        self.run(tmp_path / "s", {"a": 1})
        (tmp_path / "s" / "stamp.json").write_text(stamp)
        assert self.run(tmp_path / "s", {"a": 1})[0] == ["x"]

    def test_folder_with_other_files_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("precious")
        with (
            pytest.raises(UserError, match=r"holds other files \(thesis.tex\)"),
            steps.own_folder(tmp_path),
        ):
            pass
        assert os.listdir(tmp_path) == ["thesis.tex"]

    def test_folder_with_a_published_report_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "report.md").write_text("")
        with steps.own_folder(tmp_path, ("report.md",)):
            pass

    def test_two_runs_do_not_share_a_folder(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UserError, match="another comparison"),
            steps.own_folder(tmp_path / "out"),
            steps.own_folder(tmp_path / "out"),
        ):
            pass
        with steps.own_folder(tmp_path / "out"):
            pass

    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="--out"), steps.own_folder(tmp_path / "file" / "out"):
            pass


class TestProgress:
    def test_lines_are_not_too_many_and_estimate_the_rest(
        self, capsys: pytest.CaptureFixture
    ) -> None:
        now = [0.0]
        bar = progress.Progress(200, clock=lambda: now[0])
        bar.start("[1/2] none", 0, 100)
        for updates in range(10, 101, 10):
            now[0] += 1.0
            bar.show(curves.Entry("train_inner", updates, 5.64, 50.0, None, 1000.0))
        lines = capsys.readouterr().out.splitlines()
        assert 3 <= len(lines) <= 5
        assert lines[-1].startswith("[1/2] none: update 100 of 100, perplexity: training 50.0")
        assert lines[-1].endswith("10 s left in all")

    @pytest.mark.parametrize(
        ("seconds", "text"), [(59.4, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
    )
    def test_times(self, seconds: float, text: str) -> None:
        assert progress.format_time(seconds) == text


HYDRA = "Error executing job with overrides: ['a=1']\n"


class TestPrograms:
    @pytest.fixture
    def lock(self, tmp_path: Path):
        with steps.own_folder(tmp_path / "out") as lock:
            yield lock

    @staticmethod
    def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        path = tmp_path / "fairseq-try"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def test_failure_shows_the_end_of_the_log_and_where_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: int
    ) -> None:
        self.script(tmp_path, monkeypatch, "seq 100; echo went wrong >&2; exit 3")
        log = tmp_path / "log"
        with pytest.raises(UserError, match="fairseq-try failed with exit status 3") as caught:
            programs.run_logged(["fairseq-try"], log, lock)
        assert str(log) in str(caught.value)
        assert "went wrong" in str(caught.value)
        assert "\n  10\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["fairseq-posenc", "fairseq-train"])
    def test_failure_that_the_program_explained_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: int, name: str
    ) -> None:
        self.script(tmp_path, monkeypatch, f"echo usage; echo {name}: error: too wide; exit 2")
        with pytest.raises(UserError) as caught:
            programs.run_logged(["fairseq-try"], tmp_path / "log", lock)
        assert str(caught.value) == f"fairseq-try: too wide (its log: {tmp_path / 'log'})"

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
    def test_mistakes_are_found_in_what_a_program_says(self, output: str, message: str) -> None:
        assert programs.told_mistake(output) == message

    def test_interruption_ends_the_program(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: int
    ) -> None:
        self.script(tmp_path, monkeypatch, "echo $$; sleep 60")
        seen = []

        def stop(line: str) -> None:
            seen.append(int(line))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            programs.run_logged(["fairseq-try"], tmp_path / "log", lock, stop)
        with pytest.raises(ProcessLookupError):
            os.kill(seen[0], 0)

    def test_missing_command(self) -> None:
        with pytest.raises(UserError, match="fairseq-nonsense"):
            programs.find_command("fairseq-nonsense")
