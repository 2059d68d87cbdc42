from tests.backend.doubles import BLOCK, FakeEngine, Rig, expected_text_ids

LONG = [(5 * i) % 60 + 2 for i in range(6 * BLOCK + 2)]


def test_a_finished_lane_is_continued_in_place():
    rig = Rig(lane_ttl_s=30.0)
    _, first = rig.ask(LONG, max_tokens=9)
    rig.run()
    rig.cache.blocks.clear()
    turn = LONG + first.ids + [40, 41]
    _, second = rig.ask(turn, max_tokens=5)
    rig.run()
    assert second.ids == expected_text_ids(turn, 5)
    assert second.last.usage.cached_tokens == (len(LONG) + 8) // BLOCK * BLOCK
    assert rig.reuse.hit_tokens == {"lane": second.last.usage.cached_tokens, "host": 0}


def test_blocks_that_only_the_lane_had_go_back_to_the_cache():
    rig = Rig(lane_ttl_s=30.0)
    rig.ask(LONG)
    rig.run()
    rig.cache.blocks.clear()
    rig.ask(LONG)
    rig.run()
    assert rig.cache.lookup(rig.cache.hashes(LONG, namespace="default")) == 6


def test_what_the_lane_lacks_comes_from_the_cache():
    rig = Rig(engine=FakeEngine(lanes=1), lane_ttl_s=30.0)
    rig.ask(LONG)
    rig.run()
    rig.ask([*LONG[: 2 * BLOCK], 50, 51, 52], max_tokens=1)
    rig.run()
    _, sink = rig.ask(LONG)
    rig.run()
    assert sink.ids == expected_text_ids(LONG, 8)
    assert rig.reuse.hit_tokens["lane"] == 2 * 2 * BLOCK
    assert rig.reuse.hit_tokens["host"] == 4 * BLOCK


def test_an_expired_lane_is_not_used():
    rig = Rig(lane_ttl_s=30.0)
    rig.ask(LONG)
    rig.run()
    rig.cache.blocks.clear()
    rig.now = 31.0
    _, sink = rig.ask(LONG)
    rig.run()
    assert sink.last.usage.cached_tokens == 0
    assert sink.ids == expected_text_ids(LONG, 8)


def test_a_retained_lane_is_given_to_a_stranger_when_no_other_is_free():
    rig = Rig(engine=FakeEngine(lanes=1), lane_ttl_s=30.0)
    rig.ask(LONG)
    rig.run()
    _, stranger = rig.ask([9, 8, 7])
    rig.run()
    _, again = rig.ask(LONG)
    rig.run()
    assert stranger.ids == expected_text_ids([9, 8, 7], 8)
    assert again.ids == expected_text_ids(LONG, 8)


def test_a_lane_after_an_engine_failure_is_not_reused():
    rig = Rig(lane_ttl_s=30.0)
    rig.ask(LONG, max_tokens=9)
    rig.step()
    rig.step()
    rig.engine.fail_on = {"decode"}
    rig.engine.kv[:] = -7
    rig.run()
    rig.cache.blocks.clear()
    _, again = rig.ask(LONG)
    rig.run()
    assert again.ids == expected_text_ids(LONG, 8)


def test_a_far_retained_lane_is_left_alone_while_the_cache_has_its_blocks():
    rig = Rig(engine=FakeEngine(lanes=4), lane_ttl_s=30.0)
    others = [rig.ask([9 + i, 8, 7], max_tokens=3)[1] for i in range(3)]
    _, long = rig.ask(LONG, max_tokens=3)
    rig.run()
    assert all(sink.ended for sink in [*others, long])
    _, busy = rig.ask([20, 21], max_tokens=30)
    rig.step()
    _, again = rig.ask(LONG, max_tokens=2)
    rig.step()
    assert max(seq.lane for seq in rig.scheduler.open_sequences()) == 1, "a decode step would span all lanes"
    rig.run()
    assert again.ids == expected_text_ids(LONG, 2)
    assert busy.ids == expected_text_ids([20, 21], 30)
