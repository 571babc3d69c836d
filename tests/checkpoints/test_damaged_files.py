"""Checkpoints with settings that are none, and files that lack an entry."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint, open_whole
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.helpers.commands import run


def save(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


SETTINGS: dict[str, tuple[Any, str]] = {
    "bytes": (b"[1]", "model.adaptive_softmax_cutoff is of the type bytes"),
    "a set": ({1}, "of the type set"),
    "a tensor": (torch.ones(1), "of the type Tensor"),
    "bytes in a tuple": ((1, (b"1",)), "adaptive_softmax_cutoff.1.0 is of the type bytes"),
    "a reference": ("${oc.env:HOME}", "would be run as code"),
    "a target": ({"_target_": "os.mkdir"}, "would be run as code"),
}


@pytest.mark.parametrize("form", SETTINGS)
def test_settings_of_other_types_are_refused_by_name(form, tmp_path):
    value, message = SETTINGS[form]
    settings = {"model": Namespace(adaptive_softmax_cutoff=value)}
    path = save(tmp_path / "a.pt", {"model": {}, "cfg": settings})
    with pytest.raises(UserError, match=rf"^--checkpoint {path}.*{message}.*\Z"):  # in a line
        load_state(path, "--checkpoint")


@pytest.mark.parametrize(
    ("what", "key", "wrong"),
    [
        ("", "nothing", "KeyError"),
        ("--checkpoint", "nothing", "KeyError"),
        ("--init", "extra_state", "TypeError"),
    ],
)
def test_what_a_checkpoint_lacks_is_a_line_of_its_name(what, key, wrong, tmp_path):
    path = save(tmp_path / "a.pt", {"model": {}, "extra_state": None})
    start = re.escape(f"{what} {path}: not a complete checkpoint of fairseq ({wrong}".lstrip())
    with pytest.raises(UserError, match=f"^{start}"), open_checkpoint(path, what) as found:
        found[key]["val_loss"]


def test_settings_of_fairseq_are_read_wherever_fairseq_is_not(tmp_path):
    """What torch may load is said where it loads it, and not only as fairseq starts."""
    path = save(tmp_path / "a.pt", {"model": {}, "args": Namespace(arch="x")})
    program = (
        "import sys; from pathlib import Path\n"
        "from fairseq_posenc.checkpoints.safe_loading import open_whole\n"
        "print(open_whole(Path(sys.argv[1]))['args'].arch, 'fairseq' in sys.modules)"
    )
    assert run("python", "-c", program, path).out.split() == ["x", "False"]


def test_numbers_of_metrics_are_read(tmp_path):
    numbers = [np.float64(0.1), np.float32(0.1), np.int64(-3), np.dtype(">f8").type(0.25)]
    read = open_whole(save(tmp_path / "a.pt", {"model": {}, "best": numbers, "args": None}))["best"]
    assert read == numbers
    assert [type(number) for number in read] == [type(number) for number in numbers]


def test_a_file_that_is_written_meanwhile_is_read_whole_or_refused(tmp_path):
    """A mapped file that is cut ends the process (SIGBUS)."""
    path, other = tmp_path / "checkpoint_last.pt", tmp_path / "other.pt"
    torch.save({"model": {f"w{i}": torch.ones(1 << 18) for i in range(8)}}, path)
    shutil.copyfile(path, other)
    code = f"import shutil\nwhile True: shutil.copyfile({str(other)!r}, {str(path)!r})"
    writer = subprocess.Popen([sys.executable, "-c", code])
    reads, refusals = 0, ""
    try:
        while reads < 50 or (reads < 2000 and "was written while it was read" not in refusals):
            reads += 1
            try:
                with open_checkpoint(path) as state:
                    assert all(bool(x.eq(1).all()) for x in state["model"].values())
            except UserError as error:
                refusals += str(error)
    finally:
        writer.kill()
        writer.wait()
    assert "was written while it was read: try again" in refusals


def saved(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


WHOLE = saved({"model": {"w": torch.ones(999)}, "cfg": None})


def without_data():
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            if "/data/" not in name:
                new.writestr(name, old.read(name))
    return buffer.getvalue()


BROKEN = {
    "truncated": WHOLE[:1000],
    "empty": b"",
    "zeros": bytes(1000),
    "text": b"hello world\n" * 10,
    "without data": without_data(),
    "tensor": saved(torch.ones(3)),
    "list": saved([1, 2]),
    "other settings": saved({"a": 1}),
    "no settings": saved({"model": {}, "optimizer_history": []}),
    "weights alone": saved({"encoder.weight": torch.ones(3)}),
}


def read_by_fairseq(path):
    with pytest.raises(Exception) as caught:  # noqa: PT011  (what it is depends on the file)
        checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return find_message(caught.value)


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.filterwarnings("ignore")
def test_a_broken_checkpoint_is_one_line_that_names_the_file(tmp_path, content):
    (tmp_path / "broken.pt").write_bytes(content)
    printed = read_by_fairseq(tmp_path / "broken.pt")
    assert printed.startswith(f"{tmp_path}/broken.pt: not a complete checkpoint of fairseq (")
    assert len(printed) < len(str(tmp_path)) + 300
    assert "\n" not in printed


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_file_or_a_foreign_pickle_is_one_line_that_names_it(tmp_path):
    assert read_by_fairseq(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    assert read_by_fairseq(tmp_path / "no.pt") == f"{tmp_path}/no.pt: no such file"
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    refused = f"{tmp_path}/pickle.pt: not a checkpoint: torch.save did not write it"
    assert read_by_fairseq(tmp_path / "pickle.pt").startswith(refused)
