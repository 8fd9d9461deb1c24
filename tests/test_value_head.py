"""The value head: values stand at the right columns; reward models are those of transformers."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import model
from model.config import CheckpointError, read_config
from model.heads import completion_outputs, last_scores, state_values, with_value_head
from model.load import export, load_params
from model.parameters import cast
from model.qwen import Qwen
from model.sample import sample
from model.score_head import export_scorer, load_scorer, padding

NANO = Path(model.__file__).parent / "assets" / "nano"
PAD = 60
WIDTH = 3
TEXTS = [[7, 3, 11, 20, 3, 1], [5, 2, 24], [9]]
KINDS = {
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
}


def headed(params, width, seed=3):
    """With a random head: one of zeros is right at every column."""
    kernel = np.random.default_rng(seed).normal(size=(width, 1))
    return {**params, "value_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}


@pytest.fixture(scope="module")
def critic(tiny_config, tiny_params):
    return headed(tiny_params, tiny_config.hidden_size)


@pytest.fixture(scope="module")
def scorer_folder(tmp_path_factory):
    """A reward model as transformers writes it: (kind, **fields) -> folder and torch model."""

    def make(kind, **fields):
        family, changes = KINDS[kind]
        torch.manual_seed(5)
        shape = {
            "vocab_size": 67,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "rms_norm_eps": 3e-3,
            "max_position_embeddings": 96,
            "eos_token_id": 5,
            "pad_token_id": PAD,
            "num_labels": 1,
        }
        config = AutoConfig.for_model(family, **shape | changes | fields)
        reference = AutoModelForSequenceClassification.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + ("norm" in name))
        folder = tmp_path_factory.mktemp(kind)
        reference.save_pretrained(folder)
        return folder, reference

    return make


def padded(texts, width, side, pad_id=PAD):
    """Tokens and positions, padded on the left or on the right."""
    tokens = np.full((len(texts), width), pad_id, np.int32)
    positions = np.full((len(texts), width), -1, np.int32)
    for row, ids in enumerate(texts):
        place = slice(width - len(ids), width) if side == "left" else slice(len(ids))
        tokens[row, place], positions[row, place] = ids, np.arange(len(ids))
    return jnp.asarray(tokens), jnp.asarray(positions)


def scorer(config, params):
    """Compiled once for all texts: layer by layer, its operations are as many programs."""
    return jax.jit(lambda tokens, at: last_scores(Qwen(config), params, tokens, at))


def torch_scores(reference, tokens, positions):
    with torch.no_grad():
        out = reference(
            input_ids=torch.tensor(np.array(tokens), dtype=torch.long),
            attention_mask=torch.tensor(np.array(positions) >= 0, dtype=torch.long),
        )
    return out.logits[:, 0].float().numpy()


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_value_is_of_the_state_before_its_token(tiny_config, critic, prompts):
    """Taken at the token's own column, a value would know the token it is the baseline of."""
    qwen = Qwen(tiny_config)
    outputs, values, hidden = jax.jit(
        lambda params: (
            completion_outputs(qwen, params, *prompts, WIDTH),
            state_values(qwen, params, *prompts, WIDTH),
            qwen.apply({"params": params}, *prompts),
        )
    )(critic)
    every = (np.asarray(hidden) @ np.asarray(critic["value_head"]["kernel"]))[..., 0]
    # One column more than tokens: a truncated row is bootstrapped from the state after its last.
    wanted = every[:, -WIDTH - 1 :]
    np.testing.assert_allclose(outputs.values, wanted, atol=1e-5)
    np.testing.assert_allclose(values, wanted, atol=1e-5)
    shifted = np.abs(outputs.values[0, :WIDTH] - every[0, -WIDTH:])
    assert shifted.min() > 0.01
    # The same column gives the log-probability: the token's, from the state before it.
    head = np.asarray(critic["lm_head"]["kernel"])[:, : tiny_config.num_tokens]
    logprobs = jax.nn.log_softmax(np.asarray(hidden)[0, -WIDTH - 1 : -1] @ head)
    chosen = logprobs[np.arange(WIDTH), prompts.tokens[0, -WIDTH:]]
    np.testing.assert_allclose(outputs.logprobs[0], chosen, atol=1e-4)


def test_a_head_changes_neither_logprobs_nor_greedy_text(tiny_config, tiny_params, critic, prompts):
    qwen = Qwen(tiny_config)
    keys = jax.random.split(jax.random.key(0), (3, 2))

    @jax.jit
    def of(params):
        drawn = sample(
            tiny_config, params, *prompts, keys, max_new_tokens=5, stop_ids=jnp.array([-1]),
            pad_id=0, temperature=0.0,
        )  # fmt: skip
        return completion_outputs(qwen, params, *prompts, WIDTH), drawn

    (with_head, text), (without, plain) = of(critic), of(tiny_params)
    same((with_head.logprobs, with_head.entropy, text), (without.logprobs, without.entropy, plain))
    assert without.values.dtype == jnp.float32 and without.values.shape == with_head.values.shape
    np.testing.assert_array_equal(without.values, 0.0)


def test_the_heads_product_is_float32_under_bfloat16(tiny_config, critic, prompts):
    """In bfloat16 a value of 3 is known to 1 in 100, and an advantage is a difference of two."""
    low = cast(critic, jnp.bfloat16)
    assert low["value_head"]["kernel"].dtype == jnp.float32
    assert low["embed"]["embedding"].dtype == jnp.bfloat16
    qwen = Qwen(tiny_config, dtype=jnp.bfloat16)
    values, hidden = jax.jit(
        lambda params: (
            state_values(qwen, params, *prompts, WIDTH),
            qwen.apply({"params": params}, *prompts)[:, -WIDTH - 1 :],
        )
    )(low)
    assert hidden.dtype == jnp.bfloat16 and values.dtype == jnp.float32
    exact = np.asarray(hidden, np.float64) @ np.asarray(critic["value_head"]["kernel"], np.float64)
    np.testing.assert_allclose(values, exact[..., 0], atol=1e-5)


def test_a_score_is_the_last_tokens_on_either_side_of_padding(tiny_config, critic):
    """A fixed column -1 would read the padding of right-padded rows."""
    score = scorer(tiny_config, critic)
    left, right = (padded(TEXTS, 8, side, pad_id=0) for side in ("left", "right"))
    wanted = score(*left)
    hidden = jax.jit(Qwen(tiny_config).apply)({"params": critic}, *left)[:, -1]
    np.testing.assert_allclose(wanted, (hidden @ critic["value_head"]["kernel"])[:, 0], atol=1e-5)
    np.testing.assert_allclose(score(*right), wanted, atol=1e-5)
    rng = np.random.default_rng(0)
    for tokens, positions in (left, right):
        garbage = jnp.asarray(rng.integers(1, 25, tokens.shape), jnp.int32)
        garbage = jnp.where(positions >= 0, tokens, garbage)
        assert bool((garbage != tokens).any())
        np.testing.assert_array_equal(score(garbage, positions), score(tokens, positions))


def test_gradients_reach_head_and_trunk_and_no_further(tiny_config, critic, prompts):
    qwen = Qwen(tiny_config)

    @jax.jit
    def slopes(params):
        def score(params):
            return jnp.sum(last_scores(qwen, params, *prompts) ** 2)

        def values(params):
            return jnp.sum(completion_outputs(qwen, params, *prompts, WIDTH).values ** 2)

        return jax.grad(score)(params), jax.grad(values)(params)

    for slope in slopes(critic):
        for path, leaf in jax.tree_util.tree_leaves_with_path(slope):
            largest = float(jnp.abs(leaf).max())
            name = jax.tree_util.keystr(path)
            if path[0].key == "lm_head":
                assert largest == 0, name
            else:
                assert largest > 1e-6, name


def test_a_new_head_is_zero_and_an_old_one_stays(tiny_config, tiny_params, critic, prompts):
    params = with_value_head(tiny_config, tiny_params)
    assert "value_head" not in tiny_params
    assert params["value_head"]["kernel"].shape == (24, 1)
    np.testing.assert_array_equal(scorer(tiny_config, params)(*prompts), 0.0)
    same(with_value_head(tiny_config, critic), critic)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_model_of_transformers_scores_alike_and_goes_back(scorer_folder, tmp_path, kind):
    source, reference = scorer_folder(kind)
    config = read_config(source)
    params = load_scorer(source, config)
    assert "lm_head" not in params and params["value_head"]["kernel"].shape == (24, 1)
    export_scorer(tmp_path / "out", params, config, source=source)
    same(load_scorer(tmp_path / "out", config), params)
    back, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(back) is type(reference) and back.config.num_labels == 1
    assert back.config.pad_token_id == PAD and back.config.eos_token_id == 5
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    for name in ("architectures", "id2label", "label2id"):
        assert before[name] == after[name]
    score = scorer(config, params)
    for side in ("left", "right"):
        rows = padded(TEXTS, 7, side)
        found = score(*rows)
        np.testing.assert_allclose(found, torch_scores(reference, *rows), atol=1e-5)
        np.testing.assert_allclose(found, torch_scores(back.eval(), *rows), atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_trunk_of_a_policy_starts_a_reward_model(checkpoint, tmp_path, tied):
    """Its lm_head is not written: transformers would report it as unexpected."""
    policy = checkpoint("qwen2", pad_token_id=PAD, tie_word_embeddings=tied)
    params = headed(policy.params, 24)
    export_scorer(tmp_path / "out", params, policy.config, source=policy.folder, dtype="bfloat16")
    assert read_config(tmp_path / "out") == policy.config
    back, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    read = load_scorer(tmp_path / "out", policy.config)
    rounded = jax.tree.map(
        lambda leaf: np.asarray(leaf.astype(jnp.bfloat16), np.float32),
        {name: leaf for name, leaf in params.items() if name != "lm_head"},
    )
    same(read, rounded)
    rows = padded(TEXTS, 7, "left")
    found = scorer(policy.config, read)(*rows)
    np.testing.assert_allclose(found, torch_scores(back.eval(), *rows), atol=1e-5)


def test_a_critics_head_is_no_part_of_an_exported_policy(checkpoint, tmp_path):
    policy = checkpoint("qwen2")
    params = headed(policy.params, 24)
    export(tmp_path / "out", params, policy.config, source=policy.folder)
    same(load_params(tmp_path / "out", policy.config), policy.params)


def test_each_kind_of_folder_is_refused_where_the_other_is_wanted(scorer_folder, checkpoint):
    for kind in ("qwen2", "qwen3-tied"):
        folder, _ = scorer_folder(kind)
        with pytest.raises(CheckpointError, match="this is a reward model") as raised:
            load_params(folder, read_config(folder))
        assert str(folder) in str(raised.value) and "missing" not in str(raised.value)
    policy = checkpoint("qwen2")
    with pytest.raises(CheckpointError, match=r"no reward model .*no score\.weight"):
        load_scorer(policy.folder, policy.config)


def test_a_reward_model_without_head_is_not_written(checkpoint, tmp_path):
    policy = checkpoint("qwen2", pad_token_id=PAD)
    with pytest.raises(CheckpointError, match=r"missing \(1\) value_head/kernel"):
        export_scorer(tmp_path / "out", policy.params, policy.config, source=policy.folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"id2label": {"0": "A", "1": "B", "2": "C"}}, 3),
        ({"num_labels": 5}, 5),
        # What transformers takes the absent field to mean.
        ({"id2label": None}, 2),
    ],
)
def test_a_classifier_of_several_labels_is_refused_by_name(scorer_folder, change, count):
    folder, _ = scorer_folder("qwen2", problem_type="regression")
    read_config(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=f"num_labels .* must be 1 .* and is {count}"):
        read_config(folder)


def test_texts_end_where_transformers_looks(tmp_path):
    """The bundled tokenizer pads with a token that also ends texts: as padding it would be passed
    over, and the score be that of the token before."""
    config = read_config(NANO)
    params = headed(load_params(NANO, config), config.hidden_size)
    export_scorer(tmp_path / "out", params, config, source=NANO)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert back.config.pad_token_id == tokenizer.pad_token_id == 1
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    score = scorer(config, params)
    for end in (0, 2):
        texts = [[*tokenizer("3 + 4")["input_ids"], end], [*tokenizer("7")["input_ids"], end]]
        for side in ("left", "right"):
            rows = padded(texts, 12, side, tokenizer.pad_token_id)
            np.testing.assert_allclose(score(*rows), torch_scores(back, *rows), atol=1e-5)
    # A reward model that is trained further keeps its padding.
    assert padding(tmp_path / "out").id == 1


def toy_tokenizer(folder, specials, **roles):
    vocabulary = {token: id for id, token in enumerate(["a", "b", *specials])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(specials)
    PreTrainedTokenizerFast(tokenizer_object=inner, **roles).save_pretrained(folder)


@pytest.mark.parametrize(
    ("specials", "roles", "expected"),
    [
        (["<e>", "<p>"], {"eos_token": "<e>", "pad_token": "<p>"}, (3, None)),
        (
            ["<e>", "<x>", "<my_pad>", "<y>"],
            {"eos_token": "<e>", "pad_token": "<e>"},
            (4, "<my_pad>"),
        ),
        (["<e>", "<x>", "<y>"], {"eos_token": "<e>"}, (4, "<y>")),
    ],
    ids=["its own", "another that is named so", "the last"],
)
def test_padding_is_a_token_that_ends_no_text(tmp_path, specials, roles, expected):
    toy_tokenizer(tmp_path, specials, **roles)
    assert padding(tmp_path) == expected


def test_without_a_token_to_pad_with_there_is_no_reward_model(tmp_path, checkpoint):
    toy_tokenizer(tmp_path, ["<e>"], eos_token="<e>", pad_token="<e>")
    with pytest.raises(CheckpointError, match="ends no text; came '<e>', and texts end in '<e>'"):
        padding(tmp_path)
    for pad in (None, 5):
        folder = checkpoint("qwen2", pad_token_id=pad).folder
        with pytest.raises(CheckpointError, match=f"other than eos_token_id, 5; came {pad}"):
            padding(folder)


def test_a_lost_shard_of_a_reward_model_is_named(scorer_folder):
    """Not told of as a folder of the wrong kind because the head was in that shard."""
    folder, reference = scorer_folder("qwen2")
    config = read_config(folder)
    shutil.rmtree(folder)
    reference.save_pretrained(folder, max_shard_size="8KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["score.weight"]
    (folder / lost).unlink()
    with pytest.raises(CheckpointError, match=f"names the file {lost}, which is not there"):
        load_scorer(folder, config)
