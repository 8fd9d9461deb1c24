"""The shapes of published models: each file is read, and comes to the parameters that are known."""

import pytest

from model.parameters import parameter_count
from model.shapes import names, published

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}
"""As the model cards' files hold them: tied heads once."""


@pytest.mark.parametrize("name", names())
def test_a_shape_comes_to_the_published_number_of_parameters(name):
    assert parameter_count(published(name)) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-3b"),
        ("/models/Qwen2.5-Coder-3B", "qwen2.5-3b"),
        ("Qwen2.5-Math-1.5B", "qwen2.5-1.5b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
    ],
)
def test_a_path_or_a_hubs_name_is_recognised(path, name):
    assert published(path) == published(name)


def test_another_model_has_no_shape_here():
    assert published("Qwen2.5-3") is None
    assert published("Llama-3.2-1B") is None
