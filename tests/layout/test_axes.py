"""Rank arithmetic for up to 4,096 ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.layout.axes import Axes, Axis, Coordinates, axis_name, axis_names

sizes = st.integers(1, 8)
axes = st.builds(Axes, data=sizes, tensor=sizes, pipeline=sizes, context=sizes)


def test_coordinates_of_the_documented_example() -> None:
    example = Axes(data=2, pipeline=2, context=1, tensor=2)
    coordinates = [example.coordinates(rank) for rank in range(8)]
    assert [at.tensor for at in coordinates] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [at.data for at in coordinates] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [at.pipeline for at in coordinates] == [0, 0, 0, 0, 1, 1, 1, 1]


@given(axes, st.data())
@settings(max_examples=100, deadline=None)
def test_rank_and_coordinates_are_inverse(axes: Axes, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, axes.size - 1))
    at = axes.coordinates(rank)
    assert axes.rank(at) == rank
    assert 0 <= at.tensor < axes.tensor
    assert 0 <= at.context < axes.context
    assert 0 <= at.data < axes.data
    assert 0 <= at.pipeline < axes.pipeline


@given(axes, st.sampled_from(list(Axis)))
@settings(max_examples=50, deadline=None)
def test_groups_partition_ranks_along_one_coordinate(axes: Axes, axis: Axis) -> None:
    groups = list(axes.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(axes.size))
    others = [other for other in Axis if other is not axis]
    for group in groups:
        coordinates = [axes.coordinates(rank) for rank in group]
        assert [getattr(at, axis) for at in coordinates] == list(range(getattr(axes, axis)))
        assert len({tuple(getattr(at, other) for other in others) for at in coordinates}) == 1


def test_tensor_is_innermost_and_pipeline_outermost() -> None:
    axes = Axes(data=16, tensor=8, pipeline=8)
    assert axes.size == 1024
    assert next(axes.groups(Axis.TENSOR)) == tuple(range(8))
    assert next(axes.groups(Axis.PIPELINE)) == tuple(range(0, 1024, 128))


def test_rank_out_of_range_asserts() -> None:
    with pytest.raises(AssertionError, match="rank 4 of 4"):
        Axes(data=4).coordinates(4)
    assert Axes(data=4).coordinates(3) == Coordinates(tensor=0, context=0, data=3, pipeline=0)


# ---- names of groups


def test_groups_are_named_after_their_axes() -> None:
    axes = Axes(tensor=2, data=4, pipeline=2)
    named = {
        (0, 1): "tensor",
        (0, 2, 4, 6): "data",
        (3, 11): "pipeline",
        (0, 1, 2, 3): "tensor+data",
        (0, 2, 8, 10): "data+pipeline",
        tuple(range(16)): "all",
        (5,): "",
    }
    assert {ranks: axis_name(ranks, axes) for ranks in named} == named
    assert axis_name((0, 1), Axes(data=2)) == "data"  # more specific than "all"


def test_expert_groups_are_part_of_the_data_ranks() -> None:
    axes = Axes(data=4, tensor=2, expert=2)
    assert axis_name((0, 2), axes) == axis_name((4, 6), axes) == "expert"
    assert axis_name((0, 4), axes) == axis_name((0, 2, 4, 6), axes) == "data"
    whole = Axes(data=2, expert=2)
    assert axis_name((0, 1), whole) == "data"
    assert axis_name((0, 1), whole, exchange=True) == "expert"
    assert axis_name((0, 1), Axes(data=2), exchange=True) == "data"


@given(axes, st.data())
@settings(max_examples=100, deadline=None)
def test_axis_names_include_every_group_name(axes: Axes, data: st.DataObject) -> None:
    ranks = (
        data.draw(st.sets(st.integers(0, axes.size - 1), min_size=2, max_size=9)) if axes.size > 1 else {0}
    )
    name = axis_name(ranks, axes)
    assert name == "" if axes.size == 1 else name in axis_names(axes)
    assert len(set(axis_names(axes))) == len(axis_names(axes))


def test_single_rank_has_no_axis_names() -> None:
    assert axis_names(Axes()) == ()
    assert axis_names(Axes(data=2)) == ("data", "other")
    assert axis_names(Axes(data=2, tensor=2, expert=2)) == ("tensor", "data", "all", "expert", "other")
