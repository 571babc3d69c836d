"""Has a program run by the fork server, and is to its parent that program.

``python -IS fork_client.py PROGRAM WORD...`` hands over its open files, directory, environment and
words; then it passes on signals, and ends as the program does. Without a server in the environment
it becomes the program itself.
"""

import marshal
import os
import signal
import socket
import sys

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
PLUGIN = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "fairseq_posenc")
OPTIONS = {"-B": "PYTHONDONTWRITEBYTECODE", "-u": "PYTHONUNBUFFERED"}  # of Python, and its names
PATIENCE = 120  # seconds: until the server has imported, on a busy machine


def start(connection: socket.socket, python: str, words: list) -> int:
    """Ask the server for a program; return its number when it runs."""
    numbers = (n for n in range(256) if os.path.lexists(f"/proc/self/fd/{n}"))
    files = [number for number in numbers if os.get_inheritable(number)]
    asked = {
        "words": words,
        "python": python,
        "files": files,
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }
    body = marshal.dumps(asked)
    connection.settimeout(PATIENCE)
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], files)
    connection.sendall(body)
    message = connection.recv(4, socket.MSG_WAITALL)
    if not message:
        sys.exit("the fork server does not answer")
    connection.settimeout(None)
    return int.from_bytes(message, "big")


def wait(connection: socket.socket, program: int) -> None:
    """Pass on signals until the program has ended, and end in the same way."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    message = connection.recv(2, socket.MSG_WAITALL)
    if not message:
        sys.exit("the fork server has ended")
    status = int.from_bytes(message, "big", signed=True)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def main(program: str, words: list) -> None:
    """Run what is called like ``program`` beside this Python."""
    folder, name = os.path.split(program)
    python = os.path.join(folder, "python")
    server = os.environ.get("FAIRSEQ_POSENC_TESTS_SERVER")
    if name == "worker":  # of pytest-xdist, -u -c CODE; what it starts is as ever
        python, server, words = sys.executable, os.path.join(folder, "socket"), words[1:]
    elif name != "python":
        words = [os.path.join(os.path.dirname(sys.executable), name), *words]
    end = next((n for n, word in enumerate(words) if word not in OPTIONS), len(words))
    # Python's other options are about its own start, or ask for a terminal's dialogue.
    is_option = words[end:] and words[end][:1] == "-" and words[end] not in ("-c", "-m")
    if not server or not words[end:] or is_option:
        os.execv(sys.executable, [sys.executable, *words])
    os.environ.update({OPTIONS[option]: "1" for option in words[:end]})
    words = words[end:]
    if name == "fairseq-posenc" or {PLUGIN, f"common.user_dir={PLUGIN}"} & set(words):
        server += ".plugin"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until wait() can pass them on
        wait(connection, start(connection, python, words))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
