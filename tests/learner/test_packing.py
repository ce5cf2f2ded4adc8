import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capo.learner.packing import pack

lengths_and_budget = st.integers(1, 50).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=40), st.just(budget))
)


@given(lengths_and_budget, st.integers(1, 5))
def test_every_segment_lies_in_one_microbatch_within_the_budget(case, num_ranks):
    lengths, budget = case
    plan = pack(lengths, budget, num_ranks)
    assert len(plan) == num_ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    flat = list(itertools.chain.from_iterable(itertools.chain.from_iterable(plan)))
    assert sorted(flat) == list(range(len(lengths)))
    for microbatch in itertools.chain.from_iterable(plan):
        assert sum(lengths[index] for index in microbatch) <= budget


@given(lengths_and_budget)
def test_no_more_microbatches_than_first_fit_decreasing(case):
    lengths, budget = case
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        for place, load in enumerate(bins):
            if load + length <= budget:
                bins[place] += length
                break
        else:
            bins.append(length)
    (microbatches,) = pack(lengths, budget)
    assert len(microbatches) == len(bins)


@given(lengths_and_budget, st.integers(1, 5))
def test_the_same_arguments_give_the_same_plan(case, num_ranks):
    assert pack(case[0], case[1], num_ranks) == pack(list(case[0]), case[1], num_ranks)


@given(st.lists(st.integers(1, 20), min_size=8, max_size=60), st.integers(2, 4))
def test_ranks_differ_by_less_than_the_longest_segment_where_the_budget_leaves_room(
    lengths, num_ranks
):
    plan = pack(lengths, sum(lengths), num_ranks)
    loads = [sum(lengths[i] for microbatch in rank for i in microbatch) for rank in plan]
    assert [len(rank) for rank in plan] == [1] * num_ranks
    assert max(loads) - min(loads) <= max(lengths)


def test_microbatches_of_a_rank_are_alike_rather_than_one_full_and_one_small():
    (microbatches,) = pack([4, 4, 4, 4, 4, 4], 20)
    assert sorted(len(microbatch) for microbatch in microbatches) == [3, 3]


def test_fewer_segments_than_ranks_leaves_some_microbatches_empty():
    assert sorted(pack([3], 10, 3)) == [((),), ((),), ((0,),)]


def test_a_segment_longer_than_the_budget_says_what_to_raise():
    with pytest.raises(ValueError, match=r"segment 1 has 11 tokens.* is 10; raise learner\.token"):
        pack([3, 11], 10)
