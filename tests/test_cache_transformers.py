"""attnreg's growing room behind transformers' past_key_values."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from attnreg.integrations.transformers import cache, register  # noqa: E402
from attnreg.integrations.transformers.cache import GrowingLayer  # noqa: E402

register()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="attnreg", bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.tensor([[0, 0, 5, 9, 13], [7, 3, 8, 2, 4]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_generate_gives_the_same_tokens(model, options):
    wanted = model.generate(**INPUTS, max_new_tokens=30, do_sample=False, **options)
    past = cache(model)
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=30, do_sample=False, past_key_values=past, **options), wanted)
    assert all(type(layer) is GrowingLayer for layer in past.layers) and past.get_seq_length() == 34


def test_tokens_go_into_the_same_room(model):
    past = cache(model)
    with torch.no_grad():
        model(IDS, past_key_values=past)
        where = past.layers[0].keys.data_ptr()
        for _ in range(10):
            model(IDS[:, :1], past_key_values=past)
    assert past.layers[0].keys.data_ptr() == where and past.get_seq_length() == 15


def test_crop_reset_and_copies_leave_each_other_alone(model):
    def logits(past, ids):
        with torch.no_grad():
            return model(ids, past_key_values=past).logits

    past = cache(model)
    first = logits(past, IDS)
    other = copy.deepcopy(past)
    wrong = logits(past, IDS[:, :3])
    past.crop(-3)
    torch.testing.assert_close(logits(past, IDS[:, :3]), wrong)
    torch.testing.assert_close(logits(other, IDS[:, :3]), wrong)
    past.reset()
    torch.testing.assert_close(logits(past, IDS), first)


def test_a_cache_goes_from_one_mode_into_another(model):
    """Tensors made under inference_mode can't be written outside; those that need a gradient are not written in place."""
    with torch.no_grad():
        wanted = model(IDS).logits
    past = cache(model)
    with torch.inference_mode():
        model(IDS[:, :2], past_key_values=past)
    with torch.no_grad():
        model(IDS[:, 2:3], past_key_values=past)
    third = model(IDS[:, 3:4], past_key_values=past).logits
    last = model(IDS[:, 4:], past_key_values=past).logits
    torch.testing.assert_close(torch.cat([third, last], 1), wanted[:, 3:])
    model.zero_grad()
    (third.sum() + last.sum()).backward()
    found = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    with torch.no_grad():
        theirs = model(IDS[:, :3]).past_key_values
    model.zero_grad()
    (model(IDS[:, 3:4], past_key_values=theirs).logits.sum() + model(IDS[:, 4:], past_key_values=theirs).logits.sum()).backward()
    torch.testing.assert_close(found, model.model.layers[0].self_attn.k_proj.weight.grad)
    model.zero_grad()


def test_sliding_layers_stay_as_transformers_makes_them():
    config = transformers.MistralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, sliding_window=4)
    made = cache(transformers.MistralForCausalLM(config))
    assert [type(layer).__name__ for layer in made.layers] == ["DynamicSlidingWindowLayer"]
