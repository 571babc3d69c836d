"""Pythons that have imported torch and fairseq, and fork for each program.

These imports are most of what a start costs. A second one has the plugin as well, for programs that
name it by its path, as fairseq loads it then: most that a session starts. To all others it is left,
so that what it does when it is imported is their own, as in a new process.

``python fork_server.py FOLDER NUMBER NUMBER`` answers ``fork_client.py`` on the listening sockets
of these numbers, the second with the plugin, until its standard input ends, as it does with the
tests. What programs import beyond that they compile once, also where the environment says not to
write bytecode: then into FOLDER.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import copy
import fcntl
import gc
import importlib.util
import inspect
import io
import logging
import marshal
import os
import re
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

THIRD_PARTY = [
    *("bitarray", "hydra", "matplotlib.figure", "numpy", "omegaconf", "sacrebleu", "scipy.stats"),
    *("sklearn.metrics", "torch", "torch.distributed", "fairseq"),
]
PLUGIN = os.path.join(os.path.dirname(os.path.dirname(sys.path[0])), "fairseq_posenc")
TASKS = {"masked_lm": "roberta_m4m_tiny", "language_modeling": "transformer_lm_rope_tiny"}
TASKS["translation"] = "transformer_m4_tiny"
COMMANDS = re.compile(r"fairseq-(?!posenc)|fairseq_cli\.")


def hasten_hydra() -> None:
    """Keep Hydra from copying all that is registered, and parsing all settings, for each command.

    The copy is of what it only reads; and a setting means the same each time. It also looks for its
    caller among all frames: neither their modules nor their lines of source, which it does not
    use, are looked for.
    """
    from hydra._internal import utils
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse = OverridesParser.parse_rule
    parsed: dict[tuple[str, str], Any] = {}

    def parse_once(parser: Any, text: str, rule: str) -> Any:
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(parser, text, rule)
        return copy.copy(parsed[text, rule])

    vars(utils)["inspect"] = SimpleNamespace(**{**vars(inspect), "stack": list_frames})
    OverridesParser.parse_rule = parse_once  # type: ignore[assignment, method-assign]
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def interpret_triton() -> None:
    """Without a GPU, import Triton's own functions for its interpreter, as some tests need."""
    if importlib.util.find_spec("triton") and not sys.modules["torch"].cuda.is_available():
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            importlib.import_module("triton.language")


def list_frames() -> list[inspect.FrameInfo]:
    """Return what ``inspect.stack()`` does, but no source: it asks all modules for some files."""
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in traceback.walk_stack(sys._getframe(1))
    ]


def warm_up(*words: str) -> None:
    """Fill the caches of Hydra and Python that the first start of a fairseq command fills."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser(words[1] if words else "translation")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # and so the programs still give them
        args = options.parse_args_and_arch(parser, ["", *(words or ("--arch", "lstm"))])
        convert_namespace_to_omegaconf(args)


class Program(NamedTuple):
    """A program that runs: its client, its number, and a file to read from once it has ended."""

    client: socket.socket
    number: int
    end: int


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each program, and tell how it ended; in its process, return its request and files.

    A client that has gone was killed: so is its program then.
    """
    programs: list[Program] = []
    while True:
        files = [file for client, _, end in programs for file in (client, end)]
        ready, _, _ = select.select([0, listener, *files], [], [])
        if 0 in ready:
            for _, number, _ in programs:
                kill(number)
            os._exit(0)
        for program in [each for each in programs if each.client in ready or each.end in ready]:
            client, number, end = program
            if end not in ready:
                kill(number)
            status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
            tell(client, status.to_bytes(2, "big", signed=True))
            client.close()
            os.close(end)
            programs.remove(program)
        if listener not in ready:
            continue
        client, _ = listener.accept()
        if (received := receive(client)) is None:
            continue
        if (number := os.fork()) == 0:
            listener.close()
            client.close()
            for other, _, end in programs:
                other.close()
                os.close(end)
            os.setsid()
            return received
        for file in received[1]:
            os.close(file)
        tell(client, number.to_bytes(4, "big"))
        programs.append(Program(client, number, os.pidfd_open(number)))


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read a request of a client and the files that it sends, None if it has gone."""
    with contextlib.suppress(ConnectionError):
        head, files, _, _ = socket.recv_fds(client, 8, 250)
        body = client.recv(size := int.from_bytes(head, "big"), socket.MSG_WAITALL)
        if len(body) == size > 0:
            return marshal.loads(body), files
    return None


def tell(client: socket.socket, what: bytes) -> None:
    """Send to a client, which may have gone."""
    with contextlib.suppress(ConnectionError):
        client.sendall(what)


def kill(number: int) -> None:
    """Kill a program, and those that it has started in its group, once it has one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
    os.kill(number, signal.SIGKILL)


def become(asked: dict[str, Any], files: list[int]) -> list[str]:
    """Give this process the client's files, signals, directory, environment; return its words."""
    beyond = max(*files, *asked["files"]) + 1
    for number, file in zip(asked["files"], [fcntl.fcntl(f, fcntl.F_DUPFD, beyond) for f in files]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.executable = asked["python"]
    sys.path[1:1] = paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in paths):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    for rule in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        action, message, category, *_ = [*rule.split(":"), "", ""]
        kind = getattr(builtins, category or "Warning")
        warnings.filterwarnings(cast(Any, action), re.escape(message), kind, append=True)
    if os.environ.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    sys.modules["numpy"].random.seed()
    return asked["words"]


def run(words: list[str]) -> None:
    """Run what follows ``python`` on a command line."""
    if any(COMMANDS.match(os.path.basename(word)) for word in words[:2]):
        # They set up logging before they import fairseq, which then leaves it as it is.
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        globals()["__name__"] = "sys"  # which warnings name below the first frame of a program
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def leave(status: int) -> None:
    """End as an exit does, but let the memory go as a whole: object by object takes 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def load_plugin() -> None:
    """Have fairseq load the plugin, as its commands do for ``--user-dir``."""
    importlib.import_module("fairseq_cli")
    from fairseq.utils import import_user_module

    import_user_module(argparse.Namespace(user_dir=PLUGIN))
    sys.path.remove(os.path.dirname(PLUGIN))
    for task, arch in TASKS.items():
        warm_up("--task", task, "--arch", arch)


if __name__ == "__main__":
    logging.disable()  # of what the imports tell, which belongs to no program
    gc.disable()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # forks cannot use CUDA after the other one
    for name in THIRD_PARTY:
        importlib.import_module(name)
    interpret_triton()
    importlib.import_module("torch._dynamo")  # by optimizers at their first step; imports Triton
    hasten_hydra()
    warm_up()
    if sys.dont_write_bytecode:
        sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
    plain, plugin = (socket.socket(fileno=int(number)) for number in sys.argv[2:])
    listener = plain
    if os.fork() == 0:
        listener = plugin
        load_plugin()
    logging.disable(logging.NOTSET)
    gc.freeze()  # so that programs share these objects' memory
    gc.enable()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # 0.03 s of an exit, to free what the imports made
    words = become(*serve(listener))
    status = 0
    try:
        run(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code != status and end.code is not None:
            print(end.code, file=sys.stderr)
    except Exception:  # printed, with status 1, as the interpreter does
        sys.excepthook(*sys.exc_info())
        status = 1
    # What an error held is gone by now, and open files are written to their ends.
    leave(status)
