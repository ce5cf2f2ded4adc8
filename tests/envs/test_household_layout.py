import random
from collections import Counter

from capo.envs.household_layout import (
    CONTAINERS,
    OBJECTS,
    SURFACES,
    decode,
    digest,
    draw_layout,
    encode,
    split_of,
)


def draws(count, seed=0, **sizes):
    sizes = {"num_places": 3, "num_containers": 1, "num_objects": 3} | sizes
    rng = random.Random(seed)
    return [draw_layout(rng, **sizes) for _ in range(count)]


def test_names_are_unambiguous():
    assert len({*SURFACES, *CONTAINERS, *OBJECTS}) == len(SURFACES + CONTAINERS + OBJECTS)


def test_a_layout_has_the_asked_sizes_and_an_unsolved_goal():
    for layout in draws(500, num_places=5, num_containers=2, num_objects=4):
        assert len(set(layout.places)) == 5
        assert sum(place in CONTAINERS for place in layout.places) == 2
        assert len(set(layout.objects)) == len(layout.at) == 4
        assert layout.at[layout.goal_object] != layout.goal_place
        assert max(layout.at) < 5


def test_every_place_is_start_and_goal_alike():
    layouts = draws(3000)
    starts = Counter(layout.at[layout.goal_object] for layout in layouts)
    goals = Counter(layout.goal_place for layout in layouts)
    containers = Counter(layout.is_container(layout.goal_place) for layout in layouts)
    for share in (*starts.values(), *goals.values(), containers[True]):
        assert 900 < share < 1100


def test_the_world_is_larger_than_any_training_could_visit():
    drawn = 20_000
    repeated = drawn - len({encode(layout) for layout in draws(drawn)})
    # n draws from N layouts repeat about n^2 / 2N times: fewer than 100 means N > 2 million.
    assert repeated < 100


def test_a_payload_comes_back_as_the_layout():
    for layout in draws(50):
        assert decode(encode(layout)) == layout


def test_payloads_are_golden():
    layout = draws(1, seed=7)[0]
    assert digest(encode(layout)) == GOLDEN


def test_a_digest_has_one_split_and_splits_have_their_share():
    shares = Counter(split_of(digest(encode(layout))) for layout in draws(5000))
    assert 3800 < shares["train"] < 4200
    assert 400 < shares["valid"] < 600
    assert 400 < shares["test"] < 600


GOLDEN = "e89d319449ec07dffce6bab2"
