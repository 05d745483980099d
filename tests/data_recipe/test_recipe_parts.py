"""The recipe's parts one by one. Truth: closed forms, and the shipped encoder and decoder classes."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_recipe import corpus, crops, discriminator, losses, model, quantizer, real_speech, schedule, sentences
from lab_recipe.config import RecipeConfig
from pydantic import ValidationError

from data_recipe.tiny_recipe import TINY, int16
from vgraph_lab import bundled
from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.encoder import LabEncoder
from vgraph_lab.qwen3_tts.geometry import TokenizerConfig

CONFIG = RecipeConfig.model_validate(TINY)
CPU = torch.device("cpu")


def codec(**changes: object) -> model.Codec:
    torch.manual_seed(0)
    return model.Codec(RecipeConfig.model_validate({**TINY, **changes}))


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_recipe_describes_the_bundled_checkpoint() -> None:
    shipped, ours = TokenizerConfig.from_folder(bundled.checkpoint_folder()).decoder_config, RecipeConfig().decoder
    assert shipped == ours


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": {**TINY["encoder"], "latent_dim": 8}}, "must be decoder.codebook_dim"),
        ({"encoder": {**TINY["encoder"], "hop": 120}}, "frames differ: 960 and 1920"),
        ({"context_frames": 5}, "must fit into crop_frames"),
        ({"learning_rate": 1}, "learning_rate"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_settings_that_do_not_fit_fail(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RecipeConfig.model_validate({**TINY, **changes})


@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.5, 0.51), (1.0, 0.02), (1.5, 0.02)])
def test_the_learning_rate_follows_a_cosine(progress: float, share: float) -> None:
    assert schedule.rate_share(RecipeConfig(), progress, step=10_000) == pytest.approx(share)
    assert schedule.rate_share(RecipeConfig(), progress, step=29) == pytest.approx(share * 0.1)  # 30 of 300 warm-up steps


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (0.37, 0.0), (0.385, 0.5), (0.4, 1.0), (1.0, 1.0)])
def test_the_discriminator_ramps_in(progress: float, share: float) -> None:
    assert schedule.adversarial_share(RecipeConfig(), progress) == pytest.approx(share)


@pytest.mark.parametrize(("step", "decay"), [(0, 0.1), (8, 0.5), (100_000, 0.999)])
def test_the_average_forgets_the_start(step: int, decay: float) -> None:
    assert schedule.average_decay(RecipeConfig(), step) == pytest.approx(decay)


# -------------------------------------------------------------------------------------------------------------- crops


def test_crops_are_loud_enough_and_not_clipped() -> None:
    batch = crops.SpeechCrops(int16(4), int16(2, seed=1), CONFIG, CPU, held_out_seconds=1).draw()
    assert batch.shape == (4, 6 * 1920)
    assert batch.dtype == torch.float32
    assert (batch.abs().amax(dim=1) <= 0.98 + 1e-6).all()
    assert (batch.square().mean(dim=1) > 1e-5).all()


def test_held_out_speech_is_never_drawn() -> None:
    speech = torch.zeros(96_000, dtype=torch.int16)
    speech[-24_000:] = 10_000
    drawn = crops.SpeechCrops(speech, None, CONFIG, CPU, held_out_seconds=1)
    assert (drawn.held_out == 10_000).all()
    assert all((drawn.draw() == 0).all() for _ in range(20))


def test_too_little_speech_fails() -> None:
    with pytest.raises(InputError, match=r"synthetic speech has 12000 samples for training; a crop may need 13\d\d\d"):
        crops.SpeechCrops(int16(1.5), None, CONFIG, CPU, held_out_seconds=1)
    with pytest.raises(InputError, match="real speech has 2400 samples"):
        crops.SpeechCrops(int16(4), int16(0.1), CONFIG, CPU, held_out_seconds=1)


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(-1, 1), st.floats(0, 1))
def test_interpolation_is_exact_for_parabolas(a: float, b: float, c: float, fraction: float) -> None:
    x = torch.arange(6, dtype=torch.float64)
    pcm = a * x**2 + b * x + c
    value = crops._cubic(pcm, torch.tensor([2]), torch.tensor([fraction], dtype=torch.float64))
    assert float(value) == pytest.approx(a * (2 + fraction) ** 2 + b * (2 + fraction) + c, abs=1e-4)


def test_pcm_is_stored_and_read_back(tmp_path: Path) -> None:
    crops.write_pcm(tmp_path / "a.npz", [np.array([0.0, 0.5]), np.array([2.0, -2.0, 0.25])])
    np.testing.assert_array_equal(crops.read_pcm(tmp_path / "a.npz"), [0, 16384, 32767, -32767, 8192])
    np.testing.assert_array_equal(np.load(tmp_path / "a.npz")["ends"], [2, 5])


def test_other_files_are_no_corpus(tmp_path: Path) -> None:
    np.savez(tmp_path / "float.npz", pcm=np.zeros(3))
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    (tmp_path / "text.npz").write_text("no")
    for name, message in (
        ("float.npz", "expected int16"),
        ("other.npz", "is not a corpus"),
        ("text.npz", "is not a corpus"),
        ("no.npz", "is not a corpus"),
    ):
        with pytest.raises(InputError, match=message):
            crops.read_pcm(tmp_path / name)
    with pytest.raises(InputError, match="no clip"):
        crops.write_pcm(tmp_path / "empty.npz", [])


# ---------------------------------------------------------------------------------------------------------- quantizer


def trained(codec: model.Codec, latents: torch.Tensor) -> None:
    quantizer.initialise_codebooks(codec.decoder.quantizer, latents.transpose(1, 2).flatten(0, 1), codec.config)
    codec.decoder.refresh_tables()


def test_training_codes_are_the_encoders_and_their_features_the_decoders() -> None:
    c, latents = codec(), torch.randn(3, 16, 40)
    trained(c, latents)
    result = quantizer.quantize(c.decoder.quantizer, latents, c.config, update=False)
    torch.testing.assert_close(result.codes, LabEncoder(c.encoder, c.decoder.quantizer).quantize(latents), rtol=0, atol=0)
    torch.testing.assert_close(result.features, c.decoder.quantize(result.codes), rtol=1e-4, atol=1e-5)


def test_gradients_pass_straight_through() -> None:
    c, latents = codec(), torch.randn(2, 16, 30, requires_grad=True)
    trained(c, latents.detach())
    direction = torch.randn(2, 16, 30)
    (quantized,) = torch.autograd.grad(
        (quantizer.quantize(c.decoder.quantizer, latents, c.config, update=False).features * direction).sum(), latents
    )
    (exact,) = torch.autograd.grad((quantizer.pass_unquantized(c.decoder.quantizer, latents) * direction).sum(), latents)
    torch.testing.assert_close(quantized, exact, rtol=1e-4, atol=1e-5)


def test_commitment_pulls_latents_to_their_codes() -> None:
    c, latents = codec(), torch.randn(2, 16, 30, requires_grad=True)
    trained(c, latents.detach())
    result = quantizer.quantize(c.decoder.quantizer, latents, c.config, update=False)
    (gradient,) = torch.autograd.grad(result.commitment, latents)
    closer = quantizer.quantize(c.decoder.quantizer, latents.detach() - 0.05 * gradient / gradient.abs().mean(), c.config, update=False)
    assert closer.commitment < result.commitment
    assert result.error[1] < result.error[0] < 1  # fifteen levels say more than one
    assert result.commitment > result.error[0]  # it sums both splits and all of their levels


def test_codebooks_are_running_averages() -> None:
    c = codec(codebook_decay=0.75)
    (book,) = c.decoder.quantizer.rvq_first.codebooks
    book.cluster_usage.fill_(8.0)
    book.embedding_sum.zero_()
    vectors, index = torch.ones(6, 8), torch.tensor([0, 0, 0, 0, 1, 1])
    quantizer._move(book, vectors, index, c.config, restart_dead=False)
    np.testing.assert_allclose(book.cluster_usage[:3], [0.75 * 8 + 0.25 * 4, 0.75 * 8 + 0.25 * 2, 0.75 * 8])
    np.testing.assert_allclose(book.embedding_sum[:3, 0], [0.25 * 4, 0.25 * 2, 0])


def test_dead_codes_restart_on_vectors_of_the_batch() -> None:
    c = codec(codebook_decay=0.0)
    (book,) = c.decoder.quantizer.rvq_first.codebooks
    vectors = torch.randn(160, 8)
    quantizer._move(book, vectors, torch.zeros(160, dtype=torch.int64), c.config, restart_dead=True)
    table = book.vectors()
    torch.testing.assert_close(table[0], vectors.mean(dim=0))
    assert float(torch.cdist(table[1:], vectors).amin(dim=1).max()) < 1e-3
    np.testing.assert_allclose(book.cluster_usage[1:], 5.0)  # half of the mean usage


def test_kmeans_finds_clusters() -> None:
    c = codec(kmeans_iterations=20)
    centres = 10 * torch.randn(16, 16)
    latents = centres[torch.arange(2000) % 16] + 0.01 * torch.randn(2000, 16)
    quantizer.initialise_codebooks(c.decoder.quantizer, latents, c.config)
    result = quantizer.quantize(c.decoder.quantizer, latents.T[None], c.config, update=False)
    assert result.error[0] < 0.3  # random starts may merge some of the 16 clusters; one code for all would leave 1
    assert result.error[1] < 0.01  # the residual levels separate them


def test_dropout_keeps_first_levels() -> None:
    torch.manual_seed(0)
    kept = quantizer._kept_levels(10_000, 15, 0.15, CPU)
    assert int(kept.min()) == 1
    assert int(kept.max()) == 15
    assert float((kept < 15).float().mean()) == pytest.approx(0.15, abs=0.02)
    assert (quantizer._kept_levels(10, 1, 0.9, CPU) == 1).all()


# --------------------------------------------------------------------------------------------------- model and losses


def test_rendered_windows_are_parts_of_the_whole_waveform() -> None:
    """Twelve frames of context are enough; and the windows line up with their originals."""
    c = codec(crop_frames=20, window_frames=3, context_frames=12, batch_size=6, stream_start_share=0.5)
    wav = 0.3 * torch.randn(6, 20 * 1920)
    trained(c, c.encoder(wav).detach())
    with torch.no_grad():
        for parameter in c.decoder.decoder[-1].parameters():
            parameter.mul_(10)  # louder, so that a difference would show
    rendered = c.render(wav, quantized=True, update=False)
    assert rendered.quantized is not None
    whole = c.decoder.decode(rendered.quantized.codes)[:, 0]
    for row in range(6):
        (start,) = [frame for frame in range(18) if torch.equal(wav[row, frame * 1920 : (frame + 3) * 1920], rendered.original[row])]
        assert start == 0 if row < 3 else start >= 12
        torch.testing.assert_close(rendered.decoded[row], whole[row, start * 1920 : (start + 3) * 1920], rtol=1e-3, atol=1e-4)


def test_too_little_context_shows_in_the_waveform() -> None:
    c = codec(crop_frames=20, window_frames=3, context_frames=2, batch_size=2, stream_start_share=0.0)
    wav = 0.3 * torch.randn(2, 20 * 1920)
    trained(c, c.encoder(wav).detach())
    rendered = c.render(wav, quantized=True, update=False)
    assert rendered.quantized is not None
    whole = c.decoder.decode(rendered.quantized.codes)[0, 0]
    (start,) = [frame for frame in range(18) if torch.equal(wav[0, frame * 1920 : (frame + 3) * 1920], rendered.original[0])]
    difference = (rendered.decoded[0] - whole[start * 1920 : (start + 3) * 1920]).abs()
    assert difference.max() > 1e-3 * whole.abs().max()


def test_the_first_waveforms_are_quiet_but_alive() -> None:
    c = codec()
    wav = c.render(torch.randn(4, 6 * 1920), quantized=False, update=True).decoded.detach()
    assert 1e-4 < float(wav.square().mean().sqrt()) < 0.3
    assert {name for name, p in c.decoder.named_parameters() if name.endswith("bias") and p.any()} == set()


def test_spectral_losses_vanish_for_equal_waveforms_and_have_finite_gradients_at_silence() -> None:
    loss, wav = losses.SpectralLoss(24_000), 0.1 * torch.randn(2, 5760)
    assert [float(term) for term in loss(wav, wav)] == [0, 0]
    for near_silence in (torch.zeros_like(wav), 1e-4 * torch.randn_like(wav)):
        (gradient,) = torch.autograd.grad(sum(loss(near_silence.requires_grad_(), wav)), near_silence)
        assert torch.isfinite(gradient).all()
    assert gradient.any()


def test_every_mel_band_hears_something() -> None:
    for size, bands in losses._SCALES:
        filters = losses._filled_mel_filters(size, bands, 24_000)
        torch.testing.assert_close(filters.sum(dim=1), torch.ones(bands))


def test_a_discriminator_learns_to_tell_noise_from_a_tone() -> None:
    torch.manual_seed(0)
    judge = discriminator.Discriminator((512,), 4)
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-2)
    tone = 0.3 * torch.sin(2 * torch.pi * 500 * torch.arange(4800) / 24_000).repeat(4, 1)
    history = []
    for _ in range(15):
        noise = 0.1 * torch.randn(4, 4800)
        loss = discriminator.discriminator_loss(judge(tone), judge(noise))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.5 * history[0]
    real, decoded = judge(tone), judge(0.1 * torch.randn(4, 4800))
    assert discriminator.adversarial_loss(decoded) > discriminator.adversarial_loss(real)
    assert discriminator.feature_loss(real, real) == 0
    assert discriminator.feature_loss(real, decoded) > 0.1


# ----------------------------------------------------------------------------------------------------- text and speech


def test_sentences_come_from_the_quotes_of_glosses() -> None:
    lines = [
        '  1 This software and database is "provided as is to you" by its authors',
        '00001740 03 n 01 entity 0 | that which exists; "the entity was quite large;"; "too short"; "caf\u00e9 is not speakable here"',
        'no gloss "this is not one either"',
        '00002137 03 n 01 x 0 | a thing; "it is a thing, is it not?"',
    ]
    assert list(sentences.example_sentences(lines)) == ["the entity was quite large", "it is a thing, is it not?"]


def test_short_sentences_are_joined() -> None:
    parts = ["one two three four", "five six seven eight nine", "a question of nine words is it not so?", "left over at end"]
    assert list(sentences.join_utterances(parts)) == [
        "One two three four. Five six seven eight nine.",
        "A question of nine words is it not so?",
        "Left over at end.",
    ]


def test_wordnet_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no data\.noun.*wordnet-base"):
        sentences.wordnet_utterances(tmp_path)


@given(st.integers(0, 500))
def test_a_spoken_utterance_follows_from_its_index(index: int) -> None:
    asked: list[float] = []

    def speaker(text: str, *, speed: float, seed: int) -> np.ndarray[Any, Any]:
        asked.append(speed)
        tone: np.ndarray[Any, Any] = np.sin(np.arange(round(24_000 / speed)) * 0.05).astype(np.float32)
        return tone

    wav, again = corpus.speak(speaker, index, "text"), corpus.speak(speaker, index, "text")
    np.testing.assert_array_equal(wav, again)
    level_db = 20 * math.log10(float(np.sqrt(np.mean(wav**2))))
    assert -26.1 < level_db < -17.9
    assert 0.5 <= asked[0] <= 2.0
    # spoken 1 / r faster and stretched by 1 / r: the tempo stays within its own range
    assert 24_000 / 1.13 < len(wav) < 24_000 / 0.91


def test_prompts_are_chosen_without_effects_and_evaluation_clips(tmp_path: Path) -> None:
    sounds, texts = tmp_path / "usr/share/asterisk/sounds/it_IT_m_Carlo", tmp_path / "usr/share/doc/asterisk-core-sounds-it"
    for folder in (sounds, sounds / "digits", sounds / "silence", texts):
        folder.mkdir(parents=True)
    for name, seconds in (
        ("hello", 2.0),
        ("digits/many", 1.5),
        ("short", 1.4),
        ("silence/3", 3.0),
        ("beeperr", 3.0),
        ("applause", 3.0),
        ("vm-reenterpassword", 4.0),  # an evaluation clip
    ):
        (sounds / f"{name}.g722").write_bytes(bytes(round(seconds * 8000)))
    with gzip.open(texts / "core-sounds-it.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\ufeff; comment\nhello: Buongiorno.\napplause: [applausi]\ndigits/many: molti\n")
    assert [path.stem for path in real_speech.chosen_prompts(tmp_path, "it")] == ["many", "hello"]
    with pytest.raises(InputError, match="lacks the ru prompts"):
        list(real_speech.chosen_prompts(tmp_path, "ru"))
