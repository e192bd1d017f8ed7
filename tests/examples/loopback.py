"""Whether two processes may talk over UDP on this machine: some sandboxes forbid it."""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import cache

_SEND = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', int(sys.argv[1])))"


@cache
def why_no_loopback() -> str | None:
    """The reason, or ``None`` where they may."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.bind(("127.0.0.1", 0))
            one.settimeout(5)
            subprocess.run([sys.executable, "-c", _SEND, str(one.getsockname()[1])], check=True, timeout=60)
            return None if one.recv(1) == b"x" else "loopback garbles"
    except (OSError, subprocess.SubprocessError) as error:
        return f"UDP on 127.0.0.1 is not allowed here: {error}"
