"""`plan`: what a run's own programs need on devices that are not there."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import toy

import run
from model.errors import BadInput
from model.sample import STRIDE
from rlx.config import load_training
from rlx.cost import Cost, rollout_bytes
from rlx.derived import offline
from rlx.fits import Usage, check_fits, usage
from rlx.mesh import Sizes, on_mesh
from rlx.plan import Estimate, Outlook, PartEstimate, Planner, compare, fit, prepared
from rlx.plan_programs import decode_turns, programs
from rlx.plan_report import plan, table
from rlx.plan_shapes import Places, model_shape
from rlx.rollout import sample_rows
from rlx.roofline import Seconds
from rlx.topology import parse, plugin_installed

TINY = """
model: {path: %s}
task: {name: countdown, train_size: 64, heldout_size: 8}
sampling: {max_new_tokens: 16, max_prompt_tokens: 32}
algorithm: {name: grpo, beta: 0.1}
batch: {prompts: 8, samples: 4, micro: 16, minibatches: 1}
loop: {steps: 10}
"""

SFT = """
model: {path: %s}
task: {name: countdown, train_size: 64, heldout_size: 8, give_up: 0.5, demonstrations: 32}
sampling: {max_new_tokens: 16, max_prompt_tokens: 32}
algorithm: {name: sft}
batch: {prompts: 8, micro: 4}
loop: {steps: 10}
"""

pytestmark = pytest.mark.usefixtures("optimised")

RECIPES = sorted(Path(run.__file__).with_name("configs").glob("*.yaml"))


def needs(topology):
    platform = parse(topology).chip.platform
    if platform != "cpu" and not plugin_installed(platform):
        pytest.skip(f"the plugin for {topology} is not installed")


@pytest.fixture(scope="session")
def shape_only(tiny_nano, tmp_path_factory):
    """A checkpoint's folder without weights and without a tokenizer."""
    folder = tmp_path_factory.mktemp("shape")
    shutil.copy(tiny_nano / "config.json", folder)
    return folder


@pytest.fixture
def tiny_recipe(shape_only, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY % shape_only)
    return path


def planner(topology, config):
    made = Planner(parse(topology), lambda line: None)
    with made.made_for():
        return made, prepared(config, made.topology)[0]


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:2", "cpu:1"])
def test_the_programs_of_a_step_compile_for_each_target(tiny_recipe, topology):
    needs(topology)
    result = plan(load_training(tiny_recipe, []), parse(topology), price=2.0)
    assert [program["name"] for program in result["programs"]] == ["sample", "score", "update"]
    assert result["fits"]
    sample, score, update = result["programs"]
    assert [part["name"] for part in sample["parts"]] == ["prefill", "decode"]
    assert min(part["flops"] for p in (sample, score, update) for part in p["parts"]) > 0
    # The way back has two products for each of the way there.
    assert 2 < update["parts"][0]["flops"] / score["parts"][0]["flops"] < 5
    # While it samples, a run keeps the moments and the reference, none of them an argument.
    assert sample["bytes"]["beside"] > 0
    assert result["tokens_a_step"] == 8 * 4 * 16
    if topology != "cpu:1":
        devices = result["devices"]
        hourly = 2.0 * devices * result["step_seconds"] / 3600
        assert result["dollars_a_run"] == pytest.approx(10 * hourly)
    assert "decode" in table(result) and "note" in table(result)
    json.dumps(result)


def test_given_texts_go_through_the_fused_kernel_on_a_mesh(shape_only, tmp_path):
    needs("v5e:2x2")
    file = tmp_path / "sft.yaml"
    file.write_text(SFT % shape_only)
    config = load_training(file, ["mesh.data=2", "mesh.fsdp=2"])
    made, config = planner("v5e:2x2", config)
    outlook = made.outlook(config, made.sizes(config))
    (update,) = outlook.estimates
    assert update.name == "update" and update.fits
    assert update.parts[0].cost.uncounted.keys() == {"tpu_custom_call"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_programs_to_plan(recipe, tiny_nano):
    """Whatever it trains and is judged by; none needs a weight."""
    config = load_training(recipe, [])
    given = [f"model.path={tiny_nano}"]
    given += [f"reward.model={tiny_nano}"] if config.reward.source == "model" else []
    given += [f"critic.path={tiny_nano}"] if config.critic.path else []
    _, config = planner("cpu:1", load_training(recipe, given))
    made = programs(config, Places(None, jax.devices()[:1]))
    names = [planned.name for planned in made]
    assert names[-1] == "update"
    assert offline(config) or names[0] == "sample"
    assert ("verify" in names) == (config.reward.source == "model")


def test_a_run_on_the_cpu_holds_what_plan_says(tiny_recipe):
    _, config = planner("cpu:1", load_training(tiny_recipe, []))
    places = Places(None, jax.devices()[:1])
    planned = {p.name: p for p in programs(config, places)}
    state = planned["update"].operands[1]
    real = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    used = usage(planned["update"].lowered().compile(), planned["update"].held)
    # The update's arguments are the state and the batch; the reference lies beside.
    assert used.arguments >= 0.99 * real
    assert used.beside > 0
    assert used.peak == sum(used[:3]) - used.aliased + used.beside
    assert used.aliased >= 0.9 * real, "the state is not written over"


def test_no_logits_of_the_whole_vocabulary_are_gathered(shape_only, tmp_path):
    needs("v5e:2x2")
    described = json.loads((shape_only / "config.json").read_text())
    described |= {"vocab_size": 4864, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(described))
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY % tmp_path)
    config = load_training(file, ["mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2"])
    made, config = planner("v5e:2x2", config)
    texts = {}
    estimate = made.estimate

    def keep(planned, lowered, hosts):
        texts[planned.name] = lowered.compile().as_text()
        return estimate(planned, lowered, hosts)

    made.estimate = keep
    made.outlook(config, made.sizes(config))
    for name, text in texts.items():
        gathers = [line for line in text.splitlines() if " all-gather" in line]
        assert gathers, name
        # The table of 4864 x 16 may be gathered over fsdp, in its parts of 2432 tokens.
        assert not [line for line in gathers if "4864" in line.split("=")[1].split("(")[0]], name


def test_decoding_moves_little_more_than_weights_and_cache_on_a_tpu(shape_only, tmp_path):
    needs("v5e:1x1")
    # What the chip's vector memory of 128 MiB holds is read once: a small model moves nothing.
    described = json.loads((shape_only / "config.json").read_text())
    described |= {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 65_536,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY % tmp_path)
    changes = ["sampling.max_new_tokens=64", "sampling.max_prompt_tokens=128"]
    config = load_training(file, changes)
    made, config = planner("v5e:1x1", config)
    outlook = made.outlook(config, made.sizes(config), ("sample",))
    decode = outlook.estimates[0].parts[1].cost
    shape = {"rows": 32, "prompt": 128, "completion": 64, "samples": 4}
    least = rollout_bytes(model_shape(str(tmp_path))[0], **shape, itemsize=2)
    assert least - 64 * 128 * 2**20 <= decode.bytes <= 1.3 * least


@pytest.mark.parametrize(
    ("slots", "length"), [(0, 40), (3, 10), (4, 12), (5, 12), (8, 12), (10, 12), (11, 12), (11, 4)]
)
def test_decoding_is_told_as_many_turns_as_the_sampler_takes(slots, length):
    """As many in each loop as in the other would be half of them, where slots divide the rows."""
    settings = toy.sampling(prompts=3, samples=4, slots=slots, max_new_tokens=length)
    settings = settings._replace(stop_ids=(-1,))
    rows = jnp.arange(3)
    sampled = jax.jit(sample_rows, static_argnums=0)(
        settings, toy.initial_params(), toy.pool(), rows, rows, jax.random.key(0), 0
    )
    assert bool(sampled.mask.all())
    turns = decode_turns(settings, 1)
    widths = (slots, slots // 4) if slots else (12, 12)
    steps = STRIDE * sum(count * width for count, width in zip(turns, widths, strict=False))
    assert steps == int(sampled.slot_steps)


@pytest.mark.parametrize(
    ("prompts", "samples", "slots", "length", "shards", "turns"),
    [
        (64, 8, 64, 1024, 1, [8 * 256, 0]),
        (8, 4, 8, 16, 1, [4 * 4, 0]),
        # Two slots a part: no quarter of them, so no second loop.
        (8, 4, 8, 16, 4, [4 * 4]),
        # 16 rows in 15 slots: the last row takes its slot in the first loop.
        (8, 4, 30, 16, 2, [4 + 1, 3]),
        # 8 rows in 8 slots, and a cache that grows twice.
        (8, 4, 29, 68, 4, [8, 8, 1]),
    ],
)
def test_each_part_of_a_mesh_decodes_its_rows_in_its_slots(
    prompts, samples, slots, length, shards, turns
):
    settings = toy.sampling(prompts=prompts, samples=samples, slots=slots, max_new_tokens=length)
    assert decode_turns(settings, shards) == turns


@pytest.mark.parametrize("topology", ["cpu:1", "v5e:2x2", "h100:2"])
def test_slots_decode_each_row_to_its_end(tiny_recipe, topology):
    needs(topology)

    def decoding(slots):
        change = f"sampling.slots={slots}"
        made, config = planner(topology, load_training(tiny_recipe, [change]))
        sizes = Sizes(made.topology.devices, 1, 1)
        (sample,) = made.outlook(config, sizes, ("sample",)).estimates
        return sample.parts[1].cost.flops

    # 8 of 32 rows at a time, four times: as many tokens as all of them at once.
    assert decoding(8) / decoding(0) == pytest.approx(1, abs=0.05)


def test_the_last_few_rows_are_decoded_in_a_quarter_of_the_slots(tiny_recipe):
    def decoding(slots):
        change = f"sampling.slots={slots}"
        made, config = planner("cpu:1", load_training(tiny_recipe, [change]))
        (sample,) = made.outlook(config, Sizes(1, 1, 1), ("sample",)).estimates
        return sample.parts[1].cost.flops

    # 30 rows for 4 turns and one more; then the last two in 7 slots, for 3.
    ratio = (5 * 30 + 3 * 7) / (4 * 32)
    assert decoding(30) / decoding(0) == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("topology", ["cpu:1", "v5e:2x2"])
def test_a_probed_step_is_planned_as_it_runs(tiny_recipe, topology):
    """A sampler of whole groups alone prefills half as many prompts, and ends two samples early."""
    needs(topology)
    plain = plan(load_training(tiny_recipe, []), parse(topology))
    probed = plan(load_training(tiny_recipe, ["rollout.probe=2"]), parse(topology))
    sample, complete, prepare, update = probed["programs"]
    assert [sample["name"], complete["name"]] == ["sample", "complete"]
    assert [prepare["name"], update["name"]] == ["prepare", "update"]
    (prefill, decode), (again, rest) = (
        [part["flops"] for part in program["parts"]] for program in (sample, complete)
    )
    whole_prefill, whole_decode = (part["flops"] for part in plain["programs"][0]["parts"])
    # 16 prompts with 2 samples each, then 8 of them with 2 more.
    assert prefill / whole_prefill == pytest.approx(2, rel=0.05)
    assert again / whole_prefill == pytest.approx(1, rel=0.05)
    assert decode / whole_decode == pytest.approx(1, rel=0.05)
    assert rest / whole_decode == pytest.approx(0.5, rel=0.05)
    assert probed["tokens_a_step"] == 16 * (16 * 2 + 8 * 2)
    # The first samples wait there meanwhile.
    assert complete["bytes"]["beside"] > sample["bytes"]["beside"]
    assert not any("probing" in note for note in probed["notes"])


def test_a_reward_model_judges_both_rounds_of_a_probed_step(tiny_nano, tiny_recipe):
    given = [f"model.path={tiny_nano}", "reward.source=model", f"reward.model={tiny_nano}"]
    _, config = planner("cpu:1", load_training(tiny_recipe, [*given, "rollout.probe=2"]))
    made = {p.name: p for p in programs(config, Places(None, jax.devices()[:1]))}
    assert list(made) == ["sample", "verify", "complete", "verify_rest", "prepare", "update"]
    judged = [made[name].operands[3].mask.shape for name in ("verify", "verify_rest")]
    assert judged == [(16 * 2, 16), (8 * 2, 16)]


class Measured:
    """A planner of programs whose memory and time are told by a formula, for what is searched."""

    def __init__(self, limit, meshes=()):
        self.limit, self.meshes, self.compiled, self.seen = limit, meshes, 0, []

    def tell(self, line):
        pass

    def legal(self, config):
        return iter(self.meshes)

    def outlook(self, config, sizes, only=()):
        self.compiled += 1
        batch = config.batch
        self.seen.append((batch.micro, batch.prompts))
        peak = 10 * batch.micro + batch.prompts
        # Communication over fsdp costs time here, and data parallelism costs memory.
        peak += 100 * (sizes.data - 1)
        time = 1.0 + sizes.fsdp
        spent = Seconds(time, 0.0, 0.0)
        part = PartEstimate("update", Cost(), spent)
        return Outlook(
            config,
            sizes,
            (Estimate("update", 1.0, None, peak, peak <= self.limit, (part,), 0.0),),
        )


def test_the_most_rows_that_fit_are_found_by_bisection(tiny_recipe):
    config = load_training(tiny_recipe, [])
    # 10 x 16 + 8 fits; 10 x 32 does not. With 16 rows at a time, 2 x 8 prompts fit, not 4 x 8.
    planner = Measured(180)
    found = fit(planner, config, Sizes(1, 1, 1))
    assert (found["micro"], found["prompts"], found["rows"]) == (16, 16, 64)
    assert planner.compiled <= 6, "it compiles for each candidate"
    assert fit(Measured(5), config, Sizes(1, 1, 1))["micro"] == 0
    # At no number of rows at a time do 8 prompts fit here, and 4 of them do with 1.
    halved = fit(Measured(18), config, Sizes(1, 1, 1))
    assert (halved["micro"], halved["prompts"]) == (1, 8)


@pytest.mark.parametrize(("shards", "prompts", "seen"), [(1, 2, {8, 4, 2}), (4, 4, {8, 4})])
def test_fewer_prompts_are_tried_as_far_as_the_mesh_divides_them(
    tiny_recipe, shards, prompts, seen
):
    """`programs` has no shapes for a part of a prompt."""
    config = load_training(tiny_recipe, [])

    class Hungry(Measured):
        def outlook(self, config, sizes, only=()):
            outlook = super().outlook(config, sizes, only)
            (estimate,) = outlook.estimates
            fits = estimate.fits and (bool(only) or config.batch.prompts <= prompts)
            return outlook._replace(estimates=(estimate._replace(fits=fits),))

    planner = Hungry(58)  # 4 rows at a time
    assert fit(planner, config, Sizes(1, shards, 1))["prompts"] == prompts
    assert {count for _, count in planner.seen} == seen
    prompts = 1
    found = fit(planner, config, Sizes(1, shards, 1))
    assert found["prompts"] == (1 if shards == 1 else 0)


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        # A torus of 4 x 4 (x 4) has no axis of 2 or of 8.
        ("v6e:4x4", Sizes(1, 8, 2)),
        ("v5p:4x4x4", Sizes(8, 8, 1)),
        ("v5p:2x2x4", Sizes(2, 2, 4)),
        # Some of a host's chips.
        ("v5e:2x4", Sizes(1, 5, 1)),
        ("v5e:2x2", Sizes(3, 1, 1)),
    ],
)
def test_every_mesh_lies_on_a_tpu(topology, sizes):
    needs(topology)
    devices = Planner(parse(topology), lambda line: None).devices
    with on_mesh(sizes, devices) as mesh:
        assert mesh.devices.shape == tuple(sizes)
        assert len({device.id for device in mesh.devices.flat}) == sizes.devices


def test_a_mesh_must_divide_every_model_of_the_run(tiny_nano, tmp_path, tiny_recipe):
    """`train` would refuse what was planned."""
    described = json.loads((tiny_nano / "config.json").read_text())
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps(described | {"num_attention_heads": 1}))
    given = ["reward.source=model", f"reward.model={judge}"]
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(
        json.dumps(described | {"num_attention_heads": 4, "num_key_value_heads": 2})
    )
    given.append(f"model.path={policy}")
    needs("v5e:2x2")
    made = Planner(parse("v5e:2x2"), lambda line: None)
    alone = load_training(tiny_recipe, given[2:])
    assert {sizes.tensor for sizes in made.legal(alone)} == {1, 2}
    both = load_training(tiny_recipe, given)
    assert {sizes.tensor for sizes in made.legal(both)} == {1}


@pytest.mark.parametrize("frozen", ["model.frozen_dtype=float32", "model.frozen_memory=host"])
def test_a_reward_model_is_counted_as_the_run_keeps_it(tiny_nano, tiny_recipe, frozen):
    given = [f"model.path={tiny_nano}", "reward.source=model", f"reward.model={tiny_nano}"]
    given += ["algorithm.beta=0", "model.dtype=bfloat16"]
    held = []
    for changes in ([*given, "model.frozen_dtype=bfloat16"], [*given, frozen]):
        _, config = planner("cpu:1", load_training(tiny_recipe, changes))
        held.append(programs(config, Places(None, jax.devices()[:1]))[-1].held)
    assert (held[1] > held[0]) == ("float32" in frozen) and held[1] != held[0]


def test_meshes_are_ranked_by_time_and_those_that_do_not_fit_come_last(tiny_recipe):
    config = load_training(tiny_recipe, [])
    meshes = [Sizes(1, 4, 1), Sizes(4, 1, 1), Sizes(2, 2, 1)]
    ranked = compare(Measured(300, meshes), config)
    # The fastest of all, 4 x 1 x 1, needs 10 x 16 + 8 + 300.
    assert [outlook.sizes for outlook in ranked] == [meshes[2], meshes[0], meshes[1]]
    with pytest.raises(BadInput, match=r"no mesh"):
        compare(Measured(300), config)


def test_a_program_that_needs_too_much_is_refused_by_what_would_make_it_smaller(tiny_recipe):
    config = load_training(tiny_recipe, [])
    large = Usage(10, 10, 100, 10, 10)
    check_fits(config, "update", large, 120)
    with pytest.raises(BadInput, match=r"`update`.*batch\.micro \(16\).*model\.remat=block"):
        check_fits(config, "update", large, 119)
    with pytest.raises(BadInput, match=r"`sample`.*sampling\.slots.*sampling\.cache=int8"):
        check_fits(config, "sample", large, 119)
    with pytest.raises(BadInput, match=r"Raise mesh\.fsdp"):
        check_fits(config, "update", Usage(100, 10, 10, 10, 10), 119)
    # Where no setting is left, or the mesh needs the rows that there are.
    least = ["model.remat=block", "mesh.data=4", "mesh.fsdp=2", "mesh.tensor=1", "batch.micro=8"]
    for name in ("update", "score"):
        with pytest.raises(BadInput, match=r"of temporaries.*it\. Raise mesh\.fsdp [^;]*\.$"):
            check_fits(load_training(tiny_recipe, least), name, large, 119)
    with pytest.raises(BadInput, match=r"int8\.$"):
        check_fits(load_training(tiny_recipe, least), "sample", large, 119)


def test_the_command_prints_one_json_object(tiny_recipe, capsys, monkeypatch):
    monkeypatch.setattr("rlx.topology.set_environment", lambda virtual: None)
    code = run.main(["plan", "--json", "--config", str(tiny_recipe), "--topology", "cpu:1"])
    assert code == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    assert run.main(["plan", "--config", str(tiny_recipe), "--topology", "v5e:3x5"]) == 2
    assert "v5e:4x4" in capsys.readouterr().err


def test_a_published_shape_needs_no_files_and_an_unknown_name_is_told_which_there_are():
    assert model_shape("Qwen/Qwen2.5-3B-Instruct")[0].hidden_size == 2048
    with pytest.raises(BadInput, match=r"qwen2\.5-3b"):
        model_shape("no/such-model")


def test_given_text_is_planned_too(tiny_recipe, tiny_nano):
    text = f"""
model: {{path: {tiny_nano}}}
task: {{name: countdown, train_size: 64, heldout_size: 8}}
sampling: {{max_new_tokens: 16, max_prompt_tokens: 32}}
algorithm: {{name: sft}}
batch: {{prompts: 8}}
"""
    tiny_recipe.write_text(text)
    result = plan(load_training(tiny_recipe, []), parse("cpu:1"))
    assert [program["name"] for program in result["programs"]] == ["update"]
    assert result["programs"][0]["parts"][0]["flops"] > 0
