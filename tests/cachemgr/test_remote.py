"""The null object beyond a cache that is alone: nothing comes, nobody waits."""

from cachemgr import BlockHash, NoRemoteTiers


def test_the_null_object_is_done_at_once() -> None:
    done: list[None] = []
    nobody = NoRemoteTiers()
    give_up = nobody.fetch([], deadline=0.0, done=lambda: done.append(None))
    give_up()
    nobody.offer([BlockHash(bytes(16))], 0)
    nobody.close()
    assert done == [None]
    assert not nobody.active
