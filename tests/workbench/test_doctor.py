"""The report of ``fairseq-posenc doctor``, and that its self-test finds mistakes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import venv
from argparse import Namespace
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

from fairseq_posenc import registry
from fairseq_posenc.analysis import self_test
from fairseq_posenc.backends import BACKENDS, available, reference
from fairseq_posenc.encodings.absolute import Learned
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.modules.layer_positions import PositionEncoding
from fairseq_posenc.workbench import doctor
from tests.helpers.programs import true_start
from tests.helpers.terms import OTHERS, TABLES, change_terms


def by_subject() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.collect_findings()}


def test_report_names_everything_and_succeeds(capsys):
    assert doctor.run(Namespace()) == 0
    report = capsys.readouterr().out
    for subject in ("Python", "torch", "fairseq", "transformers", "CUDA", "triton", "--user-dir"):
        assert f"\n{subject} " in report
    assert "FAILED" not in report


def test_backends_are_listed_with_the_reason_why_not(monkeypatch):
    monkeypatch.setattr(doctor, "available", lambda: {**available(), "other": "it needs magic"})
    found = by_subject()
    assert found["backend reference"] == ("backend reference", True, "can run")
    assert found["backend other"] == ("backend other", None, "it needs magic")
    assert "other" not in found["self-test"].text


def test_triton_of_another_distribution_and_a_fairseq_that_is_a_folder(monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '9.8.7'\n")
    (tmp_path / "fairseq").mkdir()
    specs = {name: PathFinder.find_spec(name, [str(tmp_path)]) for name in ("triton", "fairseq")}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(doctor, "read_version", doctor.read_version.__wrapped__)  # uncached
    monkeypatch.setattr(doctor, "available", dict)
    monkeypatch.setattr(doctor, "self_test", lambda: doctor.Finding("self-test", True, ""))
    found = by_subject()
    assert found["triton"] == ("triton", True, "9.8.7")
    assert found["fairseq"].text.startswith("not installed")
    (tmp_path / "fairseq" / "__init__.py").write_text("raise ValueError('mutable default')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fairseq")
    specs["fairseq"] = PathFinder.find_spec("fairseq", [str(tmp_path)])
    assert by_subject()["fairseq"].text.startswith("ValueError: mutable default; pip install")


def test_every_encoding_is_compared_on_some_backend():
    backends = [name for name, why in available().items() if not why and name != "flex"]
    encoders = registry.names(encoder=True)
    for name in (*registry.names(), "rope+randomized"):
        found = self_test.measure_errors(name, backends, causal=name not in encoders)
        assert set(found) & set(backends)
        assert max(found.values()) < doctor.TOLERANCE
    assert self_test.measure_errors(name, backends, causal=True) == found  # the same numbers again


def test_self_test_finds_a_wrong_backend(monkeypatch, capsys):
    def attend(call):
        attended, weights = reference.attend(call)
        return attended * 1.1, weights

    monkeypatch.setattr(BACKENDS["sdpa"], "attend", attend)
    assert doctor.run(Namespace()) == 1
    assert "on sdpa is off by" in capsys.readouterr().out


# Rows of layers have a test of their own; without its states a table gives no result.
NAMES = {*TABLES, *OTHERS} - {"layer_table", "states"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_self_test_finds_a_missing_term(monkeypatch, name):
    attend = reference.attend

    def without(call):
        return attend(call._replace(terms=change_terms(call.terms, **{name: None})))

    monkeypatch.setitem(BACKENDS, "reference", Namespace(**{**vars(reference), "attend": without}))
    assert "on reference is off by" in doctor.self_test().text


def test_self_test_finds_missing_layer_table(monkeypatch):
    def without(encoding, shared):
        return change_terms(encoding.collect_terms(shared), layer_table=None)

    monkeypatch.setattr(PositionEncoding, "compute_terms", without)
    assert "deberta_v2 on" in doctor.self_test().text


def test_self_test_finds_wrong_rotations_and_inputs(monkeypatch):
    monkeypatch.setattr(Rope, "rotation", lambda self, ids: None)
    assert "rope on rotation is off by" in doctor.self_test().text
    for wrong in (torch.full((1, 6, 16), torch.nan), torch.ones(6, 16), torch.ones(1, 6, 1)):
        monkeypatch.setattr(Learned, "embed", lambda self, positions, wrong=wrong: wrong)
        assert "learned on the input is off by" in doctor.self_test().text


def test_self_test_reports_nan_and_exceptions(monkeypatch):
    def nan(query, key, value, terms, mask):
        return torch.full_like(value, float("nan")), None

    def crash(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(reference, "attend", nan)
    assert doctor.self_test().works is False
    monkeypatch.setattr(reference, "attend", crash)
    assert "RuntimeError: no such kernel" in doctor.self_test().text


def test_user_dir_by_name_needs_the_package_beside_fairseq(monkeypatch, tmp_path):
    monkeypatch.setattr("fairseq.__file__", str(tmp_path / "fairseq" / "__init__.py"))
    beside = tmp_path / "fairseq_posenc"
    assert "make install" in [*doctor._check_fairseq()][-1].text
    beside.symlink_to(doctor.PACKAGE)
    assert [*doctor._check_fairseq()][-1].works
    beside.unlink()
    beside.mkdir()
    assert str(beside) in [*doctor._check_fairseq()][-1].text


@pytest.mark.parametrize(("capability", "flag"), [((9, 0), "--bf16"), ((7, 0), "--fp16")])
def test_gpu_is_described(monkeypatch, capability, flag):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Big GPU")
    cuda, bf16 = doctor._check_cuda()
    assert cuda.text == f"A Big GPU, capability {capability[0]}.{capability[1]}"
    assert flag in bf16.text


@pytest.mark.matrix
def test_a_torchaudio_that_cannot_be_loaded_is_named_with_the_remedy(tmp_path):
    """In a new environment, which has the packages of this one and a broken torchaudio."""
    venv.create(tmp_path, with_pip=False)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    packages = [sysconfig.get_path("purelib"), str(Path(doctor.__file__).parents[2])]
    (site / "packages.pth").write_text("\n".join(packages))

    def run(*words):
        command = [tmp_path / "bin" / "python", *words]
        return subprocess.run(command, env=true_start(), capture_output=True, text=True)

    imports = "import fairseq; from transformers import LlamaForCausalLM, Trainer, pipeline"
    (site / "torchaudio").mkdir()
    library = site / "torchaudio" / "_torchaudio.so"  # built for another torch
    library.write_bytes(b"")
    code = f"import ctypes; ctypes.CDLL({str(library)!r})"
    (site / "torchaudio" / "__init__.py").write_text(code)
    (site / "torchaudio-2.11.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.11.0\n"
    (site / "torchaudio-2.11.0.dist-info" / "METADATA").write_text(metadata)
    assert "_torchaudio.so" in run("-c", imports).stderr
    assert "pip uninstall torchaudio" in run("-c", "import fairseq_posenc.hf").stderr
    done = run("-c", "from fairseq_posenc.workbench.cli import main; exit(main(['doctor']))")
    assert done.returncode == 1
    assert re.search("^torchaudio +FAILED .*pip uninstall torchaudio", done.stdout, re.M)
    assert not re.search("^transformers", done.stdout, re.M)  # its error has the same cause
