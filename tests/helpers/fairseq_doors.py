"""Every place of the installed fairseq that evaluates, imports or opens what something names.

``fairseq_doors.json`` is the reviewed list: of each place of fairseq-fixed 0.12.3.1 and of the
official 0.12.2, what keeps a checkpoint's settings out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import fairseq
import fairseq_cli

EVALUATES = {"eval", "exec", "compile", "__import__", "eval_str_list", "eval_str_dict", "eval_bool"}
_IMPORTS = {"import_module", "import_user_module", "instantiate", "spec_from_file_location"}
_OPENS = {
    *("open", "get_local_path", "parse_embedding", "load_dictionary", "from_pretrained"),
    *("load_checkpoint_to_cpu", "load_pretrained_component_from_model", "load_model_ensemble"),
    *("load_model_ensemble_and_task", "load_ema_from_checkpoint", "read_text", "read_bytes"),
    *("cached_path", "safe_load", "load_archive_file"),
}
_LOADS = {"torch.load", "np.load", "numpy.load", "pickle.load", "pickle.loads", "yaml.load"}
_STARTS = {
    *("subprocess.call", "subprocess.run", "subprocess.Popen", "subprocess.check_call"),
    *("subprocess.check_output", "subprocess.getoutput", "os.system", "os.popen"),
}
COVERED: dict[str, str] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def installed() -> list[Path]:
    """Return the folders of fairseq's packages."""
    return [Path(str(package.__file__)).parent for package in (fairseq, fairseq_cli)]


def find_doors(packages: Iterable[Path]) -> dict[str, ast.Call]:
    """Search the modules of packages; return the calls, by file and text."""
    found = {}
    for top in packages:
        for path in sorted(top.rglob("*.py")):
            inside = path.relative_to(top)
            if inside.parts[0] == "examples":  # programs of papers, which no command imports
                continue
            for call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
                found[f"{top.name}/{inside.as_posix()}: {ast.unparse(call)}"] = call
    return found


def evaluated_settings(call: ast.Call) -> set[str]:
    """Return the settings that a call evaluates, as ``decoder_layers`` of ``args``."""
    if name_of(call.func).rpartition(".")[2] not in EVALUATES or not call.args:
        return set()
    first = call.args[0]
    owner = name_of(first).rpartition(".")[0].rpartition(".")[2]
    return {first.attr} if isinstance(first, ast.Attribute) and owner in ("args", "cfg") else set()


def name_of(node: ast.expr) -> str:
    """Return the dotted name of what is called."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        owner, _, last = name.rpartition(".")
        evaluates = last in EVALUATES and owner in ("", "utils", "options", "builtins")
        loads = name in _LOADS or (last == "load" and "ictionary" in owner)
        if evaluates or loads or name in _STARTS or last in _IMPORTS | _OPENS:
            yield node
