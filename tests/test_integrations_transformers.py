"""transformers' families on attnreg: random small weights built from a config, fp32, against the host's eager attention."""

import copy
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from amounts import always

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import attnreg  # noqa: E402
from attnreg.integrations.transformers import HostMask, cache, check, name_layers, register  # noqa: E402
from attnreg.integrations.transformers.attention import _from_host_mask  # noqa: E402
from attnreg.integrations.transformers.masks import host_mask, recognise  # noqa: E402

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY = 40


# Families whose attention does not call the interface yet in an older transformers.
SILENT = {"BERT", "ModernBERT", "T5"} if VERSION < (5,) else {"T5"} if VERSION <= (5, 17) else set()
since_5 = pytest.mark.skipif(VERSION < (5,), reason="transformers 4 passes or does this in another way; see docs/transformers.md")


def skip_if_silent(family):
    if family in SILENT:
        pytest.skip(f"{family} of transformers {transformers.__version__} never calls the attention interface")


@pytest.fixture(autouse=True, scope="module")
def registered():
    """On backends that compile nothing, so that these tests are quick and the same everywhere."""
    register()
    attnreg.use(["sdpa", "reference"])
    yield
    attnreg.use(None)


def text(config: str, model: str, **sizes):
    """A family of decoders or encoders over tokens: how to build it small."""
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        **sizes,
    }

    def build():
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**given)).eval()

    return build


GROUPED = {"num_key_value_heads": 2}
DECODERS = {
    "GPT-2": text("GPT2Config", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "Llama": text("LlamaConfig", "LlamaForCausalLM", **GROUPED),
    "Mistral": text("MistralConfig", "MistralForCausalLM", sliding_window=4, **GROUPED),
    "Gemma 2": text("Gemma2Config", "Gemma2ForCausalLM", sliding_window=4, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=0.01, **GROUPED),
    "Gemma 3": text("Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=4, head_dim=8, layer_types=["sliding_attention", "full_attention"], **GROUPED),
    "Qwen2": text("Qwen2Config", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=1, **GROUPED),
    "Qwen3": text("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **GROUPED),
    "Phi": text("PhiConfig", "PhiForCausalLM", partial_rotary_factor=0.5, **GROUPED),
    "Phi-3": text("Phi3Config", "Phi3ForCausalLM", sliding_window=4, **GROUPED),
    "GPT-OSS": text(
        "GptOssConfig", "GptOssForCausalLM", head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"], **GROUPED,
    ),
    "Llama 4": text(
        "Llama4TextConfig", "Llama4ForCausalLM", head_dim=8, num_local_experts=2, attention_chunk_size=4, intermediate_size_mlp=48, **GROUPED,
    ),
}  # fmt: skip
ENCODERS = {
    "BERT": text("BertConfig", "BertModel"),
    "ModernBERT": text(
        "ModernBertConfig", "ModernBertModel", local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
}
NEVER_CALL = {
    "Bloom": text("BloomConfig", "BloomForCausalLM", n_layer=2, n_head=4),
    "MPT": text("MptConfig", "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "Falcon": text("FalconConfig", "FalconForCausalLM", alibi=True),
}


def build_vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    return transformers.ViTModel(config).eval()


def build_t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0, eos_token_id=None
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def build_bart():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=None,
        decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def build_whisper():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, num_mel_bins=8, max_source_positions=12, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval()


def build_llava():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, projection_dim=32
    )
    language = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=language, image_token_index=5, vision_feature_layer=-1)
    return transformers.LlavaForConditionalGeneration(config).eval()


def build_qwen2_vl():
    torch.manual_seed(0)
    language = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    special = {"image_token_id": 5, "video_token_id": 4, "vision_start_token_id": 3, "vision_end_token_id": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=language, vision_config=vision, **special)
    ).eval()


def padded(side: str, seed: int = 1):
    """Three rows of 3, 8 and 5 real tokens."""
    torch.manual_seed(seed)
    ids = torch.randint(6, VOCABULARY, (3, 8))
    mask = torch.ones(3, 8, dtype=torch.long)
    for row, real in enumerate((3, 8, 5)):
        gap = slice(0, 8 - real) if side == "left" else slice(real, 8)
        mask[row, gap], ids[row, gap] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def inputs_for(family: str, side: str = "right"):
    if family == "ViT":
        torch.manual_seed(1)
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    inputs = padded(side)
    if family in ("T5", "BART"):
        inputs["decoder_input_ids"] = torch.randint(6, VOCABULARY, (3, 5))
    if family == "Whisper":
        inputs = {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": torch.randint(6, VOCABULARY, (2, 5))}
    if family == "Llava":
        inputs["pixel_values"] = torch.randn(3, 3, 16, 16)
        image = torch.full((3, 4), 5)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], image, inputs["input_ids"].flip(1)], 1)
        inputs["attention_mask"] = torch.cat(
            [inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long), inputs["attention_mask"].flip(1)], 1
        )
    return with_images(side) if family == "Qwen2-VL" else inputs


def with_images(side: str):
    """Three rows of an image of its own size, 4, 8 and 4 tokens, and text after it. Images lie packed, one behind the other."""
    torch.manual_seed(1)
    grid = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])
    rows = [[3, *[5] * image, 2, *torch.randint(6, VOCABULARY, (words,)).tolist()] for image, words in ((4, 2), (8, 6), (4, 5))]
    longest = max(map(len, rows))
    rows = [[0] * (longest - len(row)) + row if side == "left" else row + [0] * (longest - len(row)) for row in rows]
    ids = torch.tensor(rows)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)}
    # Newer versions are told by kinds of tokens where the images are; others look for their ids.
    kinds = "mm_token_type_ids" in inspect.signature(transformers.Qwen2VLForConditionalGeneration.forward).parameters
    return {**inputs, "image_grid_thw": grid, **({"mm_token_type_ids": (ids == 5).int()} if kinds else {})}


OTHERS = {
    "ViT": build_vit,
    "T5": build_t5,
    "BART": build_bart,
    "Whisper": build_whisper,
    "Llava": build_llava,
    "Qwen2-VL": build_qwen2_vl,
}
FAMILIES = {**DECODERS, **ENCODERS, **OTHERS}


def output_of(model, inputs):
    result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def outputs_and_gradients(model, inputs):
    """Outputs on real tokens, and the gradients of a loss over them."""
    model.zero_grad()
    output = output_of(model, inputs)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape[1] == output.shape[1]:
        output = output * mask[:, :, None]
    torch.manual_seed(2)
    (output * torch.randn_like(output)).sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on(model, name):
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_equal_eager_on_real_tokens(family, side):
    skip_if_silent(family)
    if family in ("ViT", "Whisper") and side == "left":
        pytest.skip("its inputs have no padding")
    model, inputs = FAMILIES[family](), inputs_for(family, side)
    expected, gradients = outputs_and_gradients(on(model, "eager"), inputs)
    output, found = outputs_and_gradients(on(model, "attnreg"), inputs)
    assert check(model, inputs)
    assert (output - expected).abs().max() < 2e-5
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= 2e-4 * max(1.0, gradient.abs().max()), name


# ---------------------------------------------------------------------- generation

STEPS = 6


def speaker(family, implementation):
    """A model whose next token depends on what its attention sees. With weights as they start, one repeats itself, whatever attention does."""
    model = FAMILIES[family]()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return on(model, implementation)


def generated(model, inputs, **options):
    """The new tokens of each row, and the logits that they were chosen by, (B, STEPS, V); with beams, the scores of the rows."""
    result = model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True,
        output_scores=True, **options,
    )  # fmt: skip
    numbers = result.sequences_scores if "num_beams" in options else torch.stack(result.logits, 1)
    return result.sequences[:, -STEPS:], numbers


def assert_same(found, wanted):
    assert found[0].tolist() == wanted[0].tolist()
    assert (found[1] - wanted[1]).abs().max() < 1e-4


def alone(model, inputs, **options):
    """The same, each prompt alone and unpadded."""
    rows = []
    for row, mask in enumerate(inputs["attention_mask"]):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items() if name != "pixel_values"}
        one.update({name: tensor[:, mask.bool()] for name, tensor in one.items() if tensor.shape[-1] == len(mask)})
        if "image_grid_thw" in inputs:
            one["pixel_values"] = inputs["pixel_values"].split(inputs["image_grid_thw"].prod(1).tolist())[row]
        elif "pixel_values" in inputs:
            one["pixel_values"] = inputs["pixel_values"][row : row + 1]
        rows.append(generated(model, one, **options))
    return tuple(torch.cat(parts) for parts in zip(*rows))


def prompts(family):
    """Left-padded, as generation wants them; an encoder's are padded on the right."""
    if family == "Qwen2-VL":
        return with_images("left")
    inputs = padded("right" if family in ("T5", "BART") else "left")
    if family == "Llava":
        inputs["pixel_values"] = torch.randn(3, 3, 16, 16)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.full((3, 4), 5), inputs["input_ids"][:, -2:]], 1)
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(3, 6, dtype=torch.long)], 1)
    return inputs


SLIDING = ["Mistral", "Gemma 2", "Gemma 3", "Qwen2", "Phi-3", "GPT-OSS"]
SPEAKERS = [*DECODERS, "T5", "BART", "Llava", "Qwen2-VL"]


@pytest.mark.parametrize("family", SPEAKERS)
def test_generation_of_a_padded_batch_equals_each_prompt_alone(family):
    skip_if_silent(family)
    model, inputs = speaker(family, "attnreg"), prompts(family)
    wanted = alone(speaker(family, "eager"), inputs)
    assert_same(alone(model, inputs), wanted)
    assert_same(generated(model, inputs), wanted)
    assert_same(generated(model, inputs, use_cache=False), wanted)
    if family != "Llama 4":  # its chunked layers have no static form here
        assert_same(generated(model, inputs, cache_implementation="static"), wanted)


WRONGS = {
    "sees padding": lambda options: {**options, "key_mask": None, "query_mask": None},
    "sees what comes after": lambda options: {**options, "causal": False},
    "has no window": lambda options: {**options, "window": None},
}


@pytest.mark.parametrize(
    ("family", "wrong"),
    [(f, "sees padding") for f in SPEAKERS if f != "Llama 4"]  # whose masks are dense
    + [(f, "sees what comes after") for f in SPEAKERS if f not in ("Llama 4", "T5", "BART")]  # which decode one by one from the start
    + [(f, "has no window") for f in SLIDING],
)
def test_a_wrong_attention_shows_in_what_is_generated(family, wrong, monkeypatch):
    """So that the test above is one that can fail."""
    import attnreg.integrations.transformers.attention as module

    skip_if_silent(family)
    model, inputs, real = speaker(family, "attnreg"), prompts(family), module.attnreg_attention
    wanted = generated(model, inputs)[1]
    monkeypatch.setattr(module, "attnreg_attention", lambda query, key, value, **options: real(query, key, value, **WRONGS[wrong](options)))
    assert (generated(model, inputs)[1] - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
def test_generation_with_a_static_cache_and_no_padding(family):
    """generate() then hands over no mask at all, and the spare slots must stay unseen all the same."""
    ids = {"input_ids": padded("left")["input_ids"][1:2]}
    assert_same(generated(speaker(family, "attnreg"), ids, cache_implementation="static"), generated(speaker(family, "eager"), ids))


@pytest.mark.parametrize("family", always(["Llama", "Gemma 3"], [f for f in SPEAKERS if f != "Llama 4"]))
def test_generation_compiled_whole_with_a_static_cache(family):
    """One graph serves every step; a second one where a cache slides, whose tokens transformers counts as a Python number."""
    from torch._dynamo.backends.debugging import aot_eager

    if not hasattr(transformers, "CompileConfig"):
        pytest.skip("this transformers has no CompileConfig")
    skip_if_silent(family)
    torch._dynamo.reset()
    model, inputs, graphs = speaker(family, "attnreg"), prompts(family), []

    def counted(graph, examples):
        graphs.append(graph)
        return aot_eager(graph, examples)

    compiling = transformers.CompileConfig(backend=counted, fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    wanted = alone(speaker(family, "eager"), inputs)
    assert_same(generated(model, inputs, cache_implementation="static", compile_config=compiling), wanted)
    assert 1 <= len(graphs) <= 1 + (family in SLIDING)


@pytest.fixture
def caches(monkeypatch):
    """What generation did to its caches: beams that changed places, tokens that were taken back."""
    from transformers.cache_utils import Cache

    done, reorder, crop = {"reordered": 0, "cropped": 0}, Cache.reorder_cache, Cache.crop

    def reordered(self, beams):
        done["reordered"] += beams.tolist() != list(range(len(beams)))
        return reorder(self, beams)

    def cropped(self, *given):
        before = self.get_seq_length()
        result = crop(self, *given)
        done["cropped"] += self.get_seq_length() < before
        return result

    monkeypatch.setattr(Cache, "reorder_cache", reordered)
    monkeypatch.setattr(Cache, "crop", cropped)
    return done


def another(family, implementation):
    """An assistant that guesses some tokens wrongly."""
    model = speaker(family, implementation)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


OWN = {"transformers' cache": lambda model: {}, "attnreg's cache": lambda model: {"past_key_values": cache(model)}}


@pytest.mark.parametrize("kept", OWN)
@pytest.mark.parametrize("family", ["Llama", "Gemma 2", "Mistral"])
def test_beam_search(family, kept, caches):
    model, inputs = speaker(family, "attnreg"), padded("left")
    wanted = generated(speaker(family, "eager"), inputs, num_beams=3)
    caches["reordered"] = 0
    assert_same(generated(model, inputs, num_beams=3, **OWN[kept](model)), wanted)
    assert caches["reordered"]


@pytest.mark.parametrize("kept", OWN)
@pytest.mark.parametrize("family", ["Llama", "Gemma 2", "Mistral"])
def test_assisted_generation(family, kept, caches):
    model, one = speaker(family, "attnreg"), {name: tensor[1:2] for name, tensor in padded("left").items()}
    wanted = generated(speaker(family, "eager"), one)
    assert_same(generated(model, one, assistant_model=another(family, "attnreg"), **OWN[kept](model)), wanted)
    assert caches["cropped"]


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("family", ["T5", "BART", "Whisper"])
def test_generation_of_encoder_decoders(family, options):
    inputs = inputs_for(family)
    inputs.pop("decoder_input_ids")
    assert_same(generated(speaker(family, "attnreg"), inputs, **options), generated(speaker(family, "eager"), inputs, **options))


def test_a_chunk_onto_a_cache_equals_one_shot():
    model, inputs = on(DECODERS["Mistral"](), "attnreg"), padded("left")
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    whole = model(**inputs, position_ids=positions).logits
    past, parts = None, []
    for start, end in ((0, 3), (3, 6), (6, 8)):
        result = model(
            input_ids=inputs["input_ids"][:, start:end], attention_mask=inputs["attention_mask"][:, :end], past_key_values=past,
            position_ids=positions[:, start:end], use_cache=True,
        )  # fmt: skip
        past = result.past_key_values
        parts.append(result.logits)
    assert ((torch.cat(parts, 1) - whole) * inputs["attention_mask"][:, :, None]).abs().max() < 2e-6


@pytest.mark.parametrize("family", ["Mistral", "BERT", "T5"])
def test_a_whole_forward_compiles_into_one_graph(family):
    """Its backward too: T5's position bias is a parameter, whose gradient comes through `bias`."""
    torch._dynamo.reset()
    skip_if_silent(family)
    model, inputs = on(FAMILIES[family](), "attnreg"), inputs_for(family, "left")
    if family != "BERT":
        inputs["use_cache"] = False
    expected, gradients = outputs_and_gradients(model, inputs)
    output, found = outputs_and_gradients(torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
    assert (output - expected).abs().max() < 1e-5
    assert family != "T5" or sum("relative_attention_bias" in name for name in gradients) == 2
    for name, gradient in gradients.items():
        assert (found[f"_orig_mod.{name}"] - gradient).abs().max() <= 2e-4 * max(1.0, gradient.abs().max()), name


def test_gradient_checkpointing_repeats_the_call():
    model, inputs = on(DECODERS["Llama"](), "attnreg").train(), padded("left")
    _, expected = outputs_and_gradients(model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, found = outputs_and_gradients(model, inputs)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_growing_cache_keeps_the_graphs_of_earlier_steps():
    """Where queries alone are trained, no key says that there is one."""
    from transformers import DynamicCache

    found = {}
    for implementation in ("eager", "attnreg"):
        model = on(DECODERS["Llama"](), implementation)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        past = cache(model) if implementation == "attnreg" else DynamicCache(config=model.config)
        tokens = torch.arange(3, 13)[None]
        steps = [model(tokens[:, part], past_key_values=past).logits for part in (slice(0, 4), slice(4, 7), slice(7, 10))]
        torch.cat(steps, 1).square().sum().backward()
        found[implementation] = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient, expected in zip(found["attnreg"], found["eager"], strict=True):
        assert (gradient - expected).abs().max() <= 2e-4 * max(1.0, expected.abs().max())


# ---------------------------------------------------------------------- what arrives as what


class Spy:
    """Calls that reach attnreg, with their options."""

    def __init__(self, monkeypatch):
        import attnreg.integrations.transformers.attention as module

        self.calls, real = [], module.attnreg_attention

        def spy(query, key, value, **options):
            output = real(query, key, value, **options)
            self.calls.append({"query": query, "key": key, "output": output, **options})
            return output

        monkeypatch.setattr(module, "attnreg_attention", spy)


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


def test_padding_stays_padding_and_nothing_dense_is_built(spy):
    on(DECODERS["Mistral"](), "attnreg")(**padded("left"))
    for call in spy.calls:
        assert call["causal"] is True and call["window"] == (3, None)
        assert call["key_mask"].shape == (3, 8) and call["query_mask"] is call["key_mask"]
        assert call.get("mask") is None and call.get("bias") is None and call.get("key_lengths") is None
    assert spy.calls[0]["key_mask"] is spy.calls[1]["key_mask"]


@pytest.mark.parametrize("family", ["Llama", "BERT"])
def test_padded_rows_are_zero_where_eager_gives_a_mean_of_values(family, spy):
    skip_if_silent(family)
    for side in ("left", "right"):
        inputs = padded(side)
        on(FAMILIES[family](), "attnreg")(**inputs)
        hidden = inputs["attention_mask"][:, None, :, None] == 0
        assert (spy.calls[-1]["output"].masked_select(hidden) == 0).all()


def test_softcap_sinks_scale_and_alternating_windows_arrive(spy):
    on(DECODERS["Gemma 2"](), "attnreg")(**padded("left"))
    assert [call["window"] for call in spy.calls] == [(3, None), None]
    assert all(call["softcap"] == 0.01 and call["scale"] == 8**-0.5 for call in spy.calls)
    spy.calls.clear()
    on(DECODERS["GPT-OSS"](), "attnreg")(**padded("left"))
    assert [call["window"] for call in spy.calls] == [(3, None), None]
    assert all(call["sinks"].shape == (4,) for call in spy.calls)


def test_a_position_bias_arrives(spy):
    skip_if_silent("T5")
    on(build_t5(), "attnreg")(**inputs_for("T5"))
    assert all(call["scale"] == 1.0 and call["bias"] is not None for call in spy.calls)


def test_a_bidirectional_window_is_counted_on_both_sides(spy):
    skip_if_silent("ModernBERT")
    on(ENCODERS["ModernBERT"](), "attnreg")(**padded("right"))
    assert {call["window"] for call in spy.calls} == {None, (2, 2)}
    assert not any(call["causal"] for call in spy.calls)


@since_5
def test_the_spare_room_of_a_static_cache_is_left_away_or_said_by_lengths(spy):
    model = on(DECODERS["Llama"](), "attnreg")
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    inputs = padded("left")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        assert spy.calls[0]["key"].shape[2] == 8 and spy.calls[0].get("key_lengths") is None
        spy.calls.clear()
        more = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
        model(input_ids=inputs["input_ids"][:, :1], attention_mask=more, past_key_values=cache)
    assert spy.calls[0]["key"].shape[2] == 9 and spy.calls[0]["key_mask"].shape == (3, 9)
    # On a device, or under the compiler, the offset is not read: lengths say the same.
    key = torch.zeros(3, 2, 20, 8)
    mask = masking(batch_size=3, kv_length=20, q_length=1, q_offset=torch.tensor(8, device="meta"), attention_mask=None)
    options = {}
    _from_host_mask(mask, key.to("meta"), key.to("meta"), None, options)
    assert options["causal"] and options["key_lengths"].shape == (3,)


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked in full, while the first backend of all is one that looks at bare masks, as flash-attn does on a card."""
    from attnreg.call import AttentionCall
    from attnreg.kernels.reference import reference

    seen, init = [], AttentionCall.__init__

    def counted(self, *args, **kwargs):
        seen.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(AttentionCall, "__init__", counted)
    attnreg.register(attnreg.Backend("looks", reference.run, reference.capabilities, layout=reference.layout, packs=True))
    with attnreg.using("looks"):
        yield seen
    attnreg.unregister("looks")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_step_looks_at_its_mask_once_and_is_checked_once(family, mode, checked, monkeypatch):
    """Under inference_mode too, whose tensors can't be known to be unchanged: there each layer looked, and waited for the device."""
    looks, init = [], attnreg.Padding.__init__
    monkeypatch.setattr(attnreg.Padding, "__init__", lambda self, *given, **named: looks.append(self) or init(self, *given, **named))
    model, inputs = on(DECODERS[family](), "attnreg"), padded("left")
    mask = inputs["attention_mask"]
    with mode():
        past = model(**inputs).past_key_values
        assert len(checked) == len(looks) == 1
        for _ in range(3):
            checked.clear(), looks.clear()
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            model(input_ids=inputs["input_ids"][:, -1:], attention_mask=mask, past_key_values=past)
            assert len(checked) <= 1 and len(looks) == 1


@pytest.mark.parametrize("family", ["Llama", "BERT"])
def test_a_mask_of_ones_is_left_away(family, spy):
    """Kernels that drop padding would copy every row for nothing."""
    skip_if_silent(family)
    model, ids = on(FAMILIES[family](), "attnreg"), padded("left")["input_ids"]
    output = output_of(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert all(call["key_mask"] is None and call["query_mask"] is None for call in spy.calls)
    assert torch.equal(output, output_of(model, {"input_ids": ids}))


def test_a_mask_of_the_new_tokens_only_is_refused():
    """The fault of an old patch: with a past, the mask has a column for the past too."""
    model, inputs = on(DECODERS["Llama"](), "attnreg"), padded("left")
    past = model(**inputs, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask: one column for every token so far, past and new, 9 in all; got 1"):
        model(input_ids=inputs["input_ids"][:, :1], attention_mask=torch.ones(3, 1, dtype=torch.long), past_key_values=past)


def test_dropout_only_in_training(spy):
    model = text("LlamaConfig", "LlamaForCausalLM", attention_dropout=0.5)()
    on(model, "attnreg")(**padded("left"))
    model.train()(**padded("left"))
    assert [call["dropout_p"] for call in spy.calls] == [0.0, 0.0, 0.5, 0.5]


def test_four_dimensional_masks_of_the_user(spy):
    model = DECODERS["Llama"]()
    ids = padded("left")["input_ids"]
    prefix = torch.ones(8, 8, dtype=torch.bool).tril() | (torch.arange(8) < 4)  # a prefix that sees itself whole
    mask = prefix[None, None].expand(3, 1, 8, 8)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = on(model, "eager")(input_ids=ids, attention_mask=additive).logits
    on(model, "attnreg")
    for given, name in ((mask, "mask"), (additive, "bias")):
        spy.calls.clear()
        assert (model(input_ids=ids, attention_mask=given).logits - expected).abs().max() < 1e-5
        assert spy.calls[0][name] is not None and not spy.calls[0].get("causal")
    assert (spy.calls[0]["bias"] == float("-inf")).any()
    with pytest.raises(TypeError, match=r"attention_mask: .*int64.*bool"):
        model(input_ids=ids, attention_mask=mask.long())


def documents(*lengths):
    torch.manual_seed(3)
    ids = torch.randint(6, VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return ids, positions


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_position_ids_become_segments(family, rows, spy):
    model = on(DECODERS[family](), "attnreg")
    first, second = documents(3, 6, 2), documents(5, 1, 5)
    ids = torch.cat([first[0], second[0]][:rows])
    positions = torch.cat([first[1], second[1]][:rows])
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert len(spy.calls[0]["cu_seqlens"][0]) == (4 if rows == 1 else 7) and spy.calls[0].get("mask") is None
    separate = [[3, 6, 2], [5, 1, 5]][:rows]
    for row, lengths in enumerate(separate):
        start = 0
        for length in lengths:
            single = model(input_ids=ids[row : row + 1, start : start + length], use_cache=False).logits
            assert (packed[row, start : start + length] - single[0]).abs().max() < 1e-5
            start += length


def test_explicit_lengths_of_packed_rows_are_preferred(spy):
    model = on(DECODERS["Llama"](), "attnreg")
    ids, positions = documents(3, 6, 2)
    cu = torch.tensor([0, 3, 9, 11], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    spy.calls.clear()
    output = model(input_ids=ids, position_ids=positions, **given).logits
    assert (output - expected).abs().max() < 1e-6
    assert spy.calls[0]["cu_seqlens"] == (cu, cu) and spy.calls[0]["max_seqlens"] == (6, 6)
    with pytest.raises(ValueError, match="cu_seq_lens_q: packed rows have no padding"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **given)


# ---------------------------------------------------------------------- mask functions


def masking(**changes):
    given = {"batch_size": 2, "q_length": 5, "kv_length": 5, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
    return host_mask(**{**given, **changes})


@since_5
def test_patterns_that_are_recognised():
    from transformers import masking_utils as theirs

    assert recognise(theirs.causal_mask_function).causal
    sliding = recognise(theirs.sliding_window_causal_mask_function(4))
    assert sliding.causal and sliding.window == (3, None)
    if not hasattr(theirs, "remap_positions_for_packed_sequence"):
        packed = theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 1]])))
        assert recognise(packed).documents.tolist() == [[0, 0, 1]]
        return
    ids = torch.tensor([[0, 0, 1]])
    packed = theirs.and_masks(
        theirs.remap_positions_for_packed_sequence(theirs.sliding_window_causal_mask_function(2), torch.tensor([[0, 1, 0]])),
        theirs.packed_sequence_mask_function(ids),
    )
    found = recognise(packed)
    assert found.causal and found.window == (1, None) and found.documents is ids


@since_5
def test_patterns_that_are_not_recognised_are_written_out():
    from transformers import masking_utils as theirs

    chunked = theirs.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.long))
    mine = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: k != 1)
    either = theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 3)
    unknown = [chunked, mine, either, lambda b, h, q, k: k <= q]
    if hasattr(theirs, "remap_positions_for_packed_sequence"):
        unknown.append(theirs.remap_positions_for_packed_sequence(theirs.causal_mask_function, torch.arange(5).expand(2, 5)))
    for function in unknown:
        assert recognise(function) is None
        dense = masking(mask_function=function)
        assert dense.dtype == torch.bool and dense.shape == (2, 1, 5, 5)
    assert isinstance(masking(use_vmap=True), torch.Tensor)
    assert masking(mask_function=either)[0, 0].tolist() == [[j <= i or j < 3 for j in range(5)] for i in range(5)]


@since_5
def test_overlays_of_a_model_reach_the_layers(spy):
    """An or_mask_function that opens a prefix, as vision-language models use it."""
    from transformers.masking_utils import create_causal_mask

    model = DECODERS["Llama"]()
    ids = padded("left")["input_ids"]
    outputs = {}
    for name in ("eager", "attnreg"):
        on(model, name)
        mask = create_causal_mask(model.config, model.get_input_embeddings()(ids), None, None, or_mask_function=lambda b, h, q, k: k < 4)
        outputs[name] = model(input_ids=ids, attention_mask=mask).logits
    assert (outputs["eager"] - outputs["attnreg"]).abs().max() < 1e-5


def test_offsets_and_padding_masks_become_slots():
    mask = masking(kv_length=12, q_length=2, q_offset=8, attention_mask=torch.ones(2, 10, dtype=torch.bool))
    assert (mask.query_slot, mask.key_mask.shape, mask.query_mask) == (8, (2, 10), None)
    sliding = masking(kv_length=5, q_length=2, q_offset=8, kv_offset=5, attention_mask=torch.arange(20).view(2, 10) % 3 > 0)
    assert sliding.query_slot == 3 and torch.equal(sliding.key_mask, (torch.arange(20).view(2, 10) % 3 > 0)[:, 5:])
    device = masking(kv_length=12, q_length=2, q_offset=torch.tensor(8), attention_mask=torch.ones(2, 10, dtype=torch.bool))
    assert device.key_mask.tolist() == [[True] * 10 + [False] * 2] * 2
    assert masking(attention_mask=device) is device


def test_a_mask_object_says_what_it_is_when_a_model_takes_it_for_a_tensor():
    mask = masking(attention_mask=torch.ones(2, 5, dtype=torch.bool))
    assert mask.shape == (2, 1, 5, 5) and mask.to("cpu", torch.float32).key_mask is not None
    with pytest.raises(AttributeError, match="asks its mask for 'masked_fill'"):
        mask.masked_fill(mask, 0.0)
    assert isinstance(copy.copy(mask), HostMask)


# ---------------------------------------------------------------------- names, layers, refusals


@pytest.mark.parametrize("name", ["my_flash", "attnreg_sdpa", "flex_attention2", "me/mine", "paged|attnreg", "eager"])
def test_names_that_transformers_takes_for_something_else_are_refused(name):
    with pytest.raises(ValueError, match="name: "):
        register(name)


def test_a_name_can_carry_a_backend():
    register("attnreg_reference", backend="reference")
    ran = check(on(DECODERS["Llama"](), "attnreg_reference"), padded("left"))
    assert {selection.chosen.name for selection in ran.values()} == {"reference"}
    with pytest.raises(LookupError, match="no backend is called 'refrence'"):
        register("attnreg_other", backend="refrence")


def test_layers_are_named_by_themselves_and_policies_match_them():
    model = on(DECODERS["Llama"](), "attnreg")
    attnreg.use("reference", layers="model.layers.[0].*")
    try:
        ran = check(model, padded("left"))
    finally:
        attnreg.use(None, layers="model.layers.[0].*")
    assert {name: selection.chosen.name for name, selection in ran.items()} == {
        "model.layers.0.self_attn": "reference",
        "model.layers.1.self_attn": "sdpa",
    }


def test_a_compiled_model_without_names_does_not_drop_a_layer_policy():
    torch._dynamo.reset()
    model, inputs = on(DECODERS["Llama"](), "attnreg"), {**padded("left"), "use_cache": False}
    attnreg.use("reference", layers="model.layers.0.*")
    try:
        with pytest.raises(Exception, match="name_layers"):
            torch.compile(model, backend="eager", fullgraph=True)(**inputs)
        torch._dynamo.reset()
        name_layers(model)
        torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    finally:
        attnreg.use(None, layers="model.layers.0.*")


def test_an_argument_without_meaning_here_is_an_error_that_names_it():
    model = on(DECODERS["Llama"](), "attnreg")
    with pytest.raises(TypeError, match="block_table: LlamaAttention passes this argument"):
        model(**padded("left"), block_table=torch.zeros(1))


@since_5
def test_attention_weights_are_the_true_ones_and_announced():
    from attnreg.integrations.transformers import attention

    attention._warned.clear()
    model, inputs = DECODERS["Llama"](), padded("left")
    expected = on(model, "eager")(**inputs, output_attentions=True).attentions
    with pytest.warns(UserWarning, match="computes the weights a second time"):
        found = on(model, "attnreg")(**inputs, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found, expected):
        assert ((mine - theirs) * inputs["attention_mask"][:, None, :, None]).abs().max() < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(**inputs, output_attentions=True)


@pytest.mark.parametrize("family", NEVER_CALL)
def test_families_that_never_call_the_interface_are_found_out(family):
    model = NEVER_CALL[family]()
    model.set_attn_implementation("attnreg")
    with pytest.raises(RuntimeError, match=r"no attention call of .* arrived at attnreg"):
        check(model, padded("left"))


@since_5
def test_a_model_that_takes_the_mask_for_a_tensor_hears_why():
    model = NEVER_CALL["Bloom"]()
    model.config._attn_implementation = "attnreg"
    with pytest.raises(RuntimeError, match="took attnreg's mask for a tensor"):
        model(**padded("left"))


@since_5
def test_continuous_batching_is_as_the_documentation_says():
    model = on(DECODERS["Llama"](), "attnreg")
    if not hasattr(model, "generate_batch"):
        pytest.skip("this transformers has no continuous batching")
    with pytest.raises(Exception, match=r"attn|continuous|paged"):
        model.generate_batch(
            [[7, 8, 9]], generation_config=transformers.GenerationConfig(max_new_tokens=2, eos_token_id=39, pad_token_id=0)
        )


def test_the_documented_table_of_families_is_the_tested_one():
    page = (Path(__file__).parent.parent / "docs" / "transformers.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| (yes|no) \|", page, re.MULTILINE))
    assert rows == {**{family: "yes" for family in FAMILIES}, **{family: "no" for family in NEVER_CALL}}
