"""What users of other toolkits suffer from when they launch, and the tests that this one does not do it to them.

    pytest tests/launch/test_pains.py

The numbers are of issues in the named repositories. Here stands only which test shows what, and that the test is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Pain:
    where: str
    what: str
    tests: tuple[str, ...]  # file of tests/ ::name

    def __str__(self) -> str:
        return self.where.split(",")[0]


PAINS = (
    Pain(
        "DeepSpeed#6914, #3228",
        "the batch does not fit the ranks, which is found when they run; the world is read as one rank",
        (
            "plan/test_batch.py::test_the_identity_holds_or_is_refused_with_a_batch_that_works",
            "cluster/test_environment.py::test_what_a_launcher_started_is_the_world",
            "cluster/test_environment.py::test_half_a_launcher_is_refused",
            "cluster/test_nodes.py::test_two_nodes_train_what_one_node_trains",
        ),
    ),
    Pain(
        "honeybee#24, hydra#2038",
        "Hydra dies of the launcher's --local_rank=0",
        (
            "cluster/test_environment.py::test_deepspeed_and_its_argument",
            "launch/test_as_typed.py::test_every_form_trains_the_same_run",
        ),
    ),
    Pain(
        "hydra#2070, lightning-hydra-template#393, mlcommons/storage#754",
        "every rank resolves the configuration and makes a folder",
        (
            "cluster/test_rendezvous.py::test_what_rank_0_says_reaches_all",
            "cluster/test_nodes.py::test_two_nodes_train_what_one_node_trains",
            "launch/test_mistakes.py::test_under_a_launcher_it_is_answered_once_and_nobody_stays",
        ),
    ),
    Pain(
        "hydra#2074, submitit#1764",
        "launchers of Hydra and of ranks clash, and sweeps start inside every rank",
        (
            "launch/test_sweep.py::test_under_a_launcher_the_answer_is_given_once_and_no_rank_sweeps",
            "launch/test_sweep.py::test_32_points_are_32_jobs_though_one_of_two_sweeps_is_killed_half_way",
            "cluster/test_slurm_script.py::test_on_several_nodes_the_first_serves_the_rendezvous_and_each_says_its_address",
        ),
    ),
    Pain(
        "Megatron-LM#907, #795",
        "an index is made by rank 0 alone, and other machines do not have it",
        (
            "cluster/test_nodes.py::test_each_node_makes_its_own_data",
            "cluster/test_nodes.py::test_data_that_one_node_lacks_are_a_mistake_that_is_told_once",
        ),
    ),
    Pain(
        "wandb#7324, lightning#20774",
        "only the first node's GPUs are seen",
        (
            "monitor/test_wandb.py::test_online_several_nodes_write_one_run_and_each_in_its_own_folder",
            "monitor/test_wandb.py::test_in_a_shared_run_each_node_adds_itself_and_none_takes_anything_away",
        ),
    ),
    Pain(
        "DeepSpeed#2898, #3810, Megatron-DeepSpeed#439",
        "a run does not go on with another number of ranks",
        (
            "checkpoint/test_reshard.py::test_any_layout_loads_any_other",
            "engine/test_deepspeed_axes.py::test_another_layout_goes_on",
            "train/test_state.py::test_a_longer_run_in_another_layout_is_the_same_run",
        ),
    ),
    Pain(
        "DeepSpeed#5721, #4098",
        "training stands still for its saves, and a signal to the launcher loses the run",
        (
            "checkpoint/test_store.py::test_background_equals_blocking_and_does_not_see_later_changes",
            "launch/test_signals.py::test_a_signalled_run_is_saved_and_leaves_nobody",
            "launch/test_as_typed.py::test_a_stopped_run_goes_on_where_it_was",
            "launch/test_slurm.py::test_a_job_of_two_tasks_is_preempted_and_ends_as_if_never_stopped",
        ),
    ),
    Pain(
        "DeepSpeed#5878, #2802",
        "pdsh and the shells behind it change words and swallow exit codes",
        (
            "launch/test_pdsh.py::test_a_frozen_configuration_arrives",
            "cluster/test_slurm_script.py::test_texts_of_the_user_stay_words",
            "cluster/test_kubernetes.py::test_the_configuration_arrives_whole",
            "cluster/test_requeue.py::",  # what follows is decided by status.json
        ),
    ),
    Pain(
        "torch 2.13, gloo",
        "torchrun starts a killed rank again, and the ranks do not meet",
        (
            "launch/test_started_again.py::test_torchrun_starts_ranks_again_as_a_new_attempt",
            "cluster/test_nodes.py::test_after_ranks_were_killed_torchrun_starts_those_of_both_nodes_again",
            "cluster/test_rendezvous.py::test_ranks_meet_whatever_their_agents_have_counted",
        ),
    ),
    Pain(
        "torchrun",
        "every exit code is 1, and a mistake is started again and again",
        (
            "launch/test_slurm.py::test_a_mistake_on_the_nodes_is_not_started_again",
            "launch/test_mistakes.py::test_under_a_launcher_it_is_answered_once_and_nobody_stays",
            "launch/test_started_again.py::test_torchrun_does_not_start_again_what_was_stopped",
        ),
    ),
    Pain(
        "gloo",
        "it listens at what the host's name resolves to, which other machines do not reach",
        (
            "cluster/test_interface.py::test_it_is_the_way_to_where_the_ranks_meet",
            "cluster/test_nodes.py::test_control_gloo_needs_the_right_interface",
        ),
    ),
    Pain(
        "a pulled cable",
        "both sides wait for half an hour",
        ("cluster/test_nodes.py::test_cut_apart_both_sides_end_in_bounded_time_and_the_job_goes_on",),
    ),
)


@pytest.mark.parametrize("pain", PAINS, ids=str)
def test_it_is_tested(pain: Pain) -> None:
    for place in pain.tests:
        file, _, name = place.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(" if name else r"^def test_", text, re.MULTILINE), (
            f"{place} is not there"
        )
