import sys
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from cachemgr.contract import BlockHash
from cachemgr.name_map import NameMap

FEW = st.integers(0, 30)
CHANGES = st.lists(st.tuples(st.sampled_from(["insert", "remove"]), FEW, FEW), max_size=200)


def name_of(number: int) -> BlockHash:
    return BlockHash(blake2b(number.to_bytes(8, "little"), digest_size=16).digest())


@given(capacity=st.integers(0, 5000), changes=CHANGES, many=st.lists(FEW, max_size=60))
def test_it_is_a_dictionary_whose_names_keep_their_first_slot(
    capacity: int, changes: list[tuple[str, int, int]], many: list[int]
) -> None:
    names, model = NameMap(capacity), dict[BlockHash, int]()
    for change, number, slot in changes:
        name = name_of(number)
        if change == "insert":
            assert names.insert(name, slot) == (name not in model)
            model.setdefault(name, slot)
        elif name in model:
            names.remove(name)
            del model[name]
    expected = []
    for slot, number in enumerate(many):
        expected.append(name_of(number) not in model)
        model.setdefault(name_of(number), slot)
    assert names.insert_many([name_of(number) for number in many], range(len(many))) == expected
    assert (len(names), dict(names.items())) == (len(model), model)
    assert [names.get(name_of(number)) for number in range(31)] == [
        model.get(name_of(number)) for number in range(31)
    ]


def test_a_full_map_whose_names_are_all_replaced_does_not_grow() -> None:
    capacity = 20_000
    names = NameMap(capacity)
    for number in range(capacity):
        names.insert(name_of(number), number)
    full = tables_nbytes(names)
    for number in range(capacity, 3 * capacity):
        names.remove(name_of(number - capacity))
        names.insert(name_of(number), number % capacity)
    assert len(names) == capacity
    assert tables_nbytes(names) <= 1.05 * full
    assert full / capacity < 45


def tables_nbytes(names: NameMap) -> int:
    return sum(map(sys.getsizeof, names._parts))
