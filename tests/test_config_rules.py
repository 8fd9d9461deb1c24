"""What a configuration may not say: impossible values, contradictions, settings without effect."""

import pytest

from rlx.algorithms import ALGORITHMS
from rlx.config import ConfigError, check_training, load, load_training
from rlx.derived import old_logprobs, rows, updates

PREFERENCES = [name for name, row in ALGORITHMS.items() if row.source == "pairs"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_training(None, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "override, limit",
    [
        ("algorithm.clip_low=3", "at least 0, below 1"),
        ("algorithm.clip_low=1", "below 1"),
        ("algorithm.clip_high=-0.1", "at least 0"),
        ("algorithm.ddof=2", "at most 1"),
        ("critic.value_clip=0", "above 0"),
        ("critic.coefficient=0", "above 0"),
        ("critic.kind=body", "one of head, model"),
        ("reward.kl=k2", "one of none, k1, k3"),
        ("reward.clip=-1", "at least 0"),
        ("rollout.correction_cap=1", "above 1"),
        ("rollout.correction_floor=1", "below 1"),
        ("rollout.correction=mask", "one of none, token_truncate"),
        ("rollout.replay_max_age=0", "at least 1"),
        ("sampling.temperature=-1", "at least 0"),
        ("sampling.top_p=1.5", "at most 1"),
        ("batch.prompts=0", "at least 1"),
        ("loop.steps=0", "at least 1"),
        ("optimizer.b2=1", "below 1"),
        ("task.format_weight=2", "at most 1"),
        ("model.dtype=float16", "one of auto, float32, bfloat16"),
        ("model.path=", "not empty"),
        ("run.name=a/b", "matches"),
    ],
)
def test_an_impossible_value_is_refused_with_the_allowed_ones(override, limit):
    path = override.partition("=")[0]
    message = refusal(override)
    assert f"{path} (command line): expected" in message and limit in message


@pytest.mark.parametrize(
    "name, override, limit",
    [
        ("ppo_dual_clip", "dual_clip=1", "above 1"),
        ("cispo", "cap=0.9", "at least 1"),
        ("reward_model", "margin=-1", "at least 0"),
        ("reward_model", "centring=-1", "at least 0"),
        ("grpo", "beta=-1", "at least 0"),
        *((name, "beta=0", "above 0") for name in PREFERENCES),
    ],
)
def test_a_hyper_parameter_has_its_algorithms_range(name, override, limit):
    """IPO divides by beta, which in GRPO may be 0."""
    message = refusal(f"algorithm.name={name}", f"algorithm.{override}")
    assert limit in message and message.startswith("1 problem ")


def test_a_group_of_one_is_told_what_it_lacks():
    """Not that 1 does not divide something."""
    message = refusal("batch.samples=1")
    assert "batch.samples: expected at least 2" in message and "divi" not in message


@pytest.mark.parametrize(
    "algorithm, alone",
    [
        (["algorithm.name=ppo"], True),
        (["algorithm.name=reinforce_pp"], True),
        (["algorithm.name=reinforce_pp_baseline"], False),
        (["algorithm.name=gspo_token"], False),
        (["algorithm.name=rloo"], False),
        (["algorithm.name=ppo", "algorithm.advantage=components_normalised"], False),
        (["algorithm.name=grpo", "algorithm.advantage=whitened_returns"], True),
        (["algorithm.terms=[{name: ppo}, {name: grpo}]"], False),
        (["algorithm.terms=[{name: ppo}, {name: sft}]"], True),
    ],
)
def test_one_sample_is_enough_where_no_group_is_compared(algorithm, alone):
    overrides = [*algorithm, "batch.samples=1"]
    if alone:
        load_training(None, overrides)
    else:
        assert "expected at least 2" in refusal(*overrides)


@pytest.mark.parametrize("name, value", [("top_k", "5"), ("top_p", "0.9"), ("min_p", "0.1")])
def test_training_samples_what_it_trains(name, value):
    """A filtered sample's log-probability is not the full softmax's."""
    assert "distribution" in refusal(f"sampling.{name}={value}")
    assert getattr(load(None, [f"sampling.{name}={value}"]).sampling, name) == float(value)


def test_training_is_not_greedy():
    assert "sampling.temperature" in refusal("sampling.temperature=0")
    assert load(None, ["sampling.temperature=0"]).sampling.temperature == 0


def test_more_slots_than_rows_are_refused():
    given = ("batch.prompts=3", "batch.samples=4", "batch.micro=3")
    message = refusal(*given, "sampling.slots=13")
    assert "sampling.slots" in message and "batch.samples = 12" in message and "came 13" in message
    assert load_training(None, [*given, "sampling.slots=12"]).sampling.slots == 12
    # Where nothing is trained there is no step to count the rows of.
    assert load(None, ["sampling.slots=9999"]).sampling.slots == 9999


def test_rows_that_do_not_divide_are_refused_with_both_numbers():
    message = refusal("batch.prompts=3", "batch.samples=4", "batch.minibatches=5")
    assert "3 * 4 = 12" in message and "came 5" in message
    message = refusal("batch.prompts=3", "batch.samples=4", "batch.minibatches=2", "batch.micro=4")
    assert "rows, 6" in message and "came 4" in message
    load_training(None, ["batch.prompts=3", "batch.samples=4", "batch.micro=3"])


@pytest.mark.parametrize(
    "path, value, cause",
    [
        ("rollout.max_rounds", "8", "rollout.dynamic_sampling=true"),
        ("optimizer.final_fraction", "0.1", "optimizer.schedule=linear"),
        ("eval.problems", "8", "eval.every=5"),
        ("rollout.correction_cap", "3", "rollout.correction=token_truncate"),
        ("rollout.correction_floor", "0.1", "rollout.correction=sequence_mask"),
        ("rollout.replay_max_age", "3", "rollout.replay=4"),
        ("critic.coefficient", "0.5", "algorithm.name=ppo"),
        ("critic.value_clip", "0.5", "algorithm.advantage=gae"),
    ],
)
def test_a_setting_without_its_cause_is_refused(path, value, cause):
    without = [f"{path}={value}"] + (["eval.every=0"] if path.startswith("eval") else [])
    assert f"{path}: expected unset" in refusal(*without)
    load_training(None, [f"{path}={value}", cause])


def test_a_kernel_of_whole_rows_is_asked_for_only_where_rows_are_whole():
    assert "model.attention: expected unset" in refusal("model.attention=tpu")
    load_training(None, ["model.attention=auto"])
    load_training(None, ["model.attention=tpu", "batch.packing=false"])
    load_training(None, ["model.attention=tpu", "reward.source=model", "reward.model=x"])


@pytest.mark.parametrize(
    "overrides, path",
    [
        (["algorithm.name=ppo", "rollout.dynamic_sampling=true"], "rollout.dynamic_sampling"),
        (["algorithm.name=reinforce_pp", "rollout.replay=4"], "rollout.replay"),
    ],
)
def test_a_group_of_one_is_never_mixed(overrides, path):
    """Every round would be drawn and every update skipped."""
    assert f"{path}: expected unset" in refusal("batch.samples=1", *overrides)


def test_replay_is_for_advantages_that_compare_a_group():
    """Whitened over the batch, a group that is all right teaches; it would be overwritten."""
    message = refusal("algorithm.name=reinforce_pp", "rollout.replay=4")
    assert "compare no group" in message
    load_training(None, ["algorithm.name=reinforce_pp_baseline", "rollout.replay=4"])


@pytest.mark.parametrize(
    "path, value",
    [
        ("loop.mode", "staged"),
        ("sampling.temperature", "0.3"),
        ("sampling.top_k", "4"),
        ("eval.samples", "8"),
        ("eval.greedy", "false"),
        ("log.samples", "2"),
    ],
)
@pytest.mark.parametrize("task, algorithm", [("preference", "dpo"), ("chat", "sft")])
def test_given_text_is_not_sampled(task, algorithm, path, value):
    given = [f"task.name={task}", "task.file=a", f"algorithm.name={algorithm}"]
    assert f"{path}: expected unset" in refusal(*given, f"{path}={value}")


def test_worked_examples_are_measured_by_samples():
    load_training(None, ["algorithm.name=sft", "eval.samples=8", "sampling.temperature=0.3"])


def test_a_critic_of_its_own_has_no_coefficient():
    message = refusal("algorithm.name=ppo", "critic.kind=model", "critic.coefficient=0.5")
    assert "critic.coefficient: expected unset" in message


def test_weights_of_a_verifier_that_is_not_asked_are_refused():
    model = ["reward.source=model", "reward.model=a"]
    assert "task.format_weight: expected unset" in refusal(*model, "task.format_weight=0.5")


@pytest.mark.parametrize(
    "setting", ["b1=0.5", "b2=0.5", "eps=1e-3", "weight_decay=0.1", "state_dtype=int8"]
)
def test_sgd_has_no_moments(setting):
    assert setting.partition("=")[0] in refusal("optimizer.name=sgd", f"optimizer.{setting}")


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.overlong_filter=true",
        "rollout.old_logprobs=sampler",
        "rollout.correction=token_mask",
        "rollout.probe=2",
        "rollout.retire_after=2",
        "rollout.replay=2",
        "reward.source=model",
        "reward.kl=k1",
        "reward.running=true",
        "critic.kind=model",
        "critic.coefficient=0.5",
        "batch.samples=4",
    ],
)
@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_an_algorithm_that_samples_nothing_ignores_no_sampling(name, setting):
    path = setting.partition("=")[0]
    assert f"{path}: expected unset" in refusal(f"algorithm.name={name}", setting)
    load_training(None, [f"algorithm.name={name}", "batch.samples=1"])


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_given_pairs_are_not_packed(name):
    """A pair packed into one row would be none."""
    message = refusal(f"algorithm.name={name}", "batch.packing=true")
    assert f"batch.packing: expected unset, since {name}" in message
    for other in ("sft", "dapo"):
        load_training(None, [f"algorithm.name={other}", "batch.packing=true"])


def test_a_step_of_data_counts_its_rows():
    sft = load_training(None, ["algorithm.name=sft", "batch.prompts=12", "batch.micro=6"])
    assert rows(sft) == 12
    assert rows(load(None, ["batch.prompts=12"])) == 96


def test_warmup_ends_within_the_run():
    run = ["loop.steps=5", "batch.epochs=2", "batch.minibatches=4"]
    assert updates(load_training(None, [*run, "optimizer.warmup_steps=39"])) == 40
    message = refusal(*run, "optimizer.warmup_steps=40")
    assert "5 * 2 * 4" in message and "came 40" in message


def test_what_happens_between_chunks_happens_at_their_ends():
    message = refusal("loop.chunk=4", "loop.steps=9", "checkpoint.every=6", "eval.every=10")
    for path in ("loop.steps", "checkpoint.every", "eval.every"):
        assert f"{path}: expected a multiple of loop.chunk, 4" in message
    load_training(None, ["loop.chunk=4", "loop.steps=8", "checkpoint.every=0", "eval.every=0"])


def test_overlong_buffer_fits_the_completion():
    assert "overlong_buffer" in refusal("sampling.max_new_tokens=16", "rollout.overlong_buffer=17")
    load_training(None, ["sampling.max_new_tokens=16", "rollout.overlong_buffer=16"])


def test_the_updates_own_logprobs_serve_one_update_a_batch():
    assert "came current" in refusal("rollout.old_logprobs=current", "batch.minibatches=2")
    load_training(None, ["rollout.old_logprobs=current"])


def test_a_resume_names_its_folder():
    assert "run.dir" in refusal("run.resume=true")
    load_training(None, ["run.resume=true", "run.dir=runs/x"])


def test_check_training_speaks_as_load_training_does():
    overrides = ["batch.samples=1", "sampling.top_k=3"]
    with pytest.raises(ConfigError) as caught:
        check_training(load(None, overrides))
    assert str(caught.value) == refusal(*overrides)


# --- pairs ---------------------------------------------------------------------------------------

BOTH = "algorithm.terms=[{name: grpo}, {name: dpo, weight: 0.1}]"


def test_on_line_pairs_are_cut_out_of_even_groups():
    """An odd group would put a row beside another prompt's."""
    assert "expected an even number, since dpo" in refusal(BOTH, "batch.samples=5")
    load_training(None, ["algorithm.name=grpo", "batch.samples=5"])


@pytest.mark.parametrize("algorithm, rows_a_step", [(BOTH, 12), ("algorithm.name=dpo", 12)])
def test_no_cut_goes_through_a_pair(algorithm, rows_a_step):
    """12 rows are 6 pairs: 4 mini-batches of 3 rows divide the rows and split the pairs."""
    shape = ["batch.prompts=6"] if algorithm != BOTH else ["batch.prompts=3", "batch.samples=4"]
    assert rows(load_training(None, [algorithm, *shape])) == rows_a_step
    assert "batch.minibatches: expected" in refusal(algorithm, *shape, "batch.minibatches=4")
    message = refusal(algorithm, *shape, "batch.micro=3")
    assert "batch.micro: expected" in message and "dpo learns from pairs" in message
    load_training(None, [algorithm, *shape, "batch.minibatches=3", "batch.micro=2"])


def test_rows_alone_are_cut_anywhere():
    shape = ["batch.prompts=3", "batch.samples=4", "batch.minibatches=4", "batch.micro=3"]
    load_training(None, ["algorithm.name=grpo", *shape])


# --- old log-probabilities and corrections -------------------------------------------------------

KL = ["reward.kl=k1", "reward.kl_beta=0.1"]


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], "current"),
        (["batch.epochs=2"], "recompute"),
        (["rollout.replay=4"], "recompute"),
        (["rollout.correction=token_truncate"], "recompute"),
        (KL, "recompute"),
        (["reward.running=true"], "current"),
        (["rollout.old_logprobs=sampler"], "sampler"),
    ],
)
def test_auto_is_current_where_nothing_else_reads_them(overrides, expected):
    """The KL in the reward would be that of zeros, replayed text that of another policy."""
    assert old_logprobs(load_training(None, overrides)) == expected


@pytest.mark.parametrize(
    "overrides", [KL, ["rollout.replay=4"], ["rollout.correction=token_truncate"]]
)
def test_current_is_refused_where_they_are_read_before_or_are_old(overrides):
    message = refusal("rollout.old_logprobs=current", *overrides)
    path = overrides[0].partition("=")[0]
    assert "rollout.old_logprobs: expected auto or recompute" in message
    assert ("earlier policy" if path == "rollout.replay" else f"{path} reads them") in message


@pytest.mark.parametrize("name", ["gspo", "rloo", "gmpo"])
def test_a_loss_of_rows_takes_a_correction_of_rows(name):
    message = refusal(f"algorithm.name={name}", "rollout.correction=token_mask")
    assert "expected sequence_mask, since the loss of " + name in message
    load_training(None, [f"algorithm.name={name}", "rollout.correction=sequence_mask"])


def test_a_row_loss_is_told_by_its_shape():
    """By its reduction, GSPO with token_mean would be none."""
    token = "rollout.correction=token_truncate"
    load_training(None, ["algorithm.name=gspo_token", token])
    assert "gspo" in refusal("algorithm.name=gspo", "algorithm.reduction=token_mean", token)
    assert "gmpo" in refusal("algorithm.terms=[{name: grpo}, {name: gmpo}]", token)
    # A preference's loss is one of rows, and nothing corrects it.
    load_training(None, [BOTH, token])


def test_a_gap_is_corrected_once():
    message = refusal("rollout.correction=token_mask", "rollout.old_logprobs=sampler")
    assert "rollout.correction: expected none" in message and "already" in message


def test_a_truncation_has_no_floor():
    message = refusal("rollout.correction=token_truncate", "rollout.correction_floor=0.1")
    assert "rollout.correction_floor: expected unset, since token_truncate" in message


# --- reward and critic ---------------------------------------------------------------------------


def test_a_reward_model_has_a_folder_and_only_then():
    assert "reward.model: expected a reward model's folder" in refusal("reward.source=model")
    assert "reward.model: expected unset" in refusal("reward.model=rm")
    model = ["reward.source=model", "reward.model=rm"]
    load_training(None, [*model, "rollout.dynamic_sampling=true"])
    assert "right or wrong" in refusal(*model, "rollout.retire_after=2")


def test_a_kl_penalty_has_a_weight_and_only_then():
    assert "reward.kl_beta: expected above 0" in refusal("reward.kl=k3")
    assert "reward.kl_beta: expected unset" in refusal("reward.kl_beta=0.1")
    assert "reward.kl_target: expected unset" in refusal("reward.kl_target=6")
    assert "reward.kl_horizon: expected unset" in refusal(*KL, "reward.kl_horizon=5")
    message = refusal(*KL, "reward.kl_target=6", "reward.kl_horizon=255")
    assert "reward.kl_horizon: expected at least the completions of a step" in message
    load_training(None, [*KL, "reward.kl_target=6", "reward.kl_horizon=256"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.overlong_buffer=8"],
        KL,
        ["reward.running=true"],
        ["reward.clip=5"],
        ["reward.missing_stop_penalty=1"],
    ],
)
def test_what_changes_the_sum_is_nothing_to_its_parts(overrides):
    """Where nothing else reads the sum."""
    parts = ["algorithm.advantage=components_normalised"]
    path = overrides[0].partition("=")[0]
    assert f"{path}: expected unset, since dapo" in refusal(*parts, *overrides)
    load_training(None, overrides)
    load_training(None, parts)
    both = "algorithm.terms=[{name: grpo}, {name: dr_grpo, advantage: components_normalised}]"
    load_training(None, [both, *overrides])


def test_weights_of_a_verifier_that_is_not_asked():
    weight, own = "task.format_weight=0.5", "{name: 'mine.py:score'}"
    message = refusal(weight, f"reward.verifiers=[{own}]")
    assert "task.format_weight: expected unset, since reward.verifiers does not name" in message
    load_training(None, [weight, f"reward.verifiers=[{{name: task}}, {own}]"])


def test_a_loss_of_tokens_is_no_mean_over_rows():
    """It would count what stands at padding."""
    message = refusal("algorithm.reduction=row_mean")
    assert "algorithm.reduction: expected a mean over tokens, since the loss of dapo" in message
    several = "algorithm.terms=[{name: gspo}, {name: kl_k3, reduction: row_mean}]"
    assert "algorithm.terms[1].reduction: expected a mean over tokens" in refusal(several)
    load_training(None, ["algorithm.name=gspo", "algorithm.reduction=row_mean"])


def test_a_critic_is_set_where_there_is_one():
    assert "critic.value_clip: expected unset" in refusal("critic.value_clip=0.5")
    head = ["algorithm.name=ppo", "critic.learning_rate=1e-5"]
    assert "critic.learning_rate: expected unset, since critic.kind is head" in refusal(*head)
    load_training(None, [*head, "critic.kind=model", "critic.path=rm"])


# --- probing, retiring, replaying ----------------------------------------------------------------


@pytest.mark.parametrize("probe", [1, 3, 8, 16])
def test_a_probe_is_a_part_of_a_group(probe):
    message = refusal(f"rollout.probe={probe}")
    assert "rollout.probe: expected 0, or a divisor of batch.samples, 8" in message
    load_training(None, ["rollout.probe=4", "rollout.replay=8", "rollout.retire_after=1"])


def test_a_probe_and_dynamic_sampling_are_two_answers_to_one_question():
    assert "rollout.probe" in refusal("rollout.probe=4", "rollout.dynamic_sampling=true")


def test_a_critic_knows_no_replayed_text():
    assert "rollout.replay: expected unset, since ppo" in refusal(
        "algorithm.name=ppo", "rollout.replay=4"
    )


def test_a_rule_is_silent_where_the_terms_are_refused():
    """It would speak of DAPO, which nobody asked for."""
    message = refusal("algorithm.terms=[{name: ppoo}]", "batch.samples=1", "critic.kind=model")
    assert message.startswith("1 problem ")
