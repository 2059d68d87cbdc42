"""Stands in for `tensorcache serve`: a process, a child in a session of its own, a region of shared memory.

What it should do is its first argument: serve, refuse, or ignore (be deaf to SIGTERM, as what hangs is).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(what: str) -> int:
    if what == "refuse":
        print("tensorcache: port 8000 on 127.0.0.1 is in use", flush=True)
        return 2
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    region = Path(f"/dev/shm/tensorcache-{os.getpid()}-0123abcd_region")
    region.touch()

    def stop(number: int, frame: object) -> None:
        if what != "ignore":
            child.kill()
            child.wait()
            region.unlink()
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    print(f"serving smollm2: http://127.0.0.1:8000, gRPC 127.0.0.1:8001; child {child.pid}", flush=True)
    while True:
        time.sleep(600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
