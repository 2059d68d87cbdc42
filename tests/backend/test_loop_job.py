import threading

import pytest

from backend.errors import Overloaded
from backend.loop_job import LoopJob


def test_what_a_job_returns_or_raises_is_its_askers():
    job = LoopJob(lambda: 7)
    job.run()
    assert job.wait(1.0, alive=lambda: True) == 7
    failing = LoopJob(lambda: 1 / 0)
    failing.run()
    with pytest.raises(ZeroDivisionError):
        failing.wait(1.0, alive=lambda: True)


def test_a_job_that_nobody_waits_for_any_more_does_not_begin():
    ran = []
    job = LoopJob(lambda: ran.append(1))
    with pytest.raises(TimeoutError, match="took no job"):
        job.wait(0.01, alive=lambda: True)
    job.run()
    assert ran == []


def test_a_job_that_began_is_waited_for_beyond_the_limit():
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(20)
        return "done"

    job = LoopJob(slow)
    worker = threading.Thread(target=job.run)
    worker.start()
    assert begun.wait(20)
    threading.Timer(0.05, go.set).start()
    assert job.wait(0.001, alive=worker.is_alive) == "done"
    worker.join(20)


def test_a_refused_job_says_why():
    job = LoopJob(lambda: 7)
    job.refuse(Overloaded("the backend is closing"))
    with pytest.raises(Overloaded, match="closing"):
        job.wait(1.0, alive=lambda: True)
