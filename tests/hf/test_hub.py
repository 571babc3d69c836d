"""Models on the hub: a server here takes what is pushed, and gives it back."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
from transformers import AutoConfig

from fairseq_posenc.hf import read_positions, set_positions
from tests.helpers import commands
from tests.helpers.hf_models import MODELS
from tests.helpers.products import some_of

pytestmark = pytest.mark.slow
REPOSITORY = "me/tiny"


def _hash(content: bytes) -> str:
    return sha1(content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as small models need: all files are parts of commits."""

    files: ClassVar[dict[str, bytes]] = {}
    commits = 0

    @property
    def commit(self) -> str:
        return f"{Hub.commits:040}"

    def _answer(self, content: bytes, **headers: str) -> None:
        self.send_response(200 if "error" not in headers else 404)
        names = {"error": "X-Error-Code", "commit": "X-Repo-Commit", "tag": "ETag"}
        for name, value in headers.items():
            self.send_header(names[name], value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://{self.headers['Host']}/{REPOSITORY}"
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            answer: dict[str, object] = {"url": url, "name": REPOSITORY, "id": REPOSITORY}
        elif path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            kind = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            answer = {"files": [{"path": file["path"], **kind} for file in files]}
        else:
            assert "/commit/" in path, path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            Hub.commits += 1
            answer = {"commitUrl": f"{url}/commit/{self.commit}", "commitOid": self.commit}
        self._answer(json.dumps(answer).encode())

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = path.split("/", 5)[-1]
        if path.startswith("/api/models/") and not path.startswith(f"/api/models/{REPOSITORY}"):
            self._answer(b"{}", error="RepoNotFound")
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in self.files]
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _hash(content)}
                for name, content in self.files.items()
            ]
            facts = {"id": REPOSITORY, "sha": self.commit, "siblings": siblings}
            self._answer(json.dumps(entries if "/tree/" in path else facts).encode())
        elif not path.startswith(f"/{REPOSITORY}/") or name not in self.files:
            self._answer(b"{}", error="EntryNotFound", commit=self.commit)
        else:
            content = self.files[name]
            self._answer(content, commit=self.commit, tag=f'"{_hash(content)}"')

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(program: str, hub: str, folder: Path, *arguments: object) -> None:
    """Run a program with the hub at an address, which is read when its package is imported."""
    words = ["-c", program, *arguments]
    home, root = str(folder / "cache"), Path(__file__).parents[2]
    commands.run("python", *words, cwd=root, HF_ENDPOINT=hub, HF_HOME=home, HF_HUB_DISABLE_XET="1")


PUSH = """
import sys, torch
from fairseq_posenc.hf import set_positions
from huggingface_hub import model_info
from tests.helpers.hf_models import MODELS, compute_logits, make_inputs
from transformers import AutoModelForCausalLM
name, folder = sys.argv[1:]
for spec in ("alibi", "t5"):
    model = set_positions(MODELS["llama"].build(), spec)
    if folder:
        model.config.save_pretrained(folder, push_to_hub=True, repo_id=name, token="hf_x")
        assert "positions_loader.py" in [file.rfilename for file in model_info(name).siblings]
        model.save_pretrained(folder, push_to_hub=True, repo_id=name, token="hf_x")
    else:
        model.push_to_hub(name, token="hf_x")
    loaded = AutoModelForCausalLM.from_pretrained(name)
    inputs = make_inputs(MODELS["llama"])
    assert torch.equal(compute_logits(loaded, inputs), compute_logits(model, inputs))
"""
SWAP = """
import subprocess, sys
from pathlib import Path
from fairseq_posenc.workbench.cli import main
name, new = sys.argv[1:]
download = [Path(sys.executable).with_name("hf"), "download", name, "--quiet"]
folder = subprocess.check_output(download, text=True).strip()
sys.exit(main(["swap", "--checkpoint", folder, "--position-encoding", "own+sink", "--out", new]))
"""


@pytest.mark.parametrize("saves", some_of([True], [False, True]))
def test_a_pushed_model_is_tagged_and_loaded(saves: bool, hub: str, tmp_path: Path) -> None:
    run(PUSH, hub, tmp_path, REPOSITORY, tmp_path / "saved" if saves else "")
    assert b"fairseq_posenc.hf" in Hub.files["config.json"]
    assert b"- fairseq-posenc\n" in Hub.files["README.md"]


def test_commands_take_the_folder_that_hf_download_prints(hub: str, tmp_path: Path) -> None:
    set_positions(MODELS["llama"].build(), "alibi").save_pretrained(tmp_path / "model")
    Hub.files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    run(SWAP, hub, tmp_path, REPOSITORY, tmp_path / "new")
    assert read_positions(AutoConfig.from_pretrained(tmp_path / "new")) == "alibi+sink"
