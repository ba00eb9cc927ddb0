"""Nothing public escapes the laws, and no law sees a module as initialised."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from holonomy.layers import HypLinearAttention
from tests.cases import ATTENTIONS, CASES, ELSEWHERE, public_classes
from tests.laws.laws import LAWS, build, every_case

# Each states its laws when it is imported.
for path in sorted(Path(__file__).parent.glob("test_*.py")):
    if path != Path(__file__):
        importlib.import_module(f"tests.laws.{path.stem}")


def test_every_public_class_is_registered():
    missing = set(public_classes()) - {case.kind for case in CASES} - ELSEWHERE.keys()
    assert not missing, f"{missing} need a case in tests/registry and a reference: CONTRIBUTING.md, A layer"


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_class_has_a_reference():
    assert not [case.name for case in CASES if case.reference is None]


@every_case
def test_parameters_and_statistics_are_shaken(case, device):
    _, module, _ = build(case, device, torch.float64)
    for name, parameter in module.named_parameters():
        assert parameter.ne(0).any(), name
        assert parameter.numel() == 1 or parameter.unique().numel() > 1, name
    for name, buffer in module.named_buffers():
        if "running" in name:
            assert buffer.ne(0).all(), name
            assert buffer.ne(1).all(), name


# On how many cases each law runs at least, so that none loses cases unnoticed. A law that is not listed runs on all.
LEAST = {
    "test_second_derivatives_agree_with_differences_of_the_first": 325,
    "test_outputs_lie_on_the_manifold": 144,
    "test_the_change_of_curvature_is_executed": 110,
    "test_the_curvature_of_the_output_receives_a_gradient_in_both_modes": 144,
    "test_finite_input_gives_finite_output_and_gradients": 175,
    "test_the_largest_points_that_the_dtype_holds_give_points_and_finite_gradients": 175,
    "test_options_are_kept": 241,
    "test_every_module_draws_its_own_parameters_anew": 153,
    "test_another_module_may_stand_in_the_place_of_a_part": 95,
    "test_nan_in_a_mask_is_not_hidden": 12,
    "test_nan_in_a_memory_is_seen_at_every_token": 28,
    "test_compiles_without_a_graph_break": 61,
    "test_compiles_for_all_sizes": 34,
    "test_compiles_where_nothing_asks_for_a_gradient": 34,
    "test_permuting_the_nodes_permutes_the_result": 263,
    "test_no_nodes_and_no_graphs_have_a_finite_result_with_gradients": 275,
    "test_padding_has_no_effect": 91,
    "test_a_shared_curvature_is_refused_under_two_names": 148,
    "test_a_selective_checkpoint_changes_no_gradient": 95,
    "test_an_input_may_be_a_parameter": 95,
    "test_grad_agrees_with_autograd": 95,
    "test_fake_tensors_have_the_shape_of_the_result": 95,
    "test_recorded_operations_are_the_module": 77,
    "test_operations_are_recorded_where_sizes_are_symbols": 73,
    "test_an_ensemble_by_vmap_agrees_with_its_members": 95,
    "test_no_token_sees_later_ones": 72,
    "test_a_prefix_is_a_pass_of_its_own": 42,
    "test_steps_of_any_length_are_the_causal_pass": 42,
    "test_steps_with_padding_are_the_pass_with_padding": 42,
    "test_a_state_of_another_batch_is_refused": 42,
    "test_a_state_is_loaded_as_weights_are": 42,
    "test_the_state_of_some_sequences_continues_those": 42,
    "test_its_own_tokens_as_memory_are_self_attention": 28,
    "test_a_memory_has_no_order_and_its_padding_no_effect": 28,
    "test_no_memory_and_no_tokens": 28,
    "test_what_does_not_go_with_a_memory_is_refused": 36,
    "test_masks_of_pairs_have_torchs_shapes_and_meaning": 36,
    "test_the_lowest_numbers_of_a_wider_dtype_hide_pairs": 12,
    "test_a_token_that_may_attend_to_none_finds_what_no_memory_holds": 21,
    "test_weights_sum_to_one_where_there_are_keys": 60,
    "test_weights_of_a_memory_have_its_columns": 28,
    "test_rotations_know_differences_of_places_only": 9,
    "test_a_step_compiles_without_a_graph_break": 10,
    "test_learned_points_stay_finite_at_a_rate_of_a_thousand": 3,
    "test_running_statistics_are_drawn_towards_those_of_the_batch": 13,
}


@pytest.mark.parametrize("law", LAWS)
def test_no_law_loses_cases(law):
    assert len(LAWS[law]) >= LEAST.get(law, len(CASES))


# The laws of one interface.
OF_ATTENTION = (
    "test_no_token_sees_later_ones",
    "test_a_prefix_is_a_pass_of_its_own",
    "test_steps_of_any_length_are_the_causal_pass",
    "test_steps_with_padding_are_the_pass_with_padding",
    "test_a_state_of_another_batch_is_refused",
    "test_the_state_of_some_sequences_continues_those",
    "test_its_own_tokens_as_memory_are_self_attention",
    "test_a_memory_has_no_order_and_its_padding_no_effect",
    "test_no_memory_and_no_tokens",
    "test_what_does_not_go_with_a_memory_is_refused",
    "test_masks_of_pairs_have_torchs_shapes_and_meaning",
    "test_a_token_that_may_attend_to_none_finds_what_no_memory_holds",
    "test_weights_sum_to_one_where_there_are_keys",
    "test_weights_of_a_memory_have_its_columns",
    "test_a_step_compiles_without_a_graph_break",
)


@pytest.mark.parametrize("law", OF_ATTENTION)
def test_the_laws_of_attention_run_over_every_attention(law):
    missing = set(ATTENTIONS) - {case.kind for case in LAWS[law]}
    # Sums over keys have no mask of pairs.
    assert not missing - ({HypLinearAttention} if law.startswith("test_a_token_that_may_attend") else set())
