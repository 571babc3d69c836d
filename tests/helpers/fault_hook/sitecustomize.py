"""Makes a program meet a fault when it is about to write; Python runs this file at every start.

``TRUST_FAULT=ACTION,NUMBER,BYTES,FOLDER,LEDGER`` in the environment: when the program, and those
that it starts, are about to open a file for writing, rename, remove or truncate one below FOLDER
for the NUMBER-th time, counted together in LEDGER, then

- ``kill`` ends that process;
- ``torn`` ends it in the midst of a file, behind so many bytes: of this one, or of the next;
- ``full`` lets the disk be full behind so many bytes of any file;
- ``count`` does nothing.

``wait`` has no number: when there is a first checkpoint_last.pt, the process that is about to write
the next checkpoint makes LEDGER and halts, once in all.
"""

import os
import resource
import signal
import sys
import threading
import time

asked = os.environ.get("TRUST_FAULT", "").split(",")


def is_write(event, arguments):
    """Return the file that an event of Python's is about to change, None if it changes none."""
    if event == "open":
        return arguments[0] if arguments[2] & (os.O_WRONLY | os.O_RDWR) else None
    if event in ("os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"):
        return arguments[0]
    return None


def meet(action, limit):
    """Let the fault happen."""
    in_main = threading.current_thread() is threading.main_thread()
    if action == "kill" or (action == "torn" and not in_main):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "torn":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and sees an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def wait(path, ledger):
    """Halt before a checkpoint that is not the first."""
    parent, name = os.path.split(path)
    if "checkpoint" in name and os.path.exists(os.path.join(parent, "checkpoint_last.pt")):
        try:
            os.close(os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        time.sleep(3600)


def hook(event, arguments):
    """Count a write, and let the fault happen at its turn."""
    if event not in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"):
        return
    action, number, limit, folder, ledger = asked
    path = is_write(event, arguments)
    if not isinstance(path, (str, os.PathLike)) or not os.path.abspath(path).startswith(folder):
        return
    if action == "wait":
        return wait(os.path.abspath(path), ledger)
    told = f"{event} {os.path.relpath(path, folder)}"[:99].ljust(99) + "\n"
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, told.encode("ascii", "replace"))
    turn = os.lseek(file, 0, os.SEEK_CUR) // 100
    os.close(file)
    if turn == int(number) and action != "count":
        meet(action, int(limit))


if len(asked) == 5:
    sys.addaudithook(hook)
