"""Reading checkpoint folders: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vgraph_lab as vg
from vgraph_lab.errors import BackendError, CheckpointError, InputError
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry, TokenizerConfig
from vgraph_lab.qwen3_tts.inputs import validate_codes

CODES = torch.randint(0, 64, (1, 16, 5), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to damage."""
    target = tmp_path / "speech_tokenizer"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, target / name)
    return target


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        (config["decoder_config"] if key in DecoderGeometry.model_fields or key == "rope_parameters" else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_sharded_checkpoint_equals_the_single_file(folder: Path, tiny_decoder: Code2WavDecoder) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({n: tensors[n] for n in members}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {n: file for file, members in shards.items() for n in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(vg.load_decoder(folder)(CODES), tiny_decoder(CODES))


def test_sharded_checkpoint_with_a_lost_shard_fails(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"decoder.x": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names the shard 'model-00001-of-00001\.safetensors'"):
        vg.load_decoder(folder)


def test_index_cannot_point_outside_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"decoder.x": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a file of"):
        vg.load_decoder(folder)


def test_index_that_promises_too_much_fails(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"decoder.lost": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"do not hold: decoder\.lost"):
        vg.load_decoder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not JSON"),
        ("[" * 100_000, "nested too deeply to describe an index of shards"),
        ("[]", "does not describe an index of shards"),
        ("{}", "weight_map: Field required"),
        ('{"weight_map": ["a"]}', "weight_map: Input should be a valid dictionary"),
        ('{"weight_map": null}', "weight_map: Input should be a valid dictionary"),
        ('{"weight_map": {"a": 5, "b": "x"}}', r"weight_map\.a: Input should be a valid string"),
        ('{"weight_map": {"a": ["x"]}}', r"weight_map\.a: Input should be a valid string"),
        (json.dumps({"weight_map": {f"t{n}": n for n in range(20)}}), r"weight_map\.t7: [^;]*; and 12 more$"),
        ('{"weight_map": {"a": ""}}', "names the shard ''"),
        (r'{"weight_map": {"a": "x\u0000"}}', "not a file of"),
        (json.dumps({"weight_map": {"a": "x" * 5000}}), "not a file of"),
    ],
)
def test_index_that_is_none_fails(folder: Path, content: str, message: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        vg.load_decoder(folder)


def test_model_folder_with_a_tokenizer_inside(folder: Path, tiny_decoder: Code2WavDecoder) -> None:
    assert torch.equal(vg.load_decoder(folder.parent)(CODES), tiny_decoder(CODES))


def test_encoder_tensors_are_ignored(folder: Path, tiny_decoder: Code2WavDecoder) -> None:
    rewrite(folder, lambda t: t.update({"encoder.some.weight": torch.zeros(3)}))
    assert torch.equal(vg.load_decoder(folder)(CODES), tiny_decoder(CODES))


def test_missing_unexpected_and_misshaped_tensors_are_named(folder: Path) -> None:
    def damage(t: dict[str, torch.Tensor]) -> None:
        t["decoder.pre_convolution.conv.bias"] = t.pop("decoder.pre_conv.conv.bias")
        t["decoder.pre_conv.conv.weight"] = t["decoder.pre_conv.conv.weight"][:, :, :2].contiguous()

    rewrite(folder, damage)
    with pytest.raises(CheckpointError) as error:
        vg.load_decoder(folder)
    message = str(error.value)
    assert "missing 1: decoder.pre_conv.conv.bias Did you mean 'decoder.pre_convolution.conv.bias'?" in message
    assert "unexpected 1: decoder.pre_convolution.conv.bias Did you mean 'decoder.pre_conv.conv.bias'?" in message
    assert "mis-shaped 1: decoder.pre_conv.conv.weight is [32, 16, 2], the config says [32, 16, 3]" in message


def test_long_lists_are_cut(folder: Path) -> None:
    reconfigure(folder, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"missing 22: .* and 14 more"):
        vg.load_decoder(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        vg.load_decoder(tmp_path / "nothing")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        vg.load_decoder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "decoder_config: Field required"),
        ('{"decoder_config": {"head_dim": "wide"}}', "decoder_config.head_dim"),
        ('{"decoder_config": {"num_attention_heads": 6, "num_key_value_heads": 4}}', "multiple of num_key_value_heads"),
        ('{"decoder_config": {"upsample_rates": [8, 5, 4]}}', "decode_upsample_rate is 1920"),
        ('{"decoder_config": {"num_hidden_layers": 0}}', "greater than 0"),
        ("[" * 100_000, "nested too deeply"),
        ('{"decoder_config": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"decoder_config": {"rms_norm_eps": Infinity}}', r"decoder_config\.rms_norm_eps"),
        ('{"decoder_config": {"rope_theta": 1e-300}}', r"decoder_config\.rope_theta"),
        ('{"decoder_config": {"rope_theta": Infinity}}', r"decoder_config\.rope_theta"),
        ('{"decoder_config": {"layer_scale_initial_scale": Infinity}}', r"decoder_config\.layer_scale_initial_scale"),
        ('{"decoder_config": {"upsample_rates": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}}', "at most 16 items"),
        ('{"decoder_config": {"upsample_rates": [1025]}}', "less than or equal to 1024"),
        ('{"output_sample_rate": 1000001, "decoder_config": {}}', "output_sample_rate: .*less than or equal to 1000000"),
    ],
)
def test_config_that_describes_no_decoder(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        vg.load_decoder(folder)


@pytest.mark.parametrize("value", [10**12, 10**30])
@pytest.mark.parametrize(
    ("name", "largest"),
    [
        *((width, 65_536) for width in ("codebook_size", "codebook_dim", "latent_dim", "hidden_size", "intermediate_size")),
        *((width, 65_536) for width in ("head_dim", "decoder_dim")),
        *((count, 1_024) for count in ("num_quantizers", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")),
        *((frames, 1_000_000) for frames in ("sliding_window", "max_position_embeddings")),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(folder: Path, name: str, largest: int, value: int) -> None:
    reconfigure(folder, **{name: value})
    with pytest.raises(CheckpointError, match=rf"decoder_config\.{name}: Input should be less than or equal to {largest}"):
        vg.load_decoder(folder)


WEIGHT, OTHER = "decoder.pre_conv.conv.weight", "decoder.pre_conv.conv.bias"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_named(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: t.update({WEIGHT: t[WEIGHT].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"1 tensors in .* \({WEIGHT} is {dtype}\)\. Accepted: torch\.float32"):
        vg.load_decoder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite_are_named(folder: Path, value: float) -> None:
    def damage(t: dict[str, torch.Tensor]) -> None:
        for name in (WEIGHT, OTHER):
            t[name] = t[name].double()
            t[name].view(-1)[-1] = value

    rewrite(folder, damage)
    with pytest.raises(CheckpointError, match=f"2 tensors in .* contain NaN, infinity or values beyond fp32: {OTHER}, {WEIGHT}"):
        vg.load_decoder(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_float_widths_are_taken(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: t.update({WEIGHT: t[WEIGHT].to(dtype)}))
    stored = load_file(folder / "model.safetensors")[WEIGHT]
    assert torch.equal(vg.load_decoder(folder).get_parameter(WEIGHT.removeprefix("decoder.")), stored.float())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_codes_that_are_not_dense_fail() -> None:
    geometry = DecoderGeometry(codebook_size=64)
    validate_codes(CODES, geometry)
    for codes, message in (
        (CODES.to_sparse(), r"got a torch\.sparse_coo one\. Try codes\.to_dense"),
        (torch.nested.nested_tensor([CODES[0], CODES[0]]), "got a nested one"),
        (torch.nested.nested_tensor([CODES[0], CODES[0]], layout=torch.jagged), "got a nested one"),
    ):
        with pytest.raises(InputError, match=message):
            validate_codes(codes, geometry)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated"):
        vg.load_decoder(folder)


def test_pickle_is_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickled checkpoints are refused"):
        vg.load_decoder(folder)


def test_pickle_in_disguise_is_not_opened(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("the pickle was executed",))

    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="renamed pickle"):
        vg.load_decoder(folder)


def test_unsupported_dtype(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"torch\.float64"):
        vg.load_decoder(folder, dtype=torch.float64)


def test_nested_rope_base_is_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["decoder_config"]["rope_theta"]
    config["decoder_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert TokenizerConfig.from_folder(folder).decoder_config.rope_theta == 500.0


def test_grouped_query_checkpoint_round_trips(tmp_path: Path) -> None:
    geometry = DecoderGeometry(num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32, latent_dim=32, codebook_dim=16,
                               codebook_size=64, intermediate_size=64, num_hidden_layers=2, decoder_dim=48)  # fmt: skip
    decoder = random_decoder(geometry)
    save_file({f"decoder.{k}": v for k, v in decoder.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"decoder_config": geometry.model_dump()}))
    assert torch.equal(vg.load_decoder(tmp_path)(CODES), decoder(CODES))


def test_codebook_quotient_is_taken_in_fp32(tiny_folder: Path) -> None:
    """In bf16 the sums and counts would be rounded before the division."""
    half, full = vg.load_decoder(tiny_folder, dtype=torch.bfloat16), vg.load_decoder(tiny_folder)
    assert torch.equal(half.quantizer.rvq_rest.table, full.quantizer.rvq_rest.table.bfloat16())
    assert torch.equal(half.pre_transformer.cos, full.pre_transformer.cos.bfloat16())


@pytest.mark.parametrize("load", [vg.load_decoder, vg.load_encoder])
def test_device_that_is_not_there(load: Callable[..., object]) -> None:
    folder = vg.bundled.checkpoint_folder()
    with pytest.raises(BackendError, match=r"Accepted: 'auto', 'cpu', 'cuda', 'cuda:N'"):
        load(folder, device="gpu")
    with pytest.raises(BackendError, match="cuda"):
        load(folder, device="cuda:99")
