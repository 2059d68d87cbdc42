import threading
from pathlib import Path

from backend.thread_names import show_thread_name


def test_the_kernel_knows_the_name():
    seen = []

    def run():
        show_thread_name()
        seen.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())

    thread = threading.Thread(target=run, name="a-name-that-is-too-long")
    thread.start()
    thread.join()
    assert seen == ["a-name-that-is-\n"]
