"""Which mesh a run gets: what `mesh: auto` chooses, and what is refused at once."""

import dataclasses
from pathlib import Path

import pytest
from toy_run import start

import run
from model.errors import BadInput
from model.shapes import published
from rlx.compilation import Compilation
from rlx.config import ConfigError, load, load_training
from rlx.mesh import Hardware, Sizes, choose, told

RECIPE = Path(run.__file__).with_name("configs") / "countdown_dapo_qwen2.5_3b.yaml"
GIB = 2**30
BILLION = 10**9


@pytest.fixture(scope="module")
def shape(tiny_config):
    return dataclasses.replace(
        tiny_config,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_heads=8,
        num_kv_heads=4,
    )


def chosen(shape, hardware, *overrides, parameters=BILLION, training=True):
    given = {"batch.prompts": "64", "batch.samples": "4"}
    given |= dict(override.split("=") for override in overrides)
    config = load_training(None, [f"{key}={value}" for key, value in given.items()])
    return choose(config, [shape], parameters, hardware, training=training)


def refusal(shape, hardware, *overrides, **options):
    with pytest.raises(BadInput) as caught:
        chosen(shape, hardware, *overrides, **options)
    return str(caught.value)


# ---- mesh: auto ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [
        # 0.4 of it: 16 bytes a parameter fit, and nothing is split.
        (80, (8, 1, 1)),
        # 16 GB in parts of 4 GB.
        (10, (2, 4, 1)),
        # The sampler's 2 GB in halves, and the state's 16 GB in eighths of 2 GB.
        (4.9, (1, 4, 2)),
        # Sampling in quarters of 0.5 GB; the state fits in no part, and lies in the smallest.
        (1.4, (1, 2, 4)),
        # Where a device doesn't tell its memory, the state is in as many parts as there are.
        (None, (1, 8, 1)),
    ],
)
def test_the_smaller_the_memory_the_more_is_split(shape, memory, wanted):
    assert chosen(shape, Hardware(8, 1, memory and int(memory * BILLION))) == Sizes(*wanted)


def test_a_state_that_fits_nowhere_is_split_as_far_as_can_be(shape):
    """All layouts are then too full; the one with the fewest parts was chosen among equals."""
    assert chosen(shape, Hardware(8, 1, int(5.1 * BILLION)), parameters=2 * BILLION).fsdp == 4
    assert chosen(shape, Hardware(8, 1, 6 * BILLION)).shards == 8


def test_of_several_hosts_parameters_are_gathered_within_whole_ones(shape):
    """Parts of 4 would do."""
    hardware = Hardware(16, 2, 10 * BILLION)
    assert chosen(shape, hardware) == Sizes(2, 8, 1)
    assert chosen(shape, hardware._replace(hosts=1)) == Sizes(4, 4, 1)


def test_a_size_that_is_given_stands_and_the_others_are_chosen(shape):
    roomy = Hardware(8, 1, 80 * GIB)
    assert chosen(shape, roomy, "mesh.tensor=2") == Sizes(4, 1, 2)
    assert chosen(shape, roomy, "mesh.fsdp=8") == Sizes(1, 8, 1)
    assert chosen(shape, roomy, "mesh.data=2", "mesh.tensor=4") == Sizes(2, 1, 4)
    # All given: on one host also fewer than there are.
    assert chosen(shape, roomy, "mesh.data=2", "mesh.fsdp=1", "mesh.tensor=2").devices == 4


def test_where_not_all_devices_can_be_used_as_many_as_can_are(shape):
    roomy = Hardware(8, 1, 80 * GIB)
    # 6 prompts: 8 devices only with heads in quarters, and those are legal.
    assert chosen(shape, roomy, "batch.prompts=6") == Sizes(2, 1, 4)
    odd = dataclasses.replace(shape, num_heads=5, num_kv_heads=5)
    assert chosen(odd, roomy, "batch.prompts=6").devices == 6
    assert chosen(odd, roomy, "batch.prompts=19") == Sizes(1, 1, 1)
    # Several hosts use all or nothing.
    assert "19" in refusal(odd, Hardware(8, 2, 80 * GIB), "batch.prompts=19")


def test_a_run_tells_its_mesh():
    sizes = Sizes(2, 2, 2)
    assert told(sizes, Hardware(8)) == "mesh data 2 x fsdp 2 x tensor 2 (8 devices)"
    assert told(Sizes(1, 1, 1), Hardware(8)).endswith("(1 of 8 devices)")


def test_the_runs_that_the_docs_show_have_a_mesh():
    """docs/gpu.md and docs/tpu.md; the recipe's `batch.micro` has no row for each of 32 devices."""
    shape = published("Qwen2.5-3B-Instruct")
    for hardware, *changes in (
        (Hardware(8, 1, 60 * GIB),),
        (Hardware(32, 4, 60 * GIB), "batch.micro=32"),
        (Hardware(16, 4, 15 * GIB), "batch.micro=32"),
    ):
        config = load_training(RECIPE, changes)
        assert choose(config, [shape], 3 * BILLION, hardware).devices == hardware.devices
    with pytest.raises(BadInput, match=r"of batch\.micro, 8"):
        choose(load_training(RECIPE, []), [shape], 3 * BILLION, Hardware(32, 4, 60 * GIB))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mesh", "reason"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, "mesh.tensor", "num_attention_heads, 6"),
        ({"num_kv_heads": 2}, "mesh.tensor", "num_key_value_heads, 2"),
        ({"vocab_size": 510}, "mesh.tensor", "vocab_size, 510"),
        ({"intermediate_size": 98}, "mesh.tensor", "intermediate_size, 98"),
        ({"hidden_size": 66}, "mesh.fsdp", "hidden_size, 66"),
    ],
)
def test_a_model_that_a_mesh_does_not_divide_is_refused(shape, changes, mesh, reason):
    odd = dataclasses.replace(shape, **changes)
    for training in (True, False):
        message = refusal(odd, Hardware(4), f"{mesh}=4", training=training)
        assert f"{mesh} = 4 does not divide the model's {reason}" in message


def test_every_reason_is_told_at_once(shape):
    odd = dataclasses.replace(shape, num_kv_heads=2, vocab_size=510)
    message = refusal(odd, Hardware(8), "mesh.tensor=4", "batch.prompts=3")
    assert "data 1 x fsdp 2 x tensor 4" in message and "data 2 x fsdp 1 x tensor 4" in message
    for reason in ("num_key_value_heads, 2", "vocab_size, 510", "batch.prompts, 3"):
        assert message.count(reason) == 2


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("batch.prompts=19",), "does not divide batch.prompts, 19"),
        (("batch.minibatches=128",), "does not divide the rows of an update, 2"),
        (("batch.micro=2",), "does not divide the rows of batch.micro, 2"),
    ],
)
def test_a_batch_that_the_devices_do_not_divide_is_refused(shape, overrides, reason):
    """Both numbers are named; a runtime's own error names neither setting."""
    message = refusal(shape, Hardware(4), "mesh.data=4", *overrides)
    assert "mesh.data * mesh.fsdp = 4 * 1 = 4" in message and reason in message
    # Evaluation fills its batches up.
    assert chosen(shape, Hardware(4), "mesh.data=4", *overrides, training=False).data == 4


def test_pairs_stay_whole_on_each_device(shape):
    """12 rows are 3 on each of 4 devices: a pair and a half."""
    given = ("algorithm.name=dpo", "task.name=preference", "task.file=pairs.jsonl")
    config = load_training(None, [*given, "batch.prompts=6", "mesh.data=4"])
    with pytest.raises(BadInput, match="does not divide the rows of an update, 12, in whole pairs"):
        choose(config, [shape], BILLION, Hardware(4))


@pytest.mark.parametrize(
    ("hardware", "overrides", "told"),
    [
        (Hardware(8), ("mesh.data=4", "mesh.fsdp=4", "mesh.tensor=1"), "at most the number"),
        (Hardware(8), ("mesh.tensor=3",), "data auto x fsdp auto x tensor 3"),
        (Hardware(8, 2), ("mesh.data=4", "mesh.fsdp=1", "mesh.tensor=1"), "is the number"),
    ],
)
def test_sizes_whose_product_is_not_the_devices_are_refused(shape, hardware, overrides, told):
    message = refusal(shape, hardware, *overrides)
    assert told in message and "8" in message


def test_a_run_is_refused_before_anything_is_compiled(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rlx.resolve.this_hardware", lambda: Hardware(4))
    with Compilation() as compilation:
        assert start(recipe, tmp_path / "run", "batch.prompts=19", "mesh.data=4") == 2
    assert compilation.programs == 0
    assert "batch.prompts, 19" in (error := capsys.readouterr().err) and "= 4" in error
    assert not (tmp_path / "run").exists()


def test_more_devices_than_there_are_are_refused(recipe, tmp_path, capsys):
    assert start(recipe, tmp_path / "run", "mesh.data=2", "mesh.fsdp=1", "mesh.tensor=1") == 2
    error = capsys.readouterr().err
    assert "number of devices, 1; came data 2 x fsdp 1 x tensor 1 = 2" in error


# ---- the word auto -------------------------------------------------------------------------------


def test_auto_stands_for_the_whole_section(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("mesh: auto\n")
    assert load(path, []).mesh.model_dump() == {"data": 0, "fsdp": 0, "tensor": 0}
    assert load(path, ["mesh.tensor=2"]).mesh.tensor == 2
    # On the command line it is the last word, beside which a size may be given.
    path.write_text("mesh:\n  data: 4\n  tensor: 2\n")
    assert load(path, []).mesh.data == 4
    assert load(path, ["mesh=auto"]).mesh.model_dump() == {"data": 0, "fsdp": 0, "tensor": 0}
    assert load(path, ["mesh=auto", "mesh.fsdp=2"]).mesh.model_dump() == {
        "data": 0,
        "fsdp": 2,
        "tensor": 0,
    }


@pytest.mark.parametrize("word", ["8", "all", "[2, 2, 2]"])
def test_another_word_is_refused(tmp_path, word):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"mesh: {word}\n")
    with pytest.raises(ConfigError, match=r"expected auto, or settings under it, such as mesh\."):
        load(path, [])
    path.write_text("run: auto\n")
    with pytest.raises(ConfigError, match=r"run .*: expected settings under it"):
        load(path, [])
